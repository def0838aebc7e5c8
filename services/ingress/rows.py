"""The end of a request as a fact and as its one trace row (spec: identity-and-traces §2.3-2.6). Nothing is null or
NaN: what is not known is absent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from schemas.request import Outcome, Usage
from schemas.trace import (
    AgentContext,
    FinishMetadata,
    ReplayBlock,
    RequestMetrics,
    TracedWorker,
    TraceRow,
)
from services.ingress.answers import AnswerFacts
from services.ingress.requests import Record
from services.ingress.tokens import PromptTokens, from_ids, trace_block_size

FINE_TOKENS = 8192
"""A prompt of up to so many tokens has hashes in blocks of the pool's own size."""
MAX_REPLAY_HASHES = 32_768
"""A longer prompt's row goes without its replay block, so that a row stays far below a message's limit (8 MiB): 20
digits a hash."""


_NO_FINISH = FinishMetadata()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one request ended."""

    outcome: Outcome
    at: float
    reason: str | None = None
    status: int | None = None
    answer: AnswerFacts | None = None


def usage_of(record: Record, answer: AnswerFacts | None) -> Usage:
    """What the engine reported; where it did not, our own count of the input and of the stream's pieces, marked as
    estimated (spec: user-cases C3). Empty for a request that no engine worked on."""
    if answer is None or record.first_byte_at is None or (record.status or 0) >= 400:
        return Usage()
    said = answer.usage
    if said.input_tokens is not None and said.output_tokens is not None:
        return said
    if record.request.passed and (said.input_tokens is not None or record.counts_only):
        return msgspec.structs.replace(said, output_tokens=0)
    return Usage(
        input_tokens=said.input_tokens if said.input_tokens is not None else record.input_tokens,
        output_tokens=said.output_tokens
        if said.output_tokens is not None
        else len(answer.token_ids) or answer.data_lines,
        cached_tokens=said.cached_tokens,
        reasoning_tokens=said.reasoning_tokens,
        estimated=True,
    )


def request_end_row(record: Record, ending: Ending, usage: Usage, fine_tokens: int = FINE_TOKENS) -> TraceRow:
    """The finished row. Its time is the receipt plus the total, as the peer's is. ``fine_tokens``: a longer prompt's
    hashes are of larger blocks."""
    total_ms = _ms(record.received_at, ending.at) or 0.0
    return TraceRow(
        event_type="request_end",
        event_time_unix_ms=record.received_ms + round(total_ms),
        agent_context=_context(record),
        request=_metrics(record, ending, usage, total_ms, fine_tokens),
    )


def _context(record: Record) -> AgentContext | None:
    """Whose it was; absent for a request without identity, as the peer does."""
    identity = record.identity
    if identity.key.family == "request":
        return None
    return AgentContext(
        session_id=identity.session_id,
        parent_session_id=identity.parent_session_id,
        session_final=identity.final,
        input_trigger=record.resolved.input_trigger,
        turn_id=identity.turn_id,
        session=identity.key,
        weak=identity.weak,
        implicit=identity.implicit,
        turn=record.resolved.turn,
        compaction=record.resolved.compaction,
    )


def _metrics(record: Record, ending: Ending, usage: Usage, total_ms: float, fine_tokens: int) -> RequestMetrics:
    granted = record.granted
    wait_ms = _ms(record.asked_at, record.decided_at)
    undecided = record.granted is None and record.decided_at is None
    hold_ms = round(_ms(record.held_at, ending.at) or 0.0) if undecided else record.hold_ms
    computes = record.worker is not None and not record.counts_only
    choices, media = record.request.choices, record.media
    replay = replay_of(record, ending.answer, fine_tokens)
    return RequestMetrics(
        request_id=record.request_id,
        x_request_id=record.x_request_id,
        response_id=ending.answer.response_id if ending.answer else None,
        model=record.model,
        endpoint=record.request.endpoint,
        kind=record.kind,
        tenant=record.identity.key.tenant,
        stream=record.request.stream,
        outcome=ending.outcome,
        reason=ending.reason,
        status=ending.status,
        attempts=record.attempt + 1,
        hedged=record.hedged,
        input_tokens=usage.input_tokens if usage.input_tokens is not None else record.input_tokens,
        output_tokens=usage.output_tokens or 0,
        max_output_tokens=record.request.max_output_tokens,
        choices=choices if choices != 1 else None,
        modalities=media.modalities,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        usage_estimated=True if usage.estimated or usage.input_tokens is None else None,
        predicted_cached_tokens=granted.predicted_cached_tokens if granted else None,
        predicted_shared_tokens=(granted.predicted_shared_tokens or None) if granted else None,
        request_received_ms=record.received_ms,
        admission_wait_ms=wait_ms,
        hold_ms=hold_ms or None,
        hold_reason=(granted.hold_reason if granted else None) or record.hold_reason,
        decision_ms=None if wait_ms is None else max(0.0, wait_ms - record.hold_ms),
        decision_mode=record.mode,
        policy=granted.policy if granted else None,
        grant_id=record.grant_id,
        index_health=granted.index_health if granted else None,
        index_reason=granted.index_reason if granted else None,
        prefill_wait_time_ms=_ms(record.received_at, record.decided_at) if computes else None,
        prefill_time_ms=_ms(record.decided_at, record.first_byte_at) if computes else None,
        ttft_ms=_ms(record.received_at, record.first_byte_at),
        avg_itl_ms=_inter_token_ms(record, ending, usage),
        total_time_ms=total_ms,
        kv_hit_rate=_hit_rate(record),
        queue_depth=record.place or None,
        worker=None if record.worker is None else TracedWorker(worker=record.worker, rank=record.rank or 0),
        replay=replay,
        replayable=replay is not None and choices == 1 and not media.parts,
        finish_reason_metadata=_finish(ending.answer),
    )


def replay_of(record: Record, answer: AnswerFacts | None = None, fine_tokens: int = FINE_TOKENS) -> ReplayBlock | None:
    """The prompt's hashes, and those of prompt and answer where the engine told what it generated; absent without
    tokens, block size, or over the bound. Blocks are the pool's up to ``fine_tokens``, then larger (docs/adr/0018)."""
    tokens = _tokens_of(record, answer)
    if tokens is None or not tokens.block_size:
        return None
    size = trace_block_size(len(tokens), tokens.block_size, fine_tokens)
    if -(-len(tokens) // size) > MAX_REPLAY_HASHES:
        return None
    generated = answer.token_ids if answer is not None and record.request.choices == 1 else ()
    return ReplayBlock(
        trace_block_size=size,
        input_length=len(tokens),
        input_sequence_hashes=tokens.trace_hashes(size),
        completion_sequence_hashes=tokens.answered(generated, size) if generated else msgspec.UNSET,
    )


def _tokens_of(record: Record, answer: AnswerFacts | None) -> PromptTokens | None:
    """As we counted them; else as the engine said, where the client asked it and they are text."""
    if record.tokens is not None or answer is None or not answer.prompt_token_ids or record.media.parts:
        return record.tokens
    return from_ids(answer.prompt_token_ids, record.block_size) if record.request.choices == 1 else None


def _finish(answer: AnswerFacts | None) -> FinishMetadata | None:
    if answer is None:
        return None
    said = FinishMetadata(
        finish_reason=answer.finish_reason,
        backend_finish_reason=answer.backend_finish_reason,
        stop_reason=answer.stop_reason,
        tool_calls=answer.tool_calls,
        choices=answer.choices,
    )
    return None if said == _NO_FINISH else said


def _inter_token_ms(record: Record, ending: Ending, usage: Usage) -> float | None:
    """Mean time between tokens after the first, for a stream of two tokens or more."""
    if not record.request.stream or record.first_byte_at is None or (usage.output_tokens or 0) < 2:
        return None
    assert usage.output_tokens is not None
    spent = _ms(record.first_byte_at, ending.at)
    return None if spent is None else spent / (usage.output_tokens - 1)


def _hit_rate(record: Record) -> float | None:
    """The share of the prompt that the decision expected to be cached: 0..1."""
    if record.granted is None or record.tokens is None or not len(record.tokens):
        return None
    return min(1.0, record.granted.predicted_cached_tokens / len(record.tokens))


def _ms(start: float | None, end: float | None) -> float | None:
    """Milliseconds between two Unix times; absent when one is, or when they are no numbers; never negative."""
    if start is None or end is None or not math.isfinite(end - start):
        return None
    return round(max(0.0, end - start) * 1000, 3)

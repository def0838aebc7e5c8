"""The end of a request as a fact and as its one trace row (spec: identity-and-traces §2.3-2.6). Nothing is null or
NaN: what is not known is absent."""

from __future__ import annotations

import math
from dataclasses import dataclass

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

MAX_REPLAY_HASHES = 32_768
"""A longer prompt's row goes without its replay block, so that a row stays far below a message's limit (8 MiB): 20
digits a hash."""


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
    return Usage(
        input_tokens=said.input_tokens if said.input_tokens is not None else record.input_tokens,
        output_tokens=said.output_tokens if said.output_tokens is not None else answer.data_lines,
        cached_tokens=said.cached_tokens,
        reasoning_tokens=said.reasoning_tokens,
        estimated=True,
    )


def request_end_row(record: Record, ending: Ending, usage: Usage) -> TraceRow:
    """The finished row. Its time is the receipt plus the total, as the peer's is."""
    total_ms = _ms(record.received_at, ending.at) or 0.0
    return TraceRow(
        event_type="request_end",
        event_time_unix_ms=record.received_ms + round(total_ms),
        agent_context=_context(record),
        request=_metrics(record, ending, usage, total_ms),
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
    )


def _metrics(record: Record, ending: Ending, usage: Usage, total_ms: float) -> RequestMetrics:
    granted = record.granted
    wait_ms = _ms(record.asked_at, record.decided_at)
    replay = replay_of(record)
    return RequestMetrics(
        request_id=record.request_id,
        x_request_id=record.x_request_id,
        model=record.model,
        endpoint=record.request.endpoint,
        kind=record.kind,
        tenant=record.identity.key.tenant,
        stream=record.request.stream,
        outcome=ending.outcome,
        reason=ending.reason,
        status=ending.status,
        attempts=record.attempt + 1,
        input_tokens=usage.input_tokens if usage.input_tokens is not None else record.input_tokens,
        output_tokens=usage.output_tokens or 0,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        usage_estimated=True if usage.estimated or usage.input_tokens is None else None,
        predicted_cached_tokens=granted.predicted_cached_tokens if granted else None,
        request_received_ms=record.received_ms,
        admission_wait_ms=wait_ms,
        hold_ms=granted.hold_ms if granted and granted.hold_ms else None,
        hold_reason=(granted.hold_reason if granted else None) or record.hold_reason,
        decision_ms=None if wait_ms is None else max(0.0, wait_ms - (granted.hold_ms if granted else 0)),
        decision_mode=record.mode,
        policy=granted.policy if granted else None,
        grant_id=record.grant_id,
        index_health=granted.index_health if granted else None,
        index_reason=granted.index_reason if granted else None,
        ttft_ms=_ms(record.received_at, record.first_byte_at),
        avg_itl_ms=_inter_token_ms(record, ending, usage),
        total_time_ms=total_ms,
        kv_hit_rate=_hit_rate(record),
        queue_depth=record.place or None,
        worker=None if record.worker is None else TracedWorker(worker=record.worker, rank=record.rank or 0),
        replay=replay,
        replayable=replay is not None and record.request.choices == 1,
        finish_reason_metadata=_finish(ending.answer),
    )


def replay_of(record: Record) -> ReplayBlock | None:
    """The prompt's hashes in blocks of the pool's size; absent without tokens, block size, or over the bound."""
    tokens = record.tokens
    if tokens is None or not tokens.block_size or -(-len(tokens) // tokens.block_size) > MAX_REPLAY_HASHES:
        return None
    return ReplayBlock(
        trace_block_size=tokens.block_size,
        input_length=len(tokens),
        input_sequence_hashes=tokens.replay_hashes(),
    )


def _finish(answer: AnswerFacts | None) -> FinishMetadata | None:
    if answer is None or (answer.finish_reason is None and not answer.tool_calls):
        return None
    return FinishMetadata(
        finish_reason=answer.finish_reason, stop_reason=answer.stop_reason, tool_calls=answer.tool_calls
    )


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

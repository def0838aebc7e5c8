"""Trace rows (JSON, JetStream ``TG_TRACES``) on ``tg.v1.trace.<event type>.<model>.<session>``, the type being one of
``request_end``, ``tool``, ``decision``, ``worker_load`` (whose last token is the worker).

Field names are the peer's (`request_end` of ``dynamo.request.trace.v1``); ours is a superset. Nothing is null: what is
not known is absent. Hashes and counts only, never prompts.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.admit import DecisionMode
from schemas.base import Count, Message, Number, Tokens
from schemas.decision import Candidate, PolicyAsked
from schemas.index import SourceHealth
from schemas.request import Outcome
from schemas.session import ImplicitIdentity, InputTrigger, RequestKind, SessionKey
from schemas.tool import ToolStatus
from schemas.worker import RankLoad

TRACE_SCHEMA: Literal["tidegate.request.trace.v1"] = "tidegate.request.trace.v1"


class TurnFacts(Message, frozen=True, kw_only=True, omit_defaults=True):
    """What a harness says of the turn and of where its session comes from (Codex: ``x-codex-turn-metadata``).

    ``parent_turn_id``: the turn of the parent that began this agent; ``root_turn_id``: the user's, of the whole tree.
    ``forked_from_session_id``: the thread that this one was copied from, up to (not including) its item
    ``forked_from_ordinal``. ``window_number`` grows with each compaction.
    """

    agent_name: str | None = None
    root_turn_id: str | None = None
    parent_turn_id: str | None = None
    window_number: Count | None = None
    forked_from_session_id: str | None = None
    forked_from_ordinal: Count | None = None


class Compaction(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The request makes its session's history shorter: why and how, in the harness's words (the peer's object)."""

    trigger: str | None = None
    reason: str | None = None
    implementation: str | None = None
    phase: str | None = None
    strategy: str | None = None


class AgentContext(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Whose request it was. ``session_id``: the child's own id; ``session``: the house's key (its family says who said
    so)."""

    session_id: str
    parent_session_id: str | None = None
    session_final: bool | None = None
    input_trigger: InputTrigger | None = None
    turn_id: str | None = None
    session: SessionKey | None = None
    weak: bool = False
    implicit: ImplicitIdentity | None = None
    turn: TurnFacts | None = None
    compaction: Compaction | None = None


class ReplayBlock(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Chained hashes of the prompt, the partial tail block included: exactly ceil(input_length / trace_block_size).

    ``completion_sequence_hashes``, where the engine told the tokens that it generated: of the prompt and the answer
    together, so that its first whole blocks are the prompt's.
    """

    trace_block_size: int
    input_length: int
    input_sequence_hashes: tuple[int, ...]
    completion_sequence_hashes: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


class TracedWorker(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Where it ran. Rank 0 is a value, so it is always written."""

    worker: str
    rank: int = 0


class ToolCall(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A tool call that the answer asked for: never its arguments."""

    choice_index: int = 0
    tool_call_index: int = 0
    id: str | None = None
    name: str | None = None


class ChoiceFinish(Message, frozen=True, kw_only=True, omit_defaults=True):
    """How one of several choices ended."""

    # Always written: 0 is a choice.
    choice_index: int = msgspec.field(default_factory=lambda: 0)
    finish_reason: str | None = None
    backend_finish_reason: str | None = None
    stop_reason: str | None = None


class FinishMetadata(Message, frozen=True, kw_only=True, omit_defaults=True):
    """How the answer ended. ``finish_reason`` in OpenAI's words, ``backend_finish_reason`` in the engine's own where
    they differ; the last that was said, and each choice's where there are several."""

    finish_reason: str | None = None
    backend_finish_reason: str | None = None
    stop_reason: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    choices: tuple[ChoiceFinish, ...] = ()


class RequestMetrics(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Everything measured about one request. Times in ms, tokens as the engine counted them.

    ``request_id`` is the house's, ``x_request_id`` the client's, ``response_id`` the engine's.
    ``prefill_wait_time_ms``: from receipt to its dispatch to the engine that answered; ``prefill_time_ms``: from there
    to the first byte, the engine's own queue included. ``grant_id``: the row ``decision`` with the same one has the
    scores. ``hedged``: it was sent to a second engine because the first was slow; ``won``: that one answered (it is
    the ``worker`` here, and no row ``decision`` tells of it), ``lost``: the first one did, or none. ``modalities``:
    what a prompt holds besides text. ``choices``: how many were asked for, where not one.
    """

    request_id: str
    x_request_id: str | None = None
    response_id: str | None = None
    model: str | None = None
    endpoint: str | None = None
    kind: RequestKind | None = None
    tenant: str | None = None
    stream: bool | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    status: int | None = None
    attempts: int | None = None
    hedged: Literal["won", "lost"] | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    max_output_tokens: int | None = None
    choices: int | None = None
    modalities: tuple[str, ...] = ()
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    usage_estimated: bool | None = None
    predicted_cached_tokens: int | None = None
    predicted_shared_tokens: int | None = None
    request_received_ms: int | None = None
    admission_wait_ms: float | None = None
    hold_ms: int | None = None
    hold_reason: str | None = None
    decision_ms: float | None = None
    decision_mode: DecisionMode | None = None
    policy: str | None = None
    grant_id: str | None = None
    index_health: SourceHealth | None = None
    index_reason: str | None = None
    prefill_wait_time_ms: float | None = None
    prefill_time_ms: float | None = None
    ttft_ms: float | None = None
    avg_itl_ms: float | None = None
    total_time_ms: float | None = None
    kv_hit_rate: float | None = None
    queue_depth: int | None = None
    worker: TracedWorker | None = None
    replay: ReplayBlock | None = None
    replayable: bool | None = None
    finish_reason_metadata: FinishMetadata | None = None


class ToolRun(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One tool call as its harness reported it (the peer's ``tool``): sizes and times, never arguments or output.

    ``tool_call_id`` is unique within its session only. A start may be lost: readers take a terminal row by itself, and
    prefer ``started_at_unix_ms`` and ``ended_at_unix_ms`` to ``duration_ms`` to the time of the row.
    """

    tool_call_id: str
    tool_class: str
    started_at_unix_ms: Count | None = None
    ended_at_unix_ms: Count | None = None
    status: ToolStatus | None = None
    duration_ms: float | None = None
    output_tokens: Count | None = None
    output_bytes: Count | None = None
    tool_name_hash: str | None = None
    error_type: str | None = None
    inferred: bool = False


class TracedDecision(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One placement (`schemas.decision.Decision`) as a row: at most ``[admission] trace_candidates`` of its candidates,
    the chosen one first, then by their cost; ``candidates_seen``: how many there were."""

    request_id: str
    grant_id: str
    worker: TracedWorker
    model: str
    attempt: Count = 0
    kind: RequestKind = "turn"
    mode: DecisionMode = "policy"
    policy: str | None = None
    input_tokens: Tokens = 0
    block_size: Count = 0
    predicted_cached_tokens: Tokens = 0
    predicted_shared_tokens: Tokens = 0
    previous_worker: str | None = None
    index_health: SourceHealth | None = None
    index_reason: str | None = None
    hold_ms: Number = 0
    hold_reason: str | None = None
    decide_us: Number = 0
    candidates_seen: Count = 0
    candidates: tuple[Candidate, ...] = ()
    policies: tuple[PolicyAsked, ...] = ()


class TracedLoad(Message, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine's bridge said of its load at that moment (a sample, for counters beside requests)."""

    worker: str
    model: str
    kv_tokens: Count | None = None
    loads: tuple[RankLoad, ...] = ()


class TraceRow(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One finished row. ``event_source`` is ``tidegate`` for our own rows, ``harness`` for tool rows."""

    event_type: Literal["request_end", "tool_start", "tool_end", "tool_error", "decision", "worker_load"]
    event_time_unix_ms: int
    agent_context: AgentContext | None = None
    request: RequestMetrics | None = None
    tool: ToolRun | None = None
    decision: TracedDecision | None = None
    worker_load: TracedLoad | None = None
    # Always written, although constant: readers tell the schema by it.
    schema: str = msgspec.field(default_factory=lambda: TRACE_SCHEMA)
    event_source: str = msgspec.field(default_factory=lambda: "tidegate")

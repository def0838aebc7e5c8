"""Trace rows (JSON, JetStream ``TG_TRACES``): ``tg.v1.trace.{request_end,tool,decision}.<model>.<session>``.

Field names are the peer's (`request_end` of ``dynamo.request.trace.v1``); ours is a superset. Nothing is null: what is
not known is absent. Hashes and counts only, never prompts.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.admit import DecisionMode
from schemas.base import Message
from schemas.index import SourceHealth
from schemas.request import Outcome
from schemas.session import InputTrigger, RequestKind, SessionKey

TRACE_SCHEMA: Literal["tidegate.request.trace.v1"] = "tidegate.request.trace.v1"


class AgentContext(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Whose request it was. ``session_id``: the child's own id; ``session``: the house's key."""

    session_id: str
    parent_session_id: str | None = None
    session_final: bool | None = None
    input_trigger: InputTrigger | None = None
    turn_id: str | None = None
    session: SessionKey | None = None
    weak: bool = False


class ReplayBlock(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Chained hashes of the prompt, the partial tail block included: exactly ceil(input_length / trace_block_size)."""

    trace_block_size: int
    input_length: int
    input_sequence_hashes: tuple[int, ...]


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


class FinishMetadata(Message, frozen=True, kw_only=True, omit_defaults=True):
    """How the answer ended."""

    finish_reason: str | None = None
    stop_reason: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class RequestMetrics(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Everything measured about one request. Times in ms, tokens as the engine counted them."""

    request_id: str
    x_request_id: str | None = None
    model: str | None = None
    endpoint: str | None = None
    kind: RequestKind | None = None
    tenant: str | None = None
    stream: bool | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    status: int | None = None
    attempts: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    usage_estimated: bool | None = None
    predicted_cached_tokens: int | None = None
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


class TraceRow(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One finished row. ``event_source`` is ``tidegate`` for our own rows, ``harness`` for tool rows."""

    event_type: Literal["request_end", "tool_start", "tool_end", "tool_error", "decision"]
    event_time_unix_ms: int
    agent_context: AgentContext | None = None
    request: RequestMetrics | None = None
    # Always written, although constant: readers tell the schema by it.
    schema: str = msgspec.field(default_factory=lambda: TRACE_SCHEMA)
    event_source: str = msgspec.field(default_factory=lambda: "tidegate")

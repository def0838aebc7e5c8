"""One shape for the rows of everybody: ours, the peer's, and the peer's of earlier releases.

Source: spec identity-and-traces §2.3-2.7 (rows), §2.12 (``trajectory_id``; ``program_id`` before that), §3.2 (what of a
tool's times is believed).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from schemas.base import Message
from schemas.tool import ToolStatus
from schemas.trace import AgentContext, ReplayBlock, RequestMetrics, ToolRun, TracedDecision, TracedLoad
from tidegate.trace.errors import Place, Rule

OURS = "tidegate.request.trace.v1"
PEERS = "dynamo.request.trace.v1"
SCHEMAS = frozenset({OURS, PEERS, "dynamo.agent.trace.v1"})
TOOL_ENDS = frozenset({"tool_end", "tool_error"})
TOOL_EVENTS = TOOL_ENDS | {"tool_start"}

_STATUS: dict[str, ToolStatus] = {
    "running": "running",
    "succeeded": "succeeded",
    "ok": "succeeded",
    "success": "succeeded",
    "error": "error",
    "failed": "error",
    "cancelled": "cancelled",
    "canceled": "cancelled",
    "timeout": "cancelled",
}
_LARGEST_HASH = (1 << 64) - 1
_LARGEST_BLOCK = 1 << 20
_LARGEST_TIME_MS = 1 << 50


class ClaudeLink(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Which request began a sub-agent by this tool, and which one took its answer (an extension of offline traces)."""

    source_request_id: str
    consumer_request_id: str | None = None
    child_session_id: str | None = None
    execution_mode: str = "blocking"


class ToolFields(ToolRun, frozen=True, kw_only=True, omit_defaults=True):
    """The object ``tool`` of a tool row, with what only offline traces have."""

    claude: ClaudeLink | None = None


class ToolContext(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Whose tool it was."""

    session_id: str
    parent_session_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A finished request. Times in Unix ms."""

    place: Place
    start_ms: float
    end_ms: float
    event_source: str
    event_time_ms: int
    context: AgentContext | None
    metrics: RequestMetrics

    @property
    def request_id(self) -> str:
        return self.metrics.request_id

    @property
    def session(self) -> str | None:
        """As the harness named it."""
        return self.context.session_id if self.context is not None else None

    @property
    def parent(self) -> str | None:
        return self.context.parent_session_id if self.context is not None else None

    @property
    def replay(self) -> ReplayBlock | None:
        return self.metrics.replay


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpan:
    """A tool call that ended. Times in Unix ms; ``timed`` is false where the row tells no duration."""

    place: Place
    session: str
    parent: str | None
    event_type: Literal["tool_end", "tool_error"]
    event_time_ms: int
    start_ms: float
    end_ms: float
    timed: bool
    status: ToolStatus
    fields: ToolFields

    @property
    def name(self) -> str:
        return self.fields.tool_class


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStart:
    """A tool call's beginning: of use only where no end of it was heard."""

    place: Place
    session: str
    parent: str | None
    start_ms: int
    event_time_ms: int
    fields: ToolFields


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRow:
    """One placement of a request (rows of ours). Times in Unix ms."""

    place: Place
    time_ms: int
    decision: TracedDecision
    context: AgentContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """What a worker's bridge said of its load (rows of ours). Times in Unix ms."""

    place: Place
    time_ms: int
    load: TracedLoad


class BadRowError(ValueError):
    """A row is not what it should be (the file's fault)."""

    reason = "bad_row"

    def __init__(self, rule: Rule, text: str) -> None:
        super().__init__(text)
        self.rule: Rule = rule


def read_request(place: Place, event: Mapping[str, Any]) -> Request:
    """Raises `BadRowError`."""
    said = event.get("request")
    if not isinstance(said, Mapping):
        raise BadRowError("fields", "a request_end row has no object `request`")
    metrics = _converted({**said, "worker": _worker(said.get("worker"))}, RequestMetrics, "request")
    event_time_ms = _event_time(event)
    total_ms, received_ms = metrics.total_time_ms, metrics.request_received_ms
    if not 0 <= (total_ms or 0) < _LARGEST_TIME_MS or not 0 <= (received_ms or 0) < _LARGEST_TIME_MS:
        raise BadRowError("times", "request_received_ms or total_time_ms is no time")
    if received_ms is None:
        received_ms = event_time_ms - round(total_ms or 0)
    end_ms = received_ms + total_ms if total_ms is not None else float(max(received_ms, event_time_ms))
    _check_counts(metrics)
    return Request(
        place=place,
        start_ms=received_ms,
        end_ms=end_ms,
        event_source=str(event.get("event_source") or ""),
        event_time_ms=event_time_ms,
        context=_context(event),
        metrics=metrics,
    )


def read_tool(place: Place, event: Mapping[str, Any]) -> ToolSpan | ToolStart:
    """Raises `BadRowError`. Of a tool's end: its own times; else its time and duration; else a moment."""
    said = event.get("tool")
    if not isinstance(said, Mapping):
        raise BadRowError("fields", f"a {event['event_type']} row has no object `tool`")
    tool = _converted({**said, "status": _STATUS.get(str(said.get("status")))}, ToolFields, "tool")
    # Compact rows name the session at their top (spec §2.7).
    whose = event.get("agent_context") or {key: event[key] for key in _SESSION_KEYS if key in event}
    context = _converted(_renamed(whose), ToolContext, "agent_context")
    event_time_ms = _event_time(event)
    if event["event_type"] == "tool_start":
        return ToolStart(
            place=place,
            session=context.session_id,
            parent=context.parent_session_id,
            start_ms=event_time_ms if tool.started_at_unix_ms is None else tool.started_at_unix_ms,
            event_time_ms=event_time_ms,
            fields=tool,
        )
    failed = event["event_type"] == "tool_error"
    end_ms: float = event_time_ms if tool.ended_at_unix_ms is None else tool.ended_at_unix_ms
    start_ms, timed = float(end_ms), True
    if tool.started_at_unix_ms is not None:
        start_ms = tool.started_at_unix_ms
        if tool.ended_at_unix_ms is None and tool.duration_ms is not None:
            end_ms = start_ms + tool.duration_ms
    elif tool.duration_ms is not None:
        start_ms = end_ms - tool.duration_ms
    else:
        timed = False
    if not (abs(start_ms) < _LARGEST_TIME_MS and abs(end_ms) < _LARGEST_TIME_MS):
        raise BadRowError("times", "the tool's times or its duration are no times in ms")
    return ToolSpan(
        place=place,
        session=context.session_id,
        parent=context.parent_session_id,
        event_type="tool_error" if failed else "tool_end",
        event_time_ms=event_time_ms,
        start_ms=start_ms,
        end_ms=end_ms,
        timed=timed,
        status=tool.status or ("error" if failed else "succeeded"),
        fields=tool,
    )


def read_decision(place: Place, event: Mapping[str, Any]) -> DecisionRow:
    """Raises `BadRowError`."""
    decision = _converted(event.get("decision"), TracedDecision, "decision")
    return DecisionRow(place=place, time_ms=_event_time(event), decision=decision, context=_context(event))


def read_load(place: Place, event: Mapping[str, Any]) -> LoadSample:
    """Raises `BadRowError`."""
    load = _converted(event.get("worker_load"), TracedLoad, "worker_load")
    return LoadSample(place=place, time_ms=_event_time(event), load=load)


_SESSION_KEYS = ("session_id", "parent_session_id", "trajectory_id", "parent_trajectory_id")


def _event_time(event: Mapping[str, Any]) -> int:
    time_ms = event.get("event_time_unix_ms")
    if not isinstance(time_ms, int) or isinstance(time_ms, bool) or not 0 <= time_ms < _LARGEST_TIME_MS:
        raise BadRowError("fields", "event_time_unix_ms is not a time in ms")
    return time_ms


def _context(event: Mapping[str, Any]) -> AgentContext | None:
    said = event.get("agent_context")
    return None if said is None else _converted(_renamed(said), AgentContext, "agent_context")


def _renamed(said: Any) -> Any:
    """Earlier names of the same: a trajectory, before it a program, was what is a session now (its run was called
    ``session_id`` then)."""
    if not isinstance(said, Mapping):
        return said
    for old in ("trajectory", "program"):
        if said.get(f"{old}_id") is not None:
            return {**said, "session_id": said[f"{old}_id"], "parent_session_id": said.get(f"parent_{old}_id")}
    return said


def _worker(said: Any) -> Any:
    """The peer's placement as ours: where it decoded, else where it prefilled."""
    if not isinstance(said, Mapping) or "worker" in said:
        return said
    for phase in ("decode", "prefill"):
        if said.get(f"{phase}_worker_id") is not None:
            return {"worker": str(said[f"{phase}_worker_id"]), "rank": said.get(f"{phase}_dp_rank") or 0}
    return None


def _check_counts(metrics: RequestMetrics) -> None:
    for name in ("input_tokens", "output_tokens", "cached_tokens"):
        value = getattr(metrics, name)
        if value is not None and not 0 <= value < 1 << 40:
            raise BadRowError("fields", f"{name} is not a number of tokens: {value}")
    replay = metrics.replay
    if replay is None:
        return
    if not 0 < replay.trace_block_size <= _LARGEST_BLOCK:
        raise BadRowError("block_size", f"trace_block_size is {replay.trace_block_size}")
    hashes, wanted = replay.input_sequence_hashes, -(-replay.input_length // replay.trace_block_size)
    if replay.input_length < 0 or len(hashes) != wanted:
        raise BadRowError(
            "hash_count",
            f"{len(hashes)} input_sequence_hashes for {replay.input_length} tokens in blocks of "
            f"{replay.trace_block_size}: they should be {max(0, wanted)}",
        )
    completion = replay.completion_sequence_hashes
    told = () if isinstance(completion, msgspec.UnsetType) else completion
    whole = replay.input_length // replay.trace_block_size
    if told and told[:whole] != hashes[:whole]:
        raise BadRowError(
            "hash_count", f"completion_sequence_hashes do not begin with the {whole} whole blocks of the prompt"
        )
    every = hashes + told
    if every and not 0 <= min(every) <= max(every) <= _LARGEST_HASH:
        raise BadRowError("hash_range", "a sequence hash has more than 64 bits")


S = TypeVar("S", bound=msgspec.Struct)


def _converted(said: Any, kind: type[S], name: str) -> S:
    if isinstance(said, Mapping):
        # What is not known is absent in our rows; others may write null.
        said = {key: value for key, value in said.items() if value is not None}
    try:
        return msgspec.convert(said, kind)
    except msgspec.ValidationError as error:
        raise BadRowError("fields", f"{name}: {error}") from error

"""Rows as OpenTelemetry spans and log records: plain data, no SDK.

One trace per run: a session and its sub-agents. A session is a span ``invoke_agent``, below it are its requests, its
tools below the request that called them, its sub-agents below the session that began them. Every id is a hash of what
the row names, so that a row gives the same span whoever turns it into one, whenever, and in whatever order.

Names: OpenTelemetry's GenAI conventions as of `SCHEMA_URL`, and ``tidegate.*`` for what has none there
(spec: conventions §4.3). Counts, names and times only, never prompts, answers or arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

from schemas.trace import AgentContext, RequestMetrics, TraceRow
from services.recorder.errors import BadRowError

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
"""Which conventions the names are of."""
SCOPE = "tidegate.recorder"
PROVIDER = "tidegate"
"""``gen_ai.provider.name``: rows do not say which engine answered."""

Value = str | bool | int | float | tuple[str, ...]
Attributes = dict[str, Value]
Kind = Literal["client", "internal"]

_OPERATIONS = {
    "chat_completions": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
}
_NOT_OUR_FAULT = frozenset({"completed", "client_disconnect"})
_LARGEST_MS = (1 << 63) // 1_000_000 - 1


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened within a span; Unix ns."""

    name: str
    time_ns: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span; times in Unix ns. ``error``: what its status says, ``None`` where it is not an error."""

    trace_id: int
    span_id: int
    parent_id: int | None
    name: str
    kind: Kind
    start_ns: int
    end_ns: int
    attributes: Attributes
    events: tuple[Event, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Whose:
    """Where a row's spans belong: the trace of its run, its session's span in it, and the parent session's."""

    trace_id: int
    span_id: int
    parent_id: int | None
    tenant: str
    run: str


@dataclass(frozen=True, slots=True)
class Runs:
    """Which run a session belongs to; a run is named after its root session.

    ``tenant``: of rows without a session key. ``parents``: of sessions by their id, where more is known than a row
    says. Without it a sub-agent's own sub-agent, of a harness that names parents only, is of a run named after its
    parent.
    """

    tenant: str = "default"
    parents: Mapping[str, str] = field(default_factory=dict)

    def of(self, row: TraceRow) -> Whose | None:
        """Whose a row is, if anybody's."""
        context = identity(row)
        return None if context is None else self.whose(context)

    def whose(self, context: AgentContext) -> Whose:
        """The place of a session."""
        key, session_id = context.session, context.session_id
        tenant = self.tenant if key is None else key.tenant
        parent_id = context.parent_session_id or self.parents.get(session_id)
        if key is not None and key.agent:
            run, parent_id = key.root, parent_id or key.root
        else:
            run = self._root(session_id, parent_id)
        return Whose(
            trace_id=_hash(16, "run", tenant, run),
            span_id=_hash(8, "session", tenant, session_id),
            parent_id=_hash(8, "session", tenant, parent_id) if parent_id and parent_id != session_id else None,
            tenant=tenant,
            run=run,
        )

    def _root(self, session_id: str, parent_id: str | None) -> str:
        seen = {session_id}
        root, above = session_id, parent_id
        while above is not None and above not in seen:  # a circle is no tree: it ends where it is closed
            seen.add(above)
            root, above = above, self.parents.get(above)
        return root


def identity(row: TraceRow) -> AgentContext | None:
    """Whose the row is; ``None`` for a request that is a session by itself."""
    context = row.agent_context
    if context is None or (context.session is not None and context.session.family == "request"):
        return None
    return context


def call_of(session: Whose, call_id: str) -> int:
    """Which tool call of a session: as long for an id of a kilobyte as for any."""
    return _hash(8, "call", f"{session.span_id:x}", call_id)


def place_of(row: TraceRow, session: Whose | None) -> tuple[int, int] | None:
    """(trace, span) that a row of this session is of: its request's, else its session's, if it has any. A request
    without identity is a trace by itself."""
    about = row.request or row.decision
    if about is None:
        return None if session is None else (session.trace_id, session.span_id)
    trace_id = _hash(16, "request", about.request_id) if session is None else session.trace_id
    return trace_id, _hash(8, "request", about.request_id)


def request_span(row: TraceRow, session: Whose | None) -> Span:
    """Of a row ``request_end``. Raises `BadRowError` where it has no request, or a time is none."""
    request = row.request
    place = place_of(row, session)
    if request is None or place is None:
        raise BadRowError("a row request_end without its request")
    start_ms = request.request_received_ms
    if start_ms is None:
        start_ms = row.event_time_unix_ms - round(request.total_time_ms or 0)
    start_ns = unix_ns(start_ms)
    total_ms = request.total_time_ms
    end_ns = unix_ns(row.event_time_unix_ms) if total_ms is None else start_ns + unix_ns(total_ms)
    operation = _OPERATIONS.get(request.endpoint or "", request.endpoint or "chat")
    return Span(
        trace_id=place[0],
        span_id=place[1],
        parent_id=None if session is None else session.span_id,
        name=f"{operation} {request.model}" if request.model else operation,
        kind="client",
        start_ns=start_ns,
        end_ns=max(start_ns, end_ns),
        attributes=_request_attributes(request, operation) | _context_attributes(identity(row), session),
        events=_request_events(request, start_ns),
        error=_error(request),
    )


def _request_attributes(request: RequestMetrics, operation: str) -> Attributes:
    finish = request.finish_reason_metadata
    reasons: tuple[str, ...] = ()
    if finish is not None:
        told = [choice.finish_reason for choice in finish.choices] or [finish.finish_reason]
        reasons = tuple(reason for reason in told if reason)
    worker = request.worker
    outcome = request.outcome
    return said(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": request.model,
            "gen_ai.request.stream": request.stream,
            "gen_ai.request.max_tokens": request.max_output_tokens,
            "gen_ai.request.choice.count": request.choices,
            "gen_ai.response.id": request.response_id,
            "gen_ai.response.finish_reasons": reasons or None,
            "gen_ai.response.time_to_first_chunk": None if request.ttft_ms is None else request.ttft_ms / 1000,
            "gen_ai.usage.input_tokens": request.input_tokens,
            "gen_ai.usage.output_tokens": request.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": request.reasoning_tokens,
            "http.response.status_code": request.status,
            "error.type": None if _error(request) is None else request.reason or outcome,
            "tidegate.request.id": request.request_id,
            "tidegate.request.client_id": request.x_request_id,
            "tidegate.request.kind": request.kind,
            "tidegate.request.endpoint": request.endpoint,
            "tidegate.request.modalities": request.modalities or None,
            "tidegate.request.attempts": request.attempts,
            "tidegate.request.hedged": request.hedged,
            "tidegate.outcome": outcome,
            "tidegate.reason": request.reason,
            "tidegate.tenant": request.tenant,
            "tidegate.worker": worker.worker if worker else None,
            "tidegate.worker.rank": worker.rank if worker else None,
            "tidegate.usage.estimated": request.usage_estimated,
            "tidegate.usage.predicted_cached_tokens": request.predicted_cached_tokens,
            "tidegate.usage.predicted_shared_tokens": request.predicted_shared_tokens,
            "tidegate.admission.wait_ms": request.admission_wait_ms,
            "tidegate.admission.hold_ms": request.hold_ms,
            "tidegate.admission.hold_reason": request.hold_reason,
            "tidegate.admission.queue_depth": request.queue_depth,
            "tidegate.decision.grant_id": request.grant_id,
            "tidegate.decision.mode": request.decision_mode,
            "tidegate.decision.policy": request.policy,
            "tidegate.decision.index_health": request.index_health,
            "tidegate.decision.index_reason": request.index_reason,
            "tidegate.inter_token_latency_ms": request.avg_itl_ms,
            "tidegate.replayable": request.replayable,
        }
    )


def _request_events(request: RequestMetrics, start_ns: int) -> tuple[Event, ...]:
    """``held``: the hold is over; ``dispatched``: its bytes go to the engine that answered; ``first_token``."""
    found = []
    wait_ms = request.admission_wait_ms
    if request.hold_ms:
        attributes = said({"tidegate.admission.hold_reason": request.hold_reason})
        after_ms: float = request.hold_ms if wait_ms is None else wait_ms
        found.append(
            Event("held", start_ns + unix_ns(after_ms), {"tidegate.admission.hold_ms": request.hold_ms} | attributes)
        )
    if request.worker is not None and (after := _first(request.prefill_wait_time_ms, wait_ms)) is not None:
        found.append(Event("dispatched", start_ns + unix_ns(after), {"tidegate.worker": request.worker.worker}))
    if request.ttft_ms is not None:
        found.append(Event("first_token", start_ns + unix_ns(request.ttft_ms)))
    return tuple(found)


def _first(*times: float | None) -> float | None:
    return next((each for each in times if each is not None), None)


def _error(request: RequestMetrics) -> str | None:
    """A client that left is no error of ours; everything else that did not complete is one."""
    if request.outcome is None or request.outcome in _NOT_OUR_FAULT:
        return None
    return f"{request.outcome}: {request.reason}" if request.reason else request.outcome


def tool_span(row: TraceRow, session: Whose | None, caller: tuple[int, int] | None) -> Span:
    """Of a row ``tool_end`` or ``tool_error``, below its ``caller``, a request's (trace, span), or else its session.

    Raises `BadRowError` where it has no tool or session, or a time is none. A row without a duration is a moment.
    """
    tool, context = row.tool, identity(row)
    if tool is None or context is None or session is None:
        raise BadRowError(f"a row {row.event_type} without its tool or session")
    end_ms: float = row.event_time_unix_ms if tool.ended_at_unix_ms is None else tool.ended_at_unix_ms
    start_ms: float = end_ms
    if tool.started_at_unix_ms is not None:
        start_ms = tool.started_at_unix_ms
        if tool.ended_at_unix_ms is None and tool.duration_ms is not None:
            end_ms = start_ms + tool.duration_ms
    elif tool.duration_ms is not None:
        start_ms = end_ms - tool.duration_ms
    failed = row.event_type == "tool_error" or tool.status == "error"
    start_ns = unix_ns(min(start_ms, end_ms))
    facts: dict[str, Value | None] = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": tool.tool_class,
        "gen_ai.tool.call.id": tool.tool_call_id,
        "error.type": (tool.error_type or "tool_error") if failed else None,
        "tidegate.tool.status": tool.status or ("error" if failed else "succeeded"),
        "tidegate.tool.output_tokens": tool.output_tokens,
        "tidegate.tool.output_bytes": tool.output_bytes,
        "tidegate.tool.inferred": tool.inferred or None,
    }
    return Span(
        trace_id=session.trace_id if caller is None else caller[0],
        # The time too: harnesses that number their calls anew each turn name several by one id.
        span_id=_hash(8, "tool", session.tenant, context.session_id, tool.tool_call_id, str(row.event_time_unix_ms)),
        parent_id=session.span_id if caller is None else caller[1],
        name=f"execute_tool {tool.tool_class}",
        kind="internal",
        start_ns=start_ns,
        end_ns=max(start_ns, unix_ns(end_ms)),
        attributes=said(facts) | _context_attributes(context, session),
        error=(tool.error_type or "tool_error") if failed else None,
    )


def session_span(context: AgentContext, session: Whose, start_ns: int, end_ns: int) -> Span:
    """The span that the session's requests and tools lie below."""
    name = context.turn.agent_name if context.turn is not None else None
    facts: dict[str, Value | None] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.agent.id": context.session_id,
        "gen_ai.agent.name": name,
        "tidegate.tenant": session.tenant,
    }
    return Span(
        trace_id=session.trace_id,
        span_id=session.span_id,
        parent_id=session.parent_id,
        name=f"invoke_agent {name}" if name else "invoke_agent",
        kind="internal",
        start_ns=start_ns,
        end_ns=end_ns,
        attributes=said(facts) | _session_attributes(context, session),
    )


def _session_attributes(context: AgentContext, session: Whose) -> Attributes:
    """``gen_ai.conversation.id`` is the run's, ``session.id`` the agent's own."""
    turn = context.turn
    return said(
        {
            "gen_ai.conversation.id": session.run,
            "session.id": context.session_id,
            "tidegate.session.parent_id": context.parent_session_id,
            "tidegate.session.family": context.session.family if context.session is not None else None,
            "tidegate.session.weak": context.weak or None,
            "tidegate.session.forked_from": turn.forked_from_session_id if turn is not None else None,
        }
    )


def _context_attributes(context: AgentContext | None, session: Whose | None) -> Attributes:
    """Of a request or tool of a session."""
    if context is None or session is None:
        return {}
    facts: dict[str, Value | None] = {
        "tidegate.session.final": context.session_final,
        "tidegate.turn.id": context.turn_id,
        "tidegate.turn.trigger": context.input_trigger,
    }
    return _session_attributes(context, session) | said(facts)


def _hash(size: int, *parts: str) -> int:
    """An id of ``size`` bytes that is not 0; parts are told apart by their lengths."""
    text = "".join([f"{len(part)}:{part}" for part in parts])
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest(), "big") or 1


def unix_ns(ms: float) -> int:
    """Raises `BadRowError` for what is no time (ns must fit into 64 bits)."""
    if not 0 <= ms <= _LARGEST_MS:
        raise BadRowError(f"{ms} ms is no time")
    return ms * 1_000_000 if isinstance(ms, int) else round(ms * 1_000_000)


def said(attributes: Mapping[str, Value | None]) -> Attributes:
    """What is known; whole numbers that do not fit into 64 bits are left out, as nobody could read them."""
    return {
        name: value
        for name, value in attributes.items()
        if value is not None and not (isinstance(value, int) and not -(1 << 63) <= value < 1 << 63)
    }

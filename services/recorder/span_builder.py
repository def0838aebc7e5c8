"""From batches of rows to spans and log records, with the little that must be remembered between batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from schemas.base import to_json
from schemas.trace import AgentContext, TracedWorker, TraceRow
from services.recorder.errors import BadRowError
from services.recorder.spans import (
    Attributes,
    Runs,
    Span,
    Whose,
    call_of,
    identity,
    place_of,
    request_span,
    said,
    session_span,
    tool_span,
    unix_ns,
)

Severity = Literal["info", "warn", "error"]
K = TypeVar("K")
V = TypeVar("V")

_LOGGED = frozenset({"request_end", "tool_start", "tool_end", "tool_error", "decision"})
_WARNINGS = frozenset({"client_error", "refused"})
_FINE = frozenset({"completed", "client_disconnect"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """One row; time in Unix ns. ``place``: (trace, span) that it is of. ``body``: the row in JSON, without the hashes
    of its prompt."""

    time_ns: int
    event_name: str
    severity: Severity
    body: str
    attributes: Attributes
    place: tuple[int, int] | None


@dataclass(slots=True)
class _Met:
    """What a batch says of a session that is new."""

    context: AgentContext
    whose: Whose
    start_ns: int
    end_ns: int


class SpanBuilder:
    """Rows to spans, batch by batch.

    Remembers ``limit`` sessions whose span was given, and as many tool calls with the request that asked for them;
    the oldest go first. A session's span is given once, with the first rows of it, and reaches as far as those: nothing
    says when a session is over, and a trace without its root is shown badly.
    """

    def __init__(self, runs: Runs, limit: int = 65_536) -> None:
        self._runs = runs
        self._limit = limit
        self._given: OrderedDict[int, None] = OrderedDict()
        self._callers: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def spans(self, rows: Sequence[TraceRow]) -> tuple[list[Span], int]:
        """Of the rows that have one: sessions that are new, then requests, then tools; and how many rows are none that
        a span can be made of."""
        found: list[Span] = []
        new: dict[int, _Met] = {}
        bad = 0
        requests = [row for row in rows if row.event_type == "request_end"]
        tools = [row for row in rows if row.event_type in ("tool_end", "tool_error")]
        for row in (*requests, *tools):  # so that a tool finds the request that called it
            whose = self._runs.of(row)
            try:
                span = self._request(row, whose) if row.event_type == "request_end" else self._tool(row, whose)
            except BadRowError:
                bad += 1
                continue
            found.append(span)
            if whose is not None and (context := identity(row)) is not None:
                self._meet(context, whose, span, new)
        return [self._session(met) for met in new.values()] + found, bad

    def _request(self, row: TraceRow, whose: Whose | None) -> Span:
        span = request_span(row, whose)
        finish = row.request.finish_reason_metadata if row.request is not None else None
        if finish is not None and whose is not None:
            for call in finish.tool_calls:
                if call.id is not None:
                    self._remember(self._callers, call_of(whose, call.id), (span.trace_id, span.span_id))
        return span

    def _tool(self, row: TraceRow, whose: Whose | None) -> Span:
        caller = None
        if row.tool is not None and whose is not None:
            caller = self._callers.get(call_of(whose, row.tool.tool_call_id))
        return tool_span(row, whose, caller)

    def _meet(self, context: AgentContext, whose: Whose, span: Span, new: dict[int, _Met]) -> None:
        session = whose.span_id
        if session in self._given:
            self._given.move_to_end(session)
            return
        if session not in new and context.session is None and "gen_ai.tool.name" in span.attributes:
            return  # a tool's row without the key may name another run than the session's requests, which will come
        met = new.setdefault(session, _Met(context, whose, span.start_ns, span.end_ns))
        met.start_ns, met.end_ns = min(met.start_ns, span.start_ns), max(met.end_ns, span.end_ns)

    def _session(self, met: _Met) -> Span:
        self._remember(self._given, met.whose.span_id, None)
        return session_span(met.context, met.whose, met.start_ns, met.end_ns)

    def _remember(self, memory: OrderedDict[K, V], key: K, value: V) -> None:
        memory[key] = value
        memory.move_to_end(key)
        while len(memory) > self._limit:
            memory.popitem(last=False)


def log_records(rows: Sequence[TraceRow], runs: Runs) -> tuple[list[LogRecord], int]:
    """One of each row but samples of load, which are metrics; and how many rows are none that one can be made of."""
    found, bad = [], 0
    for row in rows:
        if row.event_type not in _LOGGED:
            continue
        try:
            found.append(_log_record(row, runs))
        except BadRowError:
            bad += 1
    return found, bad


def _log_record(row: TraceRow, runs: Runs) -> LogRecord:
    context, request, decision, tool = identity(row), row.request, row.decision, row.tool
    whose = runs.of(row)
    attributes = said(
        {
            "gen_ai.conversation.id": whose.run if whose is not None else None,
            "session.id": context.session_id if context is not None else None,
            "gen_ai.request.model": request.model if request else decision.model if decision else None,
            "gen_ai.tool.name": tool.tool_class if tool else None,
            "gen_ai.tool.call.id": tool.tool_call_id if tool else None,
            "tidegate.request.id": request.request_id if request else decision.request_id if decision else None,
            "tidegate.outcome": request.outcome if request else None,
            "tidegate.worker": worker.worker if (worker := _worker(row)) else None,
        }
    )
    return LogRecord(
        time_ns=unix_ns(row.event_time_unix_ms),
        event_name=f"tidegate.{row.event_type}",
        severity=_severity(row),
        body=to_json(_without_hashes(row)).decode(),
        attributes=attributes,
        place=place_of(row, whose),
    )


def _worker(row: TraceRow) -> TracedWorker | None:
    if row.request is not None:
        return row.request.worker
    return row.decision.worker if row.decision is not None else None


def _severity(row: TraceRow) -> Severity:
    outcome = row.request.outcome if row.request is not None else None
    if outcome is None or outcome in _FINE:
        return "warn" if row.event_type == "tool_error" else "info"
    return "warn" if outcome in _WARNINGS else "error"


def _without_hashes(row: TraceRow) -> TraceRow:
    request = row.request
    if request is None or request.replay is None:
        return row
    return msgspec.structs.replace(row, request=msgspec.structs.replace(request, replay=None))

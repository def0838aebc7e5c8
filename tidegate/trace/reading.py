"""Trace files to one `Trace`: wrapped or bare rows, in any order, of any number of files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from schemas.base import UNDECODABLE
from tidegate.trace.errors import Place, Problem, Problems
from tidegate.trace.files import Line, find_files, read_lines
from tidegate.trace.rows import (
    OURS,
    SCHEMAS,
    TOOL_EVENTS,
    BadRowError,
    DecisionRow,
    LoadSample,
    Request,
    ToolSpan,
    ToolStart,
    read_decision,
    read_load,
    read_request,
    read_tool,
)

NO_EVENT_TYPE = "no event_type"
"""The kind of rows that name none: they are lines of another format."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their beginning, tools of their end (lines have no order: spec §2.2)."""

    requests: tuple[Request, ...] = ()
    tools: tuple[ToolSpan, ...] = ()
    open_tools: tuple[ToolStart, ...] = ()
    """Tools whose end was not heard."""
    decisions: tuple[DecisionRow, ...] = ()
    """In the order of their time, each grant's once."""
    loads: tuple[LoadSample, ...] = ()
    """In the order of their time."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Rows of other kinds, by kind: nothing is wrong with them."""
    damaged: tuple[Problem, ...] = ()
    """Where a file could not be read to its end."""

    def sessions(self) -> dict[str, list[Request]]:
        """Requests that name a session, by it, in the order of their beginning."""
        found: dict[str, list[Request]] = {}
        for request in self.requests:
            if request.session is not None:
                found.setdefault(request.session, []).append(request)
        return found

    def parents(self) -> dict[str, str]:
        """The parent of each session that names one: the first that it named."""
        found: dict[str, str] = {}
        rows: tuple[Request | ToolSpan, ...] = (*self.requests, *self.tools)
        for row in rows:
            if row.session is not None and row.parent is not None and row.parent != row.session:
                found.setdefault(row.session, row.parent)
        return found


class _Peek(msgspec.Struct):
    """Only what tells the kind of a row: a payload row of megabytes is not built."""

    event_type: str | None = None
    schema: str | None = None
    event: _Peek | None = None


_peek = msgspec.json.Decoder(_Peek)

_OURS_ONLY = frozenset({"decision", "worker_load"})
"""Kinds of rows that only our schema has: those of others are left aside."""


def read_trace(paths: Sequence[Path]) -> Trace:
    """All rows of the files and folders. Raises `TraceFileError` with the first problems of all files."""
    reader = _Reader()
    for path in find_files(paths):
        for line in read_lines(path, reader.damage):
            reader.read(str(path), line)
    return reader.trace()


class _Reader:
    def __init__(self) -> None:
        self._problems = Problems()
        self._requests: dict[str, Request] = {}
        self._tools: list[ToolSpan] = []
        self._starts: dict[tuple[str, str], ToolStart] = {}
        self._decisions: dict[str, DecisionRow] = {}
        self._loads: list[LoadSample] = []
        self._skipped: Counter[str] = Counter()
        self._damaged: list[Problem] = []

    def damage(self, place: Place, text: str) -> None:
        self._damaged.append(Problem(place, "file", text))

    def read(self, file: str, line: Line) -> None:
        place = Place(file, line.number)
        try:
            event = self._event(line.data)
            if event is not None:
                self._take(place, event)
        except UNDECODABLE as error:
            if line.ended:
                self._problems.add(place, "json", f"the line is not a row in JSON ({error})")
            else:
                self.damage(place, "the last line is cut")
        except BadRowError as error:
            self._problems.add(place, error.rule, str(error))

    def _event(self, data: bytes) -> dict[str, Any] | None:
        """The bare row, if it is of a kind that is of use here."""
        peek = _peek.decode(data)
        wrapped = peek.event is not None
        inner = peek.event or peek
        if inner.schema is not None and inner.schema not in SCHEMAS:
            self._skipped[f"schema {inner.schema[:64]}"] += 1
            return None
        kind = inner.event_type
        ours = kind in _OURS_ONLY and inner.schema == OURS
        if kind != "request_end" and kind not in TOOL_EVENTS and not ours:
            self._skipped[(inner.event_type or NO_EVENT_TYPE)[:64]] += 1
            return None
        said = msgspec.json.decode(data)
        event: dict[str, Any] = said["event"] if wrapped else said
        return event

    def _take(self, place: Place, event: dict[str, Any]) -> None:
        if event["event_type"] == "request_end":
            request = read_request(place, event)
            before = self._requests.setdefault(request.request_id, request)
            if before is not request:
                raise BadRowError(
                    "duplicate_request_id", f"request_id {request.request_id} was in {before.place} already"
                )
            return
        if event["event_type"] == "decision":
            decision = read_decision(place, event)
            self._decisions.setdefault(decision.decision.grant_id, decision)
            return
        if event["event_type"] == "worker_load":
            self._loads.append(read_load(place, event))
            return
        tool = read_tool(place, event)
        if isinstance(tool, ToolStart):
            self._starts[(tool.session, tool.fields.tool_call_id)] = tool
        else:
            self._tools.append(tool)

    def trace(self) -> Trace:
        """Raises `TraceFileError`."""
        self._problems.raise_any()
        tools = [self._with_start(tool) for tool in self._tools]
        ended = {(tool.session, tool.fields.tool_call_id) for tool in tools}
        return Trace(
            requests=tuple(sorted(self._requests.values(), key=lambda row: (row.start_ms, row.end_ms, row.request_id))),
            tools=tuple(sorted(tools, key=lambda row: (row.end_ms, row.session, row.fields.tool_call_id))),
            open_tools=tuple(start for key, start in self._starts.items() if key not in ended),
            decisions=tuple(sorted(self._decisions.values(), key=lambda row: (row.time_ms, row.decision.grant_id))),
            loads=tuple(sorted(self._loads, key=lambda row: (row.time_ms, row.load.worker))),
            skipped=self._skipped,
            damaged=tuple(self._damaged),
        )

    def _with_start(self, tool: ToolSpan) -> ToolSpan:
        """With the time of its own tool_start, where its end does not tell it."""
        start = self._starts.get((tool.session, tool.fields.tool_call_id))
        if tool.timed or start is None or start.start_ms > tool.end_ms:
            return tool
        return replace(tool, start_ms=start.start_ms, timed=True)

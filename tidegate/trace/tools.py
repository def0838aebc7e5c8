"""Every tool that ran: as harnesses told, and for those who tell nothing, as the next request shows.

Source: spec identity-and-traces §2.11 (a tool call that an answer asked for, and of which no end was heard, lasted from
the end of that request to the beginning of the session's next). Where its start was heard, it lasted from there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from tidegate.trace.reading import Trace
from tidegate.trace.rows import Request

UNKNOWN_MS = 1.0
"""Shown of a tool whose duration nobody knows."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One tool call. Times in Unix ms. ``known`` is false where the duration is not (then it is `UNKNOWN_MS`).
    ``inferred``: its end was not told (an upper bound is known at best)."""

    session: str
    name: str
    call_id: str | None
    start_ms: float
    end_ms: float
    status: str
    inferred: bool
    known: bool

    @property
    def duration_ms(self) -> float:
        return self.end_ms - self.start_ms


def tool_uses(trace: Trace) -> list[ToolUse]:
    """Told and inferred, in the order of their beginning. A tool that ends before it begins counts as a moment."""
    found = [*_told(trace), *_begun(trace)]
    told = {(use.session, use.call_id) for use in found}
    found += [use for use in _inferred(trace) if use.call_id is None or (use.session, use.call_id) not in told]
    return sorted(found, key=lambda use: (use.start_ms, use.end_ms, use.session))


def _told(trace: Trace) -> Iterator[ToolUse]:
    for tool in trace.tools:
        known = tool.timed and tool.start_ms <= tool.end_ms
        start_ms = tool.start_ms if known else tool.end_ms
        end_ms = tool.end_ms if known else tool.end_ms + UNKNOWN_MS
        yield ToolUse(
            tool.session,
            tool.name,
            tool.fields.tool_call_id,
            start_ms,
            end_ms,
            tool.status,
            tool.fields.inferred,
            known,
        )


def _begun(trace: Trace) -> Iterator[ToolUse]:
    """Those whose end was not told: over by the session's next request, if there is one."""
    starts = {session: [request.start_ms for request in requests] for session, requests in trace.sessions().items()}
    for tool in trace.open_tools:
        begins = starts.get(tool.session, [])
        place = bisect_right(begins, tool.start_ms)
        known = place < len(begins)
        end_ms = begins[place] if known else tool.start_ms + UNKNOWN_MS
        fields = tool.fields
        yield ToolUse(
            tool.session, fields.tool_class, fields.tool_call_id, tool.start_ms, end_ms, "running", True, known
        )


def _inferred(trace: Trace) -> Iterator[ToolUse]:
    for session, requests in trace.sessions().items():
        for request, following in zip(requests, [*requests[1:], None], strict=True):
            for name, call_id in called(request):
                known = following is not None and following.start_ms >= request.end_ms
                end_ms = following.start_ms if following is not None and known else request.end_ms + UNKNOWN_MS
                yield ToolUse(session, name or "?", call_id, request.end_ms, end_ms, "succeeded", True, known)


def called(request: Request) -> list[tuple[str | None, str | None]]:
    """Name and id of each tool call that the answer asked for."""
    finish = request.metrics.finish_reason_metadata
    return [(call.name, call.id) for call in finish.tool_calls] if finish is not None else []

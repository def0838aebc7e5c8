"""Calls that run: what their start said is kept until their end comes, which may not say when they began."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from services.recorder.tool_messages import ToolReport


class OpenCalls:
    """The last ``limit`` starts whose end has not come, oldest first out (a harness may die, a plug-in drops events).

    A call is known by session and id, kept as 16 bytes whatever their length. A second start of the same call counts
    instead of the first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._started: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._started)

    def times(self, report: ToolReport) -> tuple[int | None, int | None]:
        """(began, ended) in Unix ms, as far as this report, and for an end its start, tell them.

        What the report says itself is believed first (spec: identity-and-traces §2.11); the time of an end that says
        none is the event's own. A start that lies after the end is none of this call.
        """
        tool = report.tool
        mark = _mark(report)
        if report.event_type == "tool_start":
            started = report.at_ms if tool.started_at_unix_ms is None else tool.started_at_unix_ms
            self._started[mark] = started
            self._started.move_to_end(mark)
            while len(self._started) > self._limit:
                self._started.popitem(last=False)
            return tool.started_at_unix_ms, tool.ended_at_unix_ms
        began = self._started.pop(mark, None)
        started_ms, ended_ms = tool.started_at_unix_ms, tool.ended_at_unix_ms
        if tool.duration_ms is not None:
            return started_ms, ended_ms
        if started_ms is None and began is not None and began <= (report.at_ms if ended_ms is None else ended_ms):
            started_ms = began
        if started_ms is not None and ended_ms is None:
            ended_ms = report.at_ms
        return started_ms, ended_ms


def _mark(report: ToolReport) -> bytes:
    """Lengths first, so that no two calls have one text."""
    session, call = report.session_id.encode("utf-8", "replace"), report.tool.tool_call_id.encode("utf-8", "replace")
    return blake2b(b"%d %b %b" % (len(session), session, call), digest_size=16).digest()

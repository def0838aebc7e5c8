"""What becomes of a tool event: one fact, told at once, and one durable row; the same event again is neither.

A fact is told of what its event leaves out, where that is known (a status, when the call began); a row says only what
its harness said. What is inferred is a fact only: whoever reads rows infers the same from those of the requests.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Literal

from bus import subjects
from bus.facts import FactNumbers, GapCounter
from schemas.base import to_json
from schemas.request import RequestAccepted, RequestEnd
from schemas.session import MOVES_SESSION, SessionKey
from schemas.tool import ToolEvent, ToolStatus
from schemas.trace import AgentContext, TraceRow
from services.recorder.tool_inference import InferredCall, ToolInference
from services.recorder.tool_messages import ToolEventType, ToolReport
from services.recorder.tool_sessions import KnownSessions
from services.recorder.tool_starts import OpenCalls

QUIET_TURNS = 20
"""So many turns call tools, and no event comes: something is set wrong."""
MAX_ID_CHARACTERS = 4_096
"""A session with longer ids is not remembered: tables full of such would fill the memory."""

FactEvent = Literal["start", "end", "error"]
_FACT_EVENTS: dict[ToolEventType, tuple[FactEvent, ToolStatus]] = {
    "tool_start": ("start", "running"),
    "tool_end": ("end", "succeeded"),
    "tool_error": ("error", "error"),
}
"""The fact's event, and the status of a call whose harness says none."""


@dataclass(frozen=True, slots=True)
class SessionNamed:
    """A request was accepted: its identity is known."""

    fact: RequestAccepted


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A request is over; its answer may have called tools."""

    fact: RequestEnd


@dataclass(frozen=True, slots=True)
class ToolReported:
    """A harness says something of a call."""

    report: ToolReport


@dataclass(frozen=True, slots=True)
class PublishToolFact:
    """Tell it on the bus, at most once."""

    subject: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class PublishToolRow:
    """Put it into the stream, until that has it; ``message_id`` keeps it from being stored twice."""

    subject: str
    payload: bytes
    message_id: str


@dataclass(frozen=True, slots=True)
class NoToolEvents:
    """Say that ``turns`` have called tools and no harness tells of any, although a way in is open. Once."""

    turns: int


ToolInput = SessionNamed | TurnEnded | ToolReported
ToolEffect = PublishToolFact | PublishToolRow | NoToolEvents


class ToolEventCore:
    """Checked events in, facts and rows out. ``source`` and ``epoch`` number the facts (`schemas.base.Fact`);
    ``sessions``: how many session ids are known, how many events are told from repeated ones, how many calls may run.

    ``infer``: tell also what is only inferred. ``expects``: a way in is open, so that silence is worth a word. Counters
    for the metrics: ``taken`` by event, ``rejected`` by reason, ``unknown_session``, ``inferred``, ``calling_turns``;
    ``gaps`` of the facts about requests.
    """

    def __init__(
        self,
        source: str,
        epoch: int,
        tenant: str,
        sessions: int,
        *,
        infer: bool = False,
        expects: bool = False,
    ) -> None:
        self.sessions = KnownSessions(tenant, sessions)
        self.gaps = GapCounter()
        self.taken: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.unknown_session = 0
        self.inferred = 0
        self.calling_turns = 0
        self._expects = expects
        self._open = OpenCalls(sessions)
        self._inference = ToolInference(sessions) if infer else None
        self._numbers = FactNumbers(source, epoch)
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        self._window = sessions

    def handle(self, event: ToolInput, now: float) -> list[ToolEffect]:
        """One event at Unix time ``now``. No effects for a report that was taken before."""
        match event:
            case ToolReported(report):
                return self._reported(report, now)
            case SessionNamed(accepted):
                self.gaps.see("request.accepted", accepted)
                who = accepted.identity
                if len(who.key.root) + len(who.key.agent) + len(who.session_id) > MAX_ID_CHARACTERS:
                    return []
                self.sessions.see(accepted)
                calls = self._inference.accepted(accepted) if self._inference is not None else []
                return [self._inferred(call, now) for call in calls]
            case TurnEnded(ended):
                self.gaps.see("request.end", ended)
                if self._inference is not None:
                    self._inference.ended(ended)
                return self._called(ended)

    def _called(self, ended: RequestEnd) -> list[ToolEffect]:
        """A turn is over. Without any event so far, those that called tools are worth a word."""
        if not ended.tool_names or ended.kind not in MOVES_SESSION:
            return []
        self.calling_turns += 1
        silent = self._expects and not self.taken and self.calling_turns == QUIET_TURNS
        return [NoToolEvents(self.calling_turns)] if silent else []

    def _reported(self, report: ToolReport, now: float) -> list[ToolEffect]:
        mark = report.fingerprint()
        if mark in self._recent:
            self._recent.move_to_end(mark)
            self.rejected["duplicate"] += 1
            return []
        self._recent[mark] = None
        while len(self._recent) > self._window:
            self._recent.popitem(last=False)
        known = self.sessions.find(report.session_id)
        self.unknown_session += known is None
        key = self.sessions.key_of_unknown(report.session_id) if known is None else known.key
        if self._inference is not None:
            self._inference.told(key)
        fact = self._fact(report, key, now)
        self.taken[fact.event] += 1
        return [
            PublishToolFact(subjects.tool(fact.event, key.text()), to_json(fact)),
            PublishToolRow(
                subject=subjects.trace("tool", "" if known is None else known.model, key.text()),
                payload=to_json(_row(report, None if known is None else known.key)),
                message_id=f"tool-{mark.hex()}",
            ),
        ]

    def _fact(self, report: ToolReport, key: SessionKey, now: float) -> ToolEvent:
        event, status = _FACT_EVENTS[report.event_type]
        tool = report.tool
        started, ended = self._open.times(report)
        if started is not None and ended is not None and ended < started:
            started = None  # its clock was set: nobody is to learn a time from that
        return ToolEvent(
            **self._numbers.stamp(f"tool.{event}", now),
            session=key,
            session_id=report.session_id,
            event=event,
            tool_call_id=tool.tool_call_id,
            tool_class=tool.tool_class,
            status=tool.status or status,
            started_at_ms=started,
            ended_at_ms=ended,
            duration_ms=tool.duration_ms,
            error_type=tool.error_type,
        )

    def _inferred(self, call: InferredCall, now: float) -> PublishToolFact:
        self.inferred += 1
        key = call.identity.key
        fact = ToolEvent(
            **self._numbers.stamp("tool.end", now),
            session=key,
            session_id=call.identity.session_id,
            event="end",
            tool_call_id=call.call_id,
            tool_class=call.tool,
            status="succeeded",
            started_at_ms=call.started_ms,
            ended_at_ms=call.ended_ms,
            duration_ms=float(call.ended_ms - call.started_ms),
            inferred=True,
        )
        return PublishToolFact(subjects.tool("end", key.text()), to_json(fact))


def _row(report: ToolReport, key: SessionKey | None) -> TraceRow:
    """As its harness said it, with our key where it is known."""
    return TraceRow(
        event_type=report.event_type,
        event_time_unix_ms=report.at_ms,
        event_source="harness",
        agent_context=AgentContext(
            session_id=report.session_id, parent_session_id=report.parent_session_id, session=key
        ),
        tool=report.tool,
    )

"""Idle sessions: what becomes of their KV while their tools run, and before they come back."""

from __future__ import annotations

from services.hints.agenda import Agenda, Entry
from services.hints.config import HintsSettings
from services.hints.effects import PlannedHint
from services.hints.gate import Gate
from services.hints.proposals import Proposals
from services.hints.rules import Rules
from services.hints.sessions import Session, SessionTable
from services.hints.wishes import Place
from services.hints.workers import Workers

Hints = list[PlannedHint]

UNPIN_AFTER_S = 1.0
"""A turn that has ended is leased at once, or not at all: a pin of the lease before is taken back after that."""


class Idle:
    """Times at which something is to be done about an idle session, and what."""

    def __init__(
        self,
        settings: HintsSettings,
        sessions: SessionTable,
        workers: Workers,
        rules: Rules,
        gate: Gate,
        agenda: Agenda,
        proposals: Proposals,
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._workers = workers
        self._rules = rules
        self._gate = gate
        self._agenda = agenda
        self._proposals = proposals

    def arm(self, session: Session, now: float) -> None:
        """An idle session: its old pin may have no lease any more, its tools may take long."""
        if session.kept is not None and session.kept.pin is not None:
            self._agenda.add(now + UNPIN_AFTER_S, "unpin", session.key, session.generation)
        if session.place is not None and self._workers.lowest(session.place) is not None:
            self._agenda.add(now + self._settings.demote_after_s, "demote", session.key, session.generation)

    def due(self, entry: Entry, now: float) -> Hints:
        session = self._sessions.get(entry.session)
        if session is None or session.generation != entry.generation or session.place is None:
            return []
        match entry.what:
            case "unpin":
                return self.unpin(session, now) if session.lease is None and session.state == "acting" else []
            case "renew":
                pin = self._rules.pin(session, session.place, now)
                return self._proposals.send([pin], session, now)
            case "demote":
                return self._long_tool(session, session.place, now)
            case "prefetch":
                return self.bring_up(session, now, now + self._rules.prefetch_s(session), "predicted_return")

    def _long_tool(self, session: Session, place: Place, now: float) -> Hints:
        """Its tools have run for long. One that is expected back before a move down and up would pay stays; one with a
        lease has room of its own; and where there is room for all, it is in nobody's way."""
        if session.state != "acting" or session.lease is not None:
            return []
        if not self._workers.is_crowded(place, self._settings.demote_usage):
            self._agenda.add(now + self._settings.demote_after_s, "demote", session.key, session.generation)
            return []
        expected = self._rules.expected_return(session, now)
        if expected is not None and expected - now < 2 * self._rules.prefetch_s(session):
            again = max(expected, now + UNPIN_AFTER_S)
            self._agenda.add(again, "demote", session.key, session.generation)
            return []
        hints = self._proposals.send([self._rules.demote(session, place, "long_tool")], session, now)
        if hints and expected is not None:
            at = max(now + UNPIN_AFTER_S, expected - self._rules.prefetch_s(session))
            self._agenda.add(at, "prefetch", session.key, session.generation)
        return hints

    def bring_up(self, session: Session, now: float, deadline: float, reason: str) -> Hints:
        """An idle session whose KV went to a lower tier is about to come back."""
        kept = session.kept
        if session.state != "acting" or kept is None or kept.demoted is None or kept.demoted_until <= now:
            return []
        hints = self._proposals.send([self._rules.prefetch(session, kept.place, deadline, reason)], session, now)
        if hints:
            kept.demoted, kept.demoted_until = None, 0.0
        return hints

    def unpin(self, session: Session, now: float) -> Hints:
        """The room that its lease held is others' now."""
        kept = session.kept
        if kept is None:
            return []
        self._gate.flights.forget_wishes(session.key, kept.place)
        if kept.pin is None or kept.pin_until <= now:
            return []
        return self._gate.send(self._rules.release(session, kept.place, "unpinned"), session, now)

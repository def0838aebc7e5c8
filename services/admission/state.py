"""All that admission knows, in one place, and the few changes that asks and facts share."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.request import Usage
from schemas.session import MOVES_SESSION, SessionKey
from services.admission.config import AdmissionSettings
from services.admission.counters import Counters
from services.admission.effects import Effect, Publish
from services.admission.facts import FactWriter
from services.admission.grants import Ledger, OpenGrant
from services.admission.outcomes import LeaseTold
from services.admission.requests import RequestRecord, RequestTable
from services.admission.scheduled import Scheduled
from services.admission.scoring import Choose
from services.admission.sessions import Pause, SessionChange, SessionTable
from services.admission.workers import Fleet

HEDGE = "hedge:"
"""How such a name begins."""


def hedge_id(request_id: str) -> str:
    """Under which the second sending of a request is booked (`services.admission.hedging`)."""
    return HEDGE + request_id


@dataclass(slots=True)
class AdmissionState:
    """The tables, and whether we lead (``facts`` is ``None`` for a standby: it knows the same and says nothing)."""

    settings: AdmissionSettings
    choose: Choose
    warm_at: float
    fleet: Fleet
    ledger: Ledger
    sessions: SessionTable
    requests: RequestTable
    counters: Counters
    facts: FactWriter | None = None
    scheduled: Scheduled | None = None

    @classmethod
    def fresh(cls, settings: AdmissionSettings, choose: Choose, now: float) -> AdmissionState:
        """Nothing known yet; facts are listened to until ``warmup_s`` from now before anything is decided."""
        sessions = SessionTable(settings.max_sessions)
        scheduled = None
        if settings.policy != "kv":
            scheduled = Scheduled(
                settings.policy,
                settings.policy_parameters,
                choose,
                lambda key: sessions.get(key) is not None,
                now,
                settings.session_idle_s,
            )
        return cls(
            settings=settings,
            choose=choose,
            warm_at=now + settings.warmup_s,
            fleet=Fleet(settings.foreign_request_tokens),
            ledger=Ledger(),
            sessions=sessions,
            requests=RequestTable(),
            counters=Counters(),
            scheduled=scheduled,
        )

    def release(self, request_id: str, why: str) -> OpenGrant | None:
        """Reverse the request's grant, if it has one, and count why; a second sending goes with it."""
        entry = self._release(request_id, why)
        self.release_hedge(request_id)
        return entry

    def release_hedge(self, request_id: str) -> OpenGrant | None:
        """Reverse the booking of the request's second sending, if it has one."""
        return self._release(hedge_id(request_id), "hedge")

    def _release(self, name: str, why: str) -> OpenGrant | None:
        entry = self.ledger.release(name)
        if entry is not None:
            self.counters.released[why] += 1
            if self.scheduled is not None:
                self.scheduled.withdraw(name)
        return entry

    def adopted(self, record: RequestRecord) -> None:
        """The request runs on ``record.worker``, where others sent it."""
        if self.scheduled is not None and record.worker is not None:
            held_s = record.decision.hold_ms / 1000 if record.decision is not None else 0.0
            self.scheduled.runs(record, record.worker, record.rank or 0, self.turn_index(record), held_s)

    def turn_index(self, record: RequestRecord) -> int:
        """Turns that the request's session had before it."""
        session = self.sessions.get(record.identity.key)
        if session is None:
            return 0
        return max(0, session.turns - (record.turn_open or session.is_resent(record.digest)))

    def lease_told(self, told: LeaseTold, now: float) -> list[Effect]:
        """Count what became of a lease and, as leader, publish it."""
        session = self.sessions.get(told.session)
        if session is None or self.facts is None:
            return []
        self.counters.sessions[told.state] += 1
        return [Publish(self.facts.lease(session, told, now))]

    def tell_sessions(self, changes: list[SessionChange], now: float) -> list[Effect]:
        """Count the transitions and, as leader, publish them."""
        effects: list[Effect] = []
        for change in changes:
            if change.state == "closed" and self.scheduled is not None:
                self.scheduled.closed(change.session.identity.key)
            self.counters.sessions[change.state] += 1
            if self.facts is not None:
                effects.append(Publish(self.facts.session(change, now)))
        return effects

    def pause(self, key: SessionKey, pause: Pause, numbers: dict[str, float], now: float) -> list[Effect]:
        """The session is paused, if it can be."""
        return self.tell_sessions(self.sessions.pause(key, pause, numbers), now)

    def resume(self, key: SessionKey, reason: str, place: tuple[str, int] | None, now: float) -> list[Effect]:
        """The session is paused no more, if it was."""
        return self.tell_sessions(self.sessions.resume(key, reason, place), now)

    def runs_again(self, record: RequestRecord, reason: str, now: float) -> list[Effect]:
        """The request runs on ``record.worker``: its session's pause is over."""
        if not self.sessions.paused or record.kind not in MOVES_SESSION:
            return []
        place = (record.worker, record.rank or 0) if record.worker is not None else None
        return self.resume(record.identity.key, reason, place, now)

    def turn_placed(self, record: RequestRecord, now: float) -> list[Effect]:
        """The request runs on ``record.worker``: its session has a turn in flight (counted once per request)."""
        effects: list[Effect] = []
        if not record.turn_open:
            record.turn_open = True
            effects = self.runs_again(record, "adopted", now)
            session = self.sessions.get(record.identity.key) if record.kind in MOVES_SESSION else None
            self.counters.resends += session is not None and session.is_resent(record.digest)
            effects += self.tell_sessions(
                self.sessions.begin_turn(
                    record.identity, record.model, record.kind, now, record.digest, record.received_ms
                ),
                now,
            )
        if record.worker is not None:
            self.sessions.placed(record.identity.key, record.kind, record.worker, record.rank or 0)
        return effects

    def turn_over(self, record: RequestRecord, usage: Usage, reason: str, now: float) -> list[Effect]:
        """The request's turn is over, however it came."""
        if not record.turn_open:
            return []
        record.turn_open = False
        identity, kind = record.identity, record.kind
        final_ms = record.received_ms if kind == "final" or identity.final else None
        changes = self.sessions.end_turn(identity.key, kind, usage, record.input_tokens, reason, now, final_ms=final_ms)
        return self.tell_sessions(changes, now)

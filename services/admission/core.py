"""Admission: who may run now, and on which worker. The one door: ``handle(event, now) -> effects``.

Leader and standby take in the same facts; only the leader answers and publishes. ``now`` is Unix seconds.
"""

from __future__ import annotations

from schemas.admit import AdmitRequest
from services.admission.config import AdmissionSettings
from services.admission.deciding import Deciding
from services.admission.deciding_scheduled import ScheduledDeciding
from services.admission.effects import Effect
from services.admission.events import (
    Accepted,
    AdmitAsked,
    AdmitCancelled,
    CalibrationTold,
    Decided,
    Dispatched,
    Ended,
    Event,
    FirstToken,
    IngressStated,
    LeadershipChanged,
    LearnedRead,
    LearnedUnwritten,
    MatchAnswered,
    MatchFailed,
    PauseHeard,
    PolicyAnswered,
    PolicyFailed,
    Tick,
    ToolTold,
    WorkerStated,
)
from services.admission.facts import FactWriter
from services.admission.follow import Follower
from services.admission.hedging import FIRST_TICKET, Hedges
from services.admission.outcomes import Noticed
from services.admission.remembered import Stored
from services.admission.requests import RequestRecord
from services.admission.scoring import Choose
from services.admission.state import AdmissionState

SWEEP_S = 1.0
"""How often what needs no haste is looked through, in seconds."""
DEAF_S = 1.0
"""A pause between ticks longer than this means that we did not listen: nobody's silence counts."""

MAX_REASONS = 32
"""Reasons of cancelled asks that are told apart: they are the sender's words."""


class Core:
    """The admission service without I/O. ``choose`` draws uniformly below n; ``instance`` names us in facts."""

    def __init__(self, settings: AdmissionSettings, instance: str, choose: Choose, now: float) -> None:
        self.state = AdmissionState.fresh(settings, choose, now)
        scheduled = self.state.scheduled
        self.deciding = Deciding(self.state) if scheduled is None else ScheduledDeciding(self.state, scheduled)
        self._hedges = Hedges(self.state, self.deciding)
        self._follower = Follower(self.state, self.deciding, self._hedges)
        self._instance = instance
        self._ticked = now
        self._swept = now
        self._connected = True

    @property
    def epoch(self) -> int | None:
        """Epoch of our leadership; ``None`` for a standby."""
        return self.state.facts.epoch if self.state.facts is not None else None

    @property
    def leading(self) -> bool:
        return self.state.facts is not None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; the effects are to be carried out in order."""
        if self.state.scheduled is None:
            return self._handle(event, now)
        self.state.scheduled.at(now)
        effects = self._handle(event, now)
        return [*effects, *self.deciding.settle(now)]

    def _handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case AdmitAsked(request, reply_to):
                return self._asked(request, reply_to, now)
            case MatchAnswered(ticket, reply):
                asker = self._hedges if ticket < FIRST_TICKET else self.deciding
                return asker.matched(ticket, reply, now)
            case MatchFailed(ticket, reason):
                asker = self._hedges if ticket < FIRST_TICKET else self.deciding
                return asker.match_failed(ticket, reason, now)
            case PolicyAnswered(ticket, answer):
                return self.deciding.policy_answered(ticket, answer, now)
            case PolicyFailed(ticket, reason):
                return self.deciding.policy_failed(ticket, reason, now)
            case Accepted(fact):
                return self._follower.accepted(fact, now)
            case Dispatched(fact):
                return self._follower.dispatched(fact, now)
            case FirstToken(fact):
                return self._follower.first_token(fact, now)
            case Ended(fact):
                return self._follower.ended(fact, now)
            case Decided(decision):
                return [] if self.leading else self._follower.decided(decision, now)
            case IngressStated(state):
                return self._follower.ingress_stated(state, now)
            case WorkerStated(state):
                return self._follower.worker_stated(state, now)
            case AdmitCancelled():
                return self._cancelled(event, now)
            case LeadershipChanged(epoch):
                return self._leadership(epoch, now)
            case PauseHeard(fact):
                return self.deciding.pauses.heard(fact, now)
            case ToolTold() | LearnedRead() | LearnedUnwritten() | CalibrationTold():
                return self._told(event)
            case Tick(connected, in_doubt):
                return self._tick(connected, in_doubt, now)

    def _told(self, event: ToolTold | LearnedRead | LearnedUnwritten | CalibrationTold) -> list[Effect]:
        """What only a scheduling policy wants to know."""
        scheduled = self.state.scheduled
        if scheduled is None:
            return []
        match event:
            case ToolTold(fact):
                scheduled.tool_event(fact)
            case LearnedRead(values):
                scheduled.read_learned(values)
            case LearnedUnwritten(key):
                scheduled.remembered.unwritten(key)
            case CalibrationTold(key, payload):
                scheduled.calibrated(key, payload)
        return []

    def stored_at_stop(self, now: float) -> list[Stored]:
        """What the process has learned and not stored yet, if it is the leader."""
        scheduled = self.state.scheduled
        if scheduled is None or not self.leading:
            return []
        found: list[Stored] = []
        scheduled.at(now)
        while due := scheduled.due(0.0):
            found += due
        return found

    def _asked(self, request: AdmitRequest, reply_to: str, now: float) -> list[Effect]:
        if not self.leading:
            return []
        requests = self.state.requests
        requests.heard(request.ingress, request.ingress_epoch, now)
        record = requests.note(
            RequestRecord(
                request.request_id, request.model, request.identity, request.ingress, request.ingress_epoch,
                request.received_ms, now, request.kind, request.endpoint, input_tokens=request.input_tokens,
            )
        )  # fmt: skip
        if record is None:
            return [self.deciding.refuse(request, reply_to, "request_over")]
        record.digest = request.digest
        if requests.is_cancelled(request.request_id):
            return [self.deciding.refuse(request, reply_to, "cancelled")]
        if request.hedge:
            return self._hedges.asked(request, reply_to, record, now)
        return self.deciding.asked(request, reply_to, record, now)

    def _cancelled(self, event: AdmitCancelled, now: float) -> list[Effect]:
        cancel = event.cancel
        record = self.state.requests.get(cancel.request_id)
        if record is not None and record.ingress != cancel.ingress:
            self.state.counters.cancels["not_its_owner"] += 1
            return []
        if cancel.hedge:
            return self._hedges.over(record, now) if record is not None else []
        cancels = self.state.counters.cancels
        cancels[cancel.reason if cancel.reason in cancels or len(cancels) < MAX_REASONS else "other"] += 1
        if cancel.reason == "client_disconnect":
            self.state.requests.cancel(cancel.request_id, now)
        return self.deciding.cancelled(cancel, now)

    def _leadership(self, epoch: int | None, now: float) -> list[Effect]:
        if epoch == self.epoch:
            return []
        self.deciding.drop_all()
        self._hedges.drop_all()
        self.state.facts = None if epoch is None else FactWriter(self._instance, epoch)
        if self.state.scheduled is not None:
            self.state.scheduled.epoch = epoch
        return self.deciding.pauses.lead(now) if epoch is not None else []

    def _tick(self, connected: bool, in_doubt: bool, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._ticked - now > DEAF_S:
            effects += self._clock_set_back(self._ticked - now, now)
        elif not connected or not self._connected or now - self._ticked > DEAF_S:
            self.state.requests.forgive(now)
            self.state.fleet.forgive(now)
            self.state.ledger.renew_all(now + self.state.settings.grant_ttl_s)
        elif in_doubt:  # a front door that speaks where we do not hear it is not lost
            self.state.requests.forgive(now)
            self.state.ledger.renew_all(now + self.state.settings.grant_ttl_s)
        self._connected, self._ticked = connected, now
        effects += self._follower.silent_workers(now)
        effects += self._follower.lost_ingresses(now)
        effects += self.deciding.tick(now)
        if now - self._swept >= SWEEP_S:
            self._swept = now
            effects += self._sweep(now)
        return effects

    def _clock_set_back(self, seconds: float, now: float) -> list[Effect]:
        """By ``seconds``: what waits or is idle does so as long as before, and nobody's silence counts."""
        state = self.state
        state.requests.forgive(now)
        state.fleet.forgive(now)
        state.ledger.expire_at(now + state.settings.grant_ttl_s)
        state.sessions.set_back(seconds)
        state.warm_at -= seconds
        self.deciding.set_back(seconds)
        self._swept = now
        return [Noticed("clock_set_back", {"seconds": round(seconds, 3)}, is_fault=True)]

    def _sweep(self, now: float) -> list[Effect]:
        state = self.state
        effects = self._follower.lapse(now)
        effects += state.tell_sessions(state.sessions.expire(now - state.settings.session_idle_s), now)
        state.requests.sweep(now)
        state.ledger.forget_idle(lambda worker: state.fleet.get(worker) is not None)
        if state.scheduled is not None and self.leading:
            effects += state.scheduled.due(state.settings.store_learned_s)
        return effects

"""From ask to answer: line up, ask the index, ask users' policies, grant.

Invariants: asks of one session are granted in the order of their arrival; the questions open for a model never exceed
its free places; an answer to a question that is not open any more changes nothing; a request has one grant at most.
"""

from __future__ import annotations

from collections import Counter

from schemas.admit import AdmitCancel, AdmitRequest, Granted, Held, Refused
from schemas.index import MatchReply
from schemas.policy import PolicyAnswer
from schemas.session import SessionKey
from services.admission.asks import Ask, Stage
from services.admission.consulting import NO_VERDICT, Consultation, Verdict
from services.admission.effects import AskIndex, Effect, Reply
from services.admission.facts import FactWriter
from services.admission.granting import grant_turn
from services.admission.grants import OpenGrant
from services.admission.holds import HoldQueue
from services.admission.line_speed import LineSpeeds
from services.admission.pauses import Pauses
from services.admission.placement import IndexView, Placement
from services.admission.placing import (
    barred,
    block_size,
    index_question,
    index_view,
    place_by_cost,
    previous_worker,
)
from services.admission.replies import granted_reply
from services.admission.requests import RequestRecord
from services.admission.state import AdmissionState
from services.admission.user_questions import Said, UserQuestions
from services.admission.workers import Worker

LINE_REASONS = frozenset({"hold_queue_full", "hold_deadline"})
"""Refusals for want of room, of which the line says when there will be some."""


class Deciding:
    """Every unanswered ask. Only the leader's is ever filled."""

    def __init__(self, state: AdmissionState) -> None:
        self._state = state
        self._asks: dict[str, Ask] = {}
        self._open: dict[int, Ask] = {}
        self._open_by_model: Counter[str] = Counter()
        self._open_sessions: set[SessionKey] = set()
        self._arrivals = 0
        self._tickets = 0
        self._grants = 0
        self.holds = HoldQueue(state.settings.hold_queue_limit)
        self.pauses = Pauses(state)
        self._speeds = LineSpeeds(state.settings.retry_after_s, state.settings.retry_after_most_s)
        self.users = UserQuestions(state, (self.holds.counts,))

    def __len__(self) -> int:
        return len(self._asks)

    @property
    def held(self) -> int:
        """Asks that wait to be begun or let."""
        return len(self.holds)

    @property
    def open_questions(self) -> int:
        """Asks that wait for the index or for users' policies."""
        return len(self._open)

    def waiting(self, model: str) -> int:
        """Turns of ``model`` that wait for a place."""
        return self._waiting(model)

    def waits(self, request_id: str) -> bool:
        """Whether this request has an unanswered ask."""
        return request_id in self._asks

    # What happens to an ask

    def asked(self, request: AdmitRequest, reply_to: str, record: RequestRecord, now: float) -> list[Effect]:
        """A turn asks to run, for the first time or again. ``record`` is its request's."""
        self._speeds.now = now
        counters = self._state.counters
        pending = self._asks.get(request.request_id)
        if pending is not None and pending.request.attempt == request.attempt:
            counters.asks_again += 1
            pending.reply_to = reply_to
            return [self._say_held(pending, now)] if pending.stage is Stage.HELD else []
        if request.attempt < record.attempt:
            return [self._refuse(request, reply_to, "stale_attempt")]
        entry = self._state.ledger.get(request.request_id)
        if entry is not None:
            again = self._same_grant(request, record, entry)
            if again is not None:
                counters.asks_again += 1
                return [Reply(reply_to, again)]
            same = entry.attempt == request.attempt
            self._state.release(request.request_id, "worker_lost" if same else "attempt")
        if pending is not None:
            self._drop(pending)
        counters.asks += 1
        record.attempt = request.attempt
        self._arrivals += 1
        ask = Ask(request, reply_to, self._arrivals, now, self._deadline(request, now))
        self._asks[request.request_id] = ask
        self._line_up(ask, now)
        effects = self.pump(request.model, now)
        if ask.stage is Stage.HELD and self.waits(request.request_id):
            if self.held > self._state.settings.hold_queue_limit:
                return [*effects, self._give_up(ask, "hold_queue_full", 429)]
            if ask.hold_reason != "session_order":
                effects.append(self._say_held(ask, now))
        return effects

    def cancelled(self, cancel: AdmitCancel, now: float) -> list[Effect]:
        """Its ingress does not want the answer any more."""
        ask = self._asks.get(cancel.request_id)
        if ask is not None:
            self._drop(ask)
        self._state.release(cancel.request_id, "cancelled")
        return self.pump_all(now)

    def over(self, request_id: str) -> None:
        """The request ended: whatever it still asked is moot."""
        ask = self._asks.get(request_id)
        if ask is not None:
            self._drop(ask)

    def drop_all(self) -> None:
        """We do not lead any more: nobody gets an answer; ingresses ask the next leader."""
        for ask in list(self._asks.values()):
            self._drop(ask)
        self.users.drop_leases()

    def set_back(self, seconds: float) -> None:
        """The clock was set back by so much: who waits has waited as long as before."""
        for ask in self._asks.values():
            ask.set_back(seconds)
        self.users.consulting.set_back(seconds)

    def matched(self, ticket: int, reply: MatchReply, now: float) -> list[Effect]:
        """The index answered."""
        self._state.counters.index["answered" if reply.error is None else "error"] += 1
        ask = self._open.get(ticket)
        if ask is None:
            return []
        return self._index_known(ticket, index_view(self._state, ask.request, reply), now)

    def match_failed(self, ticket: int, reason: str, now: float) -> list[Effect]:
        """The index did not answer: decide by session affinity and load."""
        self._state.counters.index[reason] += 1
        return self._index_known(ticket, IndexView.blind(reason), now)

    def policy_answered(self, ticket: int, answer: PolicyAnswer, now: float) -> list[Effect]:
        """A user's policy answered."""
        return self._advised(self.users.answered(ticket, answer, now), now)

    def policy_failed(self, ticket: int, reason: str, now: float) -> list[Effect]:
        """A user's policy did not answer: it goes on without."""
        return self._advised(self.users.failed(ticket, reason, now), now)

    # The line

    def pump_all(self, now: float) -> list[Effect]:
        """Begin with whoever may run now, for every model."""
        effects: list[Effect] = []
        if len(self.holds):
            for model in self.holds.models():
                effects += self.pump(model, now)
        return effects

    def pump(self, model: str, now: float) -> list[Effect]:
        """Begin with whoever may run now, first come first."""
        line = self.holds.line(model)
        if not line:
            return []
        if now < self._state.warm_at:
            for ask in line:
                ask.hold_reason = ask.hold_reason or "warming_up"
            return []
        workers = [worker for worker in self._state.fleet.serving(model) if worker.placeable]
        if not workers:
            return [self._nobody_serves(ask) for ask in line]
        effects: list[Effect] = []
        free = self._free(workers, model, len(line))
        blocked: set[SessionKey] = set()
        for ask in line:
            if ask.held_until > now:
                blocked.add(ask.request.identity.key)
                continue
            if free <= 0 or len(self._open) >= self._state.settings.max_deciding:
                ask.hold_reason = "at_limit" if free <= 0 else ask.hold_reason or "max_deciding"
                continue
            key = ask.request.identity.key
            if key in self._open_sessions or key in blocked:
                ask.hold_reason = ask.hold_reason or "session_order"
                blocked.add(key)
                continue
            if shunned := barred(ask.request, workers):
                options = [worker for worker in workers if worker.name not in shunned]
                if not options:
                    effects.append(self._give_up(ask, "no_worker", 503))
                    continue
                if self._room(options) <= 0:
                    ask.hold_reason = "at_limit"
                    blocked.add(key)
                    continue
            effects += self._begin(ask, now)
            free -= 1
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Keep-alives and deadlines of those who wait, and another look at the lines."""
        self._speeds.now = now
        effects = self._advised(self.users.overdue(now), now) + self.pump_all(now)
        overdue: list[Ask] = []
        for place_in_line, ask in self.holds.in_line():
            if now >= ask.expires:
                overdue.append(ask)
            elif now >= ask.say_held_at:
                effects.append(self._say_held(ask, now, place_in_line))
        effects += [self._give_up(ask, "hold_deadline", 503) for ask in overdue]
        return effects

    def settle(self, now: float) -> list[Effect]:
        """Whatever an event has left to do, when it is taken in."""
        del now
        return []

    # Inside

    def _deadline(self, request: AdmitRequest, now: float) -> float:
        longest = now + self._state.settings.hold_deadline_s
        return min(longest, request.deadline_ms / 1000) if request.deadline_ms else longest

    def _same_grant(self, request: AdmitRequest, record: RequestRecord, entry: OpenGrant) -> Granted | None:
        """The answer of before, unless another attempt asks, or the granted worker cannot be used (B1)."""
        worker = self._state.fleet.get(entry.grant.worker)
        if entry.attempt != request.attempt or record.mode == "fallback" or worker is None or not worker.placeable:
            return None
        if entry.grant.worker in request.excluded:
            return None
        return granted_reply(self._facts.epoch, entry.grant, worker, record)

    @property
    def _facts(self) -> FactWriter:
        facts = self._state.facts
        if facts is None:
            raise RuntimeError("a standby decides nothing")
        return facts

    def _line_up(self, ask: Ask, now: float) -> None:
        ask.stage = Stage.HELD
        ask.held_since = now
        ask.say_held_at = now + self._state.settings.hold_keepalive_s
        self.holds.add(ask)

    def _free(self, workers: list[Worker], model: str, wanted: int) -> int:
        """Free places, counted no further than ``wanted``."""
        taken = self._open_by_model[model]
        return self._room(workers, wanted + taken) - taken

    def _room(self, workers: list[Worker], wanted: int = 1) -> int:
        limit, account = self._state.settings.max_grants_per_rank, self._state.ledger.account
        room = 0
        for worker in workers:
            for name, rank in worker.seats:
                room += max(0, limit - account(name, rank).requests)
                if room >= wanted:
                    return room
        return room

    def _say_held(self, ask: Ask, now: float, place_in_line: int | None = None) -> Reply:
        ask.say_held_at = now + self._state.settings.hold_keepalive_s
        reason = ask.hold_reason or "session_order"
        self._state.counters.held[reason] += 1
        place_now = self.holds.place(ask) if place_in_line is None else place_in_line
        held = Held(request_id=ask.request.request_id, epoch=self._facts.epoch, reason=reason, place=place_now)
        return Reply(ask.reply_to, held)

    def _refuse(
        self, request: AdmitRequest, reply_to: str, reason: str, status: int = 503, verdict: Verdict = NO_VERDICT
    ) -> Reply:
        self._state.counters.refused[reason] += 1
        retry = self._state.settings.retry_after_s if status in (429, 503) else None
        if reason in LINE_REASONS:
            retry = self._speeds.retry_after_s(request.model, self._waiting(request.model))
        refused = Refused(
            request_id=request.request_id,
            epoch=self._facts.epoch,
            reason=reason,
            status=status,
            retry_after_s=retry,
            policy=verdict.policy or None,
            detail=verdict.reason,
        )
        return Reply(reply_to, refused)

    def _waiting(self, model: str) -> int:
        """Turns in its line."""
        return self.holds.counts.turns(model)

    def refuse(self, request: AdmitRequest, reply_to: str, reason: str) -> Reply:
        """Refuse what is not even an ask (its request is over)."""
        return self._refuse(request, reply_to, reason)

    def _give_up(self, ask: Ask, reason: str, status: int) -> Reply:
        self._drop(ask)
        return self._refuse(ask.request, ask.reply_to, reason, status)

    def _nobody_serves(self, ask: Ask) -> Reply:
        fleet = self._state.fleet
        if fleet.models_seen and not fleet.known(ask.request.model):
            return self._give_up(ask, "unknown_model", 404)
        return self._give_up(ask, "no_worker", 503)

    def _drop(self, ask: Ask) -> None:
        """It is not answered, or was refused."""
        self._take_out(ask)
        self.users.forget(ask)

    def _take_out(self, ask: Ask) -> None:
        del self._asks[ask.request.request_id]
        if ask.stage is Stage.HELD:
            self.holds.remove(ask)
        else:
            self._close(ask)

    def _close(self, ask: Ask) -> None:
        """No question about it is open any more."""
        del self._open[ask.ticket]
        model = ask.request.model
        self._open_by_model[model] -= 1
        if not self._open_by_model[model]:
            del self._open_by_model[model]
        self._open_sessions.discard(ask.request.identity.key)

    def _question(self, ask: Ask, stage: Stage) -> int:
        """Number the question that is open about this ask from now on."""
        self._tickets += 1
        if ask.stage is Stage.HELD:
            self._open_by_model[ask.request.model] += 1
            self._open_sessions.add(ask.request.identity.key)
        else:
            del self._open[ask.ticket]
        ask.stage, ask.ticket = stage, self._tickets
        self._open[ask.ticket] = ask
        return ask.ticket

    def _begin(self, ask: Ask, now: float) -> list[Effect]:
        """Out of the line, and on to the index."""
        self.holds.remove(ask)
        if ask.held_since is not None:
            ask.held_s += now - ask.held_since
            ask.held_since = None
        return self._ask_index(ask, now)

    def _ask_index(self, ask: Ask, now: float) -> list[Effect]:
        ask.started_at = now
        ticket = self._question(ask, Stage.INDEX)
        question = index_question(self._state, ask.request)
        if question is None:
            self._state.counters.index["no_chain"] += 1
            return self._scored(ask, IndexView.blind("no_chain"), now)
        return [AskIndex(ticket, question, self._state.settings.index_deadline_ms)]

    def _index_known(self, ticket: int, index: IndexView, now: float) -> list[Effect]:
        ask = self._open.get(ticket)
        if ask is None or ask.stage is not Stage.INDEX:
            return []
        effects = self._scored(ask, index, now)
        return effects + self.pump(ask.request.model, now)

    def _scored(self, ask: Ask, index: IndexView, now: float) -> list[Effect]:
        ask.index = index
        return self._consult(ask, now)

    # Users' policies

    def _consult(self, ask: Ask, now: float) -> list[Effect]:
        """Ask all that are to be asked, at once; whoever asks nobody goes on."""
        if not self.users.are_there:
            return self._go_on(ask, now)
        placement = place_by_cost(self._state, ask, now) if self.users.consulting.asks("route") else None
        effects = self.users.ask(ask, placement, previous_worker(self._state, ask.request), now)
        if not effects:
            return self._heard(ask, now)
        self._question(ask, Stage.POLICY)
        return list(effects)

    def _advised(self, finished: list[Consultation | Said], now: float) -> list[Effect]:
        """All that was asked about these asks is answered."""
        effects: list[Effect] = []
        for each in finished:
            if isinstance(each, Said):
                self._lease_said(each, now)
                continue
            ask = self._asks.get(each.subject)
            if ask is not None and ask.stage is Stage.POLICY and ask.consultation is each:
                effects += self._heard(ask, now) + self.pump(ask.request.model, now)
        return effects

    def _heard(self, ask: Ask, now: float) -> list[Effect]:
        """Hold it, refuse it, or go on. A question about it is open."""
        self.users.weigh(ask, block_size(self._state, ask.request))
        verdict, state = ask.verdict, self._state
        if verdict.refuse:
            self._drop(ask)
            return [self._refuse(ask.request, ask.reply_to, "policy_refused", 429, verdict)]
        if verdict.hold_s is None:
            return self._go_on(ask, now)
        self._close(ask)
        ask.hold_reason, ask.held_until = f"policy:{verdict.policy}", now + verdict.hold_s
        self._line_up(ask, now)
        if self.held > state.settings.hold_queue_limit:
            return [self._give_up(ask, "hold_queue_full", 429)]
        return [self._say_held(ask, now)]

    def _go_on(self, ask: Ask, now: float) -> list[Effect]:
        return self._commit(ask, place_by_cost(self._state, ask, now), now)

    def _lease_said(self, said: Said, now: float) -> None:
        """What users' policies say of a lease: of nobody here."""

    def _commit(self, ask: Ask, placement: Placement, now: float) -> list[Effect]:
        """Grant, or (when what was free is not any more) back into the line, or refuse."""
        if placement.choice is None:
            if placement.reason != "at_limit":
                return [self._give_up(ask, "no_worker", 503)]
            self._close(ask)
            ask.hold_reason = "at_limit"
            self._line_up(ask, now)
            return [self._say_held(ask, now)]
        self._take_out(ask)
        state, request, chosen = self._state, ask.request, placement.chosen
        user = self.users.placed(ask, placement)
        record = state.requests.get(request.request_id)
        worker = state.fleet.get(chosen.worker)
        if record is None or worker is None:
            raise RuntimeError(f"granted {request.request_id}, which is over, or on a worker that is gone")
        self._grants += 1
        self._speeds.granted(request.model, now)
        return grant_turn(
            state,
            self._facts,
            ask,
            placement,
            record,
            worker,
            number=self._grants,
            policy=user if ask.let is None else None,
            now=now,
        )

"""From ask to answer where a scheduling policy decides: the index, the policy (which may hold it), the grant.

An ask is told to the policy when the index has answered, and waits with it; what the index said is renewed where it
has waited for long. A retry, a turn that no seat can take, and one that the policy sends where it may not go are
placed by cost, as policy ``kv`` does, and the policy is told where they run. The policy's answers are taken at the end
of every event, whatever it was.
"""

from __future__ import annotations

from dataclasses import replace

from schemas.admit import AdmitRequest
from schemas.session import SessionKey
from schemas.worker import runs_high_first
from services.admission.asks import Ask, Stage
from services.admission.deciding import Deciding
from services.admission.effects import Effect, Reply
from services.admission.engine_priority import engine_priority
from services.admission.holds import HoldQueue
from services.admission.outcomes import LeaseTold, Let, Noticed, PauseTold, TurnedAway
from services.admission.placement import IndexView, Placement
from services.admission.placing import barred, place_by_cost
from services.admission.scheduled import Scheduled
from services.admission.scheduled_facts import wished
from services.admission.state import AdmissionState
from services.admission.user_questions import Said, UserQuestions
from services.admission.workers import Worker

RENEWED_AFTER_S = 0.5
"""What the index said longer ago is asked again before a turn is granted, in seconds: caches change."""

LIMITS_OF_A_HOLD = 2
"""A hold ends no sooner than this many times the policy's own limit: those beyond it go one after the other."""

HELD_BY_POLICY = "policy"
"""Reason of a hold: the policy keeps the turn back until there is memory for it."""


class ScheduledDeciding(Deciding):
    """`Deciding`, with the turns that the policy holds in lines of their own."""

    def __init__(self, state: AdmissionState, scheduled: Scheduled) -> None:
        super().__init__(state)
        self._scheduled = scheduled
        self.with_policy = HoldQueue(state.settings.hold_queue_limit)
        self.users = UserQuestions(state, (self.holds.counts, self.with_policy.counts))
        self._full: dict[str, Ask] = {}
        """Those that the policy has let, and that wait for a place, or for an earlier one of their session."""
        self._left: list[tuple[Ask, str]] = []
        """Those that wait no more although nothing was granted, and why; till the end of the event."""

    @property
    def held(self) -> int:
        return len(self.holds) + len(self.with_policy)

    def tick(self, now: float) -> list[Effect]:
        effects = super().tick(now)
        overdue: list[Ask] = []
        for place_in_line, ask in self.with_policy.in_line():
            if now >= ask.expires:
                overdue.append(ask)
            elif now >= ask.say_held_at:
                place = self._place_of(ask)
                effects.append(self._say_held(ask, now, place or place_in_line))
                effects += self.pauses.moved_up(ask, place, now)
            if ask.pause_at <= now < ask.expires:
                effects += self._pause(ask, self._place_of(ask), now)
        effects += [self._give_up(ask, "hold_deadline", 503) for ask in overdue]
        for model in self.with_policy.models():
            if not any(worker.placeable for worker in self._state.fleet.serving(model)):
                effects += [self._nobody_serves(ask) for ask in self.with_policy.line(model)]
        return effects

    def settle(self, now: float) -> list[Effect]:
        effects = self._obey(now)
        effects += self._let_go(now) if self._left else []
        crowded: set[str] = set()
        for ask in list(self._full.values()):
            model, choosy = ask.request.model, bool(ask.request.excluded or ask.request.avoided)
            goes_anywhere = ask.let is None and not choosy
            if ask.request.request_id not in self._full or (goes_anywhere and model in crowded):
                continue
            if self._has_room(ask):
                effects += self._by_cost(ask, now) if ask.let is None else self._let(ask, now)
                effects += self._obey(now)
            elif goes_anywhere and ask.request.identity.key not in self._open_sessions:
                crowded.add(model)  # who came later need not look at every worker
        return effects

    def drop_all(self) -> None:
        super().drop_all()
        self._left.clear()  # the next leader ends the pauses of ours

    def _deadline(self, request: AdmitRequest, now: float) -> float:
        """A hold ends with the ask's own deadline; else not before the policy's safety net has caught it."""
        longest = max(self._state.settings.hold_deadline_s, LIMITS_OF_A_HOLD * (self._scheduled.hold_limit_s or 0.0))
        return min(now + longest, request.deadline_ms / 1000) if request.deadline_ms else now + longest

    def _place_of(self, ask: Ask) -> int | None:
        """Its place in the policy's order, where the policy has one."""
        return self._scheduled.place_in_line(ask.request.request_id) if ask.let is None else None

    def _waiting(self, model: str) -> int:
        return super()._waiting(model) + self.with_policy.counts.turns(model)

    # Into the policy

    def _free(self, workers: list[Worker], model: str, wanted: int) -> int:
        """The policy says who may run: all of the line may be told to it."""
        del workers, model
        return wanted

    def _scored(self, ask: Ask, index: IndexView, now: float) -> list[Effect]:
        ask.index, ask.viewed_at = index, now
        if ask.let is not None:
            return self._grant(ask, now)
        return self._consult(ask, now)

    def _go_on(self, ask: Ask, now: float) -> list[Effect]:
        if ask.request.excluded:  # it has waited its turn once
            return self._commit(ask, place_by_cost(self._state, ask, now), now)
        return self._submit(ask, now)

    def _lease_said(self, said: Said, now: float) -> None:
        keep, ttl_s = said.verdict.keep, said.verdict.ttl_s
        if keep is not None:
            self._scheduled.lease_advice(said.session, keep, now + ttl_s if keep else None)

    def _submit(self, ask: Ask, now: float) -> list[Effect]:
        """Tell the policy; it may answer at once. No seat there: by cost. A question about it is open."""
        request, state = ask.request, self._state
        record = state.requests.get(request.request_id)
        index = state.turn_index(record) if record is not None else 0
        workers = state.fleet.serving(request.model)
        verdict = wished(ask.verdict, request.priority, self._state.settings.client_priority_s)
        if not self._scheduled.ready(request, workers, index, ask.index, verdict):
            return self._commit(ask, place_by_cost(state, ask, now), now)
        ask.let = self._scheduled.let_at_once(request.request_id)
        if ask.let is not None:  # as most are: it never waits in a line
            effects = [*self._grant(ask, now), *self._obey(now)]
        else:
            self._hold(ask, HELD_BY_POLICY, now)
            effects = self._obey(now)
        if not self._is_with_policy(ask):
            return effects
        if self.held > state.settings.hold_queue_limit:
            return [*effects, self._give_up(ask, "hold_queue_full", 429)]
        place = self._place_of(ask)
        effects.append(self._say_held(ask, now, place or self.with_policy.place(ask)))
        return effects + (self._pause(ask, place, now) if ask.pause_at <= now else [])

    # Out of the policy

    def _obey(self, now: float) -> list[Effect]:
        """Carry out what the policies have answered, and what they answer to that."""
        effects: list[Effect] = []
        while outcomes := self._scheduled.take():
            for outcome in outcomes:
                if isinstance(outcome, LeaseTold):
                    effects += self._state.lease_told(outcome, now)
                    if self._state.facts is not None:
                        effects += self.users.lease_told(outcome, now)
                    continue
                if isinstance(outcome, PauseTold):
                    effects += self.pauses.told(outcome, turn_waits=self._pause_is_of_a_turn(outcome.session), now=now)
                    continue
                if isinstance(outcome, Noticed):
                    effects.append(outcome)
                    continue
                ask = self._asks.get(outcome.request_id)
                if ask is None or not self._is_with_policy(ask):
                    continue
                if isinstance(outcome, Let):
                    ask.let = outcome
                    effects += self._let(ask, now)
                else:
                    effects += self._turned_away(ask, outcome, now)
        return effects

    def _turned_away(self, ask: Ask, outcome: TurnedAway, now: float) -> list[Effect]:
        if outcome.reason == "no_seat":
            return [self._give_up(ask, "no_worker", 503)]
        if outcome.reason == "policy_failed" or ask.request.tokens_from == "estimate":  # the engine knows better
            return self._by_cost(ask, now)
        return [self._give_up(ask, outcome.reason, 413)]

    def _let(self, ask: Ask, now: float) -> list[Effect]:
        """On to the grant, with a new answer of the index where the old one may not be true any more."""
        if ask.request.identity.key in self._open_sessions:
            ask.hold_reason = "session_order"
            self._full[ask.request.request_id] = ask
            return []
        self._leave(ask, now)
        if now - ask.viewed_at > RENEWED_AFTER_S:
            return self._ask_index(ask, now)
        ask.started_at = now
        self._question(ask, Stage.INDEX)
        return self._grant(ask, now)

    def _grant(self, ask: Ask, now: float) -> list[Effect]:
        """Grant what the policy let, where it let it. A question about it is open."""
        let, request = ask.let, ask.request
        if let is None or self._scheduled.place_of(request.request_id) != (let.worker, let.rank):
            self._scheduled.withdraw(request.request_id)
            ask.let = None
            return self._submit(ask, now)
        placement = place_by_cost(self._state, ask, now)
        places = {(seat.worker, seat.rank): number for number, seat in enumerate(placement.seats)}
        choice = places.get((let.worker, let.rank))
        barred = placement.seats[choice].excluded if choice is not None else "not_served"
        if barred == "at_limit" or (barred is None and self._is_behind(ask)):
            return self._wait_for_room(ask, now)
        if barred is None:
            return self._commit(ask, replace(placement, choice=choice), now)
        self._scheduled.withdraw(request.request_id)
        ask.let = None
        return self._commit(ask, placement, now)

    def _by_cost(self, ask: Ask, now: float) -> list[Effect]:
        """Without the policy: as ``kv`` places it, and it runs."""
        self._leave(ask, now)
        ask.started_at = now
        self._question(ask, Stage.INDEX)
        return self._commit(ask, place_by_cost(self._state, ask, now), now)

    def _commit(self, ask: Ask, placement: Placement, now: float) -> list[Effect]:
        if placement.choice is None and placement.reason == "at_limit":
            return self._wait_for_room(ask, now)
        record = self._state.requests.get(ask.request.request_id)
        index = 0
        if record is not None:
            index, record.priority = self._state.turn_index(record), self._engine_priority(ask.let)
        ask.builtin = self._scheduled.name if ask.let is not None else "kv"
        effects = super()._commit(ask, placement, now)
        if placement.choice is not None and record is not None and ask.let is None:
            self._scheduled.runs(record, placement.chosen.worker, placement.chosen.rank, index, ask.held_s)
        return effects

    def _engine_priority(self, let: Let | None) -> int | None:
        """As its engine reads it."""
        worker = self._state.fleet.get(let.worker) if let is not None else None
        if let is None or worker is None or not self._state.settings.engine_priorities:
            return None
        return engine_priority(let.priority, high_first=runs_high_first(worker.state.profile))

    # The lines

    def _is_with_policy(self, ask: Ask) -> bool:
        return ask.stage is Stage.SCHEDULED and self.waits(ask.request.request_id)

    def _wait_for_room(self, ask: Ask, now: float) -> list[Effect]:
        """Where it is to go, as many turns run as may. A question about it is open."""
        self._hold(ask, "at_limit", now)
        if self.held > self._state.settings.hold_queue_limit:
            return [self._give_up(ask, "hold_queue_full", 429)]
        self._full[ask.request.request_id] = ask
        ask.say_held_at = now
        return []

    def _is_behind(self, ask: Ask) -> bool:
        """Whether somebody who asked earlier waits for the same rank."""
        others = [other for other in self._full.values() if other.let is not None and other.arrival < ask.arrival]
        return ask.let is not None and any(
            (other.let.worker, other.let.rank) == (ask.let.worker, ask.let.rank) for other in others if other.let
        )

    def _has_room(self, ask: Ask) -> bool:
        limit, let, request = self._state.settings.max_grants_per_rank, ask.let, ask.request
        if request.identity.key in self._open_sessions:
            return False
        if let is not None:
            return self._state.ledger.account(let.worker, let.rank).requests < limit
        workers = self._state.fleet.serving(request.model)
        shunned = barred(request, workers)
        return self._room([each for each in workers if each.placeable and each.name not in shunned]) > 0

    def _hold(self, ask: Ask, reason: str, now: float) -> None:
        """No question about it is open any more; it waits with the policy."""
        if ask.ticket in self._open:
            self._close(ask)
        ask.held_before = ask.hold_reason if ask.held_s else None
        ask.stage, ask.hold_reason, ask.held_since = Stage.SCHEDULED, reason, now
        ask.say_held_at = now + self._state.settings.hold_keepalive_s
        self.with_policy.add(ask)
        self.pauses.lined_up(ask, now)

    def _leave(self, ask: Ask, now: float) -> None:
        self.with_policy.remove(ask)
        self._full.pop(ask.request.request_id, None)
        if ask.held_since is None or now <= ask.held_since:  # it did not wait here
            ask.hold_reason = ask.held_before
        else:
            ask.held_s += now - ask.held_since
        ask.held_since = None
        ask.stage = Stage.HELD

    # Pauses

    def _pause(self, ask: Ask, place: int | None, now: float) -> list[Effect]:
        return self.pauses.overdue(ask, place, len(self.with_policy), now)

    def _pause_is_of_a_turn(self, key: SessionKey) -> bool:
        """Whether the session is paused for a turn that still asks."""
        session = self._state.sessions.get(key)
        return session is not None and session.pause is not None and self.waits(session.pause.request_id)

    def _let_go(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        left, self._left = self._left, []
        for ask, reason in left:
            if not self.waits(ask.request.request_id):  # else another attempt asks
                effects += self.pauses.left(ask, reason, now)
        return effects

    def _give_up(self, ask: Ask, reason: str, status: int) -> Reply:
        reply = super()._give_up(ask, reason, status)
        self._left[-1] = (ask, reason)
        return reply

    def _drop(self, ask: Ask) -> None:
        super()._drop(ask)
        self._left.append((ask, "cancelled"))
        self._scheduled.withdraw(ask.request.request_id)

    def _take_out(self, ask: Ask) -> None:
        if ask.stage is not Stage.SCHEDULED:
            super()._take_out(ask)
            return
        del self._asks[ask.request.request_id]
        self.with_policy.remove(ask)
        self._full.pop(ask.request.request_id, None)

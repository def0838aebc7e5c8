"""From ask to answer where a scheduling policy decides: the index, the policy (which may hold it), the grant.

An ask is told to the policy when the index has answered, and waits with it; what the index said is renewed where it
has waited for long. A retry, a turn that no seat can take, and one that the policy sends where it may not go are
placed by cost, as policy ``kv`` does, and the policy is told where they run. The policy's answers are taken at the end
of every event, whatever it was.
"""

from __future__ import annotations

from dataclasses import replace

from services.admission.asks import Ask, Stage
from services.admission.deciding import Deciding
from services.admission.effects import Effect
from services.admission.holds import HoldQueue
from services.admission.placement import IndexView, Placement
from services.admission.scheduled import LeaseTold, Let, Scheduled, TurnedAway
from services.admission.state import AdmissionState
from services.admission.workers import Worker

RENEWED_AFTER_S = 0.5
"""What the index said longer ago is asked again before a turn is granted, in seconds: caches change."""

HELD_BY_POLICY = "policy"
"""Reason of a hold: the policy keeps the turn back until there is memory for it."""


class ScheduledDeciding(Deciding):
    """`Deciding`, with the turns that the policy holds in lines of their own."""

    def __init__(self, state: AdmissionState, scheduled: Scheduled) -> None:
        super().__init__(state)
        self._scheduled = scheduled
        self.with_policy = HoldQueue(state.settings.hold_queue_limit)
        self._full: dict[str, Ask] = {}
        """Those that the policy has let, and that wait for a place, or for an earlier one of their session."""

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
                effects.append(self._say_held(ask, now, place_in_line))
        effects += [self._give_up(ask, "hold_deadline", 503) for ask in overdue]
        for model in self.with_policy.models():
            if not any(worker.placeable for worker in self._state.fleet.serving(model)):
                effects += [self._nobody_serves(ask) for ask in self.with_policy.line(model)]
        return effects

    def settle(self, now: float) -> list[Effect]:
        effects = self._obey(now)
        for ask in list(self._full.values()):
            if ask.request.request_id in self._full and self._has_room(ask):
                effects += self._by_cost(ask, now) if ask.let is None else self._let(ask, now)
                effects += self._obey(now)
        return effects

    # Into the policy

    def _free(self, workers: list[Worker], model: str, wanted: int) -> int:
        """The policy says who may run: all of the line may be told to it."""
        del workers, model
        return wanted

    def _scored(self, ask: Ask, index: IndexView, now: float) -> list[Effect]:
        ask.index, ask.viewed_at = index, now
        if ask.let is not None:
            return self._grant(ask, now)
        if ask.request.excluded:  # it has waited its turn once
            return self._commit(ask, self._place(ask, now), None, now)
        return self._submit(ask, now)

    def _submit(self, ask: Ask, now: float) -> list[Effect]:
        """Tell the policy; it may answer at once. No seat there: by cost."""
        request, state = ask.request, self._state
        record = state.requests.get(request.request_id)
        index = state.turn_index(record) if record is not None else 0
        workers = state.fleet.serving(request.model)
        self._hold(ask, HELD_BY_POLICY, now)
        if not self._scheduled.ready(request, workers, index, ask.index):
            return self._by_cost(ask, now)
        effects = self._obey(now)
        if not self._is_with_policy(ask):
            return effects
        if self.held > state.settings.hold_queue_limit:
            return [*effects, self._give_up(ask, "hold_queue_full", 429)]
        return [*effects, self._say_held(ask, now, self.with_policy.place(ask))]

    # Out of the policy

    def _obey(self, now: float) -> list[Effect]:
        """Carry out what the policies have answered, and what they answer to that."""
        effects: list[Effect] = []
        while outcomes := self._scheduled.take():
            for outcome in outcomes:
                if isinstance(outcome, LeaseTold):
                    effects += self._state.lease_told(outcome, now)
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
        if ask.request.tokens_from == "estimate":  # the engine knows better
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
        placement = self._place(ask, now)
        places = {(seat.worker, seat.rank): number for number, seat in enumerate(placement.seats)}
        choice = places.get((let.worker, let.rank))
        barred = placement.seats[choice].excluded if choice is not None else "not_served"
        if barred == "at_limit" or (barred is None and self._is_behind(ask)):
            return self._wait_for_room(ask, now)
        if barred is None:
            return self._commit(ask, replace(placement, choice=choice), None, now)
        self._scheduled.withdraw(request.request_id)
        ask.let = None
        return self._commit(ask, placement, None, now)

    def _by_cost(self, ask: Ask, now: float) -> list[Effect]:
        """Without the policy: as ``kv`` places it, and it runs."""
        self._leave(ask, now)
        ask.started_at = now
        self._question(ask, Stage.INDEX)
        return self._commit(ask, self._place(ask, now), None, now)

    def _commit(self, ask: Ask, placement: Placement, policy: str | None, now: float) -> list[Effect]:
        if placement.choice is None and placement.reason == "at_limit":
            return self._wait_for_room(ask, now)
        record = self._state.requests.get(ask.request.request_id)
        index = 0
        if record is not None:
            index, record.priority = self._state.turn_index(record), self._engine_priority(ask.let)
        ask.builtin = self._scheduled.name if ask.let is not None else "kv"
        effects = super()._commit(ask, placement, policy, now)
        if placement.choice is not None and record is not None and ask.let is None:
            self._scheduled.runs(record, placement.chosen.worker, placement.chosen.rank, index)
        return effects

    def _engine_priority(self, let: Let | None) -> int | None:
        """As its engine reads it: SGLang runs the higher one first, all others the lower one."""
        worker = self._state.fleet.get(let.worker) if let is not None else None
        if let is None or worker is None or not self._state.settings.engine_priorities:
            return None
        return -let.priority if worker.state.profile.engine == "sglang" else let.priority

    # The lines

    def _is_with_policy(self, ask: Ask) -> bool:
        return ask.stage is Stage.SCHEDULED and self.waits(ask.request.request_id)

    def _wait_for_room(self, ask: Ask, now: float) -> list[Effect]:
        """Where it is to go, as many turns run as may. A question about it is open."""
        self._hold(ask, "at_limit", now)
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
        return self._room([each for each in workers if each.placeable and each.name not in request.excluded]) > 0

    def _hold(self, ask: Ask, reason: str, now: float) -> None:
        """No question about it is open any more; it waits with the policy."""
        if ask.ticket in self._open:
            self._close(ask)
        ask.stage, ask.hold_reason, ask.held_since = Stage.SCHEDULED, reason, now
        ask.say_held_at = now + self._state.settings.hold_keepalive_s
        self.with_policy.add(ask)

    def _leave(self, ask: Ask, now: float) -> None:
        self.with_policy.remove(ask)
        self._full.pop(ask.request.request_id, None)
        if ask.held_since is not None:
            ask.held_s += now - ask.held_since
            ask.held_since = None
        if not ask.held_s:
            ask.hold_reason = None
        ask.stage = Stage.HELD

    def _drop(self, ask: Ask) -> None:
        super()._drop(ask)
        self._scheduled.withdraw(ask.request.request_id)

    def _take_out(self, ask: Ask) -> None:
        if ask.stage is not Stage.SCHEDULED:
            super()._take_out(ask)
            return
        del self._asks[ask.request.request_id]
        self.with_policy.remove(ask)
        self._full.pop(ask.request.request_id, None)

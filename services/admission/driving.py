"""How a scheduling policy is told what happens, and what becomes of its answers. It may raise: nothing ends by that.

The turn that it was told of is placed by cost; a new policy takes over what the old one had learned, and is told what
runs and waits. One that fails again and again is left alone for a while, and its pool is placed by cost meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from schemas.admit import AdmitRequest
from schemas.session import SessionKey
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.estimators.learned_state import renewed
from services.admission.outcomes import Let, Noticed, Outcome, PauseTold, TurnedAway
from services.admission.policies.registry import Given, make_policy
from services.admission.pools import Pool, Turn
from services.admission.requests import RequestRecord
from services.admission.scheduled_facts import positive, program_of
from services.admission.scheduling.interface import (
    Action,
    Actions,
    Admission,
    Fleet,
    LeaseChange,
    PauseChange,
    Policy,
    Refusal,
    TurnFacts,
    WorkerFacts,
)
from services.admission.sub_agents import SubAgents

T = TypeVar("T")

BEGIN_AGAIN_S = 60.0
"""A policy that could not even begin is left alone for so long, in seconds."""


class PolicyDriver:
    """Drives the policy named ``policy``, one for each pool, and knows the turns that they know. ``is_known``: whether
    a session has had a turn.

    `take` hands over what the policies answered. ``ignored``: what a policy wanted and cannot have, by kind.
    ``failed``: calls of policies that raised, by call. ``lease_s``: when a lease ends by itself of which the policy
    does not say it. ``epoch``: of our leadership.
    """

    def __init__(
        self,
        policy: str,
        parameters: Mapping[str, Any],
        choose: Callable[[int], int],
        is_known: Callable[[SessionKey], bool],
        now: float,
        lease_s: float,
    ) -> None:
        self.name = policy
        self.hold_limit_s = make_policy(policy, parameters).hold_limit_s
        self.pools: dict[str, Pool] = {}
        self.turns: dict[str, Turn] = {}
        self.ignored: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.epoch: int | None = None
        self._parameters = parameters
        self._choose = choose
        self._is_known = is_known
        self._lease_s = lease_s
        self._now = self._clock = now
        self._numbers: dict[int, Turn] = {}
        self._of_program: Counter[tuple[str, str]] = Counter()
        self._sub_agents = SubAgents()
        self._outcomes: list[Outcome] = []
        self._count = 0

    def at(self, now: float) -> None:
        """The time from now on; policies that want to are told. Theirs never goes back, and goes on when the clock is
        set back."""
        self._now += max(0.0, now - self._clock)
        self._clock = now
        for pool in self.pools.values():
            if pool.policy is None and self._now >= pool.retry_at:
                self._begin(pool)
            elif pool.tick_s is not None and self._now - pool.ticked >= pool.tick_s:
                pool.ticked = self._now
                pool.learned.tools.refresh()  # before a decision has to wait for it
                self._tell(pool, "tick", lambda policy: policy.tick(self._now))

    def take(self) -> list[Outcome]:
        """What the policies have answered since the last call, in order."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    @property
    def _ahead(self) -> float:
        """Seconds by which the policies' time is ahead of the clock."""
        return self._now - self._clock

    # Turns

    def _turn(
        self,
        request: AdmitRequest | RequestRecord,
        pool: Pool,
        index: int,
        most: int | None,
        held_s: float = 0.0,
        expected: int | None = None,
    ) -> Turn:
        """A turn that is not known yet, of a program that the policy is to know. ``most``: tokens of its answer that
        the client allows, ``expected``: that it expects."""
        self._count += 1
        program = program_of(request.request_id, request.identity, request.kind, request.model)
        if not program.single:
            for child in self._sub_agents.began(program.name, program.parent):
                self._close(child)
        facts = TurnFacts(
            turn=self._count,
            program=program.name,
            index=index,
            prompt_tokens=max(1, request.input_tokens),
            max_output_tokens=positive(most),
            expected_output_tokens=positive(expected),
            held_s=held_s,
        )
        turn = Turn(request.request_id, pool.name, self._count, program, request.identity.key, facts, self._now)
        self.turns[request.request_id] = self._numbers[turn.number] = turn
        self._of_program[pool.name, program.name] += 1
        return turn

    def _tell_seat(self, pool: Pool, seat: int, facts: WorkerFacts | None) -> None:
        self._tell(pool, "worker_changed", lambda policy: policy.worker_changed(self._now, seat, facts))

    def _tell_ready(self, pool: Pool, turn: Turn) -> None:
        def act(policy: Policy) -> Actions:
            policy.program_arrives(self._now, turn.program)
            return policy.turn_ready(self._now, turn.facts)

        self._tell(pool, "turn_ready", act, turn)

    def _tell_runs(self, pool: Pool, turn: Turn, seat: int) -> None:
        def act(policy: Policy) -> Actions:
            policy.program_arrives(self._now, turn.program)
            return policy.turn_runs(self._now, turn.facts, seat)

        self._tell(pool, "turn_runs", act)

    def _close(self, name: str) -> None:
        for pool in self.pools.values():
            self._tell(pool, "program_closed", lambda policy: policy.program_closed(self._now, name))

    def _over(self, turn: Turn) -> None:
        self._forget(turn)
        pool, name, number = self.pools[turn.pool], turn.program.name, turn.number
        self._sub_agents.ended(name)
        self._tell(pool, "turn_aborted", lambda policy: policy.turn_aborted(self._now, number))
        if (turn.pool, name) not in self._of_program and (turn.program.single or not self._is_known(turn.key)):
            self._tell(pool, "program_closed", lambda policy: policy.program_closed(self._now, name))

    def _forget(self, turn: Turn) -> None:
        del self.turns[turn.request_id], self._numbers[turn.number]
        entry = turn.pool, turn.program.name
        self._of_program[entry] -= 1
        if not self._of_program[entry]:
            del self._of_program[entry]
            if turn.program.name in self.pools[turn.pool].paused:  # from now on nothing of it runs or waits
                self._outcomes.append(PauseTold(turn.key, "paused", None, "policy"))

    def _residency(self, number: int) -> Sequence[int] | None:
        turn = self._numbers.get(number)
        return self.pools[turn.pool].residency(turn.view) if turn is not None else None

    def _loadable(self, number: int) -> Sequence[float] | None:
        turn = self._numbers.get(number)
        return self.pools[turn.pool].loadable(turn.view) if turn is not None else None

    # The border to the policy

    def _tell(self, pool: Pool, call: str, act: Callable[[Policy], Actions | None], turn: Turn | None = None) -> None:
        """Tell the policy, and take its answer in. ``turn``: placed by cost should the policy fail."""
        policy = pool.policy
        if policy is None:
            return
        try:
            for action in act(policy) or ():
                outcome = self._outcome(pool, action)
                if outcome is not None:
                    self._outcomes.append(outcome)
        except Exception as error:  # noqa: BLE001 - the border to the policy: whatever it raises, requests go on
            self._broke(pool, call, error, turn)

    def _ask(self, pool: Pool, call: str, act: Callable[[Policy], T]) -> T | None:
        """What the policy says to a question that changes nothing."""
        try:
            return act(pool.policy) if pool.policy is not None else None
        except Exception as error:  # noqa: BLE001 - as in `_tell`
            self._broke(pool, call, error, None)
            return None

    def _broke(self, pool: Pool, call: str, error: Exception, turn: Turn | None) -> None:
        pause = pool.pause_s(self._now)
        self._failed(pool, call, error, pause)
        pool.policy = None
        if turn is not None and turn.place is None and turn.request_id in self.turns:
            self._turn_away(turn)
        pool.learned = self._renewed(pool.learned)
        if pause:
            self._stand_still(pool, self._now + pause)
        else:
            self._begin(pool)

    def _failed(self, pool: Pool, call: str, error: Exception, pause_s: float) -> None:
        self.failed[call] += 1
        self._notice("policy_failed", pool=pool.name, policy=self.name, call=call, detail=repr(error), pause_s=pause_s)

    def _renewed(self, learned: LearnedPool) -> LearnedPool:
        try:
            return renewed(learned)
        except Exception as error:  # noqa: BLE001 - as in `_tell`: it may be what broke the policy
            self.failed["learned"] += 1
            self._notice("learned_state_lost", detail=repr(error))
            return LearnedPool(work_cost=learned.work_cost, reload_cost=learned.reload_cost)

    def _turn_away(self, turn: Turn) -> None:
        self._forget(turn)
        self._sub_agents.ended(turn.program.name)
        self._outcomes.append(TurnedAway(turn.request_id, "policy_failed"))

    def _stand_still(self, pool: Pool, until: float) -> None:
        """Without a policy until then: whoever waits is placed by cost."""
        pool.policy, pool.tick_s, pool.retry_at = None, None, until
        self._outcomes += [*pool.end_leases("policy_restarted"), *pool.end_pauses("policy_restarted")]
        for turn in [each for each in self.turns.values() if each.pool == pool.name and each.place is None]:
            self._turn_away(turn)

    def _begin(self, pool: Pool) -> None:
        """A new policy for the pool, told of its seats, and of what runs and waits."""
        self._outcomes += [*pool.end_leases("policy_restarted"), *pool.end_pauses("policy_restarted")]
        try:
            policy = make_policy(self.name, self._parameters, Given(choose=self._choose, learned=pool.learned))
            policy.begin(Fleet((), self._residency, self._loadable))
            pool.tick_s = policy.tick_s
        except Exception as error:  # noqa: BLE001 - as in `_tell`
            self._failed(pool, "begin", error, BEGIN_AGAIN_S)
            self._stand_still(pool, self._now + BEGIN_AGAIN_S)
            return
        pool.policy, pool.retry_at, pool.ticked = policy, float("inf"), self._now
        for place, facts in pool.sizes.items():
            self._tell_seat(pool, pool.seats[place], facts)
        turns = [turn for turn in self.turns.values() if turn.pool == pool.name]
        for turn in sorted(turns, key=lambda each: (each.place is None, each.number)):
            if pool.policy is not policy or turn.request_id not in self.turns:
                return  # it failed again
            if turn.program.arrival is None:
                turn.program = replace(turn.program, arrival=turn.since)
            if turn.place is None:
                self._tell_ready(pool, turn)
            elif turn.place in pool.sizes:  # else its worker goes, and its end comes
                self._tell_runs(pool, turn, pool.seats[turn.place])

    # What it answers

    def _outcome(self, pool: Pool, action: Action) -> Outcome | None:
        if isinstance(action, LeaseChange):
            return pool.lease_changed(action, self.epoch, self._now, self._lease_s, self._ahead)
        if isinstance(action, PauseChange):
            return pool.pause_changed(action)
        if not isinstance(action, Admission | Refusal):
            self.ignored[type(action).__name__.lower()] += 1
            return None
        turn = self._numbers.get(action.turn)
        if turn is None or turn.place is not None:
            return None
        if isinstance(action, Refusal):
            self._forget(turn)
            self._sub_agents.ended(turn.program.name)
            return TurnedAway(turn.request_id, action.reason)
        place = turn.place = pool.places[action.seat]
        return Let(turn.request_id, *place, action.priority)

    def _notice(self, event: str, **fields: str | int | float) -> None:
        self._outcomes.append(Noticed(event, fields))

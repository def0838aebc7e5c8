"""A scheduling policy in the running service: workers become seats, sessions programs, asks and facts its events.

One policy serves one pool: the workers of one model, under whatever names they serve it. Leader and standby tell their
policies the same; what a policy did not admit itself (another leader's grant, an ingress's own choice, a retry) it is
told by `Policy.turn_runs`. Everything here is by request id, so that what is told twice, or late, is nothing.

A worker whose KV size or block size is not known has no seat. Pins are not lowered to anything: engines outside the
laboratory cannot be told to keep blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.admit import AdmitRequest
from schemas.request import RequestEnd
from schemas.session import MOVES_SESSION, RequestKind, SessionIdentity, SessionKey
from services.admission.placement import IndexView
from services.admission.policies.registry import Given, make_policy
from services.admission.requests import RequestRecord
from services.admission.scheduling.interface import (
    Action,
    Actions,
    Admission,
    Fleet,
    LeaseChange,
    LeaseState,
    Policy,
    ProgramFacts,
    Refusal,
    TurnFacts,
    TurnUsage,
    WorkerFacts,
)
from services.admission.workers import Worker

MAX_POOLS = 64
"""Models with a policy of their own; workers of more have no seats."""

Place = tuple[str, int]
"""(worker, rank)."""


@dataclass(frozen=True, slots=True)
class Let:
    """The policy sends the request there. ``priority``: lower runs earlier."""

    request_id: str
    worker: str
    rank: int
    priority: int


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """The policy will never send the request anywhere."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseTold:
    """What became of the KV that an idle session keeps at a rank, with the numbers that caused it."""

    session: SessionKey
    worker: str
    rank: int
    state: LeaseState
    numbers: Mapping[str, float]


Outcome = Let | TurnedAway | LeaseTold


@dataclass(eq=False, slots=True)
class Turn:
    """A request that the policy of ``pool`` knows as ``number``. ``place``: where it was let; ``None`` while it
    waits."""

    request_id: str
    pool: str
    number: int
    program: ProgramFacts
    key: SessionKey
    place: Place | None = None
    view: IndexView | None = None


@dataclass(eq=False, slots=True)
class Pool:
    """One policy and its seats. ``ticked``: when it was told the time last."""

    policy: Policy
    ticked: float
    seats: dict[Place, int] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)


class Scheduled:
    """Drives the policy named ``policy``, one for each pool. ``is_known``: whether a session has had a turn.

    `take` hands over what the policies answered. ``ignored``: what a policy wanted and cannot have, by kind.
    """

    def __init__(
        self,
        policy: str,
        parameters: Mapping[str, Any],
        choose: Callable[[int], int],
        is_known: Callable[[SessionKey], bool],
        now: float,
    ) -> None:
        self.name = policy
        self.pools: dict[str, Pool] = {}
        self.turns: dict[str, Turn] = {}
        self.ignored: Counter[str] = Counter()
        self._parameters = parameters
        self._choose = choose
        self._is_known = is_known
        self._now = now
        self._numbers: dict[int, Turn] = {}
        self._workers: dict[str, tuple[str, int, WorkerFacts]] = {}
        self._of_program: Counter[tuple[str, str]] = Counter()
        self._outcomes: list[Outcome] = []
        self._count = 0

    def at(self, now: float) -> None:
        """The time from now on, which never goes back; policies that want to are told."""
        self._now = max(self._now, now)
        for pool in self.pools.values():
            every = pool.policy.tick_s
            if every is not None and self._now - pool.ticked >= every:
                pool.ticked = self._now
                self._take_in(pool, pool.policy.tick(self._now))

    def take(self) -> list[Outcome]:
        """What the policies have answered since the last call, in order."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # Workers

    def worker(self, name: str, worker: Worker | None, *, lost: bool) -> set[Place]:
        """The worker's state changed, or it is gone (``None``). ``lost``: all that ran there is over.

        Returns the ranks that have become seats: what runs there already is to be told by `runs`.
        """
        wanted = _sizes(worker)
        before = self._workers.get(name)
        if before is not None and (lost or wanted is None or wanted[:2] != before[:2]):
            self._close_seats(name)
            before = None
        if wanted is None or wanted == before:
            return set()
        pool = self._pool(wanted[0])
        if pool is None:
            self.ignored["pool"] += 1
            return set()
        self._workers[name] = wanted
        opened = set()
        for rank in range(wanted[1]):
            place = name, rank
            if place not in pool.seats:
                number = next(number for number in range(len(pool.seats) + 1) if number not in pool.places)
                pool.seats[place], pool.places[number] = number, place
                opened.add(place)
            self._take_in(pool, pool.policy.worker_changed(self._now, pool.seats[place], wanted[2]))
        return opened

    def _close_seats(self, name: str) -> None:
        pool_name, ranks, _ = self._workers.pop(name)
        pool = self.pools[pool_name]
        for rank in range(ranks):
            number = pool.seats.pop((name, rank))
            self._take_in(pool, pool.policy.worker_changed(self._now, number, None))
            del pool.places[number]
        for turn in [turn for turn in self.turns.values() if turn.place is not None and turn.place[0] == name]:
            self._over(turn)

    def _pool(self, name: str) -> Pool | None:
        pool = self.pools.get(name)
        if pool is None:
            if len(self.pools) >= MAX_POOLS:
                empty = next((each for each, pool in self.pools.items() if self._is_deserted(each, pool)), None)
                if empty is None:
                    return None
                del self.pools[empty]
            policy = make_policy(self.name, self._parameters, Given(choose=self._choose))
            pool = self.pools[name] = Pool(policy, self._now)
            policy.begin(Fleet((), self._residency))
        return pool

    def _is_deserted(self, name: str, pool: Pool) -> bool:
        return not pool.seats and all(turn.pool != name for turn in self.turns.values())

    def _pool_of(self, workers: Sequence[Worker]) -> str | None:
        """The pool of the first of these that has a seat."""
        for worker in workers:
            known = self._workers.get(worker.name)
            if known is not None:
                return known[0]
        return None

    def _residency(self, number: int) -> list[int] | None:
        """Blocks of the turn's prompt by seat; ``None`` where no seat's cache is known."""
        turn = self._numbers.get(number)
        view = turn.view if turn is not None else None
        if turn is None or view is None or view.matches is None:
            return None
        pool = self.pools[turn.pool]
        blocks, is_blind = [0] * (max(pool.places, default=-1) + 1), True
        for seat, place in pool.places.items():
            match = view.matches.get(place)
            if match is not None and match.health != "blind":
                blocks[seat], is_blind = match.blocks.reach, False
        return None if is_blind else blocks

    # Turns

    def ready(self, request: AdmitRequest, workers: Sequence[Worker], index: int, view: IndexView | None) -> bool:
        """The request may run from now on. ``workers`` serve its model; ``index`` counts its session's turns.

        ``False``: there is no seat for it, and no policy has heard of it.
        """
        pool_name = self._pool_of(workers)
        if pool_name is None or request.request_id in self.turns:
            return False
        turn = self._turn(request.request_id, pool_name, request.identity, request.kind, request.model)
        turn.view = view
        pool = self.pools[pool_name]
        facts = self._facts(turn, index, request.input_tokens, request.max_output_tokens)
        self._take_in(pool, pool.policy.turn_ready(self._now, facts))
        return True

    def runs(self, record: RequestRecord, worker: str, rank: int, index: int = 0) -> None:
        """The request runs there, whoever has sent it."""
        known = self._workers.get(worker)
        place = worker, rank
        if record.request_id in self.turns or known is None or place not in self.pools[known[0]].seats:
            return
        turn = self._turn(record.request_id, known[0], record.identity, record.kind, record.model)
        turn.place = place
        pool = self.pools[known[0]]
        facts = self._facts(turn, index, record.input_tokens, None)
        self._take_in(pool, pool.policy.turn_runs(self._now, facts, pool.seats[place]))

    def place_of(self, request_id: str) -> Place | None:
        """Where the policy has the request run."""
        turn = self.turns.get(request_id)
        return turn.place if turn is not None else None

    def first_token(self, request_id: str) -> None:
        """Its prompt is computed."""
        turn = self.turns.get(request_id)
        if turn is not None:
            pool = self.pools[turn.pool]
            self._take_in(pool, pool.policy.first_token(self._now, turn.number))

    def finished(self, fact: RequestEnd, input_tokens: int) -> None:
        """It ran to its end. ``input_tokens``: of its prompt, where the engine did not say."""
        turn = self.turns.get(fact.request_id)
        if turn is None:
            return
        if turn.place is None:  # it waited, and ran somewhere that we were not told of
            self.withdraw(fact.request_id)
            return
        pool = self.pools[turn.pool]
        usage = fact.usage
        final = turn.program.single or fact.kind == "final" or bool(fact.identity.final)
        facts = TurnUsage(
            turn=turn.number,
            program=turn.program.name,
            seat=pool.seats[turn.place],
            prompt_tokens=usage.input_tokens if usage.input_tokens is not None else input_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens or 0,
            tool=fact.tool_names[0] if fact.tool_names else None,
            final=final,
        )
        self._forget(turn)
        self._take_in(pool, pool.policy.turn_finished(self._now, facts))

    def withdraw(self, request_id: str) -> None:
        """It is over without usage, or waits no more: all that it booked is given back."""
        turn = self.turns.get(request_id)
        if turn is not None:
            self._over(turn)

    def closed(self, key: SessionKey) -> None:
        """The session is over."""
        name = key.text()
        for pool in self.pools.values():
            self._take_in(pool, pool.policy.program_closed(self._now, name))

    # Inside

    def _turn(self, request_id: str, pool: str, identity: SessionIdentity, kind: RequestKind, model: str) -> Turn:
        """A turn that is not known yet, of a program that the policy knows from now on."""
        self._count += 1
        turn = Turn(request_id, pool, self._count, _program(request_id, identity, kind, model), identity.key)
        self.turns[request_id] = self._numbers[turn.number] = turn
        self._of_program[pool, turn.program.name] += 1
        self.pools[pool].policy.program_arrives(self._now, turn.program)
        return turn

    @staticmethod
    def _facts(turn: Turn, index: int, input_tokens: int, max_output_tokens: int | None) -> TurnFacts:
        most = max_output_tokens if max_output_tokens is not None and max_output_tokens > 0 else None
        return TurnFacts(turn.number, turn.program.name, index, max(1, input_tokens), most)

    def _over(self, turn: Turn) -> None:
        self._forget(turn)
        pool = self.pools[turn.pool]
        self._take_in(pool, pool.policy.turn_aborted(self._now, turn.number))
        name = turn.program.name
        if (turn.pool, name) not in self._of_program and (turn.program.single or not self._is_known(turn.key)):
            self._take_in(pool, pool.policy.program_closed(self._now, name))

    def _forget(self, turn: Turn) -> None:
        del self.turns[turn.request_id], self._numbers[turn.number]
        entry = turn.pool, turn.program.name
        self._of_program[entry] -= 1
        if not self._of_program[entry]:
            del self._of_program[entry]

    def _take_in(self, pool: Pool, actions: Actions) -> None:
        for action in actions:
            outcome = self._outcome(pool, action)
            if outcome is not None:
                self._outcomes.append(outcome)

    def _outcome(self, pool: Pool, action: Action) -> Outcome | None:
        if isinstance(action, LeaseChange):
            place = pool.places.get(action.seat)
            if place is None or ":" in action.program:
                return None
            return LeaseTold(SessionKey.from_text(action.program), *place, action.state, action.numbers)
        if not isinstance(action, Admission | Refusal):
            self.ignored[type(action).__name__.lower()] += 1
            return None
        turn = self._numbers.get(action.turn)
        if turn is None or turn.place is not None:
            return None
        if isinstance(action, Refusal):
            self._forget(turn)
            return TurnedAway(turn.request_id, action.reason)
        place = turn.place = pool.places[action.seat]
        return Let(turn.request_id, *place, action.priority)


def _sizes(worker: Worker | None) -> tuple[str, int, WorkerFacts] | None:
    """Pool, ranks and sizes of a worker that can be a seat."""
    if worker is None or not worker.placeable:
        return None
    profile = worker.state.profile
    if not profile.kv_tokens or profile.block_size is None:
        return None
    return profile.model, max(profile.ranks, 1), WorkerFacts(profile.kv_tokens, profile.block_size)


def _program(request_id: str, identity: SessionIdentity, kind: RequestKind, model: str) -> ProgramFacts:
    """A side request is no turn of its session: it is a program of its own, as a request without a session is. No name
    of those is a session's, which has no colon in it."""
    if kind not in MOVES_SESSION:
        return ProgramFacts(f"{kind}:{request_id}", kind, None, model, single=True)
    if identity.key.family == "request":
        return ProgramFacts(f"request:{request_id}", "", None, model, single=True)
    parent = identity.parent.text() if identity.parent is not None else None
    return ProgramFacts(identity.key.text(), identity.key.family, parent, model)

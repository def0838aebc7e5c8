"""A fleet and its clients for policy `Commit`: what happens to them, and what they know of it themselves.

Whatever happens is one event of the policy; after each, every check of `invariants` is made. Clients, engines and the
bus may do anything: facts come twice, late, or never.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

from services.admission.estimators.class_key import class_key
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.estimators.learned_state import decode, encode, from_state, to_state
from services.admission.policies.commit import CommitParameters
from services.admission.scheduling.interface import (
    Action,
    Admission,
    Fleet,
    LeaseChange,
    ProgramFacts,
    Refusal,
    TurnFacts,
    TurnUsage,
    WorkerFacts,
)
from tests.unit.admission.scheduling.watched import Watched

TOOLS = ("quick", "slow", None)
LABELS = ("a", "b", "unseen")
BLOCK = 16
GRANT_S = 30.0
"""So long after its end was lost, a turn is given up by whoever drives the policy."""

NO_BIAS: Mapping[int, float] = {}


class Rename(Protocol):
    """Facts and actions as others would tell them; ``position``: event and place of an argument."""

    def __call__(self, fact: Any, position: str) -> Any: ...


@cache
def _stored(seed: int) -> bytes:
    source = random.Random(seed)
    learned = LearnedPool()
    for number in range(25):
        key = class_key(agent_type=LABELS[number % 2], is_sub_agent=False, model="")
        context = 0
        for _ in range(source.randint(1, 6)):
            context += source.randint(10, 400)
            learned.turn_finished(("past", number), key, prompt_tokens=context, output_tokens=10)
            context += 10
        learned.program_finished(("past", number))
    for _ in range(600):
        learned.tool_returned("quick", source.uniform(0.1, 3.0))
        learned.tool_returned("slow", source.choice((1.0, 200.0)))
    return encode(to_state(learned))


def experienced(seed: int | None) -> LearnedPool:
    """A pool that saw 25 programs of two classes end, and two tools return so often that it makes no difference any
    more what else they do: leases are priced when their time has come, not with every new sample. Without ``seed`` it
    saw nothing."""
    learned = LearnedPool()
    if seed is not None:
        state, unread = decode(_stored(seed))
        assert not unread
        assert not from_state(state, learned)
    return learned


NAMED_BY_POSITION = ("first_token:1", "turn_aborted:1", "program_closed:1")


def renamed(fact: Any, position: str) -> Any:
    """The fact or action with its program's and its turn's name turned round; renamed twice it is what it was."""
    if isinstance(fact, str):
        return fact[::-1]
    if position in NAMED_BY_POSITION and isinstance(fact, int):
        return ~fact
    if isinstance(fact, ProgramFacts):
        return replace(fact, name=fact.name[::-1], parent=fact.parent and fact.parent[::-1])
    if isinstance(fact, TurnUsage):
        spawned = tuple(name[::-1] for name in fact.spawned)
        return replace(fact, turn=~fact.turn, program=fact.program[::-1], spawned=spawned)
    if isinstance(fact, TurnFacts):
        return replace(fact, turn=~fact.turn, program=fact.program[::-1])
    if isinstance(fact, Admission | Refusal):
        return replace(fact, turn=~fact.turn)
    if isinstance(fact, LeaseChange):
        return replace(fact, program=fact.program[::-1])
    return fact


@dataclass(slots=True)
class Known:
    """What its client knows of a program. ``is_ending``: it is over with the last of its turns, of which none, for a
    single, is no end. ``finished``,
    ``revoked``: how many turns ran to their end, and how many leases it lost; ``freed``: when it, or one that it
    waits for, was last busy."""

    arrival: float
    parent: str | None
    is_ending: bool
    context: int = 0
    finished: int = 0
    revoked: int = 0
    touched: float = 0.0
    freed: float = 0.0
    is_asked: bool = False
    children: set[str] = field(default_factory=set)


@dataclass
class World:
    """``history``: every event as a call, so that it can be told again to another policy; ``said``: the answers.

    ``held``, ``running``: turns by number; ``leased``: seats by program. ``lost``: turns whose end will never be told,
    and when they are given up. ``over``: usage of turns that are over, to be told again. ``checks`` are made after each
    event.
    """

    capacities: Sequence[int]
    parameters: CommitParameters
    learn: Callable[[], LearnedPool] = LearnedPool
    blind: bool = False
    checks: Sequence[Callable[[World], None]] = ()
    seen: Counter[str] = field(default_factory=Counter)
    now: float = 0.0
    held: dict[int, TurnFacts] = field(default_factory=dict)
    ready_at: dict[int, float] = field(default_factory=dict)
    running: dict[int, tuple[TurnFacts, int]] = field(default_factory=dict)
    lost: dict[int, float] = field(default_factory=dict)
    leased: dict[str, int] = field(default_factory=dict)
    programs: dict[str, Known] = field(default_factory=dict)
    over: list[TurnUsage] = field(default_factory=list)
    history: list[tuple[str, tuple[object, ...]]] = field(default_factory=list)
    said: list[list[Action]] = field(default_factory=list)
    kappas: dict[int, tuple[float, float]] = field(default_factory=dict)
    count: int = 0
    steps: int = 0
    is_broken: bool = False
    """A check has failed."""

    def __post_init__(self) -> None:
        self.policy = self.make()
        self.seats = {number: WorkerFacts(capacity, BLOCK) for number, capacity in enumerate(self.capacities)}

    def make(self) -> Watched:
        """The policy; another of the same kind each time."""
        policy = Watched(self.parameters, self.learn())
        policy.seen = self.seen

        def residency(turn: int) -> Sequence[int] | None:
            return None if self.blind else [(max(turn, ~turn) * 7 + seat) % 5 for seat in range(len(self.capacities))]

        policy.begin(Fleet(tuple(WorkerFacts(capacity, BLOCK) for capacity in self.capacities), residency))
        return policy

    # Events

    def tell(self, name: str, *facts: object) -> list[Action]:
        """One event, what follows from its answer, and all checks."""
        self.history.append((name, facts))
        self.steps += 1
        self.policy.now, self.is_broken = self.now, True
        answer = list(getattr(self.policy, name)(*facts) or ())
        self.said.append(answer)
        for action in answer:
            self.follow(action)
        self.forget()
        for check in self.checks:
            check(self)
        self.is_broken = False
        return answer

    def tell_nothing_new(self, name: str, *facts: object) -> None:
        """13: what is told twice, late, or of nobody, changes nothing."""
        self.seen["told in vain"] += 1
        before = self.snapshot()
        assert self.tell(name, *facts) == [], f"13: {name} in vain is answered"
        assert self.snapshot() == before, f"13: {name} in vain changes something"

    def snapshot(self) -> list[tuple[int, ...]]:
        book = self.policy.book
        seats = [
            (seat.number, seat.load, seat.running, seat.forced, seat.prefill, seat.running_tokens, seat.committed.total)
            for seat in book.seats.values()
        ]
        return [*seats, (len(book.turns), len(book.cold), len(self.held), len(self.running), len(self.leased))]

    def open(self, name: str, parent: str | None = None, *, single: bool = False) -> None:
        """The policy hears of the program for the first time."""
        if name in self.programs:
            return
        root = self.programs.get(parent) if parent is not None else None
        arrival = self.now if root is None else min(self.now, root.arrival)
        self.programs[name] = Known(arrival, parent, single, touched=self.now)
        if root is not None:
            root.children.add(name)

    def arrive(self, name: str, label: str, parent: str | None = None, *, single: bool = False) -> None:
        self.open(name, parent, single=single)
        self.tell("program_arrives", self.now, ProgramFacts(name, label, parent, single=single))

    def turn(
        self, name: str, prompt: int, most: int | None = None, bias_s: float = 0.0, seats: Mapping[int, float] = NO_BIAS
    ) -> TurnFacts:
        """The next turn of the program; ``bias_s``, ``seats``: what users' policies say of it."""
        known = self.programs.get(name)
        self.count += 1
        index = 1 if known is not None and known.finished else 0
        return TurnFacts(self.count, name, index, prompt, most, dict(seats), bias_s)

    def ready(self, turn: TurnFacts) -> None:
        if self.seats and not self.is_oversize(turn):
            self.open(turn.program)
            self.asked(turn.program)
        elif turn.program in self.programs:
            self.programs[turn.program].is_asked = True
        self.held[turn.turn] = turn
        self.ready_at[turn.turn] = self.now
        self.tell("turn_ready", self.now, turn)

    def asked(self, name: str) -> None:
        self.programs[name].touched, self.programs[name].is_asked = self.now, True

    def runs(self, turn: TurnFacts, seat: int) -> None:
        """Somebody else sent the turn there."""
        if seat not in self.seats:
            self.tell_nothing_new("turn_runs", self.now, turn, seat)
            return
        self.seen["runs elsewhere"] += 1
        self.open(turn.program)
        self.asked(turn.program)
        elsewhere = any(facts.program == turn.program and at != seat for facts, at in self.running.values())
        if elsewhere:
            turn_name = f"{turn.program}#{turn.turn}"
            self.open(turn_name, single=True)
            self.asked(turn_name)
            self.running[turn.turn] = (replace(turn, program=turn_name), seat)
        else:
            self.running[turn.turn] = (turn, seat)
        self.tell("turn_runs", self.now, turn, seat)

    def finish(
        self, turn: int, output: int, cached: int | None, tool: str | None, *, final: bool, spawned: Sequence[str] = ()
    ) -> None:
        """The engine reports the turn, which ran."""
        facts, seat = self.running.pop(turn)
        usage = TurnUsage(
            turn, facts.program, seat, facts.prompt_tokens, cached, output, tool, final, spawned=tuple(spawned)
        )
        known = self.programs[facts.program]
        known.context, known.finished, known.touched = facts.prompt_tokens + output, known.finished + 1, self.now
        known.is_ending = known.is_ending or final
        known.children |= set(spawned)
        self.over.append(usage)
        del self.over[:-8]
        self.tell("turn_finished", self.now, usage)

    def abort(self, turn: int) -> None:
        if self.held.pop(turn, None) is None:
            del self.running[turn]
        self.tell("turn_aborted", self.now, turn)

    def lose_end(self, turn: int) -> None:
        """Nobody will say what became of the turn."""
        self.lost.setdefault(turn, self.now + GRANT_S)

    def close(self, name: str) -> None:
        if name in self.programs:
            self.programs[name].is_ending = self.programs[name].is_asked = True
        self.tell("program_closed", self.now, name)

    def seat(self, number: int, capacity: int | None, foreign: int = 0) -> None:
        """The seat is gone, appeared, or has other sizes."""
        self.kappas.pop(number, None)
        if capacity is None:
            self.seen["seat lost"] += number in self.seats
            self.seats.pop(number, None)
            self.running = {turn: where for turn, where in self.running.items() if where[1] != number}
            self.tell("worker_changed", self.now, number, None)
        else:
            self.seats[number] = WorkerFacts(capacity, BLOCK, foreign_tokens=foreign)
            self.tell("worker_changed", self.now, number, self.seats[number])

    def wait(self, seconds: float) -> None:
        """Time passes; turns whose end was lost are given up."""
        self.now += seconds
        self.tell("tick", self.now)
        for turn in [turn for turn, until in self.lost.items() if until <= self.now]:
            del self.lost[turn]
            if turn in self.running:
                self.seen["lost ends"] += 1
                self.abort(turn)

    # What is known

    def is_oversize(self, turn: TurnFacts) -> bool:
        return all(turn.prompt_tokens >= seat.kv_tokens for seat in self.seats.values())

    def in_flight(self) -> set[str]:
        """Programs with a turn that waits or runs."""
        return {facts.program for facts in self.held.values()} | {facts.program for facts, _ in self.running.values()}

    def follow(self, action: Action) -> None:
        """What the owner of the policy knows by its actions alone."""
        if isinstance(action, LeaseChange):
            if action.state == "leased":
                assert action.program not in self.leased, "two leases of one program"
                self.leased[action.program] = action.seat
                return
            assert self.leased.pop(action.program, None) == action.seat, "the end of a lease that was not"
            if action.state == "revoked" and action.seat in self.seats:
                known = self.programs[action.program]
                known.revoked += 1
                assert known.revoked <= known.finished, "9: loses leases without having had a turn"
        elif isinstance(action, Refusal):
            self.seen["refused"] += 1
            facts = self.held.pop(action.turn)
            assert self.is_oversize(facts), "15: refused what fits"
            assert action.reason == ("oversize" if self.seats else "no_seat")
        elif isinstance(action, Admission):
            assert action.seat in self.seats, "sent to a seat that is not there"
            facts = self.held.pop(action.turn)  # a turn that is admitted twice is not here
            self.running[action.turn] = (facts, action.seat)

    def forget(self) -> None:
        """Programs that are over, or that the policy has forgotten in time."""
        busy = self.in_flight()
        table = self.policy.book.programs
        for name, known in list(self.programs.items()):
            if name in busy:
                known.freed = self.now
                continue
            if not (known.is_ending and known.is_asked):
                if table.get(name) is not None:
                    continue
                assert self.now - known.touched >= self.parameters.idle_expiry_s, "6: forgotten too early"
                self.seen["idle for too long"] += 1
            del self.programs[name]
            parent = self.programs.get(known.parent) if known.parent is not None else None
            for each in self.programs.values():
                if name in each.children:
                    each.freed = self.now
            if parent is not None:
                parent.children.discard(name)

    def told_again(self, rename: Rename = renamed) -> list[list[Action]]:
        """11, 16: the answers of another policy to the same history, where programs and turns have other names, and
        where nobody heeds what is said of leases."""
        policy = self.make()
        answers = []
        for name, facts in self.history:
            given = [rename(fact, f"{name}:{at}") for at, fact in enumerate(facts)]
            if isinstance(given[0], float):
                policy.now = given[0]
            answers.append([rename(action, "") for action in getattr(policy, name)(*given) or ()])
        return answers

    # The end

    def part(self) -> None:
        """Everybody goes, and says so."""
        for turn in [*self.held, *self.running]:
            if turn in self.held or turn in self.running:
                self.abort(turn)
        for name in list(self.programs):
            self.close(name)

    def fall_silent(self) -> None:
        """Nobody says anything any more: ends are given up, and time does the rest."""
        self.seen["fell silent"] += 1
        for turn in [*self.held, *self.running]:
            if turn in self.held or turn in self.running:
                self.abort(turn)
        for _ in range(len(self.programs) + 1):  # a parent goes after its sub-agents
            self.wait(self.parameters.idle_expiry_s + 1.0)

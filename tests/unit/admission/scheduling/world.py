"""A fleet and its clients for `Commit`, and the checks that hold after every event, whatever happened.

Invariants by their numbers in spec scheduling §5.3, as amended by policy §6 (roman numbers).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypeVar

from services.admission.estimators.class_key import class_key
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.estimators.learned_state import decode, encode, from_state, to_state
from services.admission.policies.commit import Commit, CommitParameters
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
from services.admission.scheduling.programs import HeldTurn, Program, ProgramState
from services.admission.scheduling.seat import Seat
from tests.unit.admission.scheduling import naive

TOOLS = ("quick", "slow", None)
LABELS = ("a", "b", "unseen")

Fact = TypeVar("Fact")


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


def experienced(seed: int) -> LearnedPool:
    """A pool that saw 25 programs of two classes end, and two tools return so often that it makes no difference any
    more what else they do: leases are priced when their time has come, not with every new sample."""
    learned = LearnedPool()
    state, unread = decode(_stored(seed))
    assert not unread
    assert not from_state(state, learned)
    return learned


class Watched(Commit):
    """Checks every admission at the moment at which it is made."""

    now = 0.0

    def _admit(self, program: Program, turn: HeldTurn, seat: Seat, *, forced: bool = False) -> None:
        is_cold = program.state in (ProgramState.NEW, ProgramState.COLD)
        is_free = forced or program.facts.single or not seat.running
        if is_cold and not is_free:
            assert naive.accepts(self, seat, program, turn, self.now), "(i) promised beyond kappa*C"
            assert not self._is_overtaking(program), "4: overtakes a new program that waits for too long"
        if forced:
            assert self.now - turn.ready >= self.parameters.hold_limit_s, "3: forced too early"
        super()._admit(program, turn, seat, forced=forced)
        if not is_free:
            band = self.parameters.lo if is_cold else self.parameters.hi
            assert naive.load(self, seat) <= band * seat.capacity, "1: beyond the band"
        assert seat.forced <= 1, "14: two forced turns on one seat"

    def _is_overtaking(self, program: Program) -> bool:
        waiting = [each for each in self.book.programs if each.state is ProgramState.NEW and each.waiting]
        head = min(waiting, key=lambda each: (naive.rank(self, each), each.number), default=program)
        if naive.rank(self, head) >= naive.rank(self, program):
            return False
        return self.now - head.first_waiting.ready > self.parameters.bypass_s


NAMED_BY_POSITION = ("first_token:1", "turn_aborted:1", "program_closed:1")


def renamed(fact: Fact, position: str = "") -> Fact:
    """The fact or action with its program's and its turn's name turned round; renamed twice it is what it was."""
    if isinstance(fact, str):
        return fact[::-1]  # type: ignore[return-value]
    if position in NAMED_BY_POSITION and isinstance(fact, int):
        return ~fact  # type: ignore[return-value]
    if isinstance(fact, ProgramFacts):
        return replace(fact, name=fact.name[::-1], parent=fact.parent and fact.parent[::-1])
    if isinstance(fact, TurnFacts | TurnUsage):
        return replace(fact, turn=~fact.turn, program=fact.program[::-1])
    if isinstance(fact, Admission | Refusal):
        return replace(fact, turn=~fact.turn)
    if isinstance(fact, LeaseChange):
        return replace(fact, program=fact.program[::-1])
    return fact


@dataclass
class World:
    """``history``: every event as a call, so that it can be told again to another policy; ``said``: the answers."""

    capacities: Sequence[int]
    parameters: CommitParameters
    learned_seed: int | None = None
    blind: bool = False
    now: float = 0.0
    held: dict[int, TurnFacts] = field(default_factory=dict)
    running: dict[int, tuple[TurnFacts, int]] = field(default_factory=dict)
    leased: dict[str, int] = field(default_factory=dict)
    programs: dict[str, int] = field(default_factory=dict)
    history: list[tuple[str, tuple[object, ...]]] = field(default_factory=list)
    said: list[list[Action]] = field(default_factory=list)
    ending: set[str] = field(default_factory=set)
    count: int = 0

    def __post_init__(self) -> None:
        self.policy = self.make()
        self.seats = dict(enumerate(self.capacities))
        self.kappas = dict.fromkeys(self.seats, (0.0, 1.2))

    def make(self) -> Watched:
        learned = LearnedPool() if self.learned_seed is None else experienced(self.learned_seed)
        policy = Watched(self.parameters, learned)

        def residency(turn: int) -> Sequence[int] | None:
            return None if self.blind else [(max(turn, ~turn) * 7 + seat) % 5 for seat in range(len(self.capacities))]

        policy.begin(Fleet(tuple(WorkerFacts(capacity, 16) for capacity in self.capacities), residency))
        return policy

    # Events

    def tell(self, name: str, *facts: object) -> None:
        """One event, and all checks."""
        self.history.append((name, facts))
        self.policy.now = self.now
        answer = list(getattr(self.policy, name)(*facts) or ())
        self.said.append(answer)
        for action in answer:
            self.follow(action)
        self.check()

    def arrive(self, label: str, prompt: int, parent: str | None = None, *, single: bool = False) -> None:
        name = f"program-{self.count}"
        self.programs[name] = 0
        if single:
            self.ending.add(name)
        self.tell("program_arrives", self.now, ProgramFacts(name, label, parent, single=single))
        self.ready(name, prompt)

    def ready(self, name: str, prompt: int) -> None:
        turn = TurnFacts(self.count, name, 1 if self.programs.get(name) else 0, prompt)
        self.count += 1
        self.held[turn.turn] = turn
        self.tell("turn_ready", self.now, turn)

    def finish(self, turn: int, output: int, cached: int | None, tool: str | None, *, final: bool) -> TurnUsage:
        facts, seat = self.running.pop(turn)
        usage = TurnUsage(turn, facts.program, seat, facts.prompt_tokens, cached, output, tool, final)
        self.programs[facts.program] = facts.prompt_tokens + output
        if final:
            self.ending.add(facts.program)
        self.forget_ended(facts.program)
        self.tell("turn_finished", self.now, usage)
        return usage

    def abort(self, turn: int) -> None:
        facts = self.held.pop(turn, None) or self.running.pop(turn)[0]
        self.forget_ended(facts.program)
        self.tell("turn_aborted", self.now, turn)

    def close(self, name: str) -> None:
        self.ending.add(name)
        self.forget_ended(name)
        self.tell("program_closed", self.now, name)

    def forget_ended(self, name: str) -> None:
        """A program that is to end does with its last turn."""
        in_flight = {facts.program for facts in self.held.values()} | {
            each.program for each, _ in self.running.values()
        }
        if name in self.ending and name not in in_flight:
            self.programs.pop(name, None)
            self.ending.discard(name)

    def seat(self, number: int, capacity: int | None) -> None:
        if capacity is None:
            self.seats.pop(number, None)
            lost = [facts.program for facts, seat in self.running.values() if seat == number]
            self.running = {turn: where for turn, where in self.running.items() if where[1] != number}
            for name in lost:
                self.forget_ended(name)
        else:
            self.seats[number] = capacity
        self.kappas.pop(number, None)
        self.tell("worker_changed", self.now, number, None if capacity is None else WorkerFacts(capacity, 16))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tell("tick", self.now)
        for name in list(self.programs):
            if self.policy.book.programs.get(name) is None:
                self.programs[name] = 0  # forgotten, for it was idle for too long

    # Checks

    def follow(self, action: Action) -> None:
        """What the owner of the policy knows by its actions alone."""
        if isinstance(action, LeaseChange):
            if action.state == "leased":
                assert action.program not in self.leased, "two leases of one program"
                self.leased[action.program] = action.seat
                return
            assert self.leased.pop(action.program) == action.seat, "the end of a lease that was not"
            if action.state == "revoked" and action.seat in self.seats:
                waits = any(facts.program == action.program for facts in self.held.values())
                assert not waits, "9: only the idle lose leases"
        elif isinstance(action, Refusal):
            facts = self.held.pop(action.turn)
            assert all(facts.prompt_tokens >= capacity for capacity in self.seats.values()), "15: refused what fits"
            self.forget_ended(facts.program)
        elif isinstance(action, Admission):
            facts = self.held.pop(action.turn)
            assert action.seat in self.seats
            self.running[action.turn] = (facts, action.seat)

    def check(self) -> None:
        policy, book = self.policy, self.policy.book
        assert set(book.turns) == {*self.held, *self.running}, "13: turns that are not there"
        assert set(book.seats) == set(self.seats)
        for number, seat in book.seats.items():
            runs = [turn for turn, (_, where) in self.running.items() if where == number]
            assert seat.running == len(runs)
            assert {program.facts.name for program in seat.leases.values()} == {
                name for name, where in self.leased.items() if where == number
            }
            assert seat.load == naive.load(policy, seat), "2: L"
            assert seat.committed.total == naive.promised(policy, seat, self.now), "2, (iii): commitments"
            below = [each for each in seat.leases.values() if naive.revocable(policy, each, seat, self.now)]
            assert seat.revocable == sum(program.lease_charge for program in below)
            assert seat.running or not any(self.fits_ever(turn, seat) for turn in self.held), "5: idle, and held"
            self.check_kappa(seat)
        self.check_held()
        if not self.programs and not self.held and not self.running:
            assert not self.leased or all(book.programs.get(name) for name in self.leased)

    def fits_ever(self, turn: int, seat: Seat) -> bool:
        """Whether the turn could go there alone: its program is not bound to another seat."""
        program = self.policy.book.turns[turn]
        if program.state in (ProgramState.RUNNING, ProgramState.LEASED) and program.seat != seat.number:
            return False
        return self.held[turn].prompt_tokens < seat.capacity and program.first_waiting.charge <= seat.capacity

    def check_kappa(self, seat: Seat) -> None:
        """(iv)"""
        steered = seat.steering.steered
        since, before = self.kappas.get(seat.number, (0.0, steered))
        assert 0.8 <= steered <= 2
        if steered != before:
            assert abs(steered - before) <= 0.02 + 1e-9
            assert since == 0.0 or self.now - since >= 5
            self.kappas[seat.number] = (self.now, steered)
        else:
            self.kappas[seat.number] = (since, before)

    def check_held(self) -> None:
        """5: nobody waits who is accepted, fits, and has no blocked head before; 3: nor for longer than H, but behind
        a forced turn."""
        policy, book = self.policy, self.policy.book
        waiting = [program for program in book.programs if program.waiting]
        order = sorted(waiting, key=lambda each: (naive.rank(policy, each), each.number))
        head = next((each for each in order if each.state is ProgramState.NEW), None)
        name = self.history[-1][0]
        if name in ("program_arrives", "first_token"):
            return
        stopped = False
        for program in order:
            turn = program.first_waiting
            bound = program.state in (ProgramState.RUNNING, ProgramState.LEASED)
            is_late = turn.facts.index > 0 and self.now - turn.ready >= self.parameters.hold_limit_s
            for seat in book.seats.values():
                if (bound and program.seat != seat.number) or turn.charge > seat.capacity:
                    continue
                assert seat.forced or not is_late, "3: held beyond H"
                if bound:
                    room = self.parameters.hi * seat.capacity - seat.load
                    assert policy._needed(program, turn) > room, "5: held, and fits"
                elif not stopped and seat.load + turn.charge <= self.parameters.lo * seat.capacity:
                    assert not naive.accepts(policy, seat, program, turn, self.now), "5: held, and accepted"
            stopped = stopped or (program is head and self.now - turn.ready > self.parameters.bypass_s)

    def told_again(self) -> list[list[Action]]:
        """16: the answers of another policy to the same history, where programs and turns have other names."""
        policy = self.make()
        answers = []
        for name, facts in self.history:
            if isinstance(facts[0], float):
                policy.now = facts[0]
            answer = getattr(policy, name)(*(renamed(fact, f"{name}:{at}") for at, fact in enumerate(facts))) or ()
            answers.append([renamed(action) for action in answer])
        return answers

    def end(self, *, is_told_again: bool = True) -> None:
        """Everybody goes: nothing is left, whatever was lost on the way."""
        for turn in [*self.held, *self.running]:
            if turn in self.held or turn in self.running:
                self.abort(turn)
        for name in list(self.programs):
            self.close(name)
        book = self.policy.book
        assert not book.turns
        assert not book.new
        assert not len(book.cold)
        assert not len(book.programs)
        for seat in book.seats.values():
            assert (seat.load, seat.running, seat.forced, seat.prefill, seat.running_tokens) == (0, 0, 0, 0, 0)
            assert (seat.revocable, seat.committed.total, len(seat.committed), len(seat.warm)) == (0, 0, 0, 0)
            assert not seat.leases
            assert not seat.programs
        if is_told_again:
            assert self.told_again() == self.said

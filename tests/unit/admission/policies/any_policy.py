"""Random histories of any policy of the registry: what every one of them has to hold, whatever it decides.

Two policies hear the same history; one of them hears some of it twice, and things that never were. They have to give
the same answers (determinism, and that what is told in vain is nothing).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.admission.policies.registry import POLICIES, Given, make_policy
from services.admission.scheduling.booked import Booked
from services.admission.scheduling.interface import (
    Action,
    Admission,
    Fleet,
    LeaseChange,
    PauseChange,
    Pin,
    Policy,
    ProgramFacts,
    Refusal,
    TurnFacts,
    TurnUsage,
    Unpin,
    WorkerFacts,
)
from tests.unit.admission.scheduling.machine import Draw, Tally

VARIANTS: tuple[tuple[str, Mapping[str, object]], ...] = (
    *((name, {}) for name in sorted(POLICIES)),
    ("thunderagent", {"form": "paper"}),
    ("infercept", {"remaining": "elapsed", "order": "request"}),
    ("concur", {"initial": 1.0}),
)

HOLDS_WITH_ROOM = frozenset({"concur"})
"""Policies that let so many programs in, whatever room there is."""

SIZES = (4_000, 10_000)
NAMES = tuple(f"program-{number}" for number in range(8))
NUMBERS = st.integers(0, (1 << 24) - 1)
LONGEST_S = 2000.0
"""More than any policy of the registry parks a turn for."""


@dataclass
class AnyWorld:
    """What a router knows, beside two policies of one kind. ``has_room``: the seats are without bound."""

    make: Callable[[], Policy]
    has_room: bool = False
    now: float = 0.0
    count: int = 0
    steps: int = 0
    seats: dict[int, WorkerFacts] = field(default_factory=dict)
    ready: dict[int, TurnFacts] = field(default_factory=dict)
    running: dict[int, tuple[TurnFacts, int]] = field(default_factory=dict)
    leased: dict[str, int] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)
    singles: set[str] = field(default_factory=set)
    over: list[TurnUsage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seats = {0: self.size(0), 1: self.size(1)}
        self.policies = self.make(), self.make()
        for policy in self.policies:
            policy.begin(Fleet(tuple(self.seats.values()), lambda turn: None))

    def size(self, number: int) -> WorkerFacts:
        return WorkerFacts(10**12 if self.has_room else SIZES[number], 16)

    # Telling

    def tell(self, name: str, *facts: object) -> None:
        """One event, what both say to it, and what follows."""
        self.steps += 1
        answer, again = (list(getattr(policy, name)(*facts) or ()) for policy in self.policies)
        assert answer == again, f"not deterministic, or something in vain was heeded: {name}"
        for action in answer:
            self.follow(action)
        for policy in self.policies[:1]:
            if isinstance(policy, Booked):
                self.check_sums(policy)
        if self.has_room and name != "program_arrives":
            assert not self.ready, "held, and there is room for everybody"

    def tell_in_vain(self, name: str, *facts: object) -> None:
        """One of them hears it, and has nothing to say."""
        assert not [each for each in getattr(self.policies[0], name)(*facts) if isinstance(each, Admission | Refusal)]

    def follow(self, action: Action) -> None:
        """Raises `KeyError` for a turn that is admitted twice, or is not ready."""
        if isinstance(action, Admission):
            assert action.seat in self.seats
            self.running[action.turn] = (self.ready.pop(action.turn), action.seat)
        elif isinstance(action, Refusal):
            del self.ready[action.turn]
        elif isinstance(action, Pin):
            assert action.seat in self.seats
            assert action.until > self.now
        elif isinstance(action, LeaseChange):
            if action.state == "leased":
                assert self.leased.setdefault(action.program, action.seat) == action.seat
            else:
                assert self.leased.pop(action.program, None) == action.seat, "the end of a lease that was not"
        elif isinstance(action, PauseChange):
            self.follow_pause(action)
        else:
            assert isinstance(action, Unpin)

    def follow_pause(self, change: PauseChange) -> None:
        """Paused and resumed in turn."""
        if change.state == "paused":
            assert change.program not in self.paused, "paused twice"
            self.paused.add(change.program)
        else:
            self.paused.remove(change.program)

    def check_sums(self, policy: Booked) -> None:
        """Conservation, of policies that keep a book."""
        book = policy.book
        assert set(book.turns) == {*self.ready, *self.running}
        for seat in book.seats.values():
            programs = [program for program in book.programs if program.seat == seat.number]
            charges = sum(turn.charge for program in programs for turn in program.running.values())
            assert seat.load == charges + sum(program.lease_charge for program in programs)
            assert seat.running == sum(at == seat.number for _, at in self.running.values())

    # Events

    def arrive(self, draw: Draw) -> None:
        name, prompt = draw.of(NAMES), 1 + draw.below(4000)
        if draw.one_in(16):
            name = f"single-{self.count}"
            self.singles.add(name)
        parent = draw.of(NAMES) if draw.one_in(4) else None
        self.tell("program_arrives", self.now, ProgramFacts(name, "", parent, single=name in self.singles))
        self.turn(name, prompt)

    def come_back(self, draw: Draw) -> None:
        """Of a program that may never have arrived."""
        self.turn(draw.of(NAMES), 1 + draw.below(4000), 1)

    def turn(self, name: str, prompt: int, index: int = 0) -> None:
        self.count += 1
        turn = TurnFacts(self.count, name, index, prompt)
        self.ready[turn.turn] = turn
        self.tell("turn_ready", self.now, turn)

    def finish(self, draw: Draw) -> None:
        turn = draw.of(sorted(self.running))
        facts, seat = self.running.pop(turn)
        cached = None if draw.one_in(8) else draw.below(facts.prompt_tokens + 1)
        tool = draw.of(("quick", "slow", None))
        usage = TurnUsage(turn, facts.program, seat, facts.prompt_tokens, cached, draw.below(60), tool, draw.one_in(4))
        self.over = [*self.over[-4:], usage]
        self.tell("turn_finished", self.now, usage)

    def first_token(self, draw: Draw) -> None:
        self.tell("first_token", self.now, draw.of(sorted(self.running)))

    def abort(self, draw: Draw) -> None:
        turn = draw.of(sorted([*self.ready, *self.running]))
        if self.ready.pop(turn, None) is None:
            del self.running[turn]
        self.tell("turn_aborted", self.now, turn)

    def close(self, draw: Draw) -> None:
        self.tell("program_closed", self.now, draw.of(NAMES))

    def wait(self, draw: Draw) -> None:
        self.now += draw.of((0.0, 0.2, 1.0, 2.5, 6.0, 30.0, 700.0)) + draw.below(64) / 64
        self.tell("tick", self.now)

    def repeat(self, draw: Draw) -> None:
        """What one of them hears twice, or of nobody."""
        self.tell("tick", self.now)
        kind = draw.below(4)
        if kind == 0 and self.over:
            self.tell_in_vain("turn_finished", self.now, draw.of(self.over))
        elif kind == 1 and self.ready:
            self.tell_in_vain("turn_ready", self.now, draw.of(list(self.ready.values())))
        elif kind == 2:
            self.tell_in_vain("turn_aborted", self.now, -1)
            self.tell_in_vain("first_token", self.now, -1)
        else:
            self.tell_in_vain("program_closed", self.now, "nobody")
            self.tell_in_vain("turn_finished", self.now, TurnUsage(-1, "nobody", 0, 9, None, 9, None, True))

    def seat(self, draw: Draw) -> None:
        """A seat goes, comes (back), or changes its size. With room for everybody, one of them stays."""
        number, goes = draw.below(3), draw.one_in(2)
        if number in self.seats and goes and not (self.has_room and number == 0):
            del self.seats[number]
            lost = [turn for turn, (_, where) in self.running.items() if where == number]
            for turn in lost:
                del self.running[turn]
            self.tell("worker_changed", self.now, number, None)
            for turn in lost:
                self.tell("turn_aborted", self.now, turn)
        else:
            self.seats[number] = self.size(draw.below(2))
            self.tell("worker_changed", self.now, number, self.seats[number])

    def traffic(self, draw: Draw) -> None:
        steps = draw.below(32)
        source = random.Random(draw.below(1 << 19))
        for _ in range(steps + 1):
            event = source.choice(OFTEN)
            if EVENTS[event](self):
                event(self, Draw(source.getrandbits(40)))

    # The end

    def end(self) -> None:
        """Everything that runs ends, again and again, and time passes: the queue is never stuck. Then all go."""
        self.seats.setdefault(0, self.size(1))
        self.tell("worker_changed", self.now, 0, self.seats[0])
        while self.ready or self.running:
            for turn, (facts, seat) in list(self.running.items()):
                if self.running.pop(turn, None) is not None:
                    usage = TurnUsage(turn, facts.program, seat, facts.prompt_tokens, 0, 1, None, True)
                    self.tell("turn_finished", self.now, usage)
            until = self.now + LONGEST_S
            while self.ready and not self.running and self.now < until:
                self.now += 50.0
                self.tell("tick", self.now)
            assert self.running or not self.ready, "nothing runs, and nobody who waits is let in"
        for name in (*NAMES, *self.singles):
            self.tell("program_closed", self.now, name)
        assert not self.leased
        assert not self.paused
        for attribute in ("_programs", "programs", "paused", "_waiting", "_gates", "_unsent", "_turns", "_open"):
            table = getattr(self.policies[0], attribute, None)
            assert not table or set(table) <= {0, 1, 2}, attribute
        if isinstance(self.policies[0], Booked):
            book = self.policies[0].book
            assert (len(book.programs), len(book.turns), len(book.cold), len(book.new)) == (0, 0, 0, 0)
            assert [seat.load for seat in book.seats.values() if seat.load] == []


Event = Callable[[AnyWorld, Draw], None]


def always(world: AnyWorld) -> bool:
    del world
    return True


EVENTS: dict[Event, Callable[[AnyWorld], bool]] = {
    AnyWorld.traffic: always,
    AnyWorld.arrive: lambda world: len(world.ready) < 12,
    AnyWorld.come_back: lambda world: len(world.ready) < 12,
    AnyWorld.finish: lambda world: bool(world.running),
    AnyWorld.first_token: lambda world: bool(world.running),
    AnyWorld.abort: lambda world: bool(world.running or world.ready),
    AnyWorld.close: always,
    AnyWorld.wait: always,
    AnyWorld.repeat: always,
    AnyWorld.seat: always,
}
OFTEN: Sequence[Event] = (
    *(AnyWorld.arrive, AnyWorld.arrive, AnyWorld.come_back, AnyWorld.come_back, AnyWorld.wait, AnyWorld.wait),
    *(AnyWorld.finish, AnyWorld.finish, AnyWorld.finish, AnyWorld.first_token, AnyWorld.repeat),
    *(AnyWorld.abort, AnyWorld.close, AnyWorld.seat),
)


def first(limit: int) -> int:
    """For policies that draw among equals."""
    del limit
    return 0


class Histories(RuleBasedStateMachine):
    """What `machine` adds its rules to."""

    world: AnyWorld


def machine(name: str, parameters: Mapping[str, object], tally: Tally) -> type[RuleBasedStateMachine]:
    """The state machine of that policy; ``tally`` counts."""

    def begin(self: Histories, number: int) -> None:
        has_room = Draw(number).one_in(4) and name not in HOLDS_WITH_ROOM
        self.world = AnyWorld(lambda: make_policy(name, parameters, Given(choose=first)), has_room)

    def teardown(self: Histories) -> None:
        if hasattr(self, "world"):
            self.world.end()
            tally.histories += 1
            tally.events += self.world.steps

    members: dict[str, object] = {"teardown": teardown, "begin": initialize(number=NUMBERS)(begin)}
    for event, can_happen in EVENTS.items():
        members[event.__name__] = _rule(event, can_happen)
    return type("Histories", (Histories,), members)


def _rule(event: Event, can_happen: Callable[[AnyWorld], bool]) -> object:
    def happen(self: Histories, number: int) -> None:
        event(self.world, Draw(number))

    happen.__name__ = event.__name__
    return precondition(lambda self: can_happen(self.world))(rule(number=NUMBERS)(happen))

"""Random histories of a `World`: as a Hypothesis state machine, one rule for each kind of event.

A rule draws one number, from which all about its event follows; so that a step costs little, and small numbers are
plain events. The rule ``traffic`` is many steps of clients and engines that mostly behave, which lead further than
hostile ones alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.admission.policies.commit import CommitParameters
from services.admission.scheduling.interface import TurnUsage
from tests.unit.admission.scheduling.invariants import EVERY_EVENT, nothing_is_left, the_same_again
from tests.unit.admission.scheduling.world import GRANT_S, LABELS, TOOLS, World, experienced

CAPACITIES = (600, 1000, 2500, 6000)
SEATS = 3
NAMES = 16
WAITS_S = (0.0, 0.3, 1.0, 2.5, 5.0, 11.0, 31.0, 61.0, 290.0, 310.0, 650.0)
NUMBERS = st.integers(0, (1 << 24) - 1)

T = TypeVar("T")


class Draw:
    """A number as a sequence of choices; 0 is the first of all."""

    def __init__(self, number: int) -> None:
        self._number = number

    def below(self, limit: int) -> int:
        self._number, value = divmod(self._number, limit)
        return value

    def of(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def one_in(self, limit: int) -> bool:
        return self.below(limit) == limit - 1


def clients(world: World) -> list[str]:
    """Programs that somebody can name: those with a ``#`` were made up by the policy."""
    return [name for name in world.programs if "#" not in name]


def parent_of(world: World, draw: Draw) -> str | None:
    """A program that is there, or one that is not (any more), or none."""
    kind = draw.below(5)
    if kind < 3 or not clients(world):
        return None
    return draw.of(clients(world)) if kind == 3 else "nobody"


def bias(draw: Draw) -> tuple[float, dict[int, float]]:
    """What users' policies say of a turn: mostly nothing."""
    return draw.of((0.0, 0.0, 0.0, 0.0, -8.0, 30.0)), draw.of(({}, {}, {}, {}, {1: -50.0}, {0: 50.0}))


def arrive(world: World, draw: Draw) -> None:
    """A program's first turn. Its arrival, or its turn, may be lost; or it came under this name before."""
    prompt = 1 + draw.below(400)
    if draw.one_in(16):
        prompt *= 7
    name = f"p{world.count}"
    if draw.one_in(8):
        name = f"s{draw.below(4)}"
    parent = parent_of(world, draw)
    if draw.one_in(12):
        world.ready(world.turn(name, prompt))
        return
    world.arrive(name, draw.of(LABELS), parent, single=draw.one_in(24) and name not in world.programs)
    if not draw.one_in(12):
        world.ready(world.turn(name, prompt, draw.of((None, None, 0, 20)), *bias(draw)))


def come_back(world: World, draw: Draw) -> None:
    """A program's next turn, in parallel with others at times. Its prompt grows, or was rewritten."""
    busy = world.in_flight()
    known = clients(world)
    if not known:
        return
    names = [name for name in known if name not in busy or draw.one_in(16)] or known
    name = draw.of(names)
    more = draw.below(200) - (20 if draw.below(4) else 400)
    world.ready(
        world.turn(name, max(1, world.programs[name].context + more), draw.of((None, None, None, 20)), *bias(draw))
    )


def finish(world: World, draw: Draw) -> None:
    """A turn ran to its end. Its count of cached tokens may be missing, and what it spawned may never arrive."""
    turn = draw.of(list(world.running))
    prompt = world.running[turn][0].prompt_tokens
    tool, final, output = draw.of(TOOLS), draw.one_in(7), draw.below(60)
    cached: int | None = draw.below(prompt + 1)
    if draw.one_in(40):
        cached = None
    spawned = (f"s{draw.below(4)}", f"p{world.count}") if draw.one_in(12) else ()
    world.finish(turn, output, cached, tool, final=final, spawned=() if final else spawned)


def abort(world: World, draw: Draw) -> None:
    turn = draw.of([*world.held, *world.running])
    world.abort(turn)
    if draw.one_in(2):
        world.tell_nothing_new("turn_aborted", world.now, turn)


def lose_end(world: World, draw: Draw) -> None:
    world.lose_end(draw.of(list(world.running)))


def tell_twice(world: World, draw: Draw) -> None:
    """A fact comes again, late, or of a turn or a program that never was."""
    kind = draw.below(6)
    if kind == 0 and world.held:
        world.tell_nothing_new("turn_ready", world.now, draw.of(list(world.held.values())))
    elif kind == 1 and world.running:
        facts, seat = draw.of(list(world.running.values()))
        world.tell_nothing_new("turn_runs", world.now, facts, seat)
    elif kind == 2 and world.over:
        world.tell_nothing_new("turn_finished", world.now, draw.of(world.over))
    elif kind == 3:
        world.tell_nothing_new("turn_aborted", world.now, -1)
        world.tell_nothing_new("first_token", world.now, -1)
    elif kind == 4:
        world.tell_nothing_new("turn_finished", world.now, TurnUsage(-1, "nobody", 0, 5, 5, 5, None, True))
    else:
        world.tell_nothing_new("program_closed", world.now, "nobody")


def runs_elsewhere(world: World, draw: Draw) -> None:
    """A turn that somebody else sent: of a program that is known, or not."""
    names = [*clients(world), f"p{world.count}"]
    name, prompt = draw.of(names), 1 + draw.below(700)
    world.runs(world.turn(name, prompt), draw.below(SEATS))


def first_token(world: World, draw: Draw) -> None:
    world.tell("first_token", world.now, draw.of(list(world.running)))


def close(world: World, draw: Draw) -> None:
    world.close(draw.of(clients(world) or ["nobody"]))


def seat(world: World, draw: Draw) -> None:
    """A seat goes, comes (back), or changes its size, or what others hold of it."""
    world.seat(draw.below(SEATS), draw.of((None, *CAPACITIES)), draw.of((0, 0, 0, 100, 400)))


def advise(world: World, draw: Draw) -> None:
    """Users' policies say what becomes of the memory that an idle program holds, or does not."""
    world.seen["advice"] += 1
    keep = draw.of((True, True, False, None))
    until = draw.of((None, world.now - 1.0, world.now + 20.0, world.now + 5000.0))
    world.tell("lease_advice", world.now, draw.of([*world.leased] or clients(world) or ["nobody"]), keep, until)


def wait(world: World, draw: Draw) -> None:
    world.wait(draw.of(WAITS_S) + draw.below(64) / 64)


def traffic(world: World, draw: Draw) -> None:
    """Up to 32 steps of clients and engines that mostly behave."""
    steps = draw.below(32)
    source = random.Random(draw.below(1 << 19))
    for _ in range(steps + 1):
        behave(world, source)


def starve(world: World, draw: Draw) -> None:
    """Nobody ends anything for longer than a turn is held; who does not say so in time is given up."""
    for turn in list(world.running):
        world.lose_end(turn)
    for _ in range(1 + draw.below(3)):
        if EVENTS[come_back](world):
            come_back(world, Draw(draw.below(1 << 18)))
    world.now += world.parameters.hold_limit_s
    world.lost = dict.fromkeys(world.lost, world.now + GRANT_S)
    world.wait(0.5)


Event = Callable[[World, Draw], None]


def always(world: World) -> bool:
    del world
    return True


EVENTS: dict[Event, Callable[[World], bool]] = {
    traffic: always,
    arrive: lambda world: len(world.programs) < NAMES,
    come_back: lambda world: bool(world.programs) and len(world.held) < NAMES,
    finish: lambda world: bool(world.running),
    first_token: lambda world: bool(world.running),
    wait: always,
    abort: lambda world: bool(world.held or world.running),
    lose_end: lambda world: bool(world.running),
    close: lambda world: bool(world.programs),
    advise: lambda world: bool(world.programs),
    starve: lambda world: bool(world.running and world.held),
    seat: always,
    runs_elsewhere: lambda world: len(world.programs) < NAMES,
    tell_twice: always,
}
"""What happens, and when it can."""

SHARES = ((0.2, arrive), (0.45, come_back), (0.72, finish), (0.76, first_token))
RARE = (abort, lose_end, close, seat, advise, starve, starve, runs_elsewhere, tell_twice)


def behave(world: World, source: random.Random) -> None:
    kind, number = source.random(), source.getrandbits(62)
    event: Event = wait
    for share, each in SHARES:
        if kind < share:
            event = each
            break
    else:
        if kind > 0.96:
            event = source.choice(RARE)
        else:
            world.wait(source.expovariate(0.2))
            return
    if EVENTS[event](world):
        event(world, Draw(number))


@dataclass(frozen=True)
class Kind:
    """One kind of histories: seats, profiles of the policy, and whether anything is learned before."""

    name: str
    seats: tuple[int, ...] = (1,)
    profiles: tuple[CommitParameters, ...] = (CommitParameters(),)


DEFAULT = Kind("commit, its default profile")
CONSERVATIVE = Kind("commit, S = 0", (1, 2), (CommitParameters(span_s=0.0),))
SEVERAL = Kind(
    "commit, several seats",
    (2, 3),
    (CommitParameters(), CommitParameters(hold_limit_s=20.0, idle_expiry_s=60.0, output_tokens=30)),
)
KINDS = (DEFAULT, CONSERVATIVE, SEVERAL)


@dataclass
class Tally:
    """What ran: histories, events, and how often what is checked came up."""

    histories: int = 0
    events: int = 0
    seen: Counter[str] = field(default_factory=Counter)


def machine(kind: Kind, tally: Tally) -> type[RuleBasedStateMachine]:
    """The state machine of that kind; ``tally`` counts."""

    def begin(self: Histories, number: int) -> None:
        draw = Draw(number)
        seats = [draw.of(CAPACITIES) for _ in range(draw.of(kind.seats))]
        learned = draw.of((None, *range(6)))
        parameters, self.ending = draw.of(kind.profiles), draw.below(8)
        self.world = World(
            seats, parameters, partial(experienced, learned), draw.one_in(3), checks=EVERY_EVENT, seen=tally.seen
        )

    def teardown(self: Histories) -> None:
        if not hasattr(self, "world") or self.world.is_broken:
            return
        if self.ending % 2:
            self.world.fall_silent()
        else:
            self.world.part()
        nothing_is_left(self.world)
        if self.ending < 2:
            the_same_again(self.world)
        tally.histories += 1
        tally.events += self.world.steps

    members: dict[str, object] = {"teardown": teardown, "begin": initialize(number=NUMBERS)(begin)}
    for event, can_happen in EVENTS.items():
        members[event.__name__] = _rule(event, can_happen)
    return type("Histories", (Histories,), members)


class Histories(RuleBasedStateMachine):
    """What `machine` adds its rules to."""

    world: World
    ending: int


def _rule(event: Event, can_happen: Callable[[World], bool]) -> object:
    def happen(self: Histories, number: int) -> None:
        event(self.world, Draw(number))

    happen.__name__ = event.__name__
    return precondition(lambda self: can_happen(self.world))(rule(number=NUMBERS)(happen))

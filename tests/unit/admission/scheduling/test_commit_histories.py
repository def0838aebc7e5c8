"""Policy `commit` over random histories: every invariant of spec scheduling §5.3, as amended by policy §6 (i to v).

| no. | invariant | checks |
|---|---|---|
| 1 | budget: within the bands when admitted; beyond them, idle leases go | `is_within_the_band`, `_crowded` |
| 2 | conservation: exact sums; all gone: L = 0, empty maps | `sums_are_exact`, `nothing_is_left` |
| 3 | bounded hold: H in mid-session, but behind a forced turn | `nobody_waits_who_may_go`, `is_forced_in_time` |
| 4 | no starvation: who waits for long is overtaken no more | `overtakes_nobody_who_waits_for_long` |
| 5 | work conservation | `an_idle_seat_takes_who_waits`, `nobody_waits_who_may_go` |
| 6 | leases end, and only live ones give priority | `leases_are_bounded`, `advice_is_bounded` |
| 7 | a floor in place of the price: the least worth, no more than needed | `_try`, `_revoke`, `test_floor_and_worth` |
| 8 | turns that run are never ended | `the_table_is_true` |
| 9 | no flapping: a lease is lost only after a turn, by the idle | `follow`, `_revoke` |
| 10 | null equivalence | `singles_go_at_once`, `nothing_is_held` |
| 11 | hints change nothing | `the_same_again` |
| 12 | order: of one class the older is never behind | `equals_go_by_arrival` |
| 13 | told twice, late, of nobody: nothing | `tell_nothing_new`, `the_table_is_true` |
| 14 | one forced turn on a seat | `_admit` |
| 15 | oversize goes alone or is refused | `nothing_oversize_is_parked`, `follow`, `is_within_the_band` |
| 16 | determinism; names and the unit of time do not matter | `the_same_again`, `test_another_unit_of_time` |
| 17 | a decision costs as much with many programs | `test_cost_of_a_decision` |
| i | promised to those that outrank: no more than kappa*C | `is_within_the_commitment` |
| ii | overtaken only by who has the smaller D, or for a while | `overtakes_nobody_who_waits_for_long` |
| iii | blocked parents and revocable leases count 0 | `sums_are_exact` |
| iv | kappa within its bounds, and slow | `kappa_moves_slowly` |
| v | S = 0 and nothing learned: by arrival, C/8 each | `without_predictions_an_eighth`, `equals_go_by_arrival` |

The many histories are in `tests/histories` (`make test-histories`).
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType

import msgspec
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from services.admission.estimators.ecdf import Exponential
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.estimators.reload_cost import H100_8B as RELOAD
from services.admission.estimators.reload_cost import ReloadCost
from services.admission.estimators.tool_times import ToolTimes
from services.admission.estimators.work import H100_8B as WORK
from services.admission.estimators.work import WorkCost
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
from tests.unit.admission.scheduling import invariants
from tests.unit.admission.scheduling.invariants import EVERY_EVENT, nothing_is_left
from tests.unit.admission.scheduling.machine import CAPACITIES, KINDS, Kind, Tally, behave, machine
from tests.unit.admission.scheduling.watched import Watched
from tests.unit.admission.scheduling.world import World, experienced

NUMBERS = (*(str(number) for number in range(1, 18)), "i", "ii", "iii", "iv", "v")


def test_every_invariant_has_its_check() -> None:
    """The table above names a check for each number, which is there; and no check is made that is not in it."""
    rows = re.findall(r"^\| (\w+) \| .* \| (`.*`) \|$", __doc__ or "", re.MULTILINE)
    assert [number for number, _ in rows] == list(NUMBERS)
    named = {name for _, names in rows for name in re.findall(r"`(\w+)`", names)}
    places = (invariants, Watched, World, sys.modules[__name__])
    assert [name for name in sorted(named) if not any(name in vars(place) for place in places)] == []
    made = {check.__name__ for check in EVERY_EVENT} | {name for name in vars(Watched) if name.startswith("is_")}
    assert made <= named


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_histories(kind: Kind) -> None:
    """A few; the same each time."""
    tally = Tally()
    few = settings(max_examples=8, stateful_step_count=10, deadline=None, database=None)
    run_state_machine_as_test(seed(1)(machine(kind, tally)), settings=few)
    assert tally.histories >= 8


def traffic(source: random.Random, world: World, steps: int) -> None:
    for _ in range(steps):
        behave(world, source)
    world.part()
    nothing_is_left(world)


def nothing_is_held(world: World) -> None:
    """10"""
    assert not world.held


class Endless(World):
    """Seats without bound."""

    def seat(self, number: int, capacity: int | None, foreign: int = 0) -> None:
        super().seat(number, 10**12, foreign)


@pytest.mark.long
@pytest.mark.parametrize("span_s", [80.0, 0.0])
def test_with_room_for_everybody_nothing_is_ever_held(span_s: float) -> None:
    """10: capacity without bound is as if there were no policy, once something is learned. Until then each program is
    charged an eighth of the capacity, whatever that is: (v)."""
    for number in range(4):
        checks = (*EVERY_EVENT, nothing_is_held)
        world = Endless([10**12], CommitParameters(span_s=span_s), partial(experienced, number), checks=checks)
        traffic(random.Random(number), world, 60)
        assert world.seen["admitted by commitment"]


SCALE = 4.0
"""A power of two: products with it are exact."""


def scaled(fact: object, position: str) -> object:
    if isinstance(fact, TurnFacts):
        return replace(fact, order_bias_s=fact.order_bias_s * SCALE)
    is_time = position.endswith(":0") or position == "lease_advice:3"
    return fact * SCALE if isinstance(fact, float) and is_time else fact


def plain(actions: list[Action]) -> list[tuple[object, ...]]:
    """What was decided, without figures that have the unit of a time."""
    said: list[tuple[object, ...]] = []
    for action in actions:
        if isinstance(action, LeaseChange):
            said.append((action.program, action.seat, action.state))
        elif isinstance(action, Admission):
            said.append((action.turn, action.seat))
        elif isinstance(action, Refusal):
            said.append((action.turn, action.reason))
    return said


def learned_in_units(scale: float) -> LearnedPool:
    """A pool that knows nothing, and whose constants have another unit of time."""
    work = WorkCost(**{name: value * scale for name, value in msgspec.structs.asdict(WORK).items()})
    reload = ReloadCost(**{name: value * scale for name, value in msgspec.structs.asdict(RELOAD).items()})
    tools = ToolTimes(cold_start=Exponential(scale, 2.0 * scale))
    return LearnedPool(work_cost=work, reload_cost=reload, tools=tools)


def parameters_in_units(parameters: CommitParameters, scale: float) -> CommitParameters:
    """S is a ratio of times."""
    times = {
        name: value * scale
        for name, value in msgspec.structs.asdict(parameters).items()
        if name.endswith("_s") and name != "span_s" and value is not None
    }
    return msgspec.structs.replace(parameters, **times)


class Uncounted(World):
    """The engines tell no cached tokens: kappa is fixed, for its steering has a period that is not a parameter."""

    def finish(
        self, turn: int, output: int, cached: int | None, tool: str | None, *, final: bool, spawned: Sequence[str] = ()
    ) -> None:
        super().finish(turn, output, None, tool, final=final, spawned=spawned)


@pytest.mark.long
def test_another_unit_of_time() -> None:
    """16: all times four times as long, those of the engine too: the same decisions."""
    for number in range(6):
        source, parameters = random.Random(number), CommitParameters()
        capacities = [source.choice(CAPACITIES) for _ in range(1 + number % 2)]
        world = Uncounted(capacities, parameters, partial(learned_in_units, 1.0))
        traffic(source, world, 80)
        again = World(capacities, parameters_in_units(parameters, SCALE), partial(learned_in_units, SCALE))
        again.history = world.history
        assert [plain(answer) for answer in again.told_again(scaled)] == [plain(answer) for answer in world.said]


SHARES = st.floats(1e-7, 1e-3)


@pytest.mark.long
@given(st.integers(0, 5), st.floats(0, 300), st.integers(1, 5000), SHARES, st.floats(1.0, 50.0), st.integers(0, 4000))
def test_floor_and_worth(past: int, elapsed: float, context: int, floor: float, more: float, survives: int) -> None:
    """7: a higher floor never lengthens a lease; one that costs more to make anew is never worth less."""
    pool = experienced(past)
    for tool in ("quick", "slow"):
        lease = pool.lease_standing(tool, elapsed, context, floor)
        under_pressure = pool.lease_standing(tool, elapsed, context, floor * more)
        assert under_pressure.index == lease.index
        assert lease.worth_keeping or not under_pressure.worth_keeping
        if under_pressure.worth_keeping:
            assert under_pressure.until <= lease.until
        cheaper = pool.lease_standing(tool, elapsed, context, floor, min(survives, context))
        assert cheaper.index <= lease.index


def calls_of(work: Callable[[], object]) -> int:
    """Functions that are called, of Python and of C, whatever else the machine does meanwhile."""
    calls = 0

    def count(frame: FrameType, event: str, value: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def decisions(programs: int) -> int:
    """Calls of 20 turns that end and return, with so many programs that run, are leased, and wait."""
    policy = Commit(CommitParameters(output_tokens=10), experienced(0))
    policy.begin(Fleet((WorkerFacts(programs * 400, 16),), lambda turn: None))
    for number in range(programs):
        now, name = number / 100, f"p{number}"
        policy.program_arrives(now, ProgramFacts(name, "a", None))
        policy.turn_ready(now, TurnFacts(number, name, 0, 300))
    running = [turn for turn, program in policy.book.turns.items() if turn in program.running]
    assert programs * 0.3 < len(running) < programs * 0.95
    now = programs / 100

    def turns() -> None:
        for turn in running[:20]:
            name = f"p{turn}"
            policy.turn_finished(now, TurnUsage(turn, name, 0, 300, 0, 10, "quick", False))
            policy.turn_ready(now, TurnFacts(programs + turn, name, 1, 310))

    return calls_of(turns)


@pytest.mark.long
def test_cost_of_a_decision() -> None:
    """17: what is called for a turn hardly depends on how many programs there are."""
    assert decisions(800) < 1.5 * decisions(100)


def test_a_turn_of_a_program_that_is_not_known() -> None:
    """Its arrival was lost: it is a program without a label."""
    world = World([1000], CommitParameters(), checks=EVERY_EVENT)
    world.ready(world.turn("stranger", 100))
    assert world.running
    world.part()
    nothing_is_left(world)

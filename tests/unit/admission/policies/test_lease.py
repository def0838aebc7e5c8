"""Policy ``lease`` by the clauses, special cases and invariants of spec scheduling §5.2 to §5.4."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.admission.estimators.learned_pool import LearnedPool
from services.admission.policies.lease import Lease, LeaseParameters, time_to_live
from services.admission.policies.registry import PolicyParameterError, make_policy
from services.admission.scheduling.interface import (
    Actions,
    Admission,
    Fleet,
    LeaseChange,
    ProgramFacts,
    TurnFacts,
    TurnUsage,
    WorkerFacts,
)
from services.admission.scheduling.programs import HeldTurn, Program, ProgramState
from services.admission.scheduling.seat import Seat

QUICK, SLOW = "quick", "slow"
VECTOR = [0.1] * 50 + [0.5] * 30 + [2.0] * 15 + [30.0] * 5


def learned() -> LearnedPool:
    """The tool of the vectors (§1.4), and one that takes 500 s longer."""
    pool = LearnedPool()
    for seconds in VECTOR * 2:
        pool.tool_returned(QUICK, seconds)
        pool.tool_returned(SLOW, 500.0 + seconds)
    return pool


class Watched(Lease):
    """Checks every admission at the moment at which it is made; numbers as in scheduling §5.3."""

    now = 0.0

    def _admit(self, program: Program, turn: HeldTurn, seat: Seat, *, forced: bool = False) -> None:
        free = forced or program.facts.single or not seat.running
        band = self.parameters.hi
        if program.state in (ProgramState.NEW, ProgramState.COLD):
            band = self.parameters.lo
        if forced:
            assert self.now - turn.ready >= self.parameters.hold_limit_s, "3: forced too early"
        if program.state is ProgramState.LEASED and program.is_idle:
            assert self.until[program.number] >= self.now, "6: an expired lease gives no priority"
        super()._admit(program, turn, seat, forced=forced)
        assert free or seat.load <= band * seat.capacity, "1: budget"
        assert seat.forced <= 1, "14: two forced turns on one seat"

    def check(self) -> None:
        """2: conservation; 5: work; 6: bound of leases."""
        for seat in self.book.seats.values():
            runs = [turn for program in seat.programs.values() for turn in program.running.values()]
            leases = [program.lease_charge for program in seat.leases.values()]
            assert seat.load == sum(turn.charge for turn in runs) + sum(leases), "2: L"
            assert seat.running == len(runs)
            for program in seat.leases.values():
                if program.is_idle:
                    assert self.until[program.number] <= self.now + self.parameters.ttl_limit_s, "6"
            waits = any(each.waiting for each in self.book.programs)
            assert seat.running or not waits or any(other.running for other in self.book.seats.values()), "5: idle"
        assert set(self.until) == {
            number for seat in self.book.seats.values() for number, each in seat.leases.items()
        }, "13: leases that are not there"


class Driver:
    """One policy, and the shortest way to tell it things."""

    def __init__(self, capacity: int = 100_000, residency: Sequence[int] | None = None, **parameters: object) -> None:
        typed = msgspec.convert({"output_tokens": 0, **parameters}, LeaseParameters)
        self.policy = Watched(typed, learned())
        self.residency = residency
        self.policy.begin(Fleet((WorkerFacts(capacity, 16),), lambda turn: self.residency))
        self.prompts: list[tuple[str, int]] = []

    @property
    def seat(self) -> Seat:
        return self.policy.book.seats[0]

    def turn(self, now: float, name: str, prompt: int, index: int = 1) -> Actions:
        self.policy.now = now
        self.prompts.append((name, prompt))
        return self.policy.turn_ready(now, TurnFacts(len(self.prompts) - 1, name, index, prompt))

    def new(self, now: float, name: str, prompt: int) -> Actions:
        self.policy.program_arrives(now, ProgramFacts(name, "", None))
        return self.turn(now, name, prompt, index=0)

    def end(self, now: float, turn: int, tool: str | None = QUICK, *, final: bool = False) -> Actions:
        self.policy.now = now
        name, prompt = self.prompts[turn]
        return self.policy.turn_finished(now, TurnUsage(turn, name, 0, prompt, prompt, 0, tool, final))

    def tick(self, now: float) -> Actions:
        self.policy.now = now
        return self.policy.tick(now)


def admitted(actions: Actions) -> list[int]:
    return [action.turn for action in actions if isinstance(action, Admission)]


def lost(actions: Actions) -> dict[str, str]:
    ends = (action for action in actions if isinstance(action, LeaseChange))
    return {each.program: each.state for each in ends if each.state in ("revoked", "expired")}


def test_time_to_live() -> None:
    """Full price, a footprint as large as the mean: Continuum's question with the time that is really held, so that the
    vector of §1.4 gives 2 s and not 0.5 (§1.8). Half the price: the last 30 s are worth it, but Q99 is not."""
    pool = learned()
    assert pool.tools.durations(QUICK).durations.best_ttl(5.0) == 0.5
    assert time_to_live(pool, QUICK, 5.0, 1.0, 0.0, 60.0) == 2.0
    assert time_to_live(pool, QUICK, 5.0, 0.0, 0.0, 60.0) == 30.0
    assert time_to_live(pool, QUICK, 5.0, 0.0, 0.0, 7.0) == 7.0
    assert time_to_live(pool, QUICK, 5.0, 1.0, 2.5, 60.0) == 2.5, "past its hazard"


def test_cold_start() -> None:
    """ln(B), between 0 and 2 s (§5.4)."""
    pool = LearnedPool()
    assert time_to_live(pool, "unseen", 5.0, 1.0, 0.0, 60.0) == pytest.approx(math.log(5.0))
    assert time_to_live(pool, "unseen", 0.5, 1.0, 0.0, 60.0) == 0.0
    assert time_to_live(pool, "unseen", 500.0, 0.0, 0.0, 60.0) == 2.0


@given(
    st.sampled_from([QUICK, SLOW, "unseen"]),
    st.floats(0, 50),
    st.floats(0, 50),
    st.floats(0, 4),
    st.floats(0, 4),
    st.floats(0, 40),
)
def test_monotone_price(tool: str, less: float, more: float, low: float, high: float, elapsed: float) -> None:
    """7: more benefit never shortens a lease, a higher price never lengthens it."""
    pool = POOL
    less, more, low, high = min(less, more), max(less, more), min(low, high), max(low, high)
    assert time_to_live(pool, tool, less, low, elapsed, 60.0) <= time_to_live(pool, tool, more, low, elapsed, 60.0)
    assert time_to_live(pool, tool, less, high, elapsed, 60.0) <= time_to_live(pool, tool, less, low, elapsed, 60.0)


POOL = learned()


def crowded() -> Driver:
    """Two idle leases of a tool that returns soon, and a turn that runs: a new program does not fit."""
    driver = Driver()
    for name, prompt in (("large", 30_000), ("small", 20_000), ("runs", 30_000)):
        driver.new(0.0, name, prompt)
    driver.end(0.0, 0)
    driver.end(0.0, 1)
    return driver


def test_a_held_turn_buys_leases_by_its_hold() -> None:
    """7: what it pays grows with the time that it waited, and the leases worth least go first; once it could buy, it
    could at any later time as well."""
    driver = crowded()
    assert admitted(driver.new(0.0, "new", 20_000)) == []
    seat = driver.seat
    book = driver.policy.book
    first = None
    for second in range(1, 300):
        pays = (second + 1.0) / (20_000 * driver.policy.parameters.turn_s)
        worth = {each.facts.name: book.index(each, float(second)) for each in seat.leases.values()}
        actions = driver.tick(float(second))
        if admitted(actions) == [3]:
            first = second
            assert lost(actions)
            assert all(worth[name] <= pays or state == "expired" for name, state in lost(actions).items())
            break
    assert first is not None
    for later in (first, first + 1, first + 40):
        again = crowded()
        again.new(0.0, "new", 20_000)
        assert admitted(again.tick(float(later))) == [3]


def test_bands() -> None:
    """A new program has to fit into lo, one that comes back to its lease into hi."""
    driver = Driver()
    driver.new(0.0, "old", 50_000)
    driver.end(0.0, 0)
    driver.new(0.0, "runs", 30_000)
    assert admitted(driver.new(0.1, "new", 10_000)) == []
    assert admitted(driver.turn(0.2, "old", 62_000)) == [3]
    assert driver.seat.load == 92_000


def test_no_gap_between_the_bands() -> None:
    """lo may be hi: memory is free below, and costs all there is from there on."""
    driver = Driver(lo=0.9, hi=0.9)
    driver.new(0.0, "old", 50_000)
    driver.new(0.0, "runs", 30_000)
    driver.end(0.0, 0)
    assert admitted(driver.new(0.1, "new", 30_000)) == []
    assert driver.policy.price(driver.seat) == 0.0
    driver.policy.worker_changed(0.1, 0, WorkerFacts(90_000, 16))
    assert driver.policy.price(driver.seat) == 1.0


def test_smallest_first() -> None:
    """Equal tools at equal times: the index follows the size, so that the smallest lease goes first, as where
    ThunderAgent pauses; never the oldest program's (§5.2)."""
    driver = Driver()
    for number, prompt in enumerate((10_000, 12_000, 40_000, 16_000)):
        driver.new(0.0, f"p{number}", prompt)
        driver.end(0.0, number)
    index = {each.facts.name: driver.policy.book.index(each, 0.0) for each in driver.seat.leases.values()}
    assert sorted(index, key=lambda name: index[name]) == ["p0", "p1", "p3", "p2"]
    driver.new(0.0, "more", 3_000)
    assert lost(driver.end(0.0, 4, SLOW)) == {}
    driver.policy.book.made_room(driver.seat)
    changed = driver.policy.worker_changed(0.0, 0, WorkerFacts(80_000, 16))
    assert list(lost(changed)) == ["more", "p1", "p3"]


def test_a_lease_that_is_over_gives_no_priority() -> None:
    """6: it expired, or the index says that its KV is gone."""
    for residency, at in ((None, 61.0), ([100], 0.2)):
        driver = Driver(residency=residency)
        driver.new(0.0, "old", 40_000)
        driver.end(0.0, 0, QUICK)
        driver.new(0.0, "runs", 46_000)
        actions = driver.turn(at, "old", 41_000)
        assert list(lost(actions)) == ["old"]
        assert admitted(actions) == []
    driver = Driver(residency=[2_500])
    driver.new(0.0, "old", 40_000)
    driver.end(0.0, 0, QUICK)
    assert lost(driver.turn(0.2, "old", 41_000)) == {}


def test_a_tool_that_runs_on_loses_its_lease() -> None:
    """The tick prices anew: under pressure a tool that is past its quick returns is worth less than the memory."""
    driver = Driver(turn_s=1e9)
    driver.new(0.0, "old", 50_000)
    driver.end(0.0, 0, QUICK)
    driver.new(0.0, "warm", 20_000)
    driver.end(0.0, 1, QUICK)
    driver.turn(0.0, "warm", 39_000)
    assert driver.policy.price(driver.seat) == 0.0, "nobody is held"
    driver.new(0.1, "new", 30_000)
    assert driver.policy.price(driver.seat) == pytest.approx(0.6)
    assert lost(driver.tick(0.4)) == {}
    assert lost(driver.tick(3.0)) == {"old": "expired"}


def test_an_overtaken_head_stops_the_others() -> None:
    """4: younger ones that fit go before it for 10 s, and then no more."""
    driver = Driver(turn_s=1e9)
    driver.new(0.0, "runs", 60_000)
    assert admitted(driver.new(0.0, "head", 50_000)) == []
    assert admitted(driver.new(5.0, "small", 5_000)) == [2]
    assert admitted(driver.new(11.0, "late", 5_000)) == []
    assert admitted(driver.end(12.0, 0, final=True)) == [1, 3]


def test_parameters() -> None:
    """What makes no sense is refused."""
    for wrong in ({"lo": 0.99, "hi": 0.9}, {"turn_s": 0}, {"bypass_s": -1}, {"span_s": 80}):
        with pytest.raises(PolicyParameterError):
            make_policy("lease", wrong)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
def test_any_history(seed: int) -> None:
    """1 to 6, 13, 14 of §5.3 after every event; in the end nothing is left, and a second policy says the same."""
    said = []
    for _ in range(2):
        source = random.Random(seed)
        policy = Watched(LeaseParameters(), learned() if seed % 2 else LearnedPool())
        residency: Sequence[int] | None = None if seed % 3 else (900, 900)
        policy.begin(Fleet((WorkerFacts(30_000, 16), WorkerFacts(20_000, 16)), _always(residency)))
        answers: list[Actions] = []
        turns: dict[int, tuple[str, int, int | None]] = {}
        for number in range(120):
            policy.now += source.choice((0.0, 0.1, 1.0, 4.0, 30.0))
            answers.append(_one_event(policy, source, turns, number))
            for action in answers[-1]:
                if isinstance(action, Admission):
                    name, prompt, _ = turns[action.turn]
                    turns[action.turn] = (name, prompt, action.seat)
            policy.check()
        for turn in list(turns):
            policy.turn_aborted(policy.now, turn)
        for number in range(8):
            policy.program_closed(policy.now, f"p{number}")
        assert not policy.book.turns
        assert not policy.until
        assert all((seat.load, seat.running, len(seat.warm)) == (0, 0, 0) for seat in policy.book.seats.values())
        said.append(answers)
    assert said[0] == said[1]


def _always(residency: Sequence[int] | None) -> Callable[[int], Sequence[int] | None]:
    return lambda turn: residency


def _one_event(
    policy: Watched, source: random.Random, turns: dict[int, tuple[str, int, int | None]], number: int
) -> Actions:
    now, kind = policy.now, source.random()
    running = [turn for turn, (_, _, seat) in turns.items() if seat is not None]
    if kind < 0.45:
        name, prompt = f"p{source.randrange(8)}", source.choice((500, 3_000, 9_000, 15_000))
        turns[number] = (name, prompt, None)
        policy.program_arrives(now, ProgramFacts(name, "", None))
        return policy.turn_ready(now, TurnFacts(number, name, source.randrange(2), prompt))
    if kind < 0.8 and running:
        turn = source.choice(running)
        name, prompt, seat = turns.pop(turn)
        policy.first_token(now, turn)
        tool = source.choice((QUICK, SLOW, None))
        usage = TurnUsage(turn, name, seat or 0, prompt, source.choice((None, 0, prompt // 2)), 200, tool, kind > 0.75)
        return [*policy.turn_finished(now, usage), *policy.turn_finished(now, usage)]
    if kind < 0.86 and turns:
        turn = source.choice(list(turns))
        del turns[turn]
        return policy.turn_aborted(now, turn)
    return policy.tick(now)


def test_what_others_say() -> None:
    """Advice to give a lease up is taken; a waiting turn knows its place; the hard cap is told."""
    driver = Driver()
    driver.new(0.0, "old", 50_000)
    driver.end(0.0, 0)
    driver.new(0.0, "runs", 30_000)
    driver.new(0.0, "new", 30_000)
    driver.new(0.1, "newer", 30_000)
    assert [driver.policy.place(turn) for turn in (1, 2, 3)] == [None, 0, 1]
    assert driver.policy.hold_limit_s == 300.0
    assert lost(driver.policy.lease_advice(0.1, "old", True, 9.0)) == {}
    actions = driver.policy.lease_advice(0.1, "old", False, None)
    assert lost(actions) == {"old": "revoked"}
    assert admitted(actions) == [2]

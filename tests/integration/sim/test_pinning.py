"""Pins in a simulated rank: who gives way under which rule, the queue's order, expiry, and jumps beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from load.sim import workloads
from load.sim.content import Chain
from load.sim.engine import Rank, RankConfig
from load.sim.requests import SimRequest
from load.sim.run import SimConfig, simulate
from load.sim.timing import TIMINGS
from services.admission.policies.continuum import Continuum, ContinuumParameters
from services.admission.policies.engine_rules import EngineRules, Pressure
from services.admission.policies.in_engine import InEngine
from services.admission.policies.infercept import Infercept, InferceptParameters
from services.admission.policies.program_fcfs import ProgramFcfs
from services.admission.policies.static_ttl import StaticTtl, StaticTtlParameters

SIZE = 16
BLOCKS = 100
COUNTER = iter(range(1_000_000))


def request(owner: str, blocks: int, output: int = 1, *, chain: Chain | None = None, priority: int = 0) -> SimRequest:
    """A prompt of so many blocks."""
    return SimRequest(
        next(COUNTER), Chain() if chain is None else chain, blocks * SIZE, output, priority=priority, owner=owner
    )


class Driver:
    """One rank, stepped by hand."""

    def __init__(self, rules: EngineRules) -> None:
        self.rank = Rank(RankConfig(num_blocks=BLOCKS + 1, rules=rules, jump=False), TIMINGS["h100-8b"])
        self.now = 0

    def submit(self, *requests: SimRequest) -> None:
        for each in requests:
            self.rank.submit(each, self.now)

    def step(self, count: int = 1) -> list[SimRequest]:
        """So many iterations; who finished."""
        finished: list[SimRequest] = []
        for _ in range(count):
            self.rank.start(self.now)
            if self.rank.due_ps is None:
                break
            self.now = self.rank.due_ps
            finished.extend(self.rank.finish(self.now).finished)
        return finished

    def pin(self, owner: str, blocks: int, priority: int, until: int | None) -> Chain:
        """Compute a context, and pin it when its turn ends."""
        chain = Chain()
        self.submit(request(owner, blocks, chain=chain))
        assert len(self.step()) == 1
        self.rank.pin(owner, chain, blocks * SIZE, self.now, priority=priority, until_ps=until)
        return chain

    @property
    def pins(self) -> set[str]:
        return set(self.rank.scheduler.pins)

    @property
    def running(self) -> list[str | None]:
        return [each.owner for each in self.rank.scheduler.running]


def pinned(pressure: Pressure) -> Driver:
    """50 blocks of x, which arrived first and expires last, and 40 of y."""
    driver = Driver(EngineRules(scheduling="priority", pinned_first=True, pressure=pressure))
    driver.pin("x", 50, 1, 10**15)
    driver.pin("y", 40, 2, 10**14)
    return driver


@pytest.mark.parametrize(("pressure", "left"), [("A", {"x"}), ("B", {"x"}), ("C", {"y"})])
def test_where_nothing_could_run_a_pin_gives_way(pressure: Pressure, left: set[str]) -> None:
    """A and B: the program that arrived last; C: the pin that would expire last (spec scheduling §1.6)."""
    driver = pinned(pressure)
    driver.submit(request("r", 45, 2))
    driver.step()
    assert driver.running == ["r"]
    assert driver.pins == left


@pytest.mark.parametrize(("pressure", "running"), [("A", ["s"]), ("B", ["s", "r"]), ("C", ["s"])])
def test_while_others_run_a_waiting_request_takes_pins_under_b_only(
    pressure: Pressure, running: list[str | None]
) -> None:
    """A and C: it waits and pins stay. B: it unpins until it fits."""
    driver = pinned(pressure)
    driver.submit(request("s", 4, 100))
    driver.step()
    driver.submit(request("r", 45, 2))
    driver.step()
    assert driver.running == running
    assert driver.pins == ({"x"} if pressure == "B" else {"x", "y"})


@pytest.mark.parametrize("pressure", ["A", "B", "C"])
def test_a_running_request_without_room(pressure: Pressure) -> None:
    """A and C: the one that arrived last is pre-empted, pins stay; B: pins go, and nobody is pre-empted."""
    driver = pinned(pressure)
    driver.submit(request("s", 5, 100, priority=1), request("t", 5, 100, priority=2))
    driver.step(1 + SIZE)
    assert driver.running == (["s", "t"] if pressure == "B" else ["s"])
    assert driver.pins == ({"x"} if pressure == "B" else {"x", "y"})


@pytest.mark.parametrize("pressure", ["A", "B", "C"])
def test_one_that_runs_alone_takes_a_pin(pressure: Pressure) -> None:
    """Pre-empting itself would help nobody."""
    driver = pinned(pressure)
    driver.submit(request("s", 10, 100))
    driver.step(2)
    assert driver.running == ["s"]
    assert len(driver.pins) == 1


def test_a_request_hits_what_was_pinned_for_it_and_ends_the_pin() -> None:
    """The next turn takes the blocks over (spec scheduling §1.6, consumption); without a pin they would be gone."""
    for keep in (True, False):
        driver = Driver(EngineRules(scheduling="priority", pinned_first=True))
        chain = driver.pin("x", 50, 1, None)
        if not keep:
            driver.rank.unpin("x", driver.now)
        driver.submit(request("other", 50), request("another", 50))
        driver.step(2)
        turn = request("x", 51, chain=chain)
        driver.submit(turn)
        driver.step(3)
        assert turn.cached_tokens == (50 * SIZE if keep else 0)
        assert driver.pins == set()
        assert driver.rank.cache.used_blocks == 0


def test_a_program_gives_its_own_pin_up_when_nothing_else_helps() -> None:
    """A prompt that was rewritten needs the room that its old context has."""
    driver = Driver(EngineRules(scheduling="priority", pinned_first=True))
    driver.pin("x", 60, 1, None)
    turn = request("x", 80)
    driver.submit(turn)
    assert driver.step() == [turn]
    assert driver.pins == set()


def test_the_order_of_the_queue() -> None:
    """Pre-empted, pinned, by the program's arrival, by the request's (spec scheduling §1.6, order key of the paper)."""
    driver = Driver(EngineRules(scheduling="priority", pinned_first=True, preempted_first=True))
    chain = driver.pin("pinned", 10, 9, None)
    waiting = driver.rank.scheduler.waiting
    preempted = request("preempted", 1, priority=8)
    preempted.preemptions = 1
    young, old = request("young", 1, priority=7), request("old", 1, priority=3)
    back = request("pinned", 11, chain=chain, priority=9)
    driver.submit(young, old, back, preempted)
    seen = []
    while len(waiting):
        seen.append(waiting.pop().owner)
    assert seen == ["preempted", "pinned", "old", "young"]


def test_a_pin_that_gives_way_costs_its_request_its_place() -> None:
    """The queue is ordered anew when a pin goes while its request waits."""
    driver = Driver(EngineRules(scheduling="priority", pinned_first=True))
    chain = driver.pin("pinned", 10, 9, None)
    driver.submit(request("old", 1, priority=3), request("pinned", 11, chain=chain, priority=9))
    waiting = driver.rank.scheduler.waiting
    assert waiting.head().owner == "pinned"
    driver.rank.unpin("pinned", driver.now)
    assert waiting.head().owner == "old"


def test_a_pin_does_not_expire_while_its_request_waits() -> None:
    """Expiry: only when the program is not in the waiting queue (spec scheduling §1.6)."""
    driver = Driver(EngineRules(scheduling="priority", pinned_first=True))
    chain = driver.pin("x", 10, 1, 10**13)
    driver.submit(request("x", 11, chain=chain))
    driver.rank.expire("x", 10**13)
    assert driver.pins == {"x"}
    driver.step()
    assert driver.pins == set()
    driver.pin("y", 10, 1, 10**13)
    driver.rank.expire("y", 10**13)
    assert driver.pins == set()


RULED: dict[str, Callable[[], InEngine]] = {
    "program_fcfs": ProgramFcfs,
    "static A": lambda: StaticTtl(StaticTtlParameters(skip_slow_tools=False)),
    "static B": lambda: StaticTtl(StaticTtlParameters(pressure="B")),
    "continuum A": Continuum,
    "continuum C": lambda: Continuum(ContinuumParameters(pressure="C")),
    "infercept": Infercept,
    "infercept, elapsed": lambda: Infercept(InferceptParameters(remaining="elapsed", order="request")),
}


@pytest.mark.parametrize("name", sorted(RULED))
def test_jumping_changes_nothing_beside_pins(name: str) -> None:
    """Under memory pressure, with pins that come, expire and give way: rows with and without jumps are equal."""
    programs = workloads.generate("mix", count=7, rate_per_s=0.5, seed=3)
    results = [simulate(programs, RULED[name](), SimConfig(kv_tokens=130_000, jump=jump)) for jump in (False, True)]
    assert results[0].turns == results[1].turns
    assert results[0].workers[0].iterations == results[1].workers[0].iterations
    assert results[0].unfinished == 0
    assert sum(worker.preemptions for worker in results[0].workers) > 0

"""The simulation as a whole: determinism, loops, sub-agents, bookkeeping, wrong policies."""

from __future__ import annotations

import json

import pytest

from load.sim import workloads
from load.sim.content import Chain
from load.sim.engine import TooLargeError
from load.sim.programs import Program, Turn
from load.sim.results import quantile, spread
from load.sim.run import PolicyError, SimConfig, alone, simulate
from services.admission.policies.kv import Kv
from services.admission.policies.least_load import LeastLoad
from services.admission.policies.registry import make_policy
from services.admission.policies.round_robin import RoundRobin
from services.admission.scheduling.interface import (
    Actions,
    Admission,
    Base,
    LeaseChange,
    Pin,
    Refusal,
    TurnFacts,
    TurnUsage,
)


def session(name: str, turns: int, arrival_s: float = 0.0, gap_s: float = 1.0) -> Program:
    """A program of equal steps: 1,000 tokens of prompt and 50 of output more each turn."""
    chain = Chain()
    plan = []
    context = 0
    for index in range(turns):
        prompt = context + 1000
        last = index == turns - 1
        plan.append(Turn(prompt, 50, 1000, chain, None if last else "tool", 0.0 if last else gap_s))
        context = prompt + 50
    return Program(name, "session", arrival_s, tuple(plan))


@pytest.mark.parametrize("policy", ["kv", "least_load", "round_robin"])
def test_equal_arguments_give_equal_bytes(policy: str) -> None:
    """Same seed, same result, byte for byte; another seed, another result."""
    config = SimConfig(workers=2, kv_tokens=150_000)

    def report(seed: int) -> str:
        programs = workloads.generate("swe", count=12, rate_per_s=0.2, seed=seed)
        return json.dumps(simulate(programs, make_policy(policy), config).summary(alone(programs, config)))

    assert report(1) == report(1)
    assert report(1) != report(2)


def test_jumping_changes_nothing() -> None:
    """A whole simulation under memory pressure: rows with and without fast-forwarded decodes are equal."""
    programs = workloads.generate("mix", count=10, rate_per_s=0.5, seed=3)
    results = [simulate(programs, Kv(), SimConfig(workers=2, kv_tokens=130_000, jump=jump)) for jump in (False, True)]
    assert results[0].turns == results[1].turns
    assert results[0].programs == results[1].programs
    assert results[0].workers[0].iterations == results[1].workers[0].iterations
    assert sum(worker.preemptions for worker in results[0].workers) > 0


def test_a_session_alone_hits_what_it_left() -> None:
    """Turn after turn on an idle worker: only new tokens are computed; the JCT is gaps and service."""
    result = simulate([session("one", 5)], RoundRobin(), SimConfig())
    assert [row.cached_tokens for row in result.turns] == [0, 1040, 2096, 3136, 4192]
    summary = result.summary()
    assert 1.0 <= float(str(summary["recompute_ratio"])) < 1.02
    assert summary["queue_share"] == 0.0
    assert 4.0 < result.roots[0].jct_s < 7.0


def test_closed_loop_keeps_its_concurrency() -> None:
    """With two at a time the third begins when one ends, whatever its arrival says."""
    programs = [session(str(number), 2 + number, arrival_s=100.0) for number in range(4)]
    result = simulate(programs, RoundRobin(), SimConfig(concurrency=2))
    rows = {row.program: row for row in result.roots}
    assert rows["0"].started_s == rows["1"].started_s == 0.0
    assert rows["2"].started_s == rows["0"].finished_s
    assert result.last_start_s == rows["3"].started_s == rows["1"].finished_s


def test_a_parent_waits_for_its_sub_agents() -> None:
    """The next turn begins when the tool and every sub-agent are over; sub-agents are no programs of their own."""
    child = session("child", 3, gap_s=5.0)
    main = session("main", 2)
    first = main.turns[0]
    turns = (Turn(first.prompt_tokens, 50, 1000, first.chain, "spawn", 0.1, (child,)), main.turns[1])
    result = simulate([Program("main", "main", 0.0, turns)], Kv(), SimConfig(workers=2))
    finished = {row.program: row.finished_s for row in result.programs}
    assert result.turns[-1].ready_s == finished["child"]
    assert [row.program for row in result.roots] == ["main"]
    assert result.unfinished == 0


def test_round_robin_and_least_load_spread() -> None:
    """Four requests at once on two workers: two each."""
    programs = [session(str(number), 1) for number in range(4)]
    for policy in (RoundRobin(), LeastLoad()):
        result = simulate(programs, policy, SimConfig(workers=2))
        assert sorted(row.worker for row in result.turns) == [0, 0, 1, 1]


def test_kv_stays_where_the_prefix_is() -> None:
    """Every later turn goes to the worker of the first, and leaves no overlap behind."""
    programs = [session(str(number), 6, arrival_s=0.3 * number) for number in range(6)]
    result = simulate(programs, Kv(), SimConfig(workers=3))
    places: dict[str, set[int]] = {}
    for row in result.turns:
        places.setdefault(row.program, set()).add(row.worker)
    assert all(len(workers) == 1 for workers in places.values())
    assert result.summary()["overlap_regret_blocks"] == 0


class Twice(Base):
    """Admits the first turn again when it is over."""

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        return (Admission(turn.turn, 0),)

    def turn_finished(self, now: float, usage: TurnUsage) -> Actions:
        return (Admission(usage.turn, 0),)


class Nowhere(Base):
    """Sends everything to a worker that does not exist."""

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        return (Admission(turn.turn, 7),)


class Slow(Base):
    """Holds every turn until the next tick but one."""

    tick_s = 5.0

    def __init__(self) -> None:
        self.held: list[int] = []

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        self.held.append(turn.turn)
        return ()

    def tick(self, now: float) -> Actions:
        held, self.held = self.held, []
        return [Admission(turn, 0) for turn in held]


class Never(Slow):
    """Holds for ever."""

    def tick(self, now: float) -> Actions:
        return ()


class Picky(Base):
    """Refuses programs whose prompt is longer than 1,500 tokens."""

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        return (Refusal(turn.turn, "oversize") if turn.prompt_tokens > 1_500 else Admission(turn.turn, 0),)


class Pinning(RoundRobin):
    """Pins what a turn leaves for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def turn_finished(self, now: float, usage: TurnUsage) -> Actions:
        if usage.final or not self.seconds:
            return ()
        return (Pin(usage.program, usage.seat, now + self.seconds), LeaseChange(usage.program, usage.seat, "leased"))


@pytest.mark.parametrize(("seconds", "kept"), [(0.0, False), (3.0, False), (30.0, True)])
def test_a_pin_keeps_what_is_idle(seconds: float, kept: bool) -> None:
    """One session waits for a tool while another fills the cache: its blocks survive only while they are pinned."""
    idle = session("idle", 2, gap_s=10.0)
    busy = [session(f"busy-{number}", 3, arrival_s=1.0 + 2 * number, gap_s=0.1) for number in range(4)]
    results = [
        simulate([idle, *busy], Pinning(seconds), SimConfig(kv_tokens=4_480, jump=jump)) for jump in (False, True)
    ]
    assert results[0].turns == results[1].turns
    assert results[1].unfinished == 0
    second = next(row for row in results[1].turns if row.program == "idle" and row.index == 1)
    assert (second.cached_tokens > 900) is kept
    assert results[1].leases == ({"leased": 9} if seconds else {})


def test_all_memory_pinned_is_no_deadlock() -> None:
    """A rank whose room is all pinned waits for a pin to end, and then goes on."""
    programs = [session("first", 2, gap_s=60.0), session("second", 3, arrival_s=5.0)]
    result = simulate(programs, Pinning(20.0), SimConfig(kv_tokens=3_200))
    row = next(row for row in result.turns if row.program == "second")
    assert result.unfinished == 0
    assert row.scheduled_s >= 5.0
    again = simulate(programs, Pinning(20.0), SimConfig(kv_tokens=3_200, jump=False))
    assert result.turns == again.turns


def test_a_refused_program_is_over() -> None:
    """It has no row, is counted, and others go on; a parent that waits for a refused sub-agent goes on too."""
    first = session("main", 2).turns[0]
    large = Program("large", "large", 0.0, (Turn(2_000, 50, 2_000, Chain()),), "main")
    turns = (Turn(1000, 50, 1000, first.chain, "spawn", 0.1, (large,)), Turn(1400, 50, 350, first.chain))
    result = simulate([Program("main", "main", 0.0, turns), session("other", 1)], Picky(), SimConfig())
    assert [row.program for row in result.programs] == ["other", "main"]
    assert (result.refused, result.unfinished) == (1, 0)


@pytest.mark.parametrize("policy", [Twice(), Nowhere()])
def test_a_wrong_admission_is_the_policys_fault(policy: Base) -> None:
    """An admission of a turn that is not ready, or to nowhere, ends the run with a clear error."""
    with pytest.raises(PolicyError, match=r"not ready|no such seat"):
        simulate([session("one", 2)], policy, SimConfig())


def test_holds_are_measured() -> None:
    """A turn held until a tick shows as held, queued, and in its TTFT."""
    result = simulate([session("one", 2)], Slow(), SimConfig())
    assert result.turns[0].hold_s == 5.0
    assert result.turns[0].queued_s == 5.0
    assert result.turns[0].ttft_s > 5.0


def test_a_policy_that_never_admits_ends() -> None:
    """Ticks alone do not keep a simulation alive for ever; what is left is counted."""
    assert simulate([session("one", 2)], Never(), SimConfig()).unfinished == 1


def test_what_never_fits_is_refused() -> None:
    """A request larger than a worker is an error of the workload, not a hang."""
    with pytest.raises(TooLargeError):
        simulate([session("one", 9)], RoundRobin(), SimConfig(kv_tokens=4_000))


def test_quantiles_are_nearest_ranks() -> None:
    """The smallest value that covers the share; nothing gives 0."""
    assert quantile([1.0, 2.0, 3.0, 4.0], 50) == 2.0
    assert quantile([1.0, 2.0, 3.0, 4.0], 99) == 4.0
    assert spread([])["mean"] == 0.0

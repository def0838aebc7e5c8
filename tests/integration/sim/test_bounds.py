"""The bounds: they finish what they begin, know the future, and are better than who does not."""

from __future__ import annotations

from itertools import pairwise

from load.sim import workloads
from load.sim.bounds import Clairvoyant, StaticCap, oracle_cap
from load.sim.content import Chain
from load.sim.programs import Program, Turn
from load.sim.results import Result
from load.sim.run import SimConfig, simulate
from services.admission.policies.round_robin import RoundRobin


def mean_jct(result: Result) -> float:
    return sum(row.jct_s for row in result.roots) / len(result.roots)


def pressed(seed: int = 1) -> tuple[list[Program], SimConfig]:
    """Programs that come faster than one worker can hold them."""
    return workloads.generate("mix", count=14, rate_per_s=0.2, seed=seed), SimConfig(kv_tokens=130_000)


def test_a_cap_lets_so_many_programs_in() -> None:
    """With one at a time programs finish one after the other, and recompute nothing."""
    programs, config = pressed()
    result = simulate(programs, StaticCap(1), config)
    order = sorted(result.roots, key=lambda row: row.finished_s)
    first_turns = {row.program: row.dispatched_s for row in result.turns if row.index == 0}
    assert all(first_turns[late.program] >= early.finished_s for early, late in pairwise(order))
    assert max(row.hold_s for row in result.turns if row.index > 0) == 0.0


def test_the_oracle_takes_the_best_cap() -> None:
    """No other of the caps has a lower mean JCT."""
    programs, config = pressed()
    best, result = oracle_cap(programs, config, (1, 3))
    others = {cap: mean_jct(simulate(programs, StaticCap(cap), config)) for cap in (1, 3)}
    assert mean_jct(result) == min(others.values()) == others[best]


def test_the_clairvoyant_is_a_bound() -> None:
    """Under pressure its mean JCT is below that of the best cap, and of nobody caring; two workers, with sub-agents:
    nothing is left behind."""
    programs, config = pressed()
    clairvoyant = mean_jct(simulate(programs, Clairvoyant(programs), config))
    assert clairvoyant < mean_jct(oracle_cap(programs, config, (2, 3, 4))[1])
    assert clairvoyant < 0.9 * mean_jct(simulate(programs, RoundRobin(), config))
    trees = workloads.generate("tree", count=8, rate_per_s=0.2, seed=2)
    for policy in (Clairvoyant(trees), StaticCap(2)):
        result = simulate(trees, policy, SimConfig(workers=2, kv_tokens=125_000))
        assert (len(result.roots), result.unfinished) == (8, 0)


def test_belady_knows_the_future_and_does_not_plan() -> None:
    """Better than nobody caring, and than the same order without hindsight; what it lets in at once, the clairvoyant
    holds back, so that it computes less twice."""
    programs, config = pressed()
    without = simulate(programs, Clairvoyant(programs, commits=False), config)
    planned = simulate(programs, Clairvoyant(programs), config)
    assert mean_jct(without) < 0.95 * mean_jct(simulate(programs, RoundRobin(), config))
    assert (len(without.roots), without.unfinished) == (14, 0)
    computed = [sum(worker.prefill_tokens for worker in result.workers) for result in (planned, without)]
    assert computed[0] < computed[1]


def test_the_clairvoyant_serves_what_is_nearly_done_first() -> None:
    """Of two that wait behind a third, the shorter one is let in first, although it came last."""

    def program(name: str, arrival_s: float, turns: int) -> Program:
        chain = Chain()
        plan = []
        for index in range(turns):
            last = index == turns - 1
            plan.append(Turn(20_000 + 400 * index, 200, 20_000, chain, None if last else "tool", 0.0 if last else 1.0))
        return Program(name, "", arrival_s, tuple(plan))

    programs = [program("runs", 0.0, 4), program("long", 0.1, 20), program("short", 0.2, 2)]
    result = simulate(programs, Clairvoyant(programs), SimConfig(kv_tokens=30_000))
    begun = {row.program: row.dispatched_s for row in result.turns if row.index == 0}
    assert begun["runs"] < begun["short"] < begun["long"]

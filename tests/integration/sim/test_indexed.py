"""The laboratory's short cut proven: residency by the simulated cache is what a real index says after the engines' KV
events, and every decision and every time is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from load.sim import workloads
from load.sim.run import SimConfig, simulate
from services.admission.policies.registry import make_policy
from tests.integration.sim.indexed import IndexedRank, IndexedSimulation


@pytest.mark.parametrize("policy", ["kv", "commit", "lease", "thunderagent"])
@pytest.mark.parametrize(("workload", "count"), [("bfcl", 6), ("tree", 4)])
def test_decisions_by_a_real_index_are_the_same(policy: str, workload: str, count: int) -> None:
    """Three workers under pressure, with evictions and shared beginnings: block-exact engines and `kvcore`'s index on
    one side, spans and jumps on the other."""
    programs = workloads.generate(workload, count=count, rate_per_s=0.5, seed=4)
    config = SimConfig(workers=3, kv_tokens=130_000)
    short = simulate(programs, make_policy(policy), config)
    full = IndexedSimulation(programs, make_policy(policy), config)
    result = full.run()
    ranks = [rank for rank in full._ranks if isinstance(rank, IndexedRank)]
    assert len(ranks) == 3
    assert sum(rank.events for rank in ranks) > 100
    assert sum(rank.rejected for rank in ranks) == 0
    assert full.answers[1] > 20
    assert result.unfinished == 0
    assert result.programs == short.programs
    assert result.leases == short.leases
    # What was found again after a pre-emption, the core does not say.
    assert [replace(row, reused_tokens=0) for row in result.turns] == [
        replace(row, reused_tokens=0) for row in short.turns
    ]
    assert any(row.best_overlap_blocks for row in result.turns)
    for counted, known in zip(result.workers, short.workers, strict=True):
        assert (counted.prefill_tokens, counted.decode_tokens) == (known.prefill_tokens, known.decode_tokens)
        assert (counted.busy_ps, counted.preemptions) == (known.busy_ps, known.preemptions)


def test_the_scenario_evicts() -> None:
    """What is compared is worth comparing: one worker's memory does not hold what it is sent."""
    programs = workloads.generate("bfcl", count=6, rate_per_s=0.5, seed=4)
    full = IndexedSimulation(programs, make_policy("kv"), SimConfig(workers=1, kv_tokens=130_000))
    full.run()
    (rank,) = full._ranks
    assert isinstance(rank, IndexedRank)
    assert full.index.stats().resident <= 130_000 // 16
    assert sum(row.cached_tokens + 16 < row.prompt_tokens - row.new_tokens for row in full.result.turns) > 3

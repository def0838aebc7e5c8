"""Generated programs against the published numbers, and their shapes."""

from __future__ import annotations

import pytest

from load.sim import workloads
from load.sim.programs import with_children


def test_recipes_come_out_as_published() -> None:
    """Turns, contexts, outputs, tool times with their tails, eta: measured on a large sample, each near enough."""
    far = [(row[0].workload, row[0].name, row[1]) for row in workloads.check(seed=1, count=1_500) if not row[2]]
    assert far == []


@pytest.mark.parametrize("name", sorted(workloads.MIXES))
def test_every_workload_makes_programs_that_fit(name: str) -> None:
    """Contexts grow, stay within the window, and the last turn calls nothing; equal seeds give equal programs."""
    programs = workloads.generate(name, count=40, seed=5)
    for program in with_children(programs):
        context = 0
        for turn in program.turns:
            assert turn.prompt_tokens > context
            context = turn.prompt_tokens + turn.output_tokens
        assert program.turns[-1].tool is None
        assert all(turn.tool is not None for turn in program.turns[:-1])
        assert program.final_tokens <= workloads.WINDOW + workloads.LEAST_PROMPT * len(program.turns)
    again = workloads.generate(name, count=40, seed=5)
    assert [program.final_tokens for program in programs] == [program.final_tokens for program in again]
    assert [program.arrival_s for program in programs] == [program.arrival_s for program in again]


def test_the_turn_multiplier_keeps_the_work() -> None:
    """x3: three times the turns, about the same final contexts (scheduling §1.10)."""
    one = workloads.measure(workloads.generate("swe", count=200, seed=2))
    three = workloads.measure(workloads.generate("swe", count=200, seed=2, turn_multiplier=3))
    assert three.turns_mean == pytest.approx(3 * one.turns_mean)
    assert three.final_mean == pytest.approx(one.final_mean, rel=0.01)
    assert three.output_mean == pytest.approx(one.output_mean / 3, rel=0.03)


def test_a_regime_shift_slows_the_second_half() -> None:
    """Tool times of the later programs are ten times those of the earlier ones."""
    programs = workloads.generate("regime", count=1_000, seed=3)
    early, late = workloads.measure(programs[:500]), workloads.measure(programs[500:])
    assert late.tool_mean_s > 5 * early.tool_mean_s


def test_shared_prompts_are_shared() -> None:
    """Programs of a class begin with the same blocks when told so, and count them once."""
    programs = workloads.generate("swe", count=3, seed=1, shared_tokens=1_600)
    roots = {program.turns[0].chain.path[0][0] for program in programs}
    assert len(roots) == 1
    assert programs[0].turns[0].chain.fork == 100
    assert programs[0].turns[0].new_tokens == programs[0].turns[0].prompt_tokens - 1_600


@pytest.mark.parametrize(
    ("lengths", "expected"), [([2, 4], 0.4545), ([7, 7, 7], 1.0), ([3], 1.0), ([1, 1], 0.0), ([], 0.0)]
)
def test_eta_vectors(lengths: list[int], expected: float) -> None:
    """The vectors of scheduling §1.4; undefined is 0."""
    assert workloads.eta(lengths) == pytest.approx(expected, abs=1e-4)

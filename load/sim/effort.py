"""How long simulations take, in CPU seconds, roughly: so that a plan can say it, and the longest go first."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from load.sim.plan import Plan
from load.sim.programs import with_children
from load.sim.scenarios import CAP, SHARE_OF_PROGRAMS, TRACE, TRACE_LINES, FleetSize, Scenario, drawn

TURN_S = 2.6e-4
"""Of one turn, on the machine where it was measured (one core of a server of 2024)."""

SLOWER = {"kv": 1.2, "plas": 1.1, "commit": 1.2, "commit_fcfs": 1.2, "lease": 1.2, "concur": 0.8, "cap": 0.6}
"""Policies that take longer than others, or that are quicker."""
HINTED = 1.6
"""By how much longer it takes where somebody tells caches what to keep."""
CAPS, KNEE = 6, 9
"""Static caps that are tried, and simulations in which one knee is found, or so."""


@cache
def turns_of(workload: str) -> float:
    """Turns of a program, sub-agents included."""
    sample = drawn(Scenario(workload=workload, fleet=FleetSize(1, 412_000), programs=100), 1)
    return sum(len(program.turns) for program in with_children(sample)) / len(sample)


def seconds_of(scenario: Scenario, policy: str) -> float:
    """CPU seconds of one simulation."""
    turns = scenario.programs * SHARE_OF_PROGRAMS.get(scenario.workload, 1.0) * scenario.turn_multiplier
    turns *= TRACE_LINES if scenario.workload.startswith(TRACE) else turns_of(scenario.workload)
    name, plus, _ = policy.partition("+")
    return turns * TURN_S * SLOWER.get(name, 1.0) * (HINTED if plus else 1.0)


def minutes_of(plan: Plan) -> tuple[int, float]:
    """About how many simulations a plan has, those that look for knees included, and their CPU minutes."""
    runs: dict[tuple[Scenario, str, int], float] = {}
    for part in plan.parts():
        for scenario in part.scenarios():
            for policy in part.runs(scenario):
                times = CAPS if policy == CAP else 1
                for seed in part.seeds:
                    runs[scenario, policy, seed] = times * seconds_of(scenario, policy)
            if scenario.load is not None and scenario.turn_multiplier == 1:
                usual = replace(scenario, load=None, perturbation="", fleet=part.knee_fleet(scenario.fleet))
                for seed in part.calibration_seeds:
                    runs[usual, "kv", seed] = KNEE * seconds_of(usual, "kv")
    caps = sum(1 for _, policy, _ in runs if policy == CAP)
    return len(runs) + (CAPS - 1) * caps, sum(runs.values()) / 60

"""Recorded traces under policies: one simulation for each policy and fleet, and its figures, in any process.

A recorded trace has one load, its own (times ``speed``), and no seeds: a policy's chance, where it has any, is that of
seed 1. Times are virtual: equal arguments give equal figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from load.sim.parallel import Processes
from load.sim.plan import ExperimentError, Plan
from load.sim.played import node_rows, played
from load.sim.recorded import Recording, load_recording
from load.sim.results import Result, TurnRow, quantile
from load.sim.run import PolicyError
from load.sim.scenarios import BOUNDS, COSTS, TRACE, FleetSize, Parameters, Scenario, make, with_hints

SEED = 1
Figures = dict[str, object]


@dataclass(frozen=True, slots=True)
class Replay:
    """Job: one simulation. ``path``: of lines as `load.sim.recorded` reads them."""

    path: Path
    policy: str
    fleet: FleetSize
    speed: float = 1.0
    lanes: int | None = None
    parameters: Parameters = ()

    def run(self) -> Figures:
        """Never raises for what a policy does wrong: then only ``error`` is there. Raises `TraceError`, `OSError`."""
        recording = load_recording(self.path, speed=self.speed)
        scenario = Scenario(workload=f"{TRACE}{self.path}", fleet=self.fleet, programs=len(recording.programs))
        policy = make(self.policy, scenario, recording.programs, SEED, None, self.parameters)
        _, arm = with_hints(self.policy)
        config = replace(self.fleet.config(), block_size=recording.block_size)
        try:
            result, skipped = played(recording, policy, config, self.lanes, arm, COSTS[self.fleet.engine][1])
        except PolicyError as error:
            return {"error": str(error)}
        return figures(recording, result, skipped)


def check(plan: Plan) -> None:
    """Whether the plan's policies can play a trace. Raises `ExperimentError`."""
    plan.check_names()
    for policy in plan.policies:
        if policy in BOUNDS:
            text = f"{policy!r} does not play a recorded trace: only policies do, with hints or without, no bounds"
            raise ExperimentError("unknown_policy", text)
    plan.check_parameters()
    if not plan.policies:
        raise ExperimentError("empty", "nothing to run: choose policies")


def replays(plan: Plan, path: Path, *, speed: float, lanes: int | None) -> list[Replay]:
    """Of every fleet and policy of a plan, in the order of reports."""
    return [
        Replay(path, policy, fleet, speed, lanes, plan.parameters_of(policy))
        for fleet in plan.fleets()
        for policy in plan.policies
    ]


def run_replays(jobs: Sequence[Replay], processes: int, on_done: Callable[[], None]) -> list[Figures]:
    """The figures of ``jobs``, in their order. Raises `TraceError`, `load.sim.parallel.WorkerLostError`."""
    with Processes(min(processes, len(jobs))) as pool:
        return pool.run(jobs, lambda number, result: on_done())


def figures(recording: Recording, result: Result, skipped: int) -> Figures:
    """Plain numbers: tokens, seconds, and ms.

    ``requests`` finished, ``failed`` could not be served, ``skipped`` waited for such ones, ``unfinished`` were held
    for ever. ``plays``: of which all requests finished; ``jct_ms``: theirs, first request to last end.
    ``computed_tokens``: of prompts, not found in a cache; ``recomputed_tokens``: prefilled beyond what no cache of any
    size could hold. ``held``: requests that waited for their admission, ``hold_ms``: how long all did; ``ttft_ms`` and
    ``latency_ms`` have that in them.
    """
    rows = result.turns
    wall_s = max((row.finished_s for row in rows), default=0.0) - min((row.ready_s for row in rows), default=0.0)
    given, cached = sum(row.prompt_tokens for row in rows), sum(row.cached_tokens for row in rows)
    prefilled = sum(worker.prefill_tokens for worker in result.workers)
    output = sum(row.output_tokens for row in rows)
    spans = _plays(recording, result)
    generated = [row for row in rows if row.output_tokens > 1]
    return {
        "requests": len(rows),
        "failed": result.refused,
        "skipped": skipped,
        "unfinished": result.unfinished,
        "plays": len(spans),
        "input_tokens": given,
        "output_tokens": output,
        "cached_tokens": cached,
        "prefix_hit_ratio": round(cached / given, 6) if given else 0.0,
        "computed_tokens": given - cached,
        "recomputed_tokens": max(0, prefilled - sum(row.new_tokens for row in rows)),
        "wall_s": _round(wall_s),
        "requests_per_s": _round(len(rows) / wall_s if wall_s else 0.0),
        "output_tokens_per_s": _round(output / wall_s if wall_s else 0.0),
        "ttft_ms": _spread(row.ttft_s for row in rows),
        "itl_ms": _spread((row.finished_s - row.first_token_s) / (row.output_tokens - 1) for row in generated),
        "latency_ms": _spread(row.finished_s - row.ready_s for row in rows),
        "jct_ms": _spread(spans),
        "held": sum(row.hold_s > 0 for row in rows),
        "hold_ms": _spread(row.hold_s for row in rows),
        "preemptions": sum(worker.preemptions for worker in result.workers),
        "hints": result.hint_counts(),
        "leases": dict(sorted(result.leases.items())),
        "overlap_regret_blocks": sum(row.best_overlap_blocks - row.overlap_blocks for row in rows),
        "loaded_tokens": sum(worker.loaded_tokens for worker in result.workers),
        "busy_share": [_round(worker.busy_ps / 1e12 / wall_s) if wall_s else 0.0 for worker in result.workers],
    }


def _plays(recording: Recording, result: Result) -> list[float]:
    """Seconds of each play of which everything finished."""
    places = node_rows(recording, result)
    found = []
    for play in recording.plays:
        rows: list[TurnRow] = [result.turns[places[number]] for number in play if number in places]
        if len(rows) == len(play):
            found.append(max(row.finished_s for row in rows) - min(row.ready_s for row in rows))
    return found


def _spread(seconds: Iterable[float]) -> dict[str, float]:
    """In ms, by the names of the online replay; zeros where there is nothing."""
    ordered = sorted(seconds)
    mean = math.fsum(ordered) / len(ordered) if ordered else 0.0
    named = {f"p{percent}": quantile(ordered, percent) for percent in (50, 90, 95, 99)}
    numbers = {"mean": mean, **named, "max": ordered[-1] if ordered else 0.0}
    return {"count": len(ordered), **{name: _round(1000 * value) for name, value in numbers.items()}}


def _round(value: float) -> float:
    return round(value, 3)

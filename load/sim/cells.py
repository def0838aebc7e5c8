"""Jobs of an experiment: one simulation each, what was measured, and what had to be known before.

A job is plain data and does its work in any process with the same result. ``key`` names it; ``plain`` of its result is
JSON, and ``restored`` takes that back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from load.sim import workloads
from load.sim.disturbed import disturbed
from load.sim.engine import TooLargeError
from load.sim.hinted import hinted
from load.sim.results import Result, beyond_bound_s, spread
from load.sim.run import PolicyError, alone, simulate
from load.sim.scenarios import (
    COSTS,
    TRACE,
    TRACE_LINES,
    WORK_SAMPLE,
    WORK_SEED,
    EngineName,
    Parameters,
    Scenario,
    generate,
    make,
    mean_work_s,
    of_trace,
    with_hints,
)
from load.sim.token_seconds import token_seconds

HOLD_LIMIT_S = 300.0
"""H of scheduling §5.3.3."""

LEAST_RHO, MOST_RHO, KNEE_STEPS = 0.15, 2.0, 7
"""Where the knee is looked for, and in how many halvings (of the ratio): to 2 %."""


@dataclass(frozen=True, slots=True)
class MeanWork:
    """Job: ideal GPU seconds of a program of a workload, over a large sample of its own seed."""

    workload: str
    engine: EngineName
    sample: int = WORK_SAMPLE

    @property
    def key(self) -> str:
        return repr(self)

    def run(self) -> float:
        if self.workload.startswith(TRACE):
            return mean_work_s(of_trace(self.workload, max(1, self.sample // TRACE_LINES), WORK_SEED), self.engine)
        return mean_work_s(workloads.generate(self.workload, count=self.sample, seed=WORK_SEED), self.engine)

    def plain(self, result: float) -> object:
        return result

    def restored(self, plain: object) -> float:
        return msgspec.convert(plain, float)


@dataclass(frozen=True, slots=True)
class Alone:
    """Job: seconds of each program of a seed alone on one idle worker."""

    scenario: Scenario
    seed: int

    @property
    def key(self) -> str:
        return repr(self)

    def run(self) -> dict[str, float]:
        programs = [program for program in generate(self.scenario, self.seed) if not program.single]
        return alone(programs, self.scenario.fleet.config())

    def plain(self, result: dict[str, float]) -> object:
        return result

    def restored(self, plain: object) -> dict[str, float]:
        return msgspec.convert(plain, dict[str, float])


@dataclass(frozen=True, slots=True)
class Knee:
    """Job: the rate at which the mean JCT under ``kv`` is twice that of programs alone (scheduling §4.3).

    Over one seed, whose arrivals are stretched, so that it is nearly monotone. ``None``: it is not below `MOST_RHO`.
    """

    scenario: Scenario
    seed: int

    @property
    def key(self) -> str:
        return repr(self)

    def plain(self, result: float | None) -> object:
        return result

    def restored(self, plain: object) -> float | None:
        return msgspec.convert(plain, float | None)

    def run(self) -> float | None:
        programs = generate(self.scenario, self.seed)
        unloaded = spread(alone(programs, self.scenario.fleet.config()).values())["mean"]
        per_rho = self.scenario.fleet.workers / mean_work_s(programs, self.scenario.fleet.engine)
        low, high = math.log(LEAST_RHO * per_rho), math.log(MOST_RHO * per_rho)
        if self._mean_jct(math.exp(high)) < 2 * unloaded:
            return None
        for _ in range(KNEE_STEPS):
            middle = (low + high) / 2
            if self._mean_jct(math.exp(middle)) < 2 * unloaded:
                low = middle
            else:
                high = middle
        return math.exp((low + high) / 2)

    def _mean_jct(self, rate_per_s: float) -> float:
        programs = generate(self.scenario, self.seed, rate_per_s)
        policy = make("kv", self.scenario, programs, self.seed, None)
        result = simulate(programs, policy, self.scenario.fleet.config())
        return spread(row.jct_s for row in result.roots)["mean"]


@dataclass(frozen=True, slots=True)
class Cell:
    """Job: one simulation. ``alone_s``: what `Alone` found for the same programs."""

    scenario: Scenario
    policy: str
    seed: int
    rate_per_s: float
    alone_s: Mapping[str, float]
    cap: int | None = None
    parameters: Parameters = ()

    @property
    def key(self) -> str:
        return repr((self.scenario, self.policy, self.seed, self.rate_per_s, self.cap, self.parameters))

    def plain(self, result: Row) -> object:
        return {"figures": dict(result.figures), "error": result.error}

    def restored(self, plain: object) -> Row:
        known = msgspec.convert(plain, StoredRow)
        return self._row(known.figures, known.error)

    def _row(self, figures: Mapping[str, float], error: str = "") -> Row:
        return Row(self.scenario, self.policy, self.seed, self.rate_per_s, self.cap, figures, error)

    def run(self) -> Row:
        """Never raises for what a policy does wrong: that is in the row."""
        programs = generate(self.scenario, self.seed, self.rate_per_s)
        config = self.scenario.fleet.config(self.scenario.concurrency)
        try:
            policy = make(self.policy, self.scenario, programs, self.seed, self.cap, self.parameters)
            _, arm = with_hints(self.policy)
            if arm == "none":
                result = disturbed(programs, policy, config, self.scenario.wrong)
            else:
                result = hinted(programs, policy, config, arm, COSTS[self.scenario.fleet.engine][1])
        except (PolicyError, TooLargeError) as error:
            return self._row({}, str(error))
        figures = flat(result.summary(self.alone_s))
        slowdowns = [row.jct_s / self.alone_s[row.program] for row in result.roots]
        squares = math.fsum(value * value for value in slowdowns)
        figures["fairness"] = math.fsum(slowdowns) ** 2 / (len(slowdowns) * squares) if squares else 1.0
        roots = {row.program: row.jct_s for row in result.roots}
        bubbles = [row.queued_s for row in result.turns if row.index > 0 and row.program in roots]
        figures["queue_share_mid"] = math.fsum(bubbles) / (math.fsum(roots.values()) or 1.0)
        waits = spread(row.queued_s for row in result.turns if row.index > 0)
        figures.update({f"wait_mid_s.{name}": value for name, value in waits.items()})
        figures["hold_beyond_bound_s"] = beyond_bound_s(result.turns, HOLD_LIMIT_S)
        figures["overlap_regret_share"] = figures["overlap_regret_blocks"] / (blocks_of(result) or 1)
        figures.update(token_seconds(result, self.scenario.fleet.workers * self.scenario.fleet.kv_tokens))
        return self._row({name: round(value, 9) for name, value in figures.items()})


class StoredRow(msgspec.Struct, frozen=True):
    """What a cell found, as it is kept."""

    figures: dict[str, int | float]
    error: str


def blocks_of(result: Result) -> int:
    """Blocks of all prompts."""
    return sum(row.prompt_tokens for row in result.turns) // workloads.BLOCK


Job = MeanWork | Alone | Knee | Cell


@dataclass(frozen=True, slots=True)
class Row:
    """What one simulation measured: ``figures`` of `load.sim.results.Result.summary` by dotted names, and ``fairness``
    (Jain's index of slowdowns), ``wait_mid_s`` (later turns: held, or queued in the engine), ``queue_share_mid`` (of
    JCT: those waits), ``token_seconds``."""

    scenario: Scenario
    policy: str
    seed: int
    rate_per_s: float
    cap: int | None
    figures: Mapping[str, float]
    error: str = ""


def flat(summary: Mapping[str, object], prefix: str = "") -> dict[str, float]:
    """Numbers by dotted names; a list of numbers (one a worker) is its mean."""
    figures: dict[str, float] = {}
    for name, value in summary.items():
        if isinstance(value, Mapping):
            figures.update(flat(value, f"{prefix}{name}."))
        elif isinstance(value, list):
            figures[prefix + name] = math.fsum(value) / len(value) if value else 0.0
        elif isinstance(value, int | float):
            figures[prefix + name] = value
    return figures

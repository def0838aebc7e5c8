"""From rows to figures: means over seeds, ratios paired by seed, the headline, and what was promised of each.

Seeds that policies were designed on and held-out ones never share a figure. A ratio is formed seed by seed, since the
seeds differ far more than the policies do; its mean, median and range are given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from load.sim.cells import Row
from load.sim.experiment import Outcome, calibration_of
from load.sim.plan import RIVALS, SeedSet, seed_set
from load.sim.scenarios import CAP, CLAIRVOYANT, Scenario

STEPS = "steps_per_min_steady"
JCT, P99, SLOWDOWN = "jct_s.mean", "jct_s.p99", "slowdown.max"
BEST_RIVAL = "best rival"
"""In place of a policy: of the published ones that ran, the best in that figure, as a mean over the seeds."""

FIGURES = (
    JCT,
    "jct_s.p50",
    "jct_s.p90",
    "jct_s.p95",
    P99,
    "queue_share",
    "queue_share_mid",
    "steps_per_min",
    STEPS,
    "prefix_hit_ratio",
    "recompute_ratio",
    "recomputed_tokens",
    "loaded_tokens",
    "loaded_disk_tokens",
    "loaded_pool_tokens",
    "preemptions",
    "slowdown.mean",
    SLOWDOWN,
    "fairness",
    "hold_new_s.mean",
    "hold_new_s.max",
    "hold_mid_s.mean",
    "hold_mid_s.max",
    "hold_beyond_bound_s",
    "wait_mid_s.max",
    "ttft_s.mean",
    "ttft_s.p99",
    "overlap_regret_blocks",
    "overlap_regret_share",
    "unfinished",
    "refused",
    "aborted",
    "retried",
    "token_seconds.running",
    "token_seconds.kept",
    "token_seconds.rest",
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one value a seed."""

    mean: float
    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """At least one value. Rounded to nine decimals."""
        numbers = (math.fsum(values) / len(values), median(values), min(values), max(values))
        return cls(*(round(number, 9) for number in numbers))


@dataclass(frozen=True, slots=True)
class Paired:
    """A ratio of one figure by seed, and what it is of."""

    over: str
    under: str
    figure: str
    by_seed: Mapping[int, float]

    @property
    def spread(self) -> Spread:
        return Spread.of(list(self.by_seed.values()))


@dataclass(frozen=True, slots=True)
class Standing:
    """One policy in one scenario. ``cap``: the best static cap, where the policy is that bound."""

    policy: str
    cap: int | None
    figures: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class RatioKind:
    """Which figure of whom over whom; throughput is of closed loops, the rest of open ones."""

    name: str
    over: str
    under: str
    figure: str

    @property
    def closed(self) -> bool:
        return self.figure == STEPS


RATIOS = (
    RatioKind("jct_ratio_kv_over_commit", "kv", "commit", JCT),
    RatioKind("jct_ratio_commit_over_kv", "commit", "kv", JCT),
    RatioKind("jct_ratio_best_rival_over_commit", BEST_RIVAL, "commit", JCT),
    RatioKind("p99_ratio_best_rival_over_commit", BEST_RIVAL, "commit", P99),
    RatioKind("jct_ratio_commit_over_clairvoyant", "commit", CLAIRVOYANT, JCT),
    RatioKind("jct_ratio_commit_over_best_cap", "commit", CAP, JCT),
    RatioKind("slowdown_ratio_program_fcfs_over_commit", "program_fcfs", "commit", SLOWDOWN),
    RatioKind("throughput_ratio_commit_over_kv", "commit", "kv", STEPS),
    RatioKind("throughput_ratio_commit_over_best_rival", "commit", BEST_RIVAL, STEPS),
    RatioKind("throughput_ratio_commit_over_best_cap", "commit", CAP, STEPS),
)


@dataclass(frozen=True, slots=True)
class ScenarioSummary:
    """All policies in one scenario, over seeds of one kind. ``j_over_j50``: the load in units of the knee. ``rows``: by
    policy and seed."""

    scenario: Scenario
    kind: SeedSet
    seeds: tuple[int, ...]
    rate_per_s: float
    j_over_j50: float | None
    standings: Mapping[str, Standing]
    ratios: Mapping[str, Paired]
    rows: Mapping[str, Mapping[int, Row]]


def summarize(outcome: Outcome) -> list[ScenarioSummary]:
    """Held-out seeds first; scenarios in the order of the plan. Rows with an error are left out."""
    summaries = []
    kinds: tuple[SeedSet, ...] = ("held-out", "design")
    for kind in kinds:
        rows = [row for row in outcome.rows if not row.error and seed_set(row.seed) == kind]
        for scenario in dict.fromkeys(row.scenario for row in rows):
            of_scenario = [row for row in rows if row.scenario == scenario]
            summaries.append(_summary(outcome, scenario, kind, of_scenario))
    return summaries


def _summary(outcome: Outcome, scenario: Scenario, kind: SeedSet, rows: Sequence[Row]) -> ScenarioSummary:
    policies = by_policy(rows)
    rate = rows[0].rate_per_s
    calibration = calibration_of(outcome.plan, scenario, outcome.calibrations)
    j50 = None if calibration is None or scenario.load is None else calibration.j50
    wanted = [each for each in RATIOS if each.closed == (scenario.load is None)]
    ratios = {each.name: pair(policies, each.over, each.under, each.figure) for each in wanted}
    return ScenarioSummary(
        scenario=scenario,
        kind=kind,
        seeds=tuple(dict.fromkeys(row.seed for row in rows)),
        rate_per_s=rate,
        j_over_j50=None if j50 is None else round(rate / j50, 9),
        standings={policy: _standing(policy, by_seed) for policy, by_seed in policies.items()},
        ratios={name: ratio for name, ratio in ratios.items() if ratio is not None},
        rows=policies,
    )


def by_policy(rows: Iterable[Row]) -> dict[str, dict[int, Row]]:
    """Rows of one scenario by policy and seed. Of the static caps the one that is best over all these seeds."""
    policies: dict[str, dict[int, Row]] = {}
    caps: dict[int, dict[int, Row]] = {}
    for row in rows:
        if row.cap is not None:
            caps.setdefault(row.cap, {})[row.seed] = row
            policies.setdefault(CAP, {})
        else:
            policies.setdefault(row.policy, {})[row.seed] = row
    if caps:
        closed = next(iter(next(iter(caps.values())).values())).scenario.load is None
        best = min(caps, key=lambda cap: (_cost(caps[cap].values(), STEPS if closed else JCT), cap))
        policies[CAP] = caps[best]
    return policies


def value(row: Row, figure: str) -> float:
    """A figure of one row. Where programs never were as many as the concurrency, all steps count."""
    if figure == STEPS:
        return row.figures[STEPS] or row.figures["steps_per_min"]
    return row.figures[figure]


def _cost(rows: Iterable[Row], figure: str) -> float:
    """Mean over seeds, lower is better."""
    values = [value(row, figure) for row in rows]
    mean = math.fsum(values) / len(values)
    return -mean if figure == STEPS else mean


def _standing(policy: str, by_seed: Mapping[int, Row]) -> Standing:
    rows = list(by_seed.values())
    figures = {figure: Spread.of([value(row, figure) for row in rows]) for figure in FIGURES}
    return Standing(policy, rows[0].cap, figures)


def best_rival(policies: Mapping[str, Mapping[int, Row]], figure: str) -> str | None:
    """Of the published policies that ran, that with the best mean over the seeds that all of them ran (of an
    interrupted run; where there is no such seed, each over its own)."""
    ran = {policy: policies[policy] for policy in RIVALS if policies.get(policy)}
    seeds = set.intersection(*(set(rows) for rows in ran.values())) if ran else set()

    def cost(policy: str) -> float:
        return _cost([row for seed, row in ran[policy].items() if seed in seeds or not seeds], figure)

    return min(ran, key=lambda policy: (cost(policy), policy), default=None)


def pair(policies: Mapping[str, Mapping[int, Row]], over: str, under: str, figure: str) -> Paired | None:
    """The ratio by seed, of seeds that both ran; ``None`` where there are none."""
    resolved = [best_rival(policies, figure) if policy == BEST_RIVAL else policy for policy in (over, under)]
    first, second = (policies.get(policy, {}) if policy is not None else {} for policy in resolved)
    ratios = pair_rows(first, second, figure)
    return Paired(str(resolved[0]), str(resolved[1]), figure, ratios) if ratios else None


def pair_rows(over: Mapping[int, Row], under: Mapping[int, Row], figure: str) -> dict[int, float]:
    """The ratio by seed, of seeds that both have."""
    return {
        seed: round(value(over[seed], figure) / value(under[seed], figure), 9)
        for seed in over
        if seed in under and value(under[seed], figure)
    }

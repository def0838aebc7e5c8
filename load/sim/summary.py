"""From rows to figures: means over seeds, ratios paired by seed, the headline, and what was promised of each.

Seeds that policies were designed on and held-out ones never share a figure. A ratio is formed seed by seed, since the
seeds differ far more than the policies do; its mean, median and range are given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from load.sim.cells import CAP, CLAIRVOYANT, Row, Scenario
from load.sim.experiment import RIVALS, Outcome, Plan, SeedSet, calibration_of, seed_set

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
    "preemptions",
    "slowdown.mean",
    SLOWDOWN,
    "fairness",
    "hold_new_s.max",
    "hold_mid_s.mean",
    "hold_mid_s.max",
    "wait_mid_s.max",
    "ttft_s.mean",
    "ttft_s.p99",
    "overlap_regret_blocks",
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
    """All policies in one scenario, over seeds of one kind. ``j_over_j50``: the load in units of the knee."""

    scenario: Scenario
    kind: SeedSet
    seeds: tuple[int, ...]
    rate_per_s: float
    j_over_j50: float | None
    standings: Mapping[str, Standing]
    ratios: Mapping[str, Paired]


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
    """Of the published policies that ran, that with the best mean over the seeds."""
    ran = [policy for policy in RIVALS if policies.get(policy)]
    return min(ran, key=lambda policy: (_cost(policies[policy].values(), figure), policy)) if ran else None


def pair(policies: Mapping[str, Mapping[int, Row]], over: str, under: str, figure: str) -> Paired | None:
    """The ratio by seed, of seeds that both ran; ``None`` where there are none."""
    resolved = [best_rival(policies, figure) if policy == BEST_RIVAL else policy for policy in (over, under)]
    first, second = (policies.get(policy, {}) if policy is not None else {} for policy in resolved)
    ratios = {
        seed: round(value(first[seed], figure) / value(second[seed], figure), 9)
        for seed in first
        if seed in second and value(second[seed], figure)
    }
    return Paired(str(resolved[0]), str(resolved[1]), figure, ratios) if ratios else None


# The headline


def headline(plan: Plan, summaries: Sequence[ScenarioSummary]) -> dict[str, object]:
    """One flat object: of held-out seeds where there are any. A key is null where nobody ran what it compares.

    Past the knee is the highest load that is (or whose knee is not known), below it the lowest that is; the closed loop
    is the one with the most programs. Figures are of the plan's first workload, ``workloads`` has each;
    ``below_knee_ratio_commit_over_kv`` and the longest holds are the worst of all workloads.
    """
    first = [each for each in summaries if each.kind == summaries[0].kind] if summaries else []
    past, below, closed = chosen(first)
    keys = [each.name for each in RATIOS if each.name != "jct_ratio_commit_over_kv"]
    workloads = {
        name: _workload_figures(past.get(name), below.get(name), closed.get(name), flatness(first, name))
        for name in _names(first)
    }
    reference = next(iter(workloads), None)
    figures: dict[str, object] = {
        "preset": plan.name,
        "seeds_are": first[0].kind if first else None,
        "seeds": list(first[0].seeds) if first else [],
        "programs": plan.programs,
        "workload": reference,
        "past_knee": past[reference].scenario.name if reference in past else None,
    }
    figures.update(dict.fromkeys(keys))
    figures.update({"below_knee_ratio_commit_over_kv": None, "recompute_commit": None})
    for share in ("queue_share", "queue_share_mid"):
        figures.update({f"{share}_kv": None, f"{share}_commit": None})
    if reference is not None:
        figures.update(workloads[reference])
    worst = [
        each.ratios[name].spread.mean for each in below.values() if (name := "jct_ratio_commit_over_kv") in each.ratios
    ]
    figures["below_knee_ratio_commit_over_kv"] = max(worst, default=None)
    for policy in ("commit", "thunderagent"):
        held = [
            each.standings[policy].figures["hold_mid_s.max"].most for each in past.values() if policy in each.standings
        ]
        figures[f"max_hold_s_{policy}"] = max(held, default=None)
    figures["turns"] = turns(first)
    figures["throughput_by_concurrency"] = throughput(first)
    figures["workloads"] = workloads
    return figures


def chosen(
    summaries: Sequence[ScenarioSummary],
) -> tuple[dict[str, ScenarioSummary], dict[str, ScenarioSummary], dict[str, ScenarioSummary]]:
    """By workload, on the first fleet: past the knee, below it, closed loop."""
    past: dict[str, ScenarioSummary] = {}
    below: dict[str, ScenarioSummary] = {}
    closed: dict[str, ScenarioSummary] = {}
    for each in _first_fleet(summaries):
        name = each.scenario.workload
        if each.scenario.concurrency is not None:
            if name not in closed or each.scenario.concurrency > (closed[name].scenario.concurrency or 0):
                closed[name] = each
        elif each.scenario.turn_multiplier == 1:
            if each.j_over_j50 is not None and each.j_over_j50 < 1:
                if name not in below or each.rate_per_s < below[name].rate_per_s:
                    below[name] = each
            elif name not in past or each.rate_per_s > past[name].rate_per_s:
                past[name] = each
    return past, below, closed


def _first_fleet(summaries: Sequence[ScenarioSummary]) -> list[ScenarioSummary]:
    return [each for each in summaries if each.scenario.fleet == summaries[0].scenario.fleet]


def _names(summaries: Sequence[ScenarioSummary]) -> list[str]:
    return list(dict.fromkeys(each.scenario.workload for each in summaries))


def _workload_figures(
    past: ScenarioSummary | None,
    below: ScenarioSummary | None,
    closed: ScenarioSummary | None,
    flat: float | None,
) -> dict[str, object]:
    figures: dict[str, object] = {}
    for summary in (past, closed):
        for name, ratio in summary.ratios.items() if summary is not None else ():
            if name == "jct_ratio_commit_over_kv":
                continue
            spread = ratio.spread
            figures[name] = spread.mean
            figures[f"{name}_median"] = spread.median
            figures[f"{name}_range"] = [spread.least, spread.most]
            if "best_rival" in name:
                figures[f"{name}_rival"] = ratio.over if ratio.over != "commit" else ratio.under
    if flat is not None:
        figures["throughput_flatness_commit"] = flat
    if below is not None and "jct_ratio_commit_over_kv" in below.ratios:
        figures["below_knee_ratio_commit_over_kv"] = below.ratios["jct_ratio_commit_over_kv"].spread.mean
    if past is not None:
        figures["load_over_j50"] = past.j_over_j50
        for policy in ("kv", "commit"):
            if policy in past.standings:
                standing = past.standings[policy].figures
                figures[f"queue_share_{policy}"] = standing["queue_share"].mean
                figures[f"queue_share_mid_{policy}"] = standing["queue_share_mid"].mean
                figures[f"recompute_{policy}"] = standing["recompute_ratio"].mean
                figures[f"prefix_hit_ratio_{policy}"] = standing["prefix_hit_ratio"].mean
    return figures


def turns(summaries: Sequence[ScenarioSummary]) -> dict[str, dict[str, float]]:
    """By workload and turn multiplier: ``kv`` over ``commit`` at one load, where more than one multiplier ran."""
    found: dict[str, dict[str, float]] = {}
    several = {each.scenario.load for each in summaries if each.scenario.turn_multiplier > 1}
    for each in _first_fleet(summaries):
        ratio = each.ratios.get("jct_ratio_kv_over_commit")
        if ratio is not None and each.scenario.load in several:
            of_workload = found.setdefault(each.scenario.workload, {})
            of_workload[str(each.scenario.turn_multiplier)] = ratio.spread.mean
    return {name: values for name, values in found.items() if len(values) > 1}


def throughput(summaries: Sequence[ScenarioSummary]) -> dict[str, dict[str, dict[str, float]]]:
    """Steps a minute by workload, policy and concurrency."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for each in _first_fleet(summaries):
        if each.scenario.concurrency is not None:
            for policy, standing in each.standings.items():
                by_concurrency = found.setdefault(each.scenario.workload, {}).setdefault(policy, {})
                by_concurrency[str(each.scenario.concurrency)] = standing.figures[STEPS].mean
    return found


def flatness(summaries: Sequence[ScenarioSummary], workload: str) -> float | None:
    """Least over most steps a minute of ``commit`` over concurrencies that memory does not hold at once: those above
    the best cap, where that is known. ``None`` of fewer than two."""
    steps = []
    for each in _first_fleet(summaries):
        if each.scenario.workload == workload and each.scenario.concurrency and "commit" in each.standings:
            bound = each.standings.get(CAP)
            if bound is None or bound.cap is None or each.scenario.concurrency > bound.cap:
                steps.append(each.standings["commit"].figures[STEPS].mean)
    return round(min(steps) / max(steps), 9) if len(steps) > 1 and max(steps) else None

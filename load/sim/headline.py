"""The headline: one flat object with what a run says, the same keys whatever was run.

It is of held-out seeds where there are any. A key is null (or empty) where nobody ran what it compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from load.sim.hint_figures import by_hints
from load.sim.plan import Plan
from load.sim.scenarios import CAP, Load
from load.sim.sides import by_fleet, by_perturbation, by_workers
from load.sim.summary import JCT, RATIOS, STEPS, ScenarioSummary

HELD = ("commit", "thunderagent")
"""Policies whose holds the headline tells."""


def of_first_kind(summaries: Sequence[ScenarioSummary]) -> list[ScenarioSummary]:
    """Of held-out seeds, where there are any."""
    return [each for each in summaries if each.kind == summaries[0].kind]


def main_of(plan: Plan, summaries: Sequence[ScenarioSummary]) -> list[ScenarioSummary]:
    """Those of the plan's main matrix, on its first fleet, in which nothing goes wrong."""
    scenarios, fleet = set(plan.scenarios()), plan.fleets()[0]
    return [
        each
        for each in of_first_kind(summaries)
        if each.scenario in scenarios and each.scenario.fleet == fleet and not each.scenario.perturbation
    ]


def headline(plan: Plan, summaries: Sequence[ScenarioSummary]) -> dict[str, object]:
    """Past the knee is the plan's ``past_load``, else the highest load, where that is past it (or its knee is not
    known); below it is every load that is; the closed loop is the one with the most programs.

    Figures are of the plan's first workload, ``workloads`` has each; ``below_knee_ratio_commit_over_kv`` and the holds
    are the worst of all workloads.
    """
    first, main = of_first_kind(summaries), main_of(plan, summaries)
    past, _, closed = chosen(main, plan.past_load)
    grown, steps = turns(main), throughput(plain_of(plan, summaries))
    worst = worst_below(main)
    workloads = {
        name: _workload_figures(past.get(name), worst.get(name), closed.get(name), steps.get(name), grown.get(name))
        for name in dict.fromkeys(each.scenario.workload_name for each in main)
    }
    reference = next(iter(workloads), None)
    figures: dict[str, object] = {
        "preset": plan.name,
        "seeds_are": first[0].kind if first else None,
        "seeds": sorted({seed for each in main for seed in each.seeds}),
        "programs": plan.programs,
        "workload": reference,
        "past_knee": past[reference].scenario.name if reference in past else None,
    }
    figures.update(dict.fromkeys(KEYS))
    if reference is not None:
        figures.update({name: value for name, value in workloads[reference].items() if name in KEYS})
    figures["below_knee_ratio_commit_over_kv"] = max(worst.values(), default=None)
    for policy in HELD:
        standings = [each.standings[policy].figures for each in past.values() if policy in each.standings]
        figures[f"max_hold_s_{policy}"] = max((each["hold_mid_s.max"].most for each in standings), default=None)
        figures[f"mean_hold_s_{policy}"] = max((each["hold_mid_s.mean"].mean for each in standings), default=None)
        beyond = max((each["hold_beyond_bound_s"].most for each in standings), default=None)
        figures[f"hold_beyond_bound_s_{policy}"] = beyond
    figures["turns"] = grown
    figures["throughput_by_concurrency"] = steps
    figures["workers"] = by_workers(first)
    figures["fleets"] = by_fleet(first)
    figures["perturbations"] = by_perturbation(first)
    figures["hints"] = by_hints(first)
    figures["unfinished"] = sum(
        row.figures["unfinished"] for each in first for rows in each.rows.values() for row in rows.values()
    )
    figures["workloads"] = workloads
    return figures


KEYS = (
    *(each.name for each in RATIOS if each.name != "jct_ratio_commit_over_kv"),
    "below_knee_ratio_commit_over_kv",
    "throughput_flatness_commit",
    "turns_growth",
    "load_over_j50",
    *(
        f"{figure}_{policy}"
        for figure in ("queue_share", "queue_share_mid", "recompute", "prefix_hit_ratio")
        for policy in ("kv", "commit")
    ),
)
"""Of the reference workload."""


def chosen(
    summaries: Sequence[ScenarioSummary], past_load: Load | None = None
) -> tuple[dict[str, ScenarioSummary], dict[str, ScenarioSummary], dict[str, ScenarioSummary]]:
    """By workload: past the knee, below it, closed loop."""
    past: dict[str, ScenarioSummary] = {}
    below: dict[str, ScenarioSummary] = {}
    closed: dict[str, ScenarioSummary] = {}
    for each in summaries:
        name = each.scenario.workload_name
        if each.scenario.concurrency is not None:
            if name not in closed or each.scenario.concurrency > (closed[name].scenario.concurrency or 0):
                closed[name] = each
        elif each.scenario.turn_multiplier == 1:
            if each.j_over_j50 is not None and each.j_over_j50 < 1:
                if name not in below or each.rate_per_s < below[name].rate_per_s:
                    below[name] = each
            elif name not in past or _goes_before(each, past[name], past_load):
                past[name] = each
    return past, below, closed


def worst_below(summaries: Sequence[ScenarioSummary]) -> dict[str, float]:
    """By workload: ``commit`` over ``kv`` at the load below the knee where that is largest."""
    worst: dict[str, float] = {}
    for each in summaries:
        ratio = each.ratios.get("jct_ratio_commit_over_kv")
        if ratio is not None and each.j_over_j50 is not None and each.j_over_j50 < 1:
            name = each.scenario.workload_name
            worst[name] = max(worst.get(name, 0.0), ratio.spread.mean)
    return worst


def _goes_before(one: ScenarioSummary, other: ScenarioSummary, wanted: Load | None) -> bool:
    return (one.scenario.load == wanted, one.rate_per_s) > (other.scenario.load == wanted, other.rate_per_s)


def _workload_figures(
    past: ScenarioSummary | None,
    below: float | None,
    closed: ScenarioSummary | None,
    steps: Mapping[str, Mapping[str, float]] | None,
    grown: Mapping[str, float] | None,
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
    flat = flatness(steps or {}, closed)
    if flat is not None:
        figures["throughput_flatness_commit"] = flat
    if grown is not None:
        figures["turns_growth"] = round(min(after / before for before, after in pairwise(grown.values())), 9)
    if below is not None:
        figures["below_knee_ratio_commit_over_kv"] = below
    if past is not None:
        figures["load_over_j50"] = past.j_over_j50
        for policy in ("kv", "commit"):
            if policy in past.standings:
                figures.update(_standing_figures(past, policy))
    return figures


def _standing_figures(past: ScenarioSummary, policy: str) -> dict[str, object]:
    standing = past.standings[policy].figures
    return {
        f"queue_share_{policy}": standing["queue_share"].mean,
        f"queue_share_mid_{policy}": standing["queue_share_mid"].mean,
        f"recompute_{policy}": standing["recompute_ratio"].mean,
        f"prefix_hit_ratio_{policy}": standing["prefix_hit_ratio"].mean,
        f"mean_hold_s_{policy}": standing["hold_mid_s.mean"].mean,
        f"max_hold_s_{policy}": standing["hold_mid_s.max"].most,
        f"hold_beyond_bound_s_{policy}": standing["hold_beyond_bound_s"].most,
    }


def turns(summaries: Sequence[ScenarioSummary]) -> dict[str, dict[str, float]]:
    """By workload and turn multiplier: ``kv`` over ``commit`` at one load, where more than one multiplier ran."""
    found: dict[str, dict[str, float]] = {}
    several = {each.scenario.load for each in summaries if each.scenario.turn_multiplier > 1}
    for each in summaries:
        ratio = each.ratios.get("jct_ratio_kv_over_commit")
        if ratio is not None and each.scenario.load in several:
            of_workload = found.setdefault(each.scenario.workload_name, {})
            of_workload[str(each.scenario.turn_multiplier)] = ratio.spread.mean
    return {name: values for name, values in found.items() if len(values) > 1}


def turns_jct(summaries: Sequence[ScenarioSummary]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """By workload and policy: (turn multiplier, mean JCT), at one load, where more than one multiplier ran."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    several = {each.scenario.load for each in summaries if each.scenario.turn_multiplier > 1}
    for each in summaries:
        if each.scenario.load in several and each.scenario.load is not None:
            for policy, standing in each.standings.items():
                points = found.setdefault(each.scenario.workload_name, {}).setdefault(policy, [])
                points.append((float(each.scenario.turn_multiplier), standing.figures[JCT].mean))
    return {name: lines for name, lines in found.items() if any(len(points) > 1 for points in lines.values())}


def plain_of(plan: Plan, summaries: Sequence[ScenarioSummary]) -> list[ScenarioSummary]:
    """On the plan's first fleet, also of matrices beside the main one, in which nothing goes wrong."""
    fleet = plan.fleets()[0]
    first = of_first_kind(summaries)
    return [each for each in first if each.scenario.fleet == fleet and not each.scenario.perturbation]


def throughput(summaries: Sequence[ScenarioSummary]) -> dict[str, dict[str, dict[str, float]]]:
    """Steps a minute by workload, policy and concurrency."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for each in summaries:
        if each.scenario.concurrency is not None:
            for policy, standing in each.standings.items():
                by_concurrency = found.setdefault(each.scenario.workload_name, {}).setdefault(policy, {})
                by_concurrency[str(each.scenario.concurrency)] = standing.figures[STEPS].mean
    return found


def flatness(steps: Mapping[str, Mapping[str, float]], closed: ScenarioSummary | None) -> float | None:
    """Least over most steps a minute of ``commit`` over concurrencies that memory does not hold at once: those above
    the best cap (of the most programs at a time), where that is known. ``None`` of fewer than two."""
    bound = None if closed is None else closed.standings.get(CAP)
    least = 0 if bound is None or bound.cap is None else bound.cap
    values = [value for concurrency, value in steps.get("commit", {}).items() if int(concurrency) > least]
    return round(min(values) / max(values), 9) if len(values) > 1 and max(values) else None

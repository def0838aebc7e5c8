"""Matrices beside the main one, as tables: fleets compared at equal load per worker, and what goes wrong.

Every comparison is paired by seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from load.sim.plan import RIVALS
from load.sim.summary import JCT, P99, ScenarioSummary, pair_rows

OURS = "commit"
TOLERATED = 1.05
"""Differences under 5 % are noise."""

Figures = dict[str, object]


def by_workers(summaries: Sequence[ScenarioSummary]) -> dict[str, dict[str, Figures]]:
    """By scenario (of one worker) and number of workers, where several numbers ran."""
    found: dict[str, dict[str, Figures]] = {}
    for each in _open(summaries):
        one = replace(each.scenario, fleet=replace(each.scenario.fleet, workers=1))
        name = replace(one, programs=each.scenario.programs // each.scenario.fleet.workers).name
        found.setdefault(name, {})[str(each.scenario.fleet.workers)] = comparison(each)
    return {name: figures for name, figures in found.items() if len(figures) > 1}


def by_fleet(summaries: Sequence[ScenarioSummary]) -> dict[str, dict[str, Figures]]:
    """By workload and load, and by fleet of one worker, where several fleets ran."""
    found: dict[str, dict[str, Figures]] = {}
    for each in _open(summaries):
        fleet = each.scenario.fleet
        if fleet.workers == 1:
            name = f"{each.scenario.workload_name}, {each.scenario.load}"
            found.setdefault(name, {})[f"{fleet.engine}{fleet.name}"] = comparison(each)
    return {name: figures for name, figures in found.items() if len(figures) > 1}


def _open(summaries: Sequence[ScenarioSummary]) -> list[ScenarioSummary]:
    """Open loops, as they are."""
    return [
        each
        for each in summaries
        if each.scenario.load is not None and not each.scenario.perturbation and each.scenario.turn_multiplier == 1
    ]


def by_perturbation(summaries: Sequence[ScenarioSummary]) -> dict[str, dict[str, Figures]]:
    """By scenario and perturbation: the comparison, and what each policy loses against itself where nothing goes wrong
    (mean JCT, paired by seed; what becomes of ``kv`` says how hard the perturbation is by itself)."""
    usual = {each.scenario: each for each in summaries if not each.scenario.perturbation}
    found: dict[str, dict[str, Figures]] = {}
    for each in summaries:
        base = usual.get(replace(each.scenario, perturbation=""))
        if not each.scenario.perturbation or base is None:
            continue
        figures = comparison(each)
        for policy in each.rows:
            lost = pair_rows(each.rows[policy], base.rows.get(policy, {}), JCT)
            if lost:
                figures[f"{policy}_over_itself"] = round(sum(lost.values()) / len(lost), 9)
        over_kv = figures.get("commit_over_kv")
        figures["bounded"] = over_kv <= TOLERATED if isinstance(over_kv, float) else None
        found.setdefault(base.scenario.name, {})[each.scenario.perturbation] = figures
    return found


def comparison(summary: ScenarioSummary) -> Figures:
    """``commit`` beside ``kv`` and the best rivals in one scenario: means, the rivals that ran there, paired ratios,
    overlap that was missed, longest hold, programs that never finished."""
    means = {policy: round(each.figures[JCT].mean, 3) for policy, each in summary.standings.items()}
    figures: Figures = {"jct_s": means, "rivals": [policy for policy in RIVALS if policy in means]}
    for name, key in (
        ("jct_ratio_kv_over_commit", "kv_over_commit"),
        ("jct_ratio_commit_over_kv", "commit_over_kv"),
        ("jct_ratio_best_rival_over_commit", "best_rival_over_commit"),
        ("p99_ratio_best_rival_over_commit", "p99_best_rival_over_commit"),
    ):
        ratio = summary.ratios.get(name)
        figures[key] = None if ratio is None else ratio.spread.mean
        if ratio is not None and "best_rival" in key:
            figures[f"{key}_rival"] = ratio.over
    figures["overlap_regret_share"] = {
        policy: each.figures["overlap_regret_share"].mean for policy, each in summary.standings.items()
    }
    if OURS in summary.standings:
        figures["max_hold_s_commit"] = summary.standings[OURS].figures["hold_mid_s.max"].most
        figures["recompute_commit"] = summary.standings[OURS].figures["recompute_ratio"].mean
        figures["p99_s_commit"] = summary.standings[OURS].figures[P99].mean
    figures["seeds"] = list(summary.seeds)
    figures["unfinished"] = sum(
        row.figures["unfinished"] for by_seed in summary.rows.values() for row in by_seed.values()
    )
    return figures

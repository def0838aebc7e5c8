"""Summaries of hand-made rows: pairing by seed, the best rival, the oracle cap, kinds of seeds, promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from load.sim.cells import Row
from load.sim.docs import BEGIN, END, filled
from load.sim.document import DocumentError, Findings, read_calibrations, read_findings, to_bytes
from load.sim.experiment import Calibration, CalibrationKey, Calibrations, Outcome
from load.sim.plan import Plan, seed_set
from load.sim.promises import PROMISES, promises
from load.sim.report import report, side_tables
from load.sim.results import TurnRow, beyond_bound_s
from load.sim.scenarios import FleetSize, Load, Scenario
from load.sim.summary import FIGURES, JCT, P99, STEPS, Spread, best_rival, by_policy, pair, summarize

FLEET = FleetSize(1, 412_000)
PAST = Scenario(workload="swe", fleet=FLEET, programs=40, load=Load(1.0, "rho"))
BELOW = Scenario(workload="swe", fleet=FLEET, programs=40, load=Load(0.5, "j50"))
CLOSED = Scenario(workload="swe", fleet=FLEET, programs=40, concurrency=8)


def row(policy: str, seed: int, jct: float, scenario: Scenario = PAST, cap: int | None = None, **more: float) -> Row:
    """``more``: figures by their last names; all others are 1."""
    figures = dict.fromkeys((*FIGURES, "unfinished"), 1.0)
    figures.update({JCT: jct, P99: 3 * jct, "unfinished": 0.0})
    figures.update({name.replace("__", "."): value for name, value in more.items()})
    rate = {PAST: 0.08, BELOW: 0.02, CLOSED: 1.0}.get(scenario, 0.05)
    return Row(scenario, policy, seed, rate, cap, figures)


def outcome(rows: list[Row]) -> Outcome:
    plan = Plan(
        name="by hand",
        policies=("kv", "commit"),
        workloads=("swe",),
        loads=(Load(1.0, "rho"), Load(0.5, "j50")),
        turn_workloads=("swe",),
        turn_load=Load(1.0, "rho"),
        turn_multipliers=(1, 3),
        closed_workloads=("swe",),
        concurrency=(8, 16),
        programs=40,
    )
    calibrations: Calibrations = {
        CalibrationKey("swe", FLEET, 40, plan.calibration_seeds, plan.work_sample): Calibration(
            12.5, dict(zip(plan.calibration_seeds, (0.03, 0.04, 0.05, None, 0.01), strict=True))
        )
    }
    return Outcome(plan, calibrations, rows)


def test_ratios_are_formed_seed_by_seed() -> None:
    """Not a ratio of means, and only of seeds that both ran: seeds differ far more than policies."""
    rows = [row("kv", 21, 100), row("kv", 22, 1000), row("kv", 23, 7), row("commit", 21, 50), row("commit", 22, 100)]
    ratio = pair(by_policy(rows), "kv", "commit", JCT)
    assert ratio is not None
    assert ratio.by_seed == {21: 2.0, 22: 10.0}
    assert ratio.spread == Spread(mean=6.0, median=6.0, least=2.0, most=10.0)
    assert pair(by_policy(rows), "kv", "continuum", JCT) is None


def test_the_best_rival_is_chosen_by_its_mean_for_each_figure() -> None:
    """One may have the best mean and another the best tail; what is not published, or is ours, is no rival."""
    rows = [
        *(row("continuum", seed, jct, jct_s__p99=900.0) for seed, jct in ((21, 10), (22, 30))),
        *(row("thunderagent", seed, 25, jct_s__p99=60.0) for seed in (21, 22)),
        *(row(policy, seed, 1) for policy in ("commit", "commit_fcfs", "kv", "clairvoyant") for seed in (21, 22)),
    ]
    policies = by_policy(rows)
    assert best_rival(policies, JCT) == "continuum"
    assert best_rival(policies, P99) == "thunderagent"
    ratio = pair(policies, "best rival", "commit", P99)
    assert ratio is not None
    assert (ratio.over, ratio.spread.mean) == ("thunderagent", 20.0)
    assert best_rival(by_policy(rows[-4:]), JCT) is None
    one_more = by_policy([*rows, row("continuum", 23, 1), row("plas", 21, 12)])
    assert best_rival(one_more, JCT) == "continuum"  # of seed 21, which all of them ran
    apart = by_policy([row("continuum", 22, 30), row("plas", 21, 40)])
    assert best_rival(apart, JCT) == "continuum"


def test_more_steps_are_better() -> None:
    """Throughput turns the comparison round; where programs were never enough, all steps count."""
    rows = [
        row("continuum", 21, 5, CLOSED, steps_per_min_steady=40.0),
        row("plas", 21, 1, CLOSED, steps_per_min_steady=0.0, steps_per_min=30.0),
    ]
    assert best_rival(by_policy(rows), STEPS) == "continuum"
    ratio = pair(by_policy(rows), "continuum", "plas", STEPS)
    assert ratio is not None
    assert ratio.spread.mean == pytest.approx(4 / 3)


def test_the_oracle_cap_is_one_for_all_seeds() -> None:
    """Tuned for the load, not for each seed; the highest throughput in a closed loop."""
    rows = [row("cap", seed, jct, cap=cap) for seed, cap, jct in ((21, 5, 10), (22, 5, 50), (21, 6, 20), (22, 6, 20))]
    assert {seed: each.cap for seed, each in by_policy(rows)["cap"].items()} == {21: 6, 22: 6}
    closed = [row("cap", 21, 9, CLOSED, cap, steps_per_min_steady=10.0 * cap) for cap in (5, 6, 7)]
    assert by_policy(closed)["cap"][21].cap == 7


def test_seeds_of_the_design_and_held_out_ones_never_share_a_figure() -> None:
    """The headline is of held-out seeds where there are any; both are shown."""
    rows = [row(policy, seed, jct) for seed in (1, 21) for policy, jct in (("kv", 4.0 * seed), ("commit", 1.0))]
    findings = Findings.of(outcome(rows))
    assert [(each.kind, each.seeds) for each in findings.summaries] == [("held-out", (21,)), ("design", (1,))]
    assert findings.headline["jct_ratio_kv_over_commit"] == 84.0
    assert (findings.headline["seeds_are"], findings.headline["seeds"]) == ("held-out", [21])
    only_design = Findings.of(outcome([each for each in rows if each.seed == 1]))
    assert only_design.headline["jct_ratio_kv_over_commit"] == 4.0
    assert "used to design" in report(only_design)
    assert "used to design" not in report(findings)
    assert [seed_set(seed) for seed in (1, 20, 21)] == ["design", "design", "held-out"]


def test_the_load_is_told_in_units_of_the_knee() -> None:
    """The median of the seeds' knees; a seed without one is above all others. Below the knee is below 1."""
    rows = [row(policy, 21, jct, each) for each in (PAST, BELOW) for policy, jct in (("kv", 2.0), ("commit", 2.1))]
    findings = Findings.of(outcome(rows))
    past, below = findings.summaries
    assert (past.j_over_j50, below.j_over_j50) == (2.0, 0.5)
    assert findings.headline["below_knee_ratio_commit_over_kv"] == pytest.approx(1.05)
    only_below = Findings.of(outcome(rows[2:]))
    assert only_below.headline["jct_ratio_kv_over_commit"] is None
    only_past = Findings.of(outcome(rows[:2]))
    assert only_past.headline["below_knee_ratio_commit_over_kv"] is None


def test_longest_holds_and_worst_workloads() -> None:
    """The longest of all seeds and workloads past the knee."""
    rows = [
        row("commit", 21, 1, hold_mid_s__max=40.0),
        row("commit", 22, 1, hold_mid_s__max=70.0),
        row("thunderagent", 21, 1, hold_mid_s__max=1_800.0),
    ]
    figures = Findings.of(outcome(rows)).headline
    assert (figures["max_hold_s_commit"], figures["max_hold_s_thunderagent"]) == (70.0, 1_800.0)


def test_promises_are_of_their_workloads() -> None:
    """Heavy tails have bounds of their own; what was not measured is not judged."""
    kept = promises(
        {
            "swe": {"recompute_commit": 1.2, "jct_ratio_kv_over_commit": 4.0},
            "lognormal": {"recompute_commit": 1.2, "jct_ratio_kv_over_commit": 2.0},
        }
    )
    assert {(each.workload, each.promise.figure): each.holds for each in kept} == {
        ("swe", "jct_ratio_kv_over_commit"): True,
        ("swe", "recompute_commit"): False,
        ("lognormal", "recompute_commit"): True,
    }
    assert all(promise.bound > 0 for promise in PROMISES)


def test_a_policy_that_fails_spoils_nothing_else() -> None:
    """Its sentence is in the result; the others' figures are there."""
    broken = Row(PAST, "plas", 21, 0.08, None, {}, "turn 3 at 1 s: it is not ready")
    stuck = row("concur", 21, 5, unfinished=2.0)
    done = outcome([row("kv", 21, 6), row("commit", 21, 2), broken, stuck])
    findings = Findings.of(done)
    assert findings.headline["jct_ratio_kv_over_commit"] == 3.0
    assert done.failed == [
        "plas on swe, 1rho, seed 21: turn 3 at 1 s: it is not ready",
        "concur on swe, 1rho, seed 21: 2 programs never finished",
    ]
    assert "## What did not finish" in report(findings)


def test_nothing_at_all_is_a_document_too() -> None:
    """No rows: every key is there, and null."""
    figures = Findings.of(outcome([])).headline
    assert figures["jct_ratio_kv_over_commit"] is None
    assert figures["max_hold_s_commit"] is None


def test_a_calibration_is_read_back(tmp_path: Path) -> None:
    """From the document that was written with it; what is no such document gives none."""
    path = tmp_path / "simulate.json"
    assert read_calibrations(path) == {}
    done = outcome([row("kv", 21, 6), row("commit", 21, 2)])
    path.write_bytes(to_bytes(Findings.of(done)))
    assert read_calibrations(path) == done.calibrations
    others = {replace(key, workload="trace:file"): value for key, value in done.calibrations.items()}
    traced = to_bytes(Findings.of(replace(done, calibrations={**done.calibrations, **others})))
    path.write_bytes(traced)
    assert read_calibrations(path) == done.calibrations
    for spoiled in (
        b"",
        b"[]",
        b"{}",
        traced.replace(b'"work_s"', b'"work"'),
        traced.replace(b'"code": "', b'"code": "0'),
    ):
        path.write_bytes(spoiled)
        assert read_calibrations(path) == {}


def test_side_tables_say_which_rivals_ran() -> None:
    """The best of three rivals is another thing than the best of nine."""
    two = replace(PAST, fleet=replace(FLEET, workers=2), programs=80)
    rows = [row(policy, 21, 2, scenario) for scenario in (PAST, two) for policy in ("kv", "static_ttl", "commit")]
    every = side_tables(Findings.of(outcome(rows)))["workers"]
    assert every[0] == "Rivals that ran in every row: `static_ttl`."
    some = side_tables(Findings.of(outcome([*rows, row("concur", 21, 1)])))["workers"]
    assert some[0].startswith("Rivals that ran in every row: `static_ttl`; in some also `concur`, so")
    assert [line for line in some if "(`concur`)" in line] == [
        line for line in some if line.startswith("| swe, 1rho | 1 ")
    ]


def test_summaries_need_rows_of_their_own() -> None:
    """Rows with errors alone give no scenario."""
    assert summarize(outcome([Row(PAST, "plas", 21, 0.08, None, {}, "no")])) == []


def test_shapes_by_hand() -> None:
    """S1 to S5 of scheduling §4.4 hold for such figures, and do not for others; what did not run is said."""

    def seen(kv: float, ours: float, apart: float, steps: float) -> dict[str, str]:
        more_turns = replace(PAST, turn_multiplier=3)
        faster = replace(CLOSED, concurrency=16)
        rows = [
            row("kv", 21, 10 * kv, recompute_ratio=kv),
            row("thunderagent", 21, 4, jct_s__p99=40.0),
            row("commit", 21, ours, jct_s__p99=3 * ours),
            row("kv", 21, 100 * kv, more_turns),
            row("commit", 21, 1.8, more_turns),
            row("kv", 21, 1.0, BELOW),
            row("commit", 21, apart, BELOW),
            row("kv", 21, 1, CLOSED, steps_per_min_steady=50.0),
            row("kv", 21, 1, faster, steps_per_min_steady=20.0),
            row("commit", 21, 1, CLOSED, steps_per_min_steady=50.0),
            row("commit", 21, 1, faster, steps_per_min_steady=steps),
        ]
        findings = Findings.of(outcome(rows))
        return {shape.name: shape.verdict for shape in findings.shapes}

    good = seen(3.0, 2.0, 1.005, 49.0)
    assert [good[f"S{number}"] for number in range(1, 10)] == ["holds"] * 5 + ["not run"] * 4
    bad = seen(1.5, 2.0, 1.02, 40.0)
    assert {name for name, verdict in bad.items() if verdict == "does not hold"} == {"S1", "S2", "S4"}


def test_turns_and_concurrency_in_the_headline() -> None:
    """By multiplier and by concurrency; flat is the least over the most, beyond what the best cap lets in."""
    more_turns, faster = replace(PAST, turn_multiplier=3), replace(CLOSED, concurrency=16)
    rows = [
        *(row(policy, 21, jct) for policy, jct in (("kv", 4.0), ("commit", 2.0))),
        *(row(policy, 21, jct, more_turns) for policy, jct in (("kv", 9.0), ("commit", 2.0))),
        row("commit", 21, 1, CLOSED, steps_per_min_steady=50.0),
        row("commit", 21, 1, faster, steps_per_min_steady=40.0),
    ]
    figures = Findings.of(outcome(rows)).headline
    assert figures["turns"] == {"swe": {"1": 2.0, "3": 4.5}}
    assert figures["throughput_by_concurrency"] == {"swe": {"commit": {"8": 50.0, "16": 40.0}}}
    assert figures["throughput_flatness_commit"] == 0.8
    rows += [row("cap", 21, 1, CLOSED, cap=8), row("cap", 21, 1, faster, cap=8)]
    assert Findings.of(outcome(rows)).headline["throughput_flatness_commit"] is None


WRONG = replace(PAST, perturbation="regime")
TWO = replace(PAST, fleet=replace(FLEET, workers=2), programs=80)
LARGE = replace(PAST, fleet=replace(FLEET, kv_tokens=824_000))


def beside() -> list[Row]:
    """The main matrix, and one row a policy of what stands beside it."""
    scenarios = ((PAST, 1.0), (WRONG, 3.0), (TWO, 1.5), (LARGE, 2.0))
    return [
        row(policy, 21, jct * factor, scenario, overlap_regret_share=0.25)
        for scenario, factor in scenarios
        for policy, jct in (("kv", 6.0), ("plas", 4.0), ("commit", 2.0 if scenario is not WRONG else 7.0))
    ]


def test_matrices_beside_the_main_one_are_tables_of_their_own() -> None:
    """What they say is not in the figures of the main one; losses are against the policy itself."""
    figures = Findings.of(outcome(beside())).headline
    assert figures["jct_ratio_kv_over_commit"] == 3.0
    wrong = figures["perturbations"]
    assert isinstance(wrong, dict)
    of_regime = wrong["swe, 1rho"]["regime"]
    assert (of_regime["commit_over_itself"], of_regime["kv_over_itself"]) == (10.5, 3.0)
    assert (of_regime["commit_over_kv"], of_regime["bounded"]) == (pytest.approx(7 / 6), False)
    workers, fleets = figures["workers"], figures["fleets"]
    assert isinstance(workers, dict)
    assert isinstance(fleets, dict)
    assert list(workers["swe, 1rho"]) == ["1", "2"]
    assert workers["swe, 1rho"]["2"]["overlap_regret_share"]["kv"] == 0.25
    assert list(fleets["swe, 1rho"]) == ["h100-8b", "h100-8b, 824000 KV tokens"]
    shapes = {shape.name: shape for shape in Findings.of(outcome(beside())).shapes}
    assert shapes["S9"].verdict == "does not hold"
    text = report(Findings.of(outcome(beside())))
    assert "## What goes wrong" in text
    assert "## Several workers" in text


def test_every_headline_has_the_same_keys() -> None:
    """Whatever was run, and if nothing was."""
    keys = [
        set(Findings.of(outcome(rows)).headline) for rows in ([], beside(), beside()[:3], [row("kv", 21, 1, CLOSED)])
    ]
    assert all(each == keys[0] for each in keys)


def test_holds_beyond_their_bound() -> None:
    """300 s, then the turns that were forced in before it, one at a time; what runs meanwhile otherwise excuses
    nothing."""

    def turn(index: int, ready: float, dispatched: float, finished: float) -> TurnRow:
        return TurnRow("a", index, 0, 1, 0, 0, 1, 1, 0, ready, dispatched, dispatched, dispatched, finished, 0, 0)

    assert beyond_bound_s([turn(1, 0, 300, 310), turn(1, 0, 310, 330), turn(1, 0, 330, 340)], 300) == 0
    assert beyond_bound_s([turn(1, 0, 300, 310), turn(1, 0, 325, 330)], 300) == 15
    assert beyond_bound_s([turn(1, 100, 110, 900), turn(1, 0, 325, 330)], 300) == 25
    assert beyond_bound_s([turn(0, 0, 5_000, 5_001), turn(1, 0, 299, 330)], 300) == 0


def test_a_page_is_filled_from_a_document(tmp_path: Path) -> None:
    """Between its marks, again and again with the same result; the rest of it stays. A page without them is refused."""
    (tmp_path / "simulate.json").write_bytes(to_bytes(Findings.of(outcome(beside()))))
    findings = read_findings(tmp_path / "simulate.json")
    assert findings.headline == Findings.of(outcome(beside())).headline
    page = filled(f"# Policies\n\n{BEGIN}\nyesterday\n{END}\n\nRest.\n", findings)
    assert page.startswith(f"# Policies\n\n{BEGIN}\n")
    assert page.endswith(f"{END}\n\nRest.\n")
    assert "yesterday" not in page
    assert "| `commit` | 2 |" in page
    assert "held-out seeds" in page
    assert filled(page, findings) == page
    for spoiled in ("# Policies", f"{END}\n{BEGIN}", f"{BEGIN}{BEGIN}{END}"):
        with pytest.raises(ValueError, match="figures"):
            filled(spoiled, findings)
    (tmp_path / "simulate.json").write_text("{}")
    with pytest.raises(DocumentError, match="no document"):
        read_findings(tmp_path / "simulate.json")

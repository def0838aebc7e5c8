"""What a user asks for beside a preset, and what there is to ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from load.sim.effort import minutes_of
from load.sim.options import Options, with_options
from load.sim.perturb import PERTURBATIONS
from load.sim.presets import PRESETS
from load.sim.scenarios import Load, policy_names
from load.sim.workloads import MIXES
from services.admission.policies.commit import CommitParameters
from tidegate.cli import main
from tidegate.commands.simulate import parameter

TRACES = Path(__file__).parents[2] / "fixtures" / "sim"


def test_without_options_a_preset_is_as_it_is() -> None:
    """Sides and all."""
    assert all(with_options(plan, Options()) == plan for plan in PRESETS.values())


def test_seeds_and_policies_are_those_of_the_sides_too() -> None:
    """As many seeds as a side had; only policies that it had, and no side without any."""
    plan = with_options(PRESETS["seeds"], Options(seeds=(31, 32, 33, 34), policies=("kv", "plas"), programs=75))
    assert (plan.seeds, plan.policies, plan.programs) == ((31, 32, 33, 34), ("kv", "plas"), 75)
    assert {side.policies for side in plan.sides} == {("kv",)}
    assert {side.seeds for side in plan.sides} == {(31, 32, 33, 34), (31, 32)}
    assert {side.programs for side in plan.sides} == {75}
    assert with_options(PRESETS["seeds"], Options(policies=("plas",))).sides == ()


def test_who_says_what_to_run_gets_only_that() -> None:
    """Loads, closed loops, turns, perturbations, fleets, traces: no sides, and nothing of the preset's own."""
    loads = with_options(PRESETS["full"], Options(loads=(Load(1.0, "jps"),), workloads=("slow",)))
    assert [each.name for each in loads.scenarios()] == ["slow, 1jps"]
    wrong = with_options(PRESETS["quick"], Options(perturbations=("aborts",), workloads=("bfcl",), workers=(2,)))
    assert [each.name for each in wrong.scenarios()] == ["bfcl, 1rho, 2 workers", "bfcl, 1rho, 2 workers, aborts"]
    trace = with_options(PRESETS["quick"], Options(traces=(Path("a.jsonl"),)))
    assert {each.workload for each in trace.scenarios()} == {"trace:a.jsonl"}
    for plan in (loads, wrong, trace):
        assert plan.sides == ()


def test_all_perturbations_are_those_that_the_fleet_can_have() -> None:
    """One worker cannot be without one."""
    every = [
        with_options(PRESETS["quick"], Options(perturbations=("all",), workers=(n,))).perturbations for n in (1, 2)
    ]
    assert set(PERTURBATIONS) - set(every[0]) == {"worker-lost"}
    assert set(every[1]) == set(PERTURBATIONS)


@pytest.mark.parametrize("text", ["commit.span_s", "commit=1", "span_s=1", ".span_s=1", "commit.=1", "commit.span_s="])
def test_parameters_have_a_policy_a_name_and_a_value(text: str) -> None:
    """The sentence shows what to write."""
    with pytest.raises(ValueError, match=r"for example commit\.span_s=40"):
        parameter(text)
    assert parameter("thunderagent.dynamo.pause_target=0.5") == ("thunderagent", "dynamo.pause_target", "0.5")


def test_a_parameter_changes_its_policy_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Span 0 is the variant in order of arrival; a wrong value says so before anything runs."""
    arguments = ["simulate", "--policies", "commit,commit_fcfs", "--workloads", "mix", "--concurrency", "6"]
    arguments += ["--seeds", "1", "--programs", "12", "--kv-tokens", "150000", "--processes", "1", "--json"]
    seen = []
    for changed in ("span_s=0", "lo=0.3"):
        assert main([*arguments, "--set", f"commit.{changed}"]) == 0
        steps = json.loads(capsys.readouterr().out)["throughput_by_concurrency"]["mix"]
        seen.append((steps["commit"], steps["commit_fcfs"]))
    assert seen[0][0] == seen[0][1] == seen[1][1]
    assert seen[1][0] != seen[1][1]
    assert main([*arguments, "--set", "commit.hold_limit_s=long"]) == 2
    assert "hold_limit_s" in capsys.readouterr().err


def test_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    """Policies with parameters, workloads, what may go wrong, presets with what they cost."""
    assert main(["simulate", "--list"]) == 0
    said = capsys.readouterr().out
    assert [name for name in (*policy_names(), *MIXES, *PERTURBATIONS, *PRESETS) if name not in said] == []
    assert f"span_s={CommitParameters().span_s}" in said


def test_presets_cost_what_they_may() -> None:
    """On two cores: under a minute, under fifteen, and an hour of CPU."""
    minutes = {name: minutes_of(plan)[1] for name, plan in PRESETS.items()}
    assert minutes["quick"] < 1.5
    assert minutes["seeds"] < 25
    assert minutes["full"] < 60
    assert minutes["hints"] < 10


def test_traces_are_workloads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By the names of their files, with and without sessions; what is no trace is told."""
    traces = [f"--trace={TRACES / name}.jsonl.gz" for name in ("conversation_prefix", "synthetic_prefix")]
    arguments = ["simulate", "--policies", "kv,commit,cap", "--concurrency", "4", "--seeds", "1", "--programs", "4"]
    arguments += ["--processes", "1", "--json"]
    assert main([*arguments, *traces]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures["workloads"]) == ["conversation_prefix", "synthetic_prefix"]
    assert figures["failed"] == []
    (tmp_path / "other.jsonl").write_text('{"timestamp": 1}\n')
    assert main([*arguments, "--trace", str(tmp_path / "other.jsonl")]) == 2
    assert "hash_ids" in capsys.readouterr().err

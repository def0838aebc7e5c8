"""Plans: loads and their units, what is refused, the calibration, and cells that say what went wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from load.sim.cells import Alone, Cell, Knee, MeanWork
from load.sim.experiment import Calibration, Listener, caps, run_plan
from load.sim.plan import DESIGN_SEEDS, HELD_OUT, RIVALS, ExperimentError, Plan
from load.sim.presets import PRESETS
from load.sim.results import Result, TurnRow
from load.sim.run import SimConfig, simulate
from load.sim.scenarios import FleetSize, Load, Scenario, generate, make, policy_names
from load.sim.token_seconds import token_seconds

FLEET = FleetSize(1, 120_000)
SMALL = Scenario(workload="swe", fleet=FLEET, programs=6, load=Load(1.0, "rho"))


@pytest.mark.parametrize("text", ["1.0rho", "0.07jps", "1.5J50", " 2rho"])
def test_loads_have_a_number_and_a_unit(text: str) -> None:
    """And are written back as they were meant."""
    load = Load.parse(text)
    assert Load.parse(str(load)) == load


@pytest.mark.parametrize("text", ["1.0", "rho", "0rho", "-1rho", "1..0rho", "1e9jps", "infrho", "1rhos", "9999jps"])
def test_other_loads_are_refused_with_an_example(text: str) -> None:
    """The sentence shows what to write."""
    with pytest.raises(ValueError, match=r"for example 1\.0rho"):
        Load.parse(text)


def test_units_of_load() -> None:
    """rho is of each worker, jps of the whole fleet, j50 of a knee, which may not be there."""
    calibration = Calibration(work_s=10.0, knees={101: 0.05, 102: 0.03, 103: None})
    assert calibration.rate_per_s(Load(0.5, "rho"), 4) == pytest.approx(0.2)
    assert calibration.rate_per_s(Load(0.5, "jps"), 4) == 0.5
    assert calibration.rate_per_s(Load(2.0, "j50"), 4) == pytest.approx(0.1)
    assert Calibration(10.0, {101: None, 102: None, 103: 0.1}).rate_per_s(Load(1.0, "j50"), 1) is None


def test_the_knee_is_where_kv_takes_twice_as_long() -> None:
    """Just below it the mean JCT is under, just above it over twice that alone; a huge memory has no knee."""
    knee = Knee(replace(SMALL, programs=12, load=None), 101)
    rate = knee.run()
    assert rate is not None
    unloaded = list(Alone(knee.scenario, 101).run().values())
    means = []
    for factor in (0.95, 1.05):
        programs = generate(knee.scenario, 101, factor * rate)
        result = simulate(programs, make("kv", knee.scenario, programs, 101, None), FLEET.config())
        means.append(sum(row.jct_s for row in result.roots) / len(result.roots) / (sum(unloaded) / len(unloaded)))
    assert means[0] < 2 < means[1]
    assert Knee(Scenario(workload="swe", fleet=FleetSize(8, 9_000_000), programs=3), 101).run() is None


def test_presets_name_what_there_is() -> None:
    """Every one passes its own check; seeds of presets that are reported are held out; quick ones are not spent."""
    for plan in PRESETS.values():
        plan.check()
    assert not DESIGN_SEEDS & set(HELD_OUT)
    assert set(PRESETS["quick"].seeds) <= DESIGN_SEEDS
    assert set(PRESETS["seeds"].seeds) == set(HELD_OUT)
    assert len(PRESETS["seeds"].workloads) == 3
    assert set(RIVALS) <= set(policy_names())


def test_caps_lie_around_what_fits() -> None:
    """Those that the study found best (policy §1), at its capacity: 6 or 7, 6, 5, 10."""
    best = {"swe": (6, 7), "mix": (6,), "lognormal": (5,), "bfcl": (10,)}
    for workload, wanted in best.items():
        tried = caps(Scenario(workload=workload, fleet=FleetSize(1, 412_000), programs=150))
        assert set(wanted) <= set(tried)
        assert len(tried) <= 8


@pytest.mark.parametrize(
    ("change", "reason", "said"),
    [
        ({"policies": ("kv", "comit")}, "unknown_policy", "commit, commit_fcfs"),
        ({"workloads": ("sweet",)}, "unknown_workload", "swe, bfcl"),
        ({"workloads": (), "turn_workloads": (), "closed_workloads": (), "sides": ()}, "empty", "nothing to run"),
        ({"seeds": (), "sides": ()}, "empty", "nothing to run"),
        ({"perturbations": ("bad luck",)}, "unknown_perturbation", "no-labels, wrong-labels"),
        ({"perturbations": ("worker-lost",)}, "unknown_perturbation", "--workers 2"),
        ({"workloads": ("trace:/no/such/file",)}, "bad_trace", "no such file"),
        ({"parameters": (("commit", "spam_s", "1"),)}, "bad_parameters", "spam_s"),
        ({"parameters": (("commit", "span_s", "long"),)}, "bad_parameters", "span_s"),
        ({"parameters": (("cap", "span_s", "1"),)}, "bad_parameters", "no policy of that name"),
    ],
)
def test_wrong_plans_say_what_there_is(change: dict[str, tuple[object, ...]], reason: str, said: str) -> None:
    """With the names to choose from."""
    with pytest.raises(ExperimentError, match=said) as refused:
        replace(PRESETS["quick"], **change).check()  # type: ignore[arg-type]
    assert refused.value.reason == reason


def test_every_policy_and_bound_runs() -> None:
    """Under pressure, and finishes; each has every figure."""
    alone_s = Alone(replace(SMALL, load=None), 3).run()
    rows = [Cell(SMALL, policy, 3, 0.3, alone_s, 2 if policy == "cap" else None).run() for policy in policy_names()]
    assert [row.error for row in rows] == [""] * len(rows)
    assert {row.figures["programs"] for row in rows} == {6}
    assert all(0 <= row.figures["queue_share_mid"] <= row.figures["queue_share"] + 1e-9 for row in rows)
    assert len({frozenset(name for name in row.figures if not name.startswith("leases")) for row in rows}) == 1


def test_a_program_that_no_worker_can_hold_is_an_error_of_its_cell() -> None:
    """It is told in the row; nothing is raised."""
    tiny = replace(SMALL, fleet=FleetSize(1, 4_000))
    programs = generate(tiny, 3)
    row = Cell(tiny, "kv", 3, 0.3, {program.name: 1.0 for program in programs}).run()
    assert "never fit" in row.error
    assert row.figures == {}


def test_a_plan_runs_in_its_order_and_is_heard_of() -> None:
    """Rows by scenario, policy, cap, seed, whichever took longest; every job is told."""

    class Counting(Listener):
        planned = done_ = 0

        def stage(self, what: str, jobs: int, seconds: float = 0.0) -> None:
            self.planned += jobs

        def done(self, seconds: float = 0.0) -> None:
            self.done_ += 1

    plan = Plan(
        name="small",
        policies=("kv", "cap"),
        workloads=("swe",),
        loads=(Load(0.02, "jps"), Load(0.2, "jps")),
        closed_workloads=("swe",),
        concurrency=(2,),
        seeds=(2, 1),
        calibration_seeds=(101,),
        programs=4,
        kv_tokens=(FLEET.kv_tokens,),
        work_sample=10,
    )
    listener = Counting()
    outcome = run_plan(plan, 1, listener)
    told = [(row.scenario.name, row.policy, row.seed) for row in outcome.rows]
    names = [f"swe, {how}, 120000 KV tokens" for how in ("0.02jps", "0.2jps", "2 at a time")]
    tried = ["kv", *("cap" for _ in caps(SMALL))]
    assert told == [(name, policy, seed) for name in names for policy in tried for seed in (2, 1)]
    assert listener.planned == listener.done_ == len(told) + 2 + 1 + 1
    again = run_plan(plan, 1, listener, outcome.calibrations)
    assert again.rows == outcome.rows
    assert MeanWork("swe", "h100-8b", 10).run() == next(iter(outcome.calibrations.values())).work_s


def test_loads_in_units_of_a_knee_that_is_not_there() -> None:
    """The sentence says which units need none."""
    plan = replace(
        PRESETS["quick"],
        workloads=("bfcl",),
        turn_workloads=(),
        closed_workloads=(),
        kv_tokens=(9_000_000,),
        workers=(8,),
        programs=3,
        work_sample=10,
    )
    with pytest.raises(ExperimentError, match="rho or jps") as refused:
        run_plan(plan, 1)
    assert refused.value.reason == "no_knee"


def test_token_seconds_by_hand() -> None:
    """One program: 100 tokens run for 2 s, 80 are kept for 3 s and found again, 200 run for 5 s; of 1,000 for 10 s."""

    def turn(index: int, prompt: int, cached: int, scheduled: float, finished: float) -> TurnRow:
        return TurnRow("a", index, 0, prompt, cached, cached, 0, prompt, 0, 0, 0, scheduled, scheduled, finished, 0, 0)

    result = Result(turns=[turn(1, 200, 80, 5.0, 10.0), turn(0, 100, 0, 0.0, 2.0)])
    shares = token_seconds(result, 1_000)
    assert shares == {
        "token_seconds.running": pytest.approx(0.12),
        "token_seconds.kept": pytest.approx(0.024),
        "token_seconds.rest": pytest.approx(0.856),
    }
    assert token_seconds(Result(), 1_000)["token_seconds.rest"] == 0.0


def test_the_fleet_is_what_was_asked_for() -> None:
    """Workers, KV, engine, closed loop."""
    config = FleetSize(3, 200_000, "h100x4-70b").config(5)
    assert config == SimConfig(workers=3, timing="h100x4-70b", kv_tokens=200_000, concurrency=5)

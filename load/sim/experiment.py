"""Experiments: policies x workloads x loads x seeds, as a plan; presets; and the run of a plan in several processes.

Seeds are of two kinds: those that policies were designed on, and held-out ones, which nobody looked at before. Every
figure says of which kind its seeds are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from load.sim.cells import (
    CAP,
    WORK_SAMPLE,
    Alone,
    Cell,
    EngineName,
    FleetSize,
    Knee,
    Load,
    MeanWork,
    Row,
    Scenario,
    policy_names,
    usual_kv_tokens,
)
from load.sim.engine import TooLargeError
from load.sim.parallel import Processes
from load.sim.workloads import MIXES, generate

SeedSet = Literal["design", "held-out"]

DESIGN_SEEDS = frozenset(range(1, 21))
"""1 to 5: policies were designed on them, and the study before (policy: head); 11 to 15 are the study's, which were
reported. The rest of 20 is for whoever tunes next."""

HELD_OUT = (21, 22, 23, 24, 25)
CALIBRATION_SEEDS = (101, 102, 103, 104, 105)
"""The knee is found on these, and nothing else."""

CAP_SAMPLE = 400

RIVALS = (
    "concur",
    "continuum",
    "continuum_b",
    "infercept",
    "plas",
    "program_fcfs",
    "static_ttl",
    "thunderagent",
    "thunderagent_paper",
)
"""Published policies that hold or retain. Not among them: our own, bounds, and those that only place."""


class ExperimentError(ValueError):
    """The experiment that was asked for cannot be (the user's mistake). ``reason``: ``unknown_policy``,
    ``unknown_workload``, ``no_knee``, ``too_small``, ``empty``."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def seed_set(seed: int) -> SeedSet:
    """Of which kind a seed is."""
    return "design" if seed in DESIGN_SEEDS else "held-out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run: ``workloads`` at ``loads``; ``turn_workloads`` at ``turn_load`` with ``turn_multipliers``;
    ``closed_workloads`` with ``concurrency`` programs at a time. Each with every policy and seed, on every fleet of
    ``workers`` and ``kv_tokens`` (``None``: the engine's usual).

    ``programs`` of each run.
    """

    name: str
    policies: tuple[str, ...]
    workloads: tuple[str, ...] = ()
    loads: tuple[Load, ...] = ()
    turn_workloads: tuple[str, ...] = ()
    turn_load: Load | None = None
    turn_multipliers: tuple[int, ...] = ()
    closed_workloads: tuple[str, ...] = ()
    concurrency: tuple[int, ...] = ()
    seeds: tuple[int, ...] = HELD_OUT
    calibration_seeds: tuple[int, ...] = CALIBRATION_SEEDS
    programs: int = 150
    workers: tuple[int, ...] = (1,)
    kv_tokens: tuple[int | None, ...] = (None,)
    engine: EngineName = "h100-8b"
    work_sample: int = WORK_SAMPLE

    def check(self) -> None:
        """Raises `ExperimentError`."""
        for policy in self.policies:
            if policy not in policy_names():
                text = f"no policy {policy!r}; there are {', '.join(policy_names())}"
                raise ExperimentError("unknown_policy", text)
        for workload in (*self.workloads, *self.turn_workloads, *self.closed_workloads):
            if workload not in MIXES:
                text = f"no workload {workload!r}; there are {', '.join(MIXES)}"
                raise ExperimentError("unknown_workload", text)
        if not self.policies or not self.seeds or not self.scenarios():
            raise ExperimentError(
                "empty", "nothing to run: choose policies, workloads, loads or concurrency, and seeds"
            )

    def fleets(self) -> list[FleetSize]:
        return [
            FleetSize(workers, kv_tokens or usual_kv_tokens(self.engine), self.engine)
            for workers in self.workers
            for kv_tokens in self.kv_tokens
        ]

    def scenarios(self) -> list[Scenario]:
        """In the order of reports, each once."""
        return list(dict.fromkeys(scenario for fleet in self.fleets() for scenario in self._on(fleet)))

    def _on(self, fleet: FleetSize) -> Iterator[Scenario]:
        for workload in self.workloads:
            for load in self.loads:
                yield Scenario(workload=workload, fleet=fleet, programs=self.programs, load=load)
        for workload in self.turn_workloads if self.turn_load is not None else ():
            for multiplier in self.turn_multipliers:
                yield Scenario(
                    workload=workload,
                    fleet=fleet,
                    programs=self.programs,
                    load=self.turn_load,
                    turn_multiplier=multiplier,
                )
        for workload in self.closed_workloads:
            for concurrency in self.concurrency:
                yield Scenario(workload=workload, fleet=fleet, programs=self.programs, concurrency=concurrency)


LOADS = (Load(0.7, "j50"), Load(1.0, "rho"))
"""Below the knee, and past it at the edge of stability, where the study measured (policy: head)."""
EVERYBODY = ("kv", *RIVALS, "commit_fcfs", "commit", "clairvoyant", "cap")

PRESETS: dict[str, Plan] = {
    "quick": Plan(
        name="quick",
        policies=("kv", "program_fcfs", "static_ttl", "continuum", "thunderagent", "commit", "clairvoyant", "cap"),
        workloads=("swe", "mix", "lognormal"),
        loads=LOADS,
        turn_workloads=("swe",),
        turn_load=LOADS[-1],
        turn_multipliers=(1, 3),
        closed_workloads=("swe",),
        concurrency=(12, 24),
        seeds=(1, 2),
        calibration_seeds=CALIBRATION_SEEDS[:2],
        programs=60,
        work_sample=400,
    ),
    "seeds": Plan(
        name="seeds",
        policies=EVERYBODY,
        workloads=("swe", "mix", "lognormal"),
        loads=LOADS,
        turn_workloads=("swe",),
        turn_load=LOADS[-1],
        turn_multipliers=(1, 2, 3, 5),
        closed_workloads=("swe",),
        concurrency=(6, 12, 24, 48),
    ),
    "full": Plan(
        name="full",
        policies=EVERYBODY,
        workloads=(
            "swe", "mix", "lognormal", "bfcl", "swebfcl", "pareto", "tree", "slow", "openhands", "regime", "two-mode",
        ),
        loads=(Load(0.7, "j50"), Load(1.0, "j50"), Load(0.8, "rho"), Load(1.0, "rho"), Load(1.12, "rho")),
        turn_workloads=("swe",),
        turn_load=LOADS[-1],
        turn_multipliers=(1, 2, 3, 5),
        closed_workloads=("swe", "mix"),
        concurrency=(6, 12, 24, 48, 96),
        seeds=(1, 2, 3, 4, 5, *HELD_OUT),
    ),
}  # fmt: skip


# The run of a plan


@dataclass(frozen=True, slots=True)
class CalibrationKey:
    """What a knee depends on."""

    workload: str
    fleet: FleetSize
    programs: int
    seeds: tuple[int, ...]
    work_sample: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """``work_s``: ideal GPU seconds of a program. ``knees``: programs a second at the knee, by calibration seed
    (``None``: no knee below rho 2); ``j50`` their median."""

    work_s: float
    knees: Mapping[int, float | None]

    @property
    def j50(self) -> float | None:
        known = [knee if knee is not None else math.inf for knee in self.knees.values()]
        middle = median(known) if known else math.inf
        return middle if math.isfinite(middle) else None

    def rate_per_s(self, load: Load, workers: int) -> float | None:
        """Programs a second at ``load``; ``None`` where that needs a knee that is not there."""
        if load.unit == "jps":
            return load.value
        if load.unit == "rho":
            return load.value * workers / self.work_s
        return None if self.j50 is None else load.value * self.j50


Calibrations = dict[CalibrationKey, Calibration]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rows in the order of the plan: scenarios, policies, seeds."""

    plan: Plan
    calibrations: Calibrations
    rows: list[Row] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """What did not finish, one sentence each."""
        said = []
        for row in self.rows:
            who = f"{row.policy} on {row.scenario.name}, seed {row.seed}"
            if row.error:
                said.append(f"{who}: {row.error}")
            elif row.figures["unfinished"]:
                said.append(f"{who}: {row.figures['unfinished']:g} programs never finished")
        return said


class Listener:
    """Hears how far a run is; here nothing becomes of it."""

    def stage(self, what: str, jobs: int) -> None:
        """A stage of so many jobs begins."""

    def done(self) -> None:
        """A job ended."""


def run_plan(
    plan: Plan,
    processes: int,
    listener: Listener | None = None,
    known: Mapping[CalibrationKey, Calibration] | None = None,
) -> Outcome:
    """Calibrate (but for what is ``known``), then run every cell. Equal plans give equal outcomes.

    Raises `ExperimentError` and `load.sim.parallel.WorkerLostError`.
    """
    plan.check()
    listener = listener or Listener()
    with Processes(processes) as pool:
        try:
            calibrations = _calibrate(plan, pool, listener, known or {})
            cells = _cells(plan, calibrations, pool, listener)
        except TooLargeError as error:
            text = f"{error}: some program fits into no worker; give more --kv-tokens"
            raise ExperimentError("too_small", text) from None
        listener.stage("simulations", len(cells))
        # Those that take longest first, so that no process is left alone with one at the end.
        order = sorted(range(len(cells)), key=lambda each: _effort(cells[each]), reverse=True)
        rows = pool.run([cells[each] for each in order], listener.done)
    by_place = dict(zip(order, rows, strict=True))
    return Outcome(plan, calibrations, [by_place[each] for each in range(len(cells))])


def _cells(plan: Plan, calibrations: Calibrations, pool: Processes, listener: Listener) -> list[Cell]:
    runs = [(scenario, _rate(plan, scenario, calibrations)) for scenario in plan.scenarios()]
    jobs = list({_alone(scenario, seed): None for scenario, _ in runs for seed in plan.seeds})
    listener.stage("programs alone", len(jobs))
    alone_s = dict(zip(jobs, pool.run(jobs, listener.done), strict=True))
    return [
        Cell(scenario, policy, seed, rate, alone_s[_alone(scenario, seed)], cap)
        for scenario, rate in runs
        for policy in plan.policies
        for cap in (caps(scenario) if policy == CAP else (None,))
        for seed in plan.seeds
    ]


def _calibrate(
    plan: Plan, pool: Processes, listener: Listener, known: Mapping[CalibrationKey, Calibration]
) -> Calibrations:
    """Work and knee of every open-loop workload and fleet of the plan."""
    keys = list(dict.fromkeys(_key(plan, scenario) for scenario in plan.scenarios() if scenario.load is not None))
    missing = [key for key in keys if key not in known]
    works = list(dict.fromkeys(MeanWork(key.workload, key.fleet.engine, plan.work_sample) for key in missing))
    listener.stage("work of a program", len(works))
    work_s = dict(zip(works, pool.run(works, listener.done), strict=True))
    jobs = [Knee(_usual(key), seed) for key in missing for seed in key.seeds]
    listener.stage("calibration to the knee", len(jobs))
    knees = dict(zip(jobs, pool.run(jobs, listener.done), strict=True))
    found = {
        key: Calibration(
            work_s[MeanWork(key.workload, key.fleet.engine, plan.work_sample)],
            {seed: knees[Knee(_usual(key), seed)] for seed in key.seeds},
        )
        for key in missing
    }
    return {key: known[key] if key in known else found[key] for key in keys}


def _usual(key: CalibrationKey) -> Scenario:
    return Scenario(workload=key.workload, fleet=key.fleet, programs=key.programs)


def _key(plan: Plan, scenario: Scenario) -> CalibrationKey:
    return CalibrationKey(scenario.workload, scenario.fleet, plan.programs, plan.calibration_seeds, plan.work_sample)


def calibration_of(plan: Plan, scenario: Scenario, calibrations: Calibrations) -> Calibration | None:
    """Of an open-loop scenario."""
    return calibrations.get(_key(plan, scenario))


def _rate(plan: Plan, scenario: Scenario, calibrations: Calibrations) -> float:
    if scenario.load is None:
        return 1.0
    rate = calibrations[_key(plan, scenario)].rate_per_s(scenario.load, scenario.fleet.workers)
    if rate is None:
        text = f"{scenario.workload} has no knee on this fleet with so few programs, so {scenario.load} is no rate: "
        text += "give loads in rho or jps, or more --programs"
        raise ExperimentError("no_knee", text)
    return rate


def _alone(scenario: Scenario, seed: int) -> Alone:
    """What a program does alone depends neither on the load nor on how many workers there are."""
    fleet = FleetSize(1, scenario.fleet.kv_tokens, scenario.fleet.engine)
    like = Scenario(
        workload=scenario.workload,
        fleet=fleet,
        programs=scenario.programs,
        turn_multiplier=scenario.turn_multiplier,
    )
    return Alone(like, seed)


def caps(scenario: Scenario) -> list[int]:
    """Static caps among which the best one is: from one below the capacity over the mean final context of the programs
    that a turn belongs to, to one above it over that of all programs (policy §1: near capacity over final context;
    under heavy tails it is the long ones that are there)."""
    sample = generate(scenario.workload, count=CAP_SAMPLE, seed=CALIBRATION_SEEDS[0])
    finals = [program.final_tokens for program in sample]
    turns = [len(program.turns) for program in sample]
    of_turns = sum(final * count for final, count in zip(finals, turns, strict=True)) / sum(turns)
    fewest = scenario.fleet.kv_tokens / max(of_turns, sum(finals) / len(finals))
    most = scenario.fleet.kv_tokens / min(of_turns, sum(finals) / len(finals))
    return list(range(max(1, round(fewest) - 1), max(1, round(most) + 1) + 1))


def _effort(cell: Cell) -> tuple[int, int, float]:
    return cell.scenario.turn_multiplier, cell.scenario.concurrency or 0, cell.rate_per_s

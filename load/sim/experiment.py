"""The run of a plan in several processes: calibration to the knee, programs alone, every cell.

What a journal knows is not run again. An interruption leaves the rows that there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TypeVar

from load.sim.cells import Alone, Cell, Knee, MeanWork, Row
from load.sim.effort import seconds_of
from load.sim.engine import TooLargeError
from load.sim.journal import Job, Journal
from load.sim.parallel import Processes
from load.sim.plan import CALIBRATION_SEEDS, ExperimentError, Plan
from load.sim.scenarios import CAP, FleetSize, Load, Scenario, drawn
from load.sim.traces import TraceError

T = TypeVar("T")

CAP_SAMPLE = 400


@dataclass(frozen=True, slots=True)
class CalibrationKey:
    """What a knee depends on. ``programs``: for each worker; without ``seeds`` no knee is looked for."""

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
    """Rows in the order of the plan: parts, scenarios, policies, seeds. ``missing``: cells that an interruption left
    undone."""

    plan: Plan
    calibrations: Calibrations
    rows: list[Row] = field(default_factory=list)
    missing: int = 0

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

    def stage(self, what: str, jobs: int, seconds: float = 0.0) -> None:
        """A stage of so many jobs begins, which take about so many CPU seconds (0: it is not known)."""

    def done(self, seconds: float = 0.0) -> None:
        """A job ended, which was thought to take so long."""


def run_plan(
    plan: Plan,
    processes: int,
    listener: Listener | None = None,
    known: Mapping[CalibrationKey, Calibration] | None = None,
    journal: Journal | None = None,
) -> Outcome:
    """Calibrate (but for what is ``known``), then run every cell. Equal plans give equal outcomes.

    ``journal``: open; what it knows is taken, what is found is written there. Interrupted after the first row, the
    outcome has what there is. Raises `ExperimentError`, `load.sim.parallel.WorkerLostError` and, of the journal,
    `OSError`; `KeyboardInterrupt` before any row.
    """
    plan.check()
    cells: list[Cell] = []
    rows: dict[int, Row] = {}
    calibrations: Calibrations = {}
    try:
        with Processes(processes) as pool:
            run = _Run(pool, listener or Listener(), Journal(None) if journal is None else journal)
            calibrations.update(_calibrate(plan, run, known or {}))
            cells.extend(_cells(plan, calibrations, run))
            run.stage("simulations", cells, rows, [seconds_of(cell.scenario, cell.policy) for cell in cells])
    except (TooLargeError, TraceError) as error:
        raise _users_mistake(error) from None
    except KeyboardInterrupt:
        if not rows:
            raise
    there = [rows[each] for each in range(len(cells)) if each in rows]
    return Outcome(plan, calibrations, there, len(cells) - len(there))


def _users_mistake(error: TooLargeError | TraceError) -> ExperimentError:
    if isinstance(error, TooLargeError):
        return ExperimentError("too_small", f"{error}: some program fits into no worker; give more --kv-tokens")
    return ExperimentError("bad_trace", f"--trace: {error}")


@dataclass(frozen=True, slots=True)
class _Run:
    """Where jobs are run, who hears of them, and where results are kept."""

    pool: Processes
    listener: Listener
    journal: Journal

    def stage(
        self, what: str, jobs: Sequence[Job[T]], results: dict[int, T], seconds: Sequence[float] | None = None
    ) -> None:
        """Fill ``results`` by place. Those that take longest go first, so that no process is left alone at the end."""
        seconds = seconds or [0.0] * len(jobs)
        for place, job in enumerate(jobs):
            if self.journal.knows(job):
                results[place] = self.journal.known(job)
        order = [place for place in range(len(jobs)) if place not in results]
        order.sort(key=lambda place: seconds[place], reverse=True)
        self.listener.stage(what, len(order), sum(seconds[place] for place in order))

        def done(number: int, result: T) -> None:
            place = order[number]
            results[place] = result
            self.journal.add(jobs[place], result)
            self.listener.done(seconds[place])

        self.pool.run([jobs[place] for place in order], done)

    def all(self, what: str, jobs: Sequence[Job[T]]) -> list[T]:
        """The results of one stage."""
        results: dict[int, T] = {}
        self.stage(what, jobs, results)
        return [results[place] for place in range(len(jobs))]


def _cells(plan: Plan, calibrations: Calibrations, run: _Run) -> list[Cell]:
    """Of all parts, each once."""
    wanted = [(part, scenario) for part in plan.parts() for scenario in part.scenarios()]
    jobs = list({_alone(scenario, seed): None for part, scenario in wanted for seed in part.seeds})
    alone_s = dict(zip(jobs, run.all("programs alone", jobs), strict=True))
    cells: dict[str, Cell] = {}
    for part, scenario in wanted:
        rate = _rate(part, scenario, calibrations)
        for policy in part.runs(scenario):
            for cap in caps(scenario) if policy == CAP else (None,):
                for seed in part.seeds:
                    alone = alone_s[_alone(scenario, seed)]
                    cell = Cell(scenario, policy, seed, rate, alone, cap, plan.parameters_of(policy))
                    cells.setdefault(repr((scenario, policy, seed, cap)), cell)
    return list(cells.values())


def _calibrate(plan: Plan, run: _Run, known: Mapping[CalibrationKey, Calibration]) -> Calibrations:
    """Work and knee of every open-loop workload and fleet of the plan."""
    keys = list(
        dict.fromkeys(
            _key(part, scenario) for part in plan.parts() for scenario in part.scenarios() if scenario.load is not None
        )
    )
    missing = [key for key in keys if key not in known]
    works = list(dict.fromkeys(_work(key) for key in missing))
    work_s = dict(zip(works, run.all("work of a program", works), strict=True))
    jobs = [Knee(_usual(key), seed) for key in missing for seed in key.seeds]
    knees = dict(zip(jobs, run.all("calibration to the knee", jobs), strict=True))
    found = {
        key: Calibration(work_s[_work(key)], {seed: knees[Knee(_usual(key), seed)] for seed in key.seeds})
        for key in missing
    }
    return {key: known[key] if key in known else found[key] for key in keys}


def _work(key: CalibrationKey) -> MeanWork:
    return MeanWork(key.workload, key.fleet.engine, key.work_sample)


def _usual(key: CalibrationKey) -> Scenario:
    return Scenario(workload=key.workload, fleet=key.fleet, programs=key.programs * key.fleet.workers)


def _key(part: Plan, scenario: Scenario) -> CalibrationKey:
    fleet = part.knee_fleet(scenario.fleet)
    return CalibrationKey(scenario.workload, fleet, part.programs, part.calibration_seeds, part.work_sample)


def calibration_of(plan: Plan, scenario: Scenario, calibrations: Calibrations) -> Calibration | None:
    """Of an open-loop scenario: with a knee, where any part of the plan looked for one."""
    found = [calibrations.get(_key(part, scenario)) for part in plan.parts()]
    there = [each for each in found if each is not None]
    return max(there, key=lambda each: each.j50 is not None, default=None)


def _rate(part: Plan, scenario: Scenario, calibrations: Calibrations) -> float:
    if scenario.load is None:
        return 1.0
    rate = calibrations[_key(part, scenario)].rate_per_s(scenario.load, scenario.fleet.workers)
    if rate is None:
        text = (
            f"{scenario.workload_name} has no knee on this fleet with so few programs, so {scenario.load} is no rate: "
        )
        text += "give loads in rho or jps, or more --programs"
        raise ExperimentError("no_knee", text)
    return rate


def _alone(scenario: Scenario, seed: int) -> Alone:
    """What a program does alone depends neither on the load nor on how many workers there are, and on what goes wrong
    only where that changes the program."""
    like = Scenario(
        workload=scenario.workload,
        fleet=replace(scenario.fleet, workers=1),
        programs=scenario.programs,
        turn_multiplier=scenario.turn_multiplier,
        perturbation=scenario.perturbation if scenario.wrong.changes_programs else "",
    )
    return Alone(like, seed)


def caps(scenario: Scenario) -> list[int]:
    """Static caps among which the best one is: from one below the capacity over the mean final context of the programs
    that a turn belongs to, to one above it over that of all programs (policy §1: near capacity over final context;
    under heavy tails it is the long ones that are there)."""
    sample = drawn(replace(scenario, programs=CAP_SAMPLE, turn_multiplier=1), CALIBRATION_SEEDS[0])
    finals = [program.final_tokens for program in sample]
    turns = [len(program.turns) for program in sample]
    of_turns = sum(final * count for final, count in zip(finals, turns, strict=True)) / sum(turns)
    fewest = scenario.fleet.kv_tokens / max(of_turns, sum(finals) / len(finals))
    most = scenario.fleet.kv_tokens / min(of_turns, sum(finals) / len(finals))
    return list(range(max(1, round(fewest) - 1), max(1, round(most) + 1) + 1))

"""What an experiment runs, as plain data: policies x scenarios x seeds, and smaller matrices beside it.

Seeds are of two kinds: those that policies were designed on, and held-out ones, which nobody looked at before. Every
figure says of which kind its seeds are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

from load.sim.perturb import PERTURBATIONS
from load.sim.scenarios import (
    BOUNDS,
    TRACE,
    WORK_SAMPLE,
    EngineName,
    FleetSize,
    Load,
    Parameters,
    Scenario,
    make,
    policy_names,
    usual_kv_tokens,
    with_hints,
)
from load.sim.workloads import MIXES
from services.admission.policies.registry import PolicyParameterError

SeedSet = Literal["design", "held-out"]

DESIGN_SEEDS = frozenset(range(1, 21))
"""1 to 5: policies were designed on them, and the study before (policy: head); 11 to 15 are the study's, which were
reported. The rest of 20 is for whoever tunes next."""

HELD_OUT = (21, 22, 23, 24, 25)
CALIBRATION_SEEDS = (101, 102, 103, 104, 105)
"""The knee is found on these, and nothing else."""

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
    ``unknown_workload``, ``unknown_perturbation``, ``bad_parameters``, ``bad_trace``, ``no_knee``, ``too_small``,
    ``empty``."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def seed_set(seed: int) -> SeedSet:
    """Of which kind a seed is."""
    return "design" if seed in DESIGN_SEEDS else "held-out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run: ``workloads`` at ``loads``; ``turn_workloads`` at ``turn_load`` with ``turn_multipliers``;
    ``closed_workloads`` with ``concurrency`` programs at a time; ``wrong_workloads`` at ``wrong_load``, as they are and
    with each of ``perturbations``. Each with every policy and seed, on every fleet of ``workers``, ``kv_tokens``
    (``None``: the engine's usual), ``chunk``, ``max_seqs`` and ``host_tokens``, with ``disk_tokens`` and
    ``pool_tokens`` (see `FleetSize`).

    ``programs``: of each run, for each worker; in a closed loop at least twice as many as there are at a time.
    ``past_load``: what figures past the knee are of, where it is (``None``: the highest load).
    ``calibration_seeds``: of the knee, which is not looked for where there are none. ``knee_memory``: host and pool
    tokens of the fleet whose knee it is, where several sizes of memory have one rate of arrivals. ``parameters``:
    policy, dotted name and value. ``sides``: matrices beside it, without sides of their own; what is asked of the
    experiment as a whole (headline, promises) is of the main one.
    """

    name: str
    policies: tuple[str, ...]
    workloads: tuple[str, ...] = ()
    loads: tuple[Load, ...] = ()
    past_load: Load | None = None
    turn_workloads: tuple[str, ...] = ()
    turn_load: Load | None = None
    turn_multipliers: tuple[int, ...] = ()
    closed_workloads: tuple[str, ...] = ()
    concurrency: tuple[int, ...] = ()
    wrong_workloads: tuple[str, ...] = ()
    wrong_load: Load | None = None
    perturbations: tuple[str, ...] = ()
    seeds: tuple[int, ...] = HELD_OUT
    calibration_seeds: tuple[int, ...] = CALIBRATION_SEEDS
    knee_memory: tuple[int, int] | None = None
    programs: int = 150
    workers: tuple[int, ...] = (1,)
    kv_tokens: tuple[int | None, ...] = (None,)
    chunk: tuple[int, ...] = (2048,)
    max_seqs: tuple[int, ...] = (256,)
    host_tokens: tuple[int, ...] = (0,)
    host_gbps: float = 50.0
    disk_tokens: int = 0
    pool_tokens: int = 0
    pool_through: bool = True
    engine: EngineName = "h100-8b"
    work_sample: int = WORK_SAMPLE
    parameters: tuple[tuple[str, str, str], ...] = ()
    sides: tuple[Plan, ...] = ()

    @property
    def device_alone(self) -> bool:
        """There is no memory below the device: what is promised of the default policy is promised of that."""
        return not (any(self.host_tokens) or self.disk_tokens or self.pool_tokens)

    def check(self) -> None:
        """Raises `ExperimentError`."""
        for part in self.parts():
            part.check_names()
        self.check_parameters()
        if not any(part.policies and part.seeds and part.scenarios() for part in self.parts()):
            raise ExperimentError(
                "empty", "nothing to run: choose policies, workloads, loads or concurrency, and seeds"
            )

    def check_names(self) -> None:
        """Of this matrix alone. Raises `ExperimentError`."""
        for policy in self.policies:
            self._check_policy(policy)
        turning = self.turn_workloads if self.turn_multipliers != (1,) else ()
        for workload in (*self.workloads, *turning, *self.closed_workloads, *self.wrong_workloads):
            if workload.startswith(TRACE):
                self._check_trace(workload, turning)
            elif workload not in MIXES:
                text = f"no workload {workload!r}; there are {', '.join(MIXES)}"
                raise ExperimentError("unknown_workload", text)
        for name in self.perturbations:
            if name not in PERTURBATIONS:
                text = f"no perturbation {name!r}; there are {', '.join(PERTURBATIONS)}"
                raise ExperimentError("unknown_perturbation", text)
            least = PERTURBATIONS[name].least_workers
            if min(self.workers) < least and not any(workers >= least for workers in self.workers):
                text = f"{name} needs at least {least} workers: give --workers {least}"
                raise ExperimentError("unknown_perturbation", text)

    def _check_policy(self, policy: str) -> None:
        if policy.partition("+")[0] not in policy_names():
            text = f"no policy {policy!r}; there are {', '.join(policy_names())}"
            raise ExperimentError("unknown_policy", text)
        try:
            _, arm = with_hints(policy)
        except ValueError as error:
            raise ExperimentError("unknown_policy", str(error)) from None
        if arm != "none" and self.wrong_workloads and self.perturbations:
            raise ExperimentError("unknown_perturbation", f"{policy}: nothing goes wrong where there are hints")

    @staticmethod
    def _check_trace(workload: str, turning: tuple[str, ...]) -> None:
        path = Path(workload.removeprefix(TRACE))
        if not path.is_file():
            raise ExperimentError("bad_trace", f"--trace {path}: there is no such file")
        if workload in turning:
            raise ExperimentError("bad_trace", f"{path}: turns of a trace cannot be multiplied")

    def check_parameters(self) -> None:
        """Of all matrices. Raises `ExperimentError`."""
        known = {policy for part in self.parts() for policy in part.policies}
        sample = Scenario(workload="swe", fleet=self.fleets()[0], programs=1)
        for policy in dict.fromkeys(each[0] for each in self.parameters):
            if policy not in known or policy in BOUNDS:
                text = f"--set {policy}.…: no policy of that name runs here that has parameters"
                raise ExperimentError("bad_parameters", text)
            try:
                make(policy, sample, [], 1, None, self.parameters_of(policy))
            except (PolicyParameterError, ValueError, TypeError) as error:
                raise ExperimentError("bad_parameters", str(error)) from None

    def parameters_of(self, policy: str) -> Parameters:
        """Of one policy: dotted names and values."""
        return tuple((name, value) for of, name, value in self.parameters if of == policy)

    def traces(self) -> list[Path]:
        """Files that are workloads."""
        names = (
            name for part in self.parts() for name in (*part.workloads, *part.closed_workloads, *part.wrong_workloads)
        )
        return [Path(name.removeprefix(TRACE)) for name in dict.fromkeys(names) if name.startswith(TRACE)]

    def parts(self) -> tuple[Plan, ...]:
        """The main matrix, then those beside it."""
        return (self, *self.sides)

    def fleets(self) -> list[FleetSize]:
        sizes = product(self.workers, self.kv_tokens, self.chunk, self.max_seqs, self.host_tokens)
        usual = usual_kv_tokens(self.engine)
        return [
            FleetSize(
                workers,
                kv_tokens or usual,
                self.engine,
                chunk,
                max_seqs,
                host_tokens,
                self.host_gbps,
                disk_tokens=self.disk_tokens,
                pool_tokens=self.pool_tokens,
                pool_through=self.pool_through,
            )
            for workers, kv_tokens, chunk, max_seqs, host_tokens in sizes
        ]

    def knee_fleet(self, fleet: FleetSize) -> FleetSize:
        """The fleet whose knee counts for this one."""
        if self.knee_memory is None:
            return fleet
        host_tokens, pool_tokens = self.knee_memory
        return replace(fleet, host_tokens=host_tokens, disk_tokens=0, pool_tokens=pool_tokens, pool_through=True)

    def scenarios(self) -> list[Scenario]:
        """Of this matrix alone, in the order of reports, each once."""
        return list(dict.fromkeys(scenario for fleet in self.fleets() for scenario in self._on(fleet)))

    def runs(self, scenario: Scenario) -> tuple[str, ...]:
        """The policies that can run a scenario: the bounds only where the fleet stays as it is."""
        if scenario.wrong.static_fleet:
            return self.policies
        return tuple(policy for policy in self.policies if policy not in BOUNDS)

    def _on(self, fleet: FleetSize) -> Iterator[Scenario]:
        programs = self.programs * fleet.workers
        for workload in self.workloads:
            for load in self.loads:
                yield Scenario(workload=workload, fleet=fleet, programs=programs, load=load)
        for workload in self.turn_workloads if self.turn_load is not None else ():
            for multiplier in self.turn_multipliers:
                yield Scenario(
                    workload=workload,
                    fleet=fleet,
                    programs=programs,
                    load=self.turn_load,
                    turn_multiplier=multiplier,
                )
        for workload in self.closed_workloads:
            for concurrency in self.concurrency:
                enough = max(programs, 2 * concurrency)
                yield Scenario(workload=workload, fleet=fleet, programs=enough, concurrency=concurrency)
        for workload in self.wrong_workloads if self.wrong_load is not None else ():
            for name in ("", *self.perturbations):
                if not name or fleet.workers >= PERTURBATIONS[name].least_workers:
                    yield Scenario(
                        workload=workload,
                        fleet=fleet,
                        programs=programs,
                        load=self.wrong_load,
                        perturbation=name,
                    )

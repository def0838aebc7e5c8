"""One cell of an experiment: which programs come how fast to which fleet, who schedules them, what was measured.

A job is plain data and does its work in any process with the same result: all chance comes from its seed.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from load.sim import workloads
from load.sim.bounds import Clairvoyant, StaticCap
from load.sim.engine import TooLargeError
from load.sim.programs import Program, with_children
from load.sim.results import spread
from load.sim.run import PolicyError, SimConfig, alone, simulate
from load.sim.timing import TIMINGS
from load.sim.token_seconds import token_seconds
from services.admission.estimators import reload_cost, work
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.estimators.reload_cost import ReloadCost
from services.admission.estimators.work import WorkCost
from services.admission.policies.registry import POLICIES, Given, make_policy
from services.admission.scheduling.interface import Policy

Unit = Literal["rho", "jps", "j50"]
EngineName = Literal["h100-8b", "h100x4-70b"]

WORK_SEED, WORK_SAMPLE = 99, 2_000
"""Of the sample whose mean work makes rho a rate."""

SHARE_OF_PROGRAMS = {"tree": 0.4}
"""Roots per program of other workloads (policy: 60 against 150)."""

LEAST_RHO, MOST_RHO, KNEE_STEPS = 0.15, 2.0, 7
"""Where the knee is looked for, and in how many halvings (of the ratio): to 2 %."""

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "commit_fcfs": ("commit", {"span_s": 0.0}),
    "continuum_b": ("continuum", {"pressure": "B"}),
    "continuum_c": ("continuum", {"pressure": "C"}),
    "thunderagent_paper": ("thunderagent", {"form": "paper"}),
}
"""Policies with parameters that are compared under a name of their own."""

CLAIRVOYANT, CAP = "clairvoyant", "cap"
BOUNDS = (CLAIRVOYANT, CAP)
"""What no policy can be: `load.sim.bounds`. ``cap`` stands for several static caps, of which the best is taken."""


def policy_names() -> list[str]:
    """All that can be compared, the bounds last."""
    return [*sorted({*POLICIES, *VARIANTS}), *BOUNDS]


@dataclass(frozen=True, slots=True)
class Load:
    """How fast programs come. ``jps``: programs a second to the whole fleet. ``rho``: arrival rate x ideal GPU seconds
    of a program, of each worker. ``j50``: in units of the knee (see `Knee`)."""

    value: float
    unit: Unit

    @classmethod
    def parse(cls, text: str) -> Load:
        """Of ``1.0rho``, ``0.07jps``, ``1.5j50``. Raises `ValueError`, which says what to write."""
        match = re.fullmatch(r"([0-9.]+)(rho|jps|j50)", text.strip().lower())
        try:
            value = float(match[1]) if match else math.nan
        except ValueError:
            value = math.nan
        if match is None or not 0 < value <= 1_000:
            raise ValueError(f"load {text!r}: write a number and its unit, for example 1.0rho, 0.07jps or 1.5j50")
        unit: Unit = next(each for each in get_args(Unit) if each == match[2])
        return cls(value, unit)

    def __str__(self) -> str:
        return f"{self.value:g}{self.unit}"


@dataclass(frozen=True, slots=True)
class FleetSize:
    """``workers`` with ``kv_tokens`` each."""

    workers: int
    kv_tokens: int
    engine: EngineName = "h100-8b"

    def config(self, concurrency: int | None = None) -> SimConfig:
        return SimConfig(workers=self.workers, timing=self.engine, kv_tokens=self.kv_tokens, concurrency=concurrency)


COSTS: dict[EngineName, tuple[WorkCost, ReloadCost]] = {
    "h100-8b": (work.H100_8B, reload_cost.H100_8B),
    "h100x4-70b": (work.H100_70B, reload_cost.H100_70B),
}
"""What policies believe of each engine's times."""


def usual_kv_tokens(engine: EngineName) -> int:
    """KV capacity of one worker."""
    return TIMINGS[engine].kv_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything but the seed and the policy. Open loop at ``load``, or closed loop with ``concurrency`` programs.

    ``turn_multiplier``: every turn becomes so many (`load.sim.workloads.generate`).
    """

    workload: str
    fleet: FleetSize
    programs: int
    load: Load | None = None
    concurrency: int | None = None
    turn_multiplier: int = 1

    @property
    def name(self) -> str:
        """For people."""
        how = f"{self.concurrency} at a time" if self.load is None else str(self.load)
        turns = f", turns x{self.turn_multiplier}" if self.turn_multiplier > 1 else ""
        workers = f", {self.fleet.workers} workers" if self.fleet.workers > 1 else ""
        usual = self.fleet.kv_tokens == usual_kv_tokens(self.fleet.engine)
        return f"{self.workload}, {how}{turns}{workers}" + ("" if usual else f", {self.fleet.kv_tokens} KV tokens")


def generate(scenario: Scenario, seed: int, rate_per_s: float = 1.0) -> list[Program]:
    """The programs of one scenario and seed."""
    share = SHARE_OF_PROGRAMS.get(scenario.workload, 1.0)
    return workloads.generate(
        scenario.workload,
        count=max(1, round(scenario.programs * share)),
        rate_per_s=rate_per_s,
        seed=seed,
        turn_multiplier=scenario.turn_multiplier,
    )


def mean_work_s(programs: Sequence[Program], engine: EngineName) -> float:
    """Ideal GPU seconds of a program, sub-agents included (policy: head)."""
    cost = COSTS[engine][0]
    total = []
    for program in with_children(programs):
        context = 0
        for turn in program.turns:
            total.append(cost.seconds(turn.prompt_tokens, turn.output_tokens, context))
            context = turn.prompt_tokens + turn.output_tokens
    return math.fsum(total) / len(programs)


def make(policy: str, scenario: Scenario, programs: Sequence[Program], seed: int, cap: int | None) -> Policy:
    """The policy or bound of that name. Raises `PolicyParameterError`, `ValueError`."""
    work_cost, reload = COSTS[scenario.fleet.engine]
    if policy == CLAIRVOYANT:
        return Clairvoyant(programs, work_cost=work_cost, reload_cost=reload)
    if policy == CAP:
        if cap is None:
            raise ValueError("a static cap needs its number")
        return StaticCap(cap)
    name, parameters = VARIANTS.get(policy, (policy, {}))
    if name == "continuum":
        parameters = {**parameters, "reload_cost": msgspec.to_builtins(reload)}
    learned = LearnedPool(work_cost=work_cost, reload_cost=reload)
    return make_policy(name, parameters, Given(random.Random(f"{seed}/{policy}").randrange, learned))


# Jobs


@dataclass(frozen=True, slots=True)
class MeanWork:
    """Job: ideal GPU seconds of a program of a workload, over a large sample of its own seed."""

    workload: str
    engine: EngineName
    sample: int = WORK_SAMPLE

    def run(self) -> float:
        return mean_work_s(workloads.generate(self.workload, count=self.sample, seed=WORK_SEED), self.engine)


@dataclass(frozen=True, slots=True)
class Alone:
    """Job: seconds of each program of a seed alone on one idle worker."""

    scenario: Scenario
    seed: int

    def run(self) -> dict[str, float]:
        return alone(generate(self.scenario, self.seed), self.scenario.fleet.config())


@dataclass(frozen=True, slots=True)
class Knee:
    """Job: the rate at which the mean JCT under ``kv`` is twice that of programs alone (scheduling §4.3).

    Over one seed, whose arrivals are stretched, so that it is nearly monotone. ``None``: it is not below `MOST_RHO`.
    """

    scenario: Scenario
    seed: int

    def run(self) -> float | None:
        programs = generate(self.scenario, self.seed)
        unloaded = spread(alone(programs, self.scenario.fleet.config()).values())["mean"]
        per_rho = self.scenario.fleet.workers / mean_work_s(programs, self.scenario.fleet.engine)
        low, high = math.log(LEAST_RHO * per_rho), math.log(MOST_RHO * per_rho)
        if self._mean_jct(math.exp(high)) < 2 * unloaded:
            return None
        for _ in range(KNEE_STEPS):
            middle = (low + high) / 2
            if self._mean_jct(math.exp(middle)) < 2 * unloaded:
                low = middle
            else:
                high = middle
        return math.exp((low + high) / 2)

    def _mean_jct(self, rate_per_s: float) -> float:
        programs = generate(self.scenario, self.seed, rate_per_s)
        policy = make("kv", self.scenario, programs, self.seed, None)
        result = simulate(programs, policy, self.scenario.fleet.config())
        return spread(row.jct_s for row in result.roots)["mean"]


@dataclass(frozen=True, slots=True)
class Cell:
    """Job: one simulation. ``alone_s``: what `Alone` found for the same programs."""

    scenario: Scenario
    policy: str
    seed: int
    rate_per_s: float
    alone_s: Mapping[str, float]
    cap: int | None = None

    def run(self) -> Row:
        """Never raises for what a policy does wrong: that is in the row."""
        programs = generate(self.scenario, self.seed, self.rate_per_s)
        config = self.scenario.fleet.config(self.scenario.concurrency)
        try:
            result = simulate(programs, make(self.policy, self.scenario, programs, self.seed, self.cap), config)
        except (PolicyError, TooLargeError) as error:
            return Row(self.scenario, self.policy, self.seed, self.rate_per_s, self.cap, {}, str(error))
        figures = flat(result.summary(self.alone_s))
        slowdowns = [row.jct_s / self.alone_s[row.program] for row in result.roots]
        squares = math.fsum(value * value for value in slowdowns)
        figures["fairness"] = math.fsum(slowdowns) ** 2 / (len(slowdowns) * squares) if squares else 1.0
        roots = {row.program: row.jct_s for row in result.roots}
        bubbles = [row.queued_s for row in result.turns if row.index > 0 and row.program in roots]
        figures["queue_share_mid"] = math.fsum(bubbles) / (math.fsum(roots.values()) or 1.0)
        waits = spread(row.queued_s for row in result.turns if row.index > 0)
        figures.update({f"wait_mid_s.{name}": value for name, value in waits.items()})
        figures.update(token_seconds(result, self.scenario.fleet.workers * self.scenario.fleet.kv_tokens))
        rounded = {name: round(value, 9) for name, value in figures.items()}
        return Row(self.scenario, self.policy, self.seed, self.rate_per_s, self.cap, rounded)


Job = MeanWork | Alone | Knee | Cell


@dataclass(frozen=True, slots=True)
class Row:
    """What one simulation measured: ``figures`` of `load.sim.results.Result.summary` by dotted names, and ``fairness``
    (Jain's index of slowdowns), ``wait_mid_s`` (later turns: held, or queued in the engine), ``queue_share_mid`` (of
    JCT: those waits), ``token_seconds``."""

    scenario: Scenario
    policy: str
    seed: int
    rate_per_s: float
    cap: int | None
    figures: Mapping[str, float]
    error: str = ""


def flat(summary: Mapping[str, object], prefix: str = "") -> dict[str, float]:
    """Numbers by dotted names; a list of numbers (one a worker) is its mean."""
    figures: dict[str, float] = {}
    for name, value in summary.items():
        if isinstance(value, Mapping):
            figures.update(flat(value, f"{prefix}{name}."))
        elif isinstance(value, list):
            figures[prefix + name] = math.fsum(value) / len(value) if value else 0.0
        elif isinstance(value, int | float):
            figures[prefix + name] = value
    return figures

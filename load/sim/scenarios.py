"""Which programs come how fast to which fleet, and who schedules them: the plain data of an experiment.

Equal data give equal programs and policies in any process: all chance comes from the seed.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import msgspec

from load.sim import workloads
from load.sim.bounds import Clairvoyant, StaticCap
from load.sim.hinting import ARMS, Arm
from load.sim.perturb import NOTHING, PERTURBATIONS, Perturbation, perturbed, until_aborted
from load.sim.programs import Program, with_children
from load.sim.run import SimConfig
from load.sim.timing import TIMINGS
from load.sim.traces import TRACE_LABEL, load_cut
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

SHARE_OF_PROGRAMS = {"tree": 0.4, "forks": 0.4}
"""Roots per program of other workloads (policy: 60 against 150)."""

TRACE = "trace:"
"""Begins the name of a workload that is a file."""
TRACE_LINES = 8
"""Lines of a trace for each program of other workloads."""

Parameters = tuple[tuple[str, str], ...]
"""Of one policy: dotted names, and values as JSON (or plain words)."""

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "commit_fcfs": ("commit", {"span_s": 0.0}),
    "continuum_b": ("continuum", {"pressure": "B"}),
    "continuum_c": ("continuum", {"pressure": "C"}),
    "thunderagent_paper": ("thunderagent", {"form": "paper"}),
}
"""Policies with parameters that are compared under a name of their own."""

CLAIRVOYANT, BELADY, CAP = "clairvoyant", "belady", "cap"
BOUNDS = (CLAIRVOYANT, BELADY, CAP)
"""What no policy can be: `load.sim.bounds`. ``cap`` stands for several static caps, of which the best is taken."""


def policy_names() -> list[str]:
    """All that can be compared, the bounds last; each but the bounds also with hints (`with_hints`)."""
    return [*sorted({*POLICIES, *VARIANTS}), *BOUNDS]


def with_hints(policy: str) -> tuple[str, Arm]:
    """Of ``kv+planner``: the policy, and who tells caches what to keep (`load.sim.hinting`). Raises `ValueError`."""
    name, plus, arm = policy.partition("+")
    known: Arm | None = next((each for each in ARMS if each == arm), None) if plus else "none"
    if known is None or (plus and name in BOUNDS):
        raise ValueError(f"{policy!r}: hints are {', '.join(ARMS)}, of policies that are no bounds")
    return name, known


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
    """``workers`` with ``kv_tokens`` each. ``chunk``: tokens of one iteration; ``max_seqs``: requests that run at
    once. ``host_tokens``, ``disk_tokens``: of memory below each one's KV, ``pool_tokens``: of a pool that all share,
    written through or back; over links of so many GB/s a GPU."""

    workers: int
    kv_tokens: int
    engine: EngineName = "h100-8b"
    chunk: int = 2048
    max_seqs: int = 256
    host_tokens: int = 0
    host_gbps: float = 50.0
    disk_tokens: int = 0
    disk_gbps: float = 6.0
    pool_tokens: int = 0
    pool_gbps: float = 25.0
    pool_through: bool = True

    def config(self, concurrency: int | None = None) -> SimConfig:
        return SimConfig(
            workers=self.workers,
            timing=self.engine,
            kv_tokens=self.kv_tokens,
            token_budget=self.chunk,
            max_num_seqs=self.max_seqs,
            host_tokens=self.host_tokens,
            host_gbps=self.host_gbps,
            disk_tokens=self.disk_tokens,
            disk_gbps=self.disk_gbps,
            pool_tokens=self.pool_tokens,
            pool_gbps=self.pool_gbps,
            pool_through=self.pool_through,
            concurrency=concurrency,
        )

    @property
    def name(self) -> str:
        """For people: what is not as usual, after commas; empty where all is."""
        said = f", {self.workers} workers" if self.workers > 1 else ""
        said += "" if self.kv_tokens == usual_kv_tokens(self.engine) else f", {self.kv_tokens} KV tokens"
        said += "" if self.chunk == 2048 else f", chunk {self.chunk}"
        said += "" if self.max_seqs == 256 else f", {self.max_seqs} sequences"
        said += f", {self.host_tokens} host tokens at {self.host_gbps:g} GB/s" if self.host_tokens else ""
        said += f", {self.disk_tokens} disk tokens at {self.disk_gbps:g} GB/s" if self.disk_tokens else ""
        back = "" if self.pool_through else ", written back"
        return said + (f", {self.pool_tokens} pool tokens at {self.pool_gbps:g} GB/s{back}" if self.pool_tokens else "")


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

    ``workload``: a name, or ``trace:`` and the path of a file (`load.sim.traces.load_cut`). ``turn_multiplier``: every
    turn becomes so many (`load.sim.workloads.generate`). ``perturbation``: what goes wrong (`load.sim.perturb`).
    """

    workload: str
    fleet: FleetSize
    programs: int
    load: Load | None = None
    concurrency: int | None = None
    turn_multiplier: int = 1
    perturbation: str = ""

    @property
    def name(self) -> str:
        """For people."""
        how = f"{self.concurrency} at a time" if self.load is None else str(self.load)
        turns = f", turns x{self.turn_multiplier}" if self.turn_multiplier > 1 else ""
        wrong = f", {self.perturbation}" if self.perturbation else ""
        return f"{self.workload_name}, {how}{turns}{self.fleet.name}{wrong}"

    @property
    def workload_name(self) -> str:
        """For people, and in file names."""
        return workload_name(self.workload)

    @property
    def wrong(self) -> Perturbation:
        """What goes wrong."""
        return PERTURBATIONS[self.perturbation] if self.perturbation else NOTHING


def workload_name(workload: str) -> str:
    """Of a trace, the name of its file."""
    if workload.startswith(TRACE):
        return Path(workload).name.partition(".")[0]
    return workload


def generate(scenario: Scenario, seed: int, rate_per_s: float = 1.0) -> list[Program]:
    """The programs of one scenario and seed. Where what goes wrong makes them smaller, they come as much faster: the
    GPU seconds that arrive are the same."""
    usual = drawn(scenario, seed, rate_per_s)
    how = scenario.wrong
    if how is NOTHING:
        return usual
    changed = perturbed(usual, how, seed)
    if how.is_less_work:
        engine = scenario.fleet.engine
        faster = mean_work_s(usual, engine) / mean_work_s([until_aborted(program) for program in changed], engine)
        changed = perturbed(drawn(scenario, seed, rate_per_s * faster), how, seed)
    return changed


def drawn(scenario: Scenario, seed: int, rate_per_s: float = 1.0) -> list[Program]:
    """The programs before anything goes wrong. Raises `load.sim.traces.TraceError`, `OSError` of a trace."""
    share = SHARE_OF_PROGRAMS.get(scenario.workload, 1.0)
    count = max(1, round(scenario.programs * share))
    if scenario.workload.startswith(TRACE):
        return of_trace(scenario.workload, count, seed, rate_per_s)
    return workloads.generate(
        scenario.workload,
        count=count,
        rate_per_s=rate_per_s,
        seed=seed,
        turn_multiplier=scenario.turn_multiplier,
    )


def of_trace(workload: str, count: int, seed: int, rate_per_s: float = 1.0) -> list[Program]:
    """The window of a trace that is the seed's, with `TRACE_LINES` lines for each of ``count``; its arrivals stretched
    to ``rate_per_s`` programs a second."""
    path = Path(workload.removeprefix(TRACE))
    programs = load_cut(path, requests=TRACE_LINES * count, cut=seed, block_size=workloads.BLOCK)
    last_s = programs[-1].arrival_s
    stretch = len(programs) / last_s / rate_per_s if last_s else 1.0
    return [replace(program, arrival_s=program.arrival_s * stretch) for program in programs]


def mean_work_s(programs: Sequence[Program], engine: EngineName) -> float:
    """Ideal GPU seconds of a program, sub-agents included (policy: head). Where a trace's prompts begin as others do,
    that is not work."""
    cost = COSTS[engine][0]
    total = []
    for program in with_children(programs):
        context = 0
        for turn in program.turns:
            if program.label == TRACE_LABEL:
                context = turn.prompt_tokens - turn.new_tokens
            total.append(cost.seconds(turn.prompt_tokens, turn.output_tokens, context))
            context = turn.prompt_tokens + turn.output_tokens
    return math.fsum(total) / len(programs)


def make(
    policy: str,
    scenario: Scenario,
    programs: Sequence[Program],
    seed: int,
    cap: int | None,
    changed: Parameters = (),
) -> Policy:
    """The policy or bound of that name; ``changed``: its parameters by dotted names. Raises `PolicyParameterError`,
    `ValueError`."""
    work_cost, reload = COSTS[scenario.fleet.engine]
    policy, _ = with_hints(policy)
    if policy in (CLAIRVOYANT, BELADY):
        return Clairvoyant(programs, commits=policy == CLAIRVOYANT, work_cost=work_cost, reload_cost=reload)
    if policy == CAP:
        if cap is None:
            raise ValueError("a static cap needs its number")
        return StaticCap(cap)
    name, given = VARIANTS.get(policy, (policy, {}))
    parameters = with_parameters(given, changed)
    if name == "continuum":
        parameters = {**parameters, "reload_cost": msgspec.to_builtins(reload)}
    learned = LearnedPool(work_cost=work_cost, reload_cost=reload)
    return make_policy(name, parameters, Given(random.Random(f"{seed}/{policy}").randrange, learned))


def with_parameters(given: Mapping[str, object], changed: Parameters) -> dict[str, object]:
    """``given``, with the values at dotted names in their places. Raises `ValueError`."""
    found = dict(given)
    for name, text in changed:
        place = found
        *path, last = name.split(".")
        for step in path:
            inner = place.get(step)
            place[step] = inner = dict(inner) if isinstance(inner, Mapping) else {}
            place = inner
        try:
            place[last] = json.loads(text)
        except ValueError:
            place[last] = text
    return found

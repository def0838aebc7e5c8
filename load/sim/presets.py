"""Plans by name: ``quick`` shows that it works, ``seeds`` is what figures are quoted from, ``full`` is everything;
``hints``: what it is worth to tell caches what to keep."""

from __future__ import annotations

from dataclasses import replace

from load.sim.perturb import PERTURBATIONS
from load.sim.plan import CALIBRATION_SEEDS, HELD_OUT, RIVALS, Plan
from load.sim.scenarios import Load

EDGE = Load(1.0, "rho")
"""The edge of stability, past the knee: where the study measured (policy: head)."""
LOADS = (Load(0.7, "j50"), EDGE)
EVERYBODY = ("kv", *RIVALS, "lease", "commit_fcfs", "commit", "clairvoyant", "belady", "cap")
SOME = ("kv", "program_fcfs", "static_ttl", "continuum", "thunderagent", "commit", "clairvoyant", "cap")
FEW = ("kv", "static_ttl", "continuum", "thunderagent", "commit")
"""Of matrices beside the main one: no caching of ours, the rivals that are best somewhere, ours."""

ALONE = tuple(name for name, each in PERTURBATIONS.items() if each.least_workers == 1)
TOGETHER = ("less-memory", "worker-lost")
"""Perturbations for one worker, and those that are of interest where there are several."""


def _side(name: str, like: Plan, **changes: object) -> Plan:
    """A matrix without a knee of its own, with what ``like`` has of policies, sizes and seeds."""
    empty = {
        "workloads": (), "turn_workloads": (), "closed_workloads": (), "calibration_seeds": (), "loads": (EDGE,),
        "wrong_load": EDGE,
    }  # fmt: skip
    return replace(like, **{"name": name, **empty, **changes})  # type: ignore[arg-type]


def _quick() -> Plan:
    main = Plan(
        name="quick",
        policies=SOME,
        workloads=("swe", "mix", "lognormal"),
        loads=LOADS,
        turn_workloads=("swe",),
        turn_load=EDGE,
        turn_multipliers=(1, 3),
        closed_workloads=("swe",),
        concurrency=(12, 24),
        seeds=(1, 2),
        calibration_seeds=CALIBRATION_SEEDS[:2],
        programs=60,
        work_sample=400,
    )
    small = replace(main, policies=("kv", "continuum", "commit"), seeds=(1,), programs=40)
    sides = (
        _side("workers", small, workloads=("swe",), workers=(1, 2)),
        _side("wrong", small, wrong_workloads=("mix",), perturbations=ALONE),
        _side("wrong, 2 workers", small, wrong_workloads=("mix",), perturbations=TOGETHER, workers=(2,)),
        _side("rollouts", small, closed_workloads=("rollout",), concurrency=(32, 64)),
    )
    return replace(main, sides=sides)


def _seeds() -> Plan:
    main = Plan(
        name="seeds",
        policies=EVERYBODY,
        workloads=("swe", "mix", "lognormal"),
        loads=LOADS,
        turn_workloads=("swe",),
        turn_load=EDGE,
        turn_multipliers=(1, 2, 3, 5),
        closed_workloads=("swe",),
        concurrency=(6, 12, 24, 48),
    )
    few = replace(main, policies=FEW)
    sides = (
        _side("workers", few, workloads=("swe", "mix"), workers=(1, 2, 4)),
        _side("wrong", few, wrong_workloads=("swe", "mix"), perturbations=ALONE),
        _side("wrong, 2 workers", few, wrong_workloads=("mix",), perturbations=TOGETHER, workers=(2,)),
        _side("rollouts", few, closed_workloads=("rollout",), concurrency=(32, 128, 512), seeds=main.seeds[:2]),
    )
    return replace(main, sides=sides)


def _full() -> Plan:
    main = Plan(
        name="full",
        policies=EVERYBODY,
        workloads=("swe", "mix", "lognormal", "bfcl", "swebfcl", "pareto", "tree", "slow"),
        loads=(Load(0.4, "j50"), Load(0.7, "j50"), EDGE, Load(1.5, "j50")),
        past_load=EDGE,
        turn_workloads=("swe",),
        turn_load=EDGE,
        turn_multipliers=(1, 2, 3, 5),
        closed_workloads=("swe", "mix"),
        concurrency=(6, 12, 24, 48, 96),
        seeds=HELD_OUT,
    )
    few = replace(main, policies=FEW)
    three = replace(few, seeds=main.seeds[:3])
    rollouts = (32, 64, 128, 256, 512)
    sides = (
        _side("others", main, policies=SOME, workloads=("openhands", "regime", "two-mode")),
        _side("workers", few, workloads=("swe", "mix", "tree", "openhands"), workers=(1, 2, 4)),
        _side("wrong", few, wrong_workloads=("swe", "mix", "lognormal"), perturbations=ALONE),
        _side("wrong, 2 workers", few, wrong_workloads=("swe", "mix"), perturbations=TOGETHER, workers=(2,)),
        _side("rollouts", three, closed_workloads=("rollout",), concurrency=rollouts),
        _side("cache sizes", three, workloads=("swe", "mix"), kv_tokens=(206_000, None, 824_000)),
        _side("70B", three, workloads=("swe", "mix"), engine="h100x4-70b"),
        _side("chunks", three, workloads=("swe",), chunk=(256, 512, 1_024, 2_048, 4_096)),
        _side("batches", three, workloads=("swe",), max_seqs=(16, 64, 256)),
        _side("host tier", three, workloads=("swe", "mix"), host_tokens=(0, 1_600_000)),
    )
    return replace(main, sides=sides)


HINT_LOAD = Load(1.4, "j50")
HINT_ARMS = ("", "+continuum", "+planner")


def _hints() -> Plan:
    """Nobody, an engine's plug-in and the planner tell caches what to keep. Sizes: of a worker's host memory, and of
    the pool that all share; a worker's KV cache has 412,000 tokens. All have the rate of arrivals of one knee."""
    main = Plan(
        name="hints",
        policies=tuple(f"commit{arm}" for arm in HINT_ARMS),
        workloads=("swe", "mix", "forks"),
        loads=(HINT_LOAD,),
        wrong_load=HINT_LOAD,
        seeds=HELD_OUT[:3],
        calibration_seeds=CALIBRATION_SEEDS[:3],
        knee_memory=(400_000, 800_000),
        programs=100,
        workers=(2,),
        host_tokens=(400_000,),
        pool_tokens=800_000,
    )
    sides = (
        replace(main, name="small", host_tokens=(200_000,), pool_tokens=400_000),
        replace(main, name="large", host_tokens=(800_000,), pool_tokens=1_600_000),
        replace(main, name="device alone", host_tokens=(0,), pool_tokens=0, workloads=("swe",)),
        replace(main, name="enough", host_tokens=(4_000_000,), pool_tokens=16_000_000, workloads=("swe",)),
        replace(main, name="written back", pool_through=False, workloads=("swe", "forks")),
        replace(
            main, name="disk", host_tokens=(200_000,), disk_tokens=400_000, pool_tokens=400_000, workloads=("swe",)
        ),
        replace(main, name="kv", policies=tuple(f"kv{arm}" for arm in HINT_ARMS), workloads=("swe", "mix")),
    )
    return replace(main, sides=sides)


def _quick_hints() -> Plan:
    small = replace(
        _hints(), name="hints-quick", workloads=("swe",), seeds=(1,), calibration_seeds=CALIBRATION_SEEDS[:1],
        programs=30, kv_tokens=(200_000,), host_tokens=(100_000,), pool_tokens=200_000, work_sample=400,
        knee_memory=None,
    )  # fmt: skip
    return replace(small, sides=())


PRESETS: dict[str, Plan] = {plan.name: plan for plan in (_quick(), _seeds(), _full(), _hints())}
QUICK: dict[str, Plan] = {"hints": _quick_hints()}
"""Of presets that ``--quick`` makes small: what shows that they work."""

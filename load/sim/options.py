"""What a user asks for beside a preset, as a change of its plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from load.sim.perturb import PERTURBATIONS
from load.sim.plan import Plan
from load.sim.scenarios import TRACE, EngineName, Load

ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``None``: as the preset has it. ``traces``: files that are workloads too. ``perturbations``: names or ``all``."""

    policies: tuple[str, ...] | None = None
    workloads: tuple[str, ...] | None = None
    traces: tuple[Path, ...] = ()
    loads: tuple[Load, ...] | None = None
    concurrency: tuple[int, ...] | None = None
    turn_multipliers: tuple[int, ...] | None = None
    perturbations: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = None
    programs: int | None = None
    workers: tuple[int, ...] | None = None
    kv_tokens: tuple[int, ...] | None = None
    chunk: tuple[int, ...] | None = None
    max_seqs: tuple[int, ...] | None = None
    host_tokens: tuple[int, ...] | None = None
    host_gbps: float | None = None
    disk_tokens: int | None = None
    pool_tokens: int | None = None
    engine: EngineName | None = None
    parameters: tuple[tuple[str, str, str], ...] = ()

    @property
    def chooses(self) -> bool:
        """Whether it says what is run: then the matrices beside the main one are not."""
        memory = (self.kv_tokens, self.host_tokens, self.disk_tokens, self.pool_tokens)
        fleet = (self.workers, self.chunk, self.max_seqs, self.engine, *memory)
        return bool(self.traces) or any(each is not None for each in (self.workloads, *self._loops, *fleet))

    @property
    def _loops(self) -> tuple[object, ...]:
        return self.loads, self.concurrency, self.turn_multipliers, self.perturbations


def with_options(plan: Plan, options: Options) -> Plan:
    """``plan``, changed. Of loads, closed loops, turns and perturbations only those run that are given, if any are.
    Traces run beside the workloads that are given, or alone. Policies, seeds and the number of programs are those of
    the matrices beside the main one too, as far as those have as many."""
    main = _sized(_looped(plan, options), options)
    sides = () if options.chooses else tuple(_side(side, plan, options) for side in plan.sides)
    return replace(main, sides=tuple(side for side in sides if side.policies), parameters=options.parameters)


def _looped(plan: Plan, options: Options) -> Plan:
    traces = tuple(f"{TRACE}{path}" for path in options.traces)
    chosen, given = plan.workloads, options.workloads is not None or bool(traces)
    turning, closed, wrong = plan.turn_workloads, plan.closed_workloads, plan.wrong_workloads
    if given:
        chosen = (*(options.workloads or ()), *traces)
        turning, closed, wrong = (tuple(each for each in chosen if each in own) for own in (turning, closed, wrong))
    if all(
        each is None for each in (options.loads, options.concurrency, options.turn_multipliers, options.perturbations)
    ):
        return replace(plan, workloads=chosen, turn_workloads=turning, closed_workloads=closed, wrong_workloads=wrong)
    load = options.loads[-1] if options.loads else plan.turn_load
    return replace(
        plan,
        workloads=chosen if options.loads else (),
        loads=options.loads or (),
        past_load=None,
        turn_workloads=chosen if options.turn_multipliers else (),
        turn_load=load,
        turn_multipliers=options.turn_multipliers or (),
        closed_workloads=chosen if options.concurrency else (),
        concurrency=options.concurrency or (),
        wrong_workloads=chosen if options.perturbations else (),
        wrong_load=load,
        perturbations=_perturbations(options),
    )


def _perturbations(options: Options) -> tuple[str, ...]:
    if options.perturbations != (ALL,):
        return options.perturbations or ()
    workers = max(options.workers or (1,))
    return tuple(name for name, each in PERTURBATIONS.items() if each.least_workers <= workers)


def _sized(plan: Plan, options: Options) -> Plan:
    names: tuple[str, ...] = ("policies", "seeds", "programs", "workers", "kv_tokens", "chunk", "max_seqs")
    names += ("host_tokens", "host_gbps", "disk_tokens", "pool_tokens", "engine")
    given = {name: getattr(options, name) for name in names}
    return replace(plan, **{name: value for name, value in given.items() if value is not None})


def _side(side: Plan, plan: Plan, options: Options) -> Plan:
    policies, seeds, programs = side.policies, side.seeds, side.programs
    if options.policies is not None:
        policies = tuple(policy for policy in options.policies if policy in side.policies)
    if options.seeds is not None:
        seeds = options.seeds[: len(side.seeds)]
    if options.programs is not None:
        programs = max(2, round(options.programs * side.programs / plan.programs))
    return replace(side, policies=policies, seeds=seeds, programs=programs)

"""What there is to compare, as text: policies with their parameters, workloads, perturbations, presets."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from load.sim.effort import minutes_of
from load.sim.hinting import ARMS
from load.sim.perturb import PERTURBATIONS
from load.sim.presets import PRESETS
from load.sim.scenarios import BOUNDS, VARIANTS
from load.sim.workloads import MIXES
from services.admission.policies.registry import POLICIES, Entry


def listing() -> Iterator[str]:
    """Lines for people."""
    yield "Policies, and their parameters (--set policy.parameter=value):"
    for name, maker in sorted(POLICIES.items()):
        said = [f"{field}={value}" for field, value in parameters(maker.parameters)] if isinstance(maker, Entry) else []
        yield f"  {name}" + (f": {', '.join(said)}" if said else "")
    for name, (base, given) in VARIANTS.items():
        yield f"  {name}: {base} with " + ", ".join(f"{field}={value}" for field, value in given.items())
    yield f"Bounds: {', '.join(BOUNDS)}"
    yield f"Each policy also with hints to its caches: policy+{', policy+'.join(arm for arm in ARMS if arm != 'none')}"
    yield "Workloads:"
    for name, mix in MIXES.items():
        yield f"  {name}: " + ", ".join(f"{100 * share:g} % {shape.label}" for share, shape in mix)
    yield "  any file of requests in Mooncake's format (--trace); a recorded trace is played as it was"
    yield "What may go wrong (--perturb):"
    for name, each in PERTURBATIONS.items():
        needs = f" (from {each.least_workers} workers on)" if each.least_workers > 1 else ""
        yield f"  {name}: {each.what}{needs}"
    yield "Presets:"
    for name, plan in PRESETS.items():
        cells, minutes = minutes_of(plan)
        yield f"  {name}: about {cells} simulations, {minutes:.0f} CPU minutes"


def parameters(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted names and default values."""
    for field in msgspec.structs.fields(kind):
        default = (
            field.default_factory()
            if field.default is msgspec.NODEFAULT and callable(field.default_factory)
            else field.default
        )
        yield from _spread(f"{prefix}{field.name}", default)


def _spread(name: str, value: object) -> Iterator[tuple[str, object]]:
    """A struct's fields, by dotted names, with what they are in it."""
    if not isinstance(value, msgspec.Struct):
        yield name, value
        return
    for field in msgspec.structs.fields(value):
        yield from _spread(f"{name}.{field.name}", getattr(value, field.name))

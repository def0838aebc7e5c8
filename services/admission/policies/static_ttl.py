"""Policy ``static_ttl``: a pin of fixed length for every tool call, and program first come, first served.

What the released preview of Continuum does: 2 s, none for a tool whose calls so far took longer than that on average;
live pins first, then the program's arrival. Source: spec scheduling §1.7 (preview code), §4.6 ("static 2 s").
"""

from __future__ import annotations

import math

import msgspec

from services.admission.estimators.class_key import clean_label
from services.admission.estimators.least_recent import LeastRecentlyUsed
from services.admission.policies.engine_rules import EngineRules, Pressure
from services.admission.policies.in_engine import InEngine, Program
from services.admission.scheduling.interface import TurnUsage

MAX_TOOLS = 256


class StaticTtlParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``ttl_s`` of every pin. ``skip_slow_tools``: none for tools that take longer on average. Raises `ValueError`."""

    ttl_s: float = 2.0
    skip_slow_tools: bool = True
    pressure: Pressure = "A"

    def __post_init__(self) -> None:
        if not 0 < self.ttl_s < math.inf:
            raise ValueError("ttl_s must be greater than 0")


class _Mean:
    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0


class StaticTtl(InEngine):
    """Means per tool, of all its calls, for as many tools as are remembered."""

    def __init__(self, parameters: StaticTtlParameters | None = None) -> None:
        self._parameters = parameters or StaticTtlParameters()
        self._tools: LeastRecentlyUsed[str, _Mean] = LeastRecentlyUsed(MAX_TOOLS, _Mean)
        self.engine = EngineRules(scheduling="priority", pinned_first=True, pressure=self._parameters.pressure)

    def priority(self, now: float, program: Program) -> int:
        return program.order

    def tool_returned(self, program: Program, tool: str, seconds: float) -> None:
        mean = self._tools.use(clean_label(tool))
        mean.count += 1
        mean.total += seconds

    def pin_until(self, now: float, program: Program, usage: TurnUsage) -> float | None:
        mean = self._tools.peek(clean_label(usage.tool))
        if self._parameters.skip_slow_tools and mean is not None and mean.total > self._parameters.ttl_s * mean.count:
            return None
        return now + self._parameters.ttl_s

"""Policy ``infercept``: while a tool runs, keep the KV or discard it, whichever wastes fewer token-seconds.

Preserving wastes the context for as long as the tool is expected to run; discarding wastes the time of the whole batch
while the context is computed again in chunks beside it. What is preserved stays until the tool returns, and yields to
requests that find no room. Source: spec scheduling §3 (InferCept, from its code).

Not built: swapping (there is no tier below the device here), and its order among those that yield (cheapest to compute
again first): the program that arrived last yields first.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from services.admission.estimators.errors import MAX_SAMPLE
from services.admission.estimators.tool_times import ToolTimes
from services.admission.policies.engine_rules import EngineRules, Pressure
from services.admission.policies.in_engine import InEngine, Program
from services.admission.scheduling.interface import TurnUsage


class InferceptParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``saturation`` S: query tokens of a full iteration; ``per_token_ms`` and ``base_ms``: its time, f(q).

    ``remaining``: the tool is expected to run for its mean, or for as long again as it has run. ``order``: of the
    engine's queue, by arrival of the program (its first call, as in the code) or of the request. Raises `ValueError`.
    """

    saturation: int = 384
    per_token_ms: float = 0.0279
    base_ms: float = 15.4
    remaining: Literal["mean", "elapsed"] = "mean"
    order: Literal["program", "request"] = "program"
    pressure: Pressure = "B"

    def __post_init__(self) -> None:
        if self.saturation < 2 or not 0 < self.per_token_ms < math.inf or not 0 <= self.base_ms < math.inf:
            raise ValueError("saturation must be at least 2, per_token_ms positive, base_ms not negative")


def discard_waste(
    context: int, query_tokens: int, running_tokens: int, parameters: InferceptParameters | None = None
) -> float:
    """Token-seconds wasted by computing ``context`` tokens again beside a batch that computes ``query_tokens`` an
    iteration and holds ``running_tokens``.

    Source: spec scheduling §3: ``f_S*n(n+1)/2*h + f_h*n*M_run + f_last*(M_run+last)``, h = max(S-b, 1),
    n = max(ceil(ctx/h)-1, 0), f_h and f_last without the base.
    """
    given = parameters or InferceptParameters()
    chunk = max(given.saturation - query_tokens, 1)
    chunks = max(math.ceil(context / chunk) - 1, 0)
    last = context % chunk
    per_token_s = given.per_token_ms / 1000
    full_s = per_token_s * given.saturation + given.base_ms / 1000
    again = full_s * chunks * (chunks + 1) / 2 * chunk
    beside = per_token_s * chunk * chunks * running_tokens
    return again + beside + per_token_s * last * (running_tokens + last)


class Infercept(InEngine):
    """One pin per interception, decided when it begins."""

    def __init__(self, parameters: InferceptParameters | None = None) -> None:
        self._parameters = parameters or InferceptParameters()
        self._tools = ToolTimes(threshold=0)
        priority = self._parameters.order == "program"
        self.engine = EngineRules(scheduling="priority" if priority else "fcfs", pressure=self._parameters.pressure)

    def priority(self, now: float, program: Program) -> int:
        return program.order if self._parameters.order == "program" else 0

    def tool_returned(self, program: Program, tool: str, seconds: float) -> None:
        self._tools.record(tool, seconds)

    def pin_until(self, now: float, program: Program, usage: TurnUsage) -> float | None:
        running = self._running[usage.seat]
        waste = discard_waste(program.context, running.turns, running.prompt_tokens, self._parameters)
        if self._parameters.remaining == "elapsed":
            return now + waste / max(1, program.context)
        durations, source = self._tools.durations(usage.tool or "")
        mean = durations.mean_held(MAX_SAMPLE, 0.0) if source != "cold_start" else 0.0
        return math.inf if mean * program.context <= waste else None

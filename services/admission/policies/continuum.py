"""Policy ``continuum``: while a tool runs, its program's KV stays pinned for the time that pays best on average.

tau* = argmax P(tau)*(T*eta + PR) - tau over the recorded durations of the tool; T is how long programs queue whose KV
was evicted, eta how much a program's order says of what is left of it, PR the time to compute its context again. Queue:
pre-empted first (with pressure C not, as in the preview), then live pins, then the program's arrival. Source: spec
scheduling §1.2-1.6.

What the publication leaves open is as in its re-implementations (§1.3): T over the last 100 returns, from arrival to
the first token less the computing (a router does not see the first block); eta over 256 completed programs, 0 where it
is undefined, never negative, and 1 in the cold start.
"""

from __future__ import annotations

import math

import msgspec

from services.admission.estimators.ecdf import Exponential
from services.admission.estimators.order_correlation import OrderCorrelation
from services.admission.estimators.queueing import QueueingDelay
from services.admission.estimators.reload_cost import H100_8B, ReloadCost
from services.admission.estimators.tool_times import HISTORY, HISTORY_THRESHOLD, ToolTimes
from services.admission.policies.engine_rules import EngineRules, Pressure
from services.admission.policies.in_engine import InEngine, OpenTurn, Program
from services.admission.scheduling.interface import TurnUsage


class ContinuumParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``pressure``: see `Pressure`. ``history`` durations are kept of a tool; ``history_threshold`` K, below or at
    which a tool's own do not answer. ``delay_window`` of T, ``program_window`` of eta. ``cold_start_mean_s``: of the
    exponential of the cold start; ``cold_start_limit_s`` bounds its pins. ``least_ttl_s``: a pin no longer is none.

    Raises `ValueError`.
    """

    pressure: Pressure = "A"
    history: int = HISTORY
    history_threshold: int = HISTORY_THRESHOLD
    delay_window: int = 100
    program_window: int = 256
    cold_start_mean_s: float = 1.0
    cold_start_limit_s: float = 60.0
    least_ttl_s: float = 0.01
    reload_cost: ReloadCost = H100_8B

    def __post_init__(self) -> None:
        counts = (self.history, self.delay_window, self.program_window)
        if min(counts) < 1 or max(counts) > 1 << 16 or not 0 <= self.history_threshold < self.history:
            raise ValueError("windows must be 1 to 65536, history_threshold below history")
        for value in (self.cold_start_mean_s, self.cold_start_limit_s):
            if not 0 < value < math.inf:
                raise ValueError("cold_start_mean_s and cold_start_limit_s must be greater than 0")
        if not 0 <= self.least_ttl_s < math.inf:
            raise ValueError("least_ttl_s must not be negative")


class Continuum(InEngine):
    """Feeds its own estimators."""

    def __init__(self, parameters: ContinuumParameters | None = None) -> None:
        given = self._parameters = parameters or ContinuumParameters()
        self.tools = ToolTimes(
            history=given.history,
            threshold=given.history_threshold,
            cold_start=Exponential(given.cold_start_mean_s, given.cold_start_limit_s),
        )
        self.order_correlation = OrderCorrelation(window=given.program_window)
        self.queueing_delay = QueueingDelay(window=given.delay_window)
        self.engine = EngineRules(
            scheduling="priority", pinned_first=True, preempted_first=given.pressure != "C", pressure=given.pressure
        )

    def priority(self, now: float, program: Program) -> int:
        return program.order

    def tool_returned(self, program: Program, tool: str, seconds: float) -> None:
        self.tools.record(tool, seconds)

    def turn_measured(self, now: float, turn: OpenTurn, usage: TurnUsage) -> None:
        facts = self._seats.get(usage.seat)
        if not turn.context_before or turn.first_token is None or usage.cached_tokens is None or facts is None:
            return
        # Evicted: less was found than a whole conversation leaves, but for its last two blocks.
        if usage.cached_tokens + 2 * facts.block_size < min(turn.context_before, usage.prompt_tokens):
            computed = self._parameters.reload_cost.seconds(usage.prompt_tokens, usage.cached_tokens)
            self.queueing_delay.record(max(0.0, turn.first_token - turn.ready - computed))

    def program_ended(self, program: Program) -> None:
        self.order_correlation.record(program.turns)

    def time_to_live(self, tool: str, context_tokens: int) -> float:
        """tau* in seconds."""
        durations, source = self.tools.durations(tool)
        eta = 1.0 if source == "cold_start" else max(0.0, self.order_correlation.raw or 0.0)
        reload = self._parameters.reload_cost.seconds(context_tokens)
        return durations.best_ttl(self.queueing_delay.mean * eta + reload)

    def pin_until(self, now: float, program: Program, usage: TurnUsage) -> float | None:
        ttl = self.time_to_live(usage.tool or "", program.context)
        return now + ttl if ttl > self._parameters.least_ttl_s else None

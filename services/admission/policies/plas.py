"""Policy ``plas``: in the engine, programs with the least attained service go first (Autellix, as a router can do it).

The priority of a call is the queue of its program's attained service; queues double. Service of a call: its decoding,
and the computing of what it did not find cached. A sub-agent begins with its parent's service, and a parent takes over
what its sub-agents attained on top (ATLAS: the longest path). Anti-starvation: a program that waited ``starvation``
times as long as it was served goes to the first queue. Source: spec scheduling §3 (Autellix).

Not built: demotion of a call that runs (a router's priority is fixed when the call is sent), and swapping.
"""

from __future__ import annotations

import math

import msgspec

from services.admission.estimators.reload_cost import H100_8B, ReloadCost
from services.admission.policies.engine_rules import BY_PRIORITY
from services.admission.policies.in_engine import InEngine, OpenTurn, Program
from services.admission.scheduling.interface import Actions, ProgramFacts, TurnUsage


class PlasParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``first_queue_s``: service up to which a program is in the first of ``queues`` (ours: the publication has no
    number here). ``starvation``: beta; 0: never promoted. Raises `ValueError`."""

    first_queue_s: float = 1.0
    queues: int = 16
    starvation: float = 0.0
    reload_cost: ReloadCost = H100_8B

    def __post_init__(self) -> None:
        if not 0 < self.first_queue_s < math.inf or not 1 <= self.queues <= 64 or not 0 <= self.starvation < math.inf:
            raise ValueError("first_queue_s must be positive, queues 1 to 64, starvation not negative")


class Plas(InEngine):
    """Attained service is kept per program; waiting too, for the anti-starvation rule."""

    engine = BY_PRIORITY

    def __init__(self, parameters: PlasParameters | None = None) -> None:
        self._parameters = parameters or PlasParameters()
        self._waited: dict[str, float] = {}

    def program_arrives(self, now: float, program: ProgramFacts) -> None:
        known = program.name in self._programs
        super().program_arrives(now, program)
        parent = self._programs.get(program.parent) if program.parent is not None else None
        if not known and parent is not None:
            self._programs[program.name].service_s = parent.service_s

    def priority(self, now: float, program: Program) -> int:
        parameters = self._parameters
        waited = self._waited.get(program.name, 0.0)
        if parameters.starvation and waited >= parameters.starvation * program.service_s:
            return 0
        ratio = program.service_s / parameters.first_queue_s
        return 0 if ratio < 1 else min(parameters.queues - 1, int(math.log2(ratio)) + 1)

    def turn_measured(self, now: float, turn: OpenTurn, usage: TurnUsage) -> None:
        computed = self._parameters.reload_cost.seconds(usage.prompt_tokens, usage.cached_tokens or 0)
        begun = turn.first_token if turn.first_token is not None else now
        program = turn.program
        program.service_s += max(0.0, now - begun) + computed
        waited = max(0.0, begun - turn.ready - computed)
        self._waited[program.name] = self._waited.get(program.name, 0.0) + waited

    def program_ended(self, program: Program) -> None:
        parent = self._programs.get(program.parent) if program.parent is not None else None
        if parent is not None:
            parent.service_s = max(parent.service_s, program.service_s)

    def program_closed(self, now: float, program: str) -> Actions:
        self._waited.pop(program, None)
        return super().program_closed(now, program)

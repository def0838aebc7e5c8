"""Policy ``program_fcfs``: in the engine, turns of the program that arrived first go first. No pins.

Source: spec scheduling §1.6 (order), §4.6 ("needs only a priority field").
"""

from __future__ import annotations

from services.admission.policies.engine_rules import BY_PRIORITY
from services.admission.policies.in_engine import InEngine, Program


class ProgramFcfs(InEngine):
    """The priority is the number of the program's arrival."""

    engine = BY_PRIORITY

    def priority(self, now: float, program: Program) -> int:
        return program.order

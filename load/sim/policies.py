"""The policies of admission, as the laboratory uses them: `services.admission.policies` has them."""

from __future__ import annotations

from collections.abc import Callable

from services.admission.policies.kv import Kv
from services.admission.policies.least_load import LeastLoad
from services.admission.policies.round_robin import RoundRobin
from services.admission.scheduling.interface import (
    Action,
    Actions,
    Admission,
    Base,
    Fleet,
    LeaseChange,
    Pin,
    Policy,
    ProgramFacts,
    Refusal,
    TurnFacts,
    TurnUsage,
    Unpin,
    WorkerFacts,
)

__all__ = [
    "PLACEMENTS",
    "Action",
    "Actions",
    "Admission",
    "Base",
    "Fleet",
    "Kv",
    "LeaseChange",
    "LeastLoad",
    "Pin",
    "Policy",
    "ProgramFacts",
    "Refusal",
    "RoundRobin",
    "TurnFacts",
    "TurnUsage",
    "Unpin",
    "WorkerFacts",
]

PLACEMENTS: dict[str, Callable[[], Policy]] = {"round_robin": RoundRobin, "least_load": LeastLoad, "kv": Kv}
"""Policies that hold nothing back, by name."""

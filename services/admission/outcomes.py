"""What scheduling policies answered, by request, worker and session: see `services.admission.scheduled`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from schemas.session import SessionKey
from services.admission.scheduling.interface import LeaseState

Place = tuple[str, int]
"""(worker, rank)."""


@dataclass(frozen=True, slots=True)
class Let:
    """The policy sends the request there. ``priority``: lower runs earlier."""

    request_id: str
    worker: str
    rank: int
    priority: int


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """The policy will never send the request anywhere. ``reason``: the policy's, or ``policy_failed``."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """A lease as it was given: by which leadership (``None``: before we led), when, for how many tokens, and when it
    ends by itself (Unix seconds)."""

    epoch: int | None
    since: float
    until: float
    tokens: int


@dataclass(frozen=True, slots=True)
class LeaseTold:
    """What became of the KV that an idle session keeps at a rank, with the numbers that caused it."""

    session: SessionKey
    worker: str
    rank: int
    state: LeaseState
    terms: LeaseTerms
    numbers: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class PauseTold:
    """A policy paused the session, or resumed it: ``place``, where its next turn goes, where that is known."""

    session: SessionKey
    state: Literal["paused", "resumed"]
    place: Place | None
    reason: str


@dataclass(frozen=True, slots=True)
class Noticed:
    """Something of the policies that a person wants to read in the log. ``event``: its stable name."""

    event: str
    fields: Mapping[str, Any]
    is_fault: bool = True


Outcome = Let | TurnedAway | LeaseTold | PauseTold | Noticed

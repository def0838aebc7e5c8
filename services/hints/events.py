"""What can happen to the hint planner: the first argument of `core.Core.handle`."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.decision import Decision
from schemas.hint import HintResult
from schemas.session import SessionFact


@dataclass(frozen=True, slots=True)
class SessionChanged:
    """Admission tells of a session (``acting`` or ``closed``; others are passed over)."""

    fact: SessionFact


@dataclass(frozen=True, slots=True)
class Decided:
    """A turn was placed."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Answered:
    """A bridge says what became of an envelope."""

    result: HintResult


@dataclass(frozen=True, slots=True)
class LeadershipChanged:
    """``epoch`` of our leadership; ``None``: somebody else leads, or nobody."""

    epoch: int | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes; once a second."""


Event = SessionChanged | Decided | Answered | LeadershipChanged | Tick

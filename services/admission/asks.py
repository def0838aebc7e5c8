"""One unanswered `AdmitRequest`, from its arrival to its answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from schemas.admit import AdmitRequest
from services.admission.placement import IndexView
from services.admission.scheduled import Let


class Stage(Enum):
    """``HELD``: waits in line. ``INDEX``, ``POLICY``: a question about it is open. ``SCHEDULED``: the scheduling policy
    knows it, and it waits."""

    HELD = "held"
    INDEX = "index"
    POLICY = "policy"
    SCHEDULED = "scheduled"


@dataclass(slots=True, eq=False)
class Ask:
    """A turn that asks to run.

    ``arrival`` grows with every ask and orders the line. ``ticket`` numbers the open question, so that a late answer to
    an earlier one is recognised. Times are Unix seconds; ``held_since`` is ``None`` while it is not in line.
    ``builtin``: whose choice it is. ``let``: where the scheduling policy has sent it. ``viewed_at``: when ``index``
    was said.
    """

    request: AdmitRequest
    reply_to: str
    arrival: int
    asked_at: float
    expires: float
    stage: Stage = Stage.HELD
    ticket: int = -1
    started_at: float = 0.0
    held_since: float | None = None
    held_s: float = 0.0
    hold_reason: str | None = None
    say_held_at: float = 0.0
    index: IndexView | None = None
    builtin: str = "kv"
    let: Let | None = None
    viewed_at: float = 0.0

"""One unanswered `AdmitRequest`, from its arrival to its answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from schemas.admit import AdmitRequest
from schemas.decision import PolicyAsk, PolicyAsked
from services.admission.consulting import NO_VERDICT, Consultation, Verdict, summary
from services.admission.outcomes import Let
from services.admission.placement import IndexView


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

    ``consultation``: the last one of users' policies, ``verdict`` what it came to, ``times`` how often each was asked.
    ``held_until``: a user's policy keeps it in line till then. ``held_before``: why it was held before the scheduling
    policy knew it. ``pause_at``: when waiting with it pauses its session, or may.
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
    consultation: Consultation | None = None
    verdict: Verdict = NO_VERDICT
    times: Counter[tuple[str, PolicyAsk]] = field(default_factory=Counter)
    held_until: float = 0.0
    held_before: str | None = None
    pause_at: float = 0.0

    def set_back(self, seconds: float) -> None:
        """The clock was set back by so much."""
        self.asked_at -= seconds
        self.expires -= seconds
        self.started_at -= seconds
        self.say_held_at -= seconds
        self.viewed_at -= seconds
        self.held_until -= seconds
        self.pause_at -= seconds
        if self.held_since is not None:
            self.held_since -= seconds

    @property
    def policies(self) -> tuple[PolicyAsked, ...]:
        """Users' policies that were asked about it, and what became of that."""
        return summary(self.consultation, self.times) if self.consultation is not None else ()

"""What the hint planner wants done."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.hint import ActionPayload, ActionType, HintCommand
from schemas.policy import HintQuestion
from schemas.session import SessionKey


@dataclass(frozen=True, slots=True)
class PlannedHint:
    """One action for one worker's cache. It is answered once (`events.ActionAnswered`), or given up."""

    worker: str
    rank: int
    session: SessionKey
    session_id: str
    action_id: str
    action_type: ActionType
    payload: ActionPayload


@dataclass(frozen=True, slots=True)
class AskSession:
    """Ask an indexer what is known of the session's prefix; the answer is `events.SessionAnswered`."""

    session: SessionKey


@dataclass(frozen=True, slots=True)
class AskPolicy:
    """Ask user's policy ``name``; the answer is `events.PolicyAnswered` or `events.PolicyFailed`."""

    ticket: int
    name: str
    question: HintQuestion
    deadline_ms: int


PlannerEffect = PlannedHint | AskSession | AskPolicy


@dataclass(frozen=True, slots=True)
class SendHint:
    """Publish the command on its worker's subject."""

    command: HintCommand


Effect = SendHint | AskSession | AskPolicy

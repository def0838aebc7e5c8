"""What can happen to the hint planner: the first argument of `planner.Planner.handle` and `core.Core.handle`."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.decision import Decision
from schemas.hint import ActionResult, HintCommand, HintIntent, HintResult
from schemas.index import SessionResidency
from schemas.policy import HintAnswer
from schemas.pool import PoolState
from schemas.request import RequestEnd
from schemas.session import SessionFact, SessionKey
from schemas.tool import ToolEvent
from schemas.worker import WorkerState


@dataclass(frozen=True, slots=True)
class SessionChanged:
    """Admission tells of a session."""

    fact: SessionFact


@dataclass(frozen=True, slots=True)
class Decided:
    """A turn was placed."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A turn is over, and called tools."""

    end: RequestEnd


@dataclass(frozen=True, slots=True)
class ToolChanged:
    """A harness tells of a tool call."""

    event: ToolEvent


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A bridge's heartbeat: capacity, lower tiers, health."""

    state: WorkerState


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """A pool bridge's heartbeat."""

    state: PoolState


@dataclass(frozen=True, slots=True)
class ActionAnswered:
    """What became of one action at its worker."""

    worker: str
    result: ActionResult


@dataclass(frozen=True, slots=True)
class NotSent:
    """The action could not be sent (the bus was away)."""

    action_id: str


@dataclass(frozen=True, slots=True)
class SessionAnswered:
    """An indexer's answer to `effects.AskSession`; ``None``: there is none, for ``reason``."""

    session: SessionKey
    residency: SessionResidency | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class PolicyAnswered:
    """A user's policy answers question ``ticket``."""

    ticket: int
    answer: HintAnswer


@dataclass(frozen=True, slots=True)
class PolicyFailed:
    """Question ``ticket`` has no answer. ``cause``: ``late``, ``absent``, ``malformed``, ``failed`` or ``unsent``."""

    ticket: int
    cause: str


@dataclass(frozen=True, slots=True)
class IntentGiven:
    """A user's policy says, unasked, what caches should be told. ``publisher``: whose subject it came on."""

    publisher: str
    intent: HintIntent


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes; once a second."""


PlannerEvent = (
    SessionChanged
    | Decided
    | TurnEnded
    | ToolChanged
    | WorkerSeen
    | PoolSeen
    | ActionAnswered
    | NotSent
    | SessionAnswered
    | PolicyAnswered
    | PolicyFailed
    | IntentGiven
    | Tick
)
"""What the planner itself understands: no bus, no leadership."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A bridge says what became of an envelope."""

    result: HintResult


@dataclass(frozen=True, slots=True)
class Commanded:
    """A command that some hint planner has sent: of ours nothing new, of a leader before us what we have to know."""

    command: HintCommand


@dataclass(frozen=True, slots=True)
class LeadershipChanged:
    """``epoch`` of our leadership; ``None``: somebody else leads, or nobody."""

    epoch: int | None


Event = PlannerEvent | Answered | Commanded | LeadershipChanged

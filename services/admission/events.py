"""What can happen to admission: the first argument of `core.Core.handle`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from schemas.admit import AdmitCancel, AdmitRequest
from schemas.decision import Decision
from schemas.index import MatchReply
from schemas.ingress import IngressState
from schemas.policy import PolicyAnswer
from schemas.request import RequestAccepted, RequestDispatched, RequestEnd, RequestFirstToken
from schemas.session import SessionFact
from schemas.tool import ToolEvent
from schemas.worker import WorkerState


@dataclass(frozen=True, slots=True)
class AdmitAsked:
    """A turn asks to run; answers go to ``reply_to``."""

    request: AdmitRequest
    reply_to: str


@dataclass(frozen=True, slots=True)
class AdmitCancelled:
    """Its ingress asks to forget a turn."""

    cancel: AdmitCancel


@dataclass(frozen=True, slots=True)
class MatchAnswered:
    """The index answered question ``ticket``."""

    ticket: int
    reply: MatchReply


@dataclass(frozen=True, slots=True)
class MatchFailed:
    """The index did not answer question ``ticket``; ``reason`` is the error's."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True)
class PolicyAnswered:
    """A user's policy answered question ``ticket``."""

    ticket: int
    answer: PolicyAnswer


@dataclass(frozen=True, slots=True)
class PolicyFailed:
    """A user's policy did not answer question ``ticket``: ``late``, ``absent``, ``malformed``, ``failed`` (it said so
    itself) or ``unsent`` (the bus is away)."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerStated:
    """A bridge's heartbeat."""

    state: WorkerState


@dataclass(frozen=True, slots=True)
class IngressStated:
    """An ingress's heartbeat."""

    state: IngressState


@dataclass(frozen=True, slots=True)
class Accepted:
    """An ingress accepted a request."""

    fact: RequestAccepted


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A request's bytes went to a worker."""

    fact: RequestDispatched


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request's answer began."""

    fact: RequestFirstToken


@dataclass(frozen=True, slots=True)
class Ended:
    """A request is over."""

    fact: RequestEnd


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision of the leader, as a standby sees it."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class LeadershipChanged:
    """``epoch`` of our leadership; ``None``: somebody else leads, or nobody."""

    epoch: int | None


@dataclass(frozen=True, slots=True)
class PauseHeard:
    """A session was paused or resumed: the leader's fact, as everybody hears it."""

    fact: SessionFact


@dataclass(frozen=True, slots=True)
class ToolTold:
    """A harness told of a tool call."""

    fact: ToolEvent


@dataclass(frozen=True, slots=True)
class LearnedRead:
    """All that the bucket of what pools have learned holds, by key."""

    values: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class LearnedUnwritten:
    """The bucket did not take a pool's value."""

    key: str


@dataclass(frozen=True, slots=True)
class CalibrationTold:
    """A measured reload curve of the bucket; ``None``: it was deleted."""

    key: str
    payload: bytes | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes; ten times a second. ``connected``: whether facts can reach us. ``in_doubt``: whether we lead without
    a renewal, so that others may be heard elsewhere (`bus.leadership`)."""

    connected: bool = True
    in_doubt: bool = False


Event = (
    AdmitAsked
    | AdmitCancelled
    | MatchAnswered
    | MatchFailed
    | PolicyAnswered
    | PolicyFailed
    | WorkerStated
    | IngressStated
    | Accepted
    | Dispatched
    | FirstToken
    | Ended
    | Decided
    | LeadershipChanged
    | PauseHeard
    | ToolTold
    | LearnedRead
    | LearnedUnwritten
    | CalibrationTold
    | Tick
)

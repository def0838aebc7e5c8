"""What can happen to admission: the first argument of `core.Core.handle`."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.admit import AdmitCancel, AdmitRequest
from schemas.decision import Decision
from schemas.index import MatchReply
from schemas.ingress import IngressState
from schemas.policy import RouteAnswer
from schemas.request import RequestAccepted, RequestDispatched, RequestEnd, RequestFirstToken
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
    """The route policy answered question ``ticket``."""

    ticket: int
    answer: RouteAnswer


@dataclass(frozen=True, slots=True)
class PolicyFailed:
    """The route policy did not answer question ``ticket``: ``late``, ``absent`` or ``unusable``."""

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
class Tick:
    """Time passes; ten times a second. ``connected``: whether facts can reach us."""

    connected: bool = True


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
    | Tick
)

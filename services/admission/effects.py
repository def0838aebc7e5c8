"""What admission wants done: the answers of `core.Core.handle`, for the shell to carry out in order."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from schemas.admit import AdmitReply
from schemas.decision import Decision
from schemas.index import MatchRequest
from schemas.placed import Placed
from schemas.policy import RouteQuestion
from schemas.request import RequestEnd
from schemas.session import SessionFact
from schemas.trace import TraceRow
from services.admission.placement import Placement


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer an ask."""

    reply_to: str
    message: AdmitReply


@dataclass(frozen=True, slots=True)
class AskIndex:
    """Ask the index; answer with `MatchAnswered` or `MatchFailed` of this ticket before the deadline (ms)."""

    ticket: int
    question: MatchRequest
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class AskPolicy:
    """Ask the route policy ``name``; answer with `PolicyAnswered` or `PolicyFailed` before the deadline (ms)."""

    ticket: int
    name: str
    question: RouteQuestion
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish a fact on the subject of its kind, in its encoding."""

    fact: Placed | SessionFact | RequestEnd


@dataclass(frozen=True, slots=True)
class PublishDecision:
    """Publish a decision, completed by the ranks it was made from."""

    decision: Decision
    placement: Placement

    def fact(self) -> Decision:
        """The whole decision. Not made before the answer has left: with many ranks it takes longer than deciding."""
        return msgspec.structs.replace(self.decision, candidates=self.placement.candidates())


@dataclass(frozen=True, slots=True)
class WriteRow:
    """Write the durable row of a request whose ingress is lost; ``message_id`` is the request's id."""

    row: TraceRow
    model: str
    session: str
    message_id: str


Effect = Reply | AskIndex | AskPolicy | Publish | PublishDecision | WriteRow

"""What admission wants done: the answers of `core.Core.handle`, for the shell to carry out in order."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from schemas.admit import AdmitReply
from schemas.decision import Decision, PolicyAsk
from schemas.index import MatchRequest
from schemas.placed import Placed
from schemas.policy import PolicyQuestion
from schemas.request import RequestEnd
from schemas.session import SessionFact
from schemas.trace import TraceRow
from services.admission.outcomes import Noticed
from services.admission.placement import Placement
from services.admission.remembered import Stored


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
    """Ask the user's policy ``name``; answer with `PolicyAnswered` or `PolicyFailed` before the deadline (ms)."""

    ticket: int
    name: str
    question: PolicyQuestion
    deadline_ms: int
    ask: PolicyAsk = "route"


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


Effect = Reply | AskIndex | AskPolicy | Publish | PublishDecision | WriteRow | Noticed | Stored
"""`Noticed` goes to the log, `Stored` into the bucket of what was learned (`LearnedUnwritten` where it does not)."""

"""What the ingress's core wants done, in this order. All but `Publish` and `PublishRow` concern one request's task."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.admit import AdmitCancel, AdmitRequest
from schemas.base import Fact
from schemas.index import RecogniseRequest
from schemas.trace import TraceRow
from services.ingress.contents import Dialect
from services.ingress.endpoints import ClientRequest
from services.ingress.replies import ErrorReply
from services.ingress.tokens import PageRule


@dataclass(frozen=True, slots=True)
class Publish:
    """A fact for everyone, as JSON; ``packed``: as MessagePack."""

    subject: str
    fact: Fact
    packed: bool = False


@dataclass(frozen=True, slots=True)
class PublishRow:
    """The request's one durable row, as JSON; the message id is its request id. Re-send it until acknowledged."""

    subject: str
    row: TraceRow
    message_id: str


@dataclass(frozen=True, slots=True)
class CountPrompt:
    """Get the prompt's tokens, chained in blocks of ``block_size`` tokens, under ``adapter`` where the model is one,
    and its ``pages`` in a shared pool, or where there are no tokens its chain over text; with ``messages`` the chain of
    its messages too. ``dialect``: how its engines read Anthropic's messages. Answer with `events.PromptCounted`,
    whatever happens."""

    request_id: str
    request: ClientRequest
    block_size: int
    adapter: str | None = None
    pages: PageRule | None = None
    messages: bool = False
    dialect: Dialect = "vllm"


@dataclass(frozen=True, slots=True)
class AskIndexer:
    """Ask whose turn it is (MessagePack); answer with `events.Recognised`, whatever happens."""

    request_id: str
    question: RecogniseRequest


@dataclass(frozen=True, slots=True)
class AskAdmission:
    """Ask (MessagePack), and hand every reply in as `events.AdmitReplied` until it is a grant or a refusal, or in its
    place `events.AdmitFailed`."""

    subject: str
    question: AdmitRequest


@dataclass(frozen=True, slots=True)
class CancelAdmission:
    """Stop listening for a decision, and say so (MessagePack); ``cancel.hedge``: for that of `AskHedge`."""

    subject: str
    cancel: AdmitCancel


@dataclass(frozen=True, slots=True)
class AskHedge:
    """Ask whether the request may be sent to a second engine (MessagePack), beside everything else that its task does;
    answer with `events.HedgeAnswered`, whatever happens. The `Forward` that may follow is done beside it, too."""

    subject: str
    question: AdmitRequest


@dataclass(frozen=True, slots=True)
class EngineFields:
    """What a request tells its engine's cache (`services.ingress.engine_fields`): ``session_id``, by which hints name
    its session (empty: not told); ``xargs``, JSON values by their names in ``vllm_xargs``; ``kv_hints``, an envelope as
    JSON, ``None``: none."""

    session_id: str = ""
    xargs: tuple[tuple[str, bytes], ...] = ()
    kv_hints: bytes | None = None


NO_FIELDS = EngineFields()


@dataclass(frozen=True, slots=True)
class Forward:
    """Send the client's bytes to this worker. ``rank`` matters where ``ranks`` > 1. ``priority`` is admission's;
    ``session_id``: whose request it is; ``fields``: what else may be put into it; ``dialect``: the worker's."""

    request_id: str
    attempt: int
    worker: str
    url: str
    rank: int
    ranks: int
    priority: int | None
    session_id: str = ""
    fields: EngineFields = NO_FIELDS
    dialect: Dialect = "vllm"


@dataclass(frozen=True, slots=True)
class Follow:
    """From here on the second sending is the request's; what it answers is passed on by `Relay`, as any answer."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Relay:
    """Pass the engine's answer on to the client, status and headers first."""

    request_id: str


@dataclass(frozen=True, slots=True)
class HeldComment:
    """Write ``text``, an SSE comment; where nothing was sent to the client yet, after the head of an event stream."""

    request_id: str
    text: bytes


@dataclass(frozen=True, slots=True)
class CloseUpstream:
    """Close the connection to the engine (once; nothing of that attempt is wanted any more)."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Nothing was sent to the client yet: send this, whole."""

    request_id: str
    reply: ErrorReply


@dataclass(frozen=True, slots=True)
class BreakOff:
    """The answer broke after something of it was sent. Send ``event`` (empty for an answer that is not a stream) and
    close the client's connection so that it sees that the answer is not complete."""

    request_id: str
    event: bytes


Effect = (
    Publish
    | PublishRow
    | CountPrompt
    | AskIndexer
    | AskAdmission
    | CancelAdmission
    | AskHedge
    | Forward
    | Follow
    | Relay
    | HeldComment
    | CloseUpstream
    | Answer
    | BreakOff
)

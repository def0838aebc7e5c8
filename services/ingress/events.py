"""What happens at the front door, as the core hears it. Everything about one request names it; everything about one
attempt on an engine names the attempt, so that what comes late from an earlier attempt is recognised.

The order for one request: `RequestReceived`, `PromptCounted`, `Recognised` (where that is asked), `AdmitReplied` (or
`AdmitFailed`), `HedgeDue` and `HedgeAnswered` (where it may be sent twice), `FirstByte`, `AnswerProgress`,
`AnswerEnded` (or `AnswerFailed`); `ClientGone` and `RequestFailed` at any time. Chunks are no events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schemas.admit import AdmitReply, Granted
from schemas.index import RecogniseReply
from schemas.worker import WorkerState
from services.ingress.answers import AnswerFacts
from services.ingress.endpoints import ClientRequest
from services.ingress.identity import Resolved
from services.ingress.message_chain import MessageChain
from services.ingress.modalities import TEXT_ONLY, Media
from services.ingress.texts import TextBlocks
from services.ingress.tokens import PromptTokens

AdmitFailure = Literal["admit_silent", "no_responders", "bus_down", "bad_reply", "hold_timeout"]
"""Why there is no decision: silence for ``admit_idle_s``, nobody subscribed, no bus, an answer that cannot be read;
or ``hold_timeout``: the leader answers, but the request was held until its deadline."""

RecogniseFailure = Literal["no_indexer", "index_silent", "bus_down", "bad_reply"]
"""Why nobody said whose turn it is: nobody subscribed, no answer in time, no bus, an answer that cannot be read (or
that says that the question could not)."""

AnswerFailure = Literal[
    "connect_error",
    "connect_timeout",
    "first_byte_timeout",
    "idle_timeout",
    "total_timeout",
    "connection_lost",
    "bad_answer",
    "event_too_large",
    "bad_url",
    "api_not_served",
]
"""Why an answer did not come or broke off; the reasons of `web.errors` and of `errors.AnswerError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReceived:
    """A request was read whole. ``request_id`` is new; ``x_request_id`` is the client's own. ``sticky``: the worker
    that its client's turn state names (`services.ingress.turn_state`)."""

    request_id: str
    request: ClientRequest
    resolved: Resolved
    x_request_id: str | None = None
    sticky: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCounted:
    """Answer to `effects.CountPrompt`. Without ``tokens`` (``skipped`` says why, as a metric label) the request is
    placed by its ``text``; without either by session and load. ``messages``: where they were asked for. ``media``: what
    a prompt without tokens holds besides text (one with tokens holds nothing else)."""

    request_id: str
    tokens: PromptTokens | None = None
    tokens_from: Literal["tokenizer", "engine", "estimate"] = "estimate"
    skipped: str | None = None
    text: TextBlocks | None = None
    messages: MessageChain | None = None
    media: Media = TEXT_ONLY


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognised:
    """Answer to `effects.AskIndexer`; without ``reply``, ``failure`` says why there is none."""

    request_id: str
    reply: RecogniseReply | None = None
    failure: RecogniseFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitReplied:
    """One reply to `effects.AskAdmission`."""

    request_id: str
    attempt: int
    reply: AdmitReply


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitFailed:
    """No decision came."""

    request_id: str
    attempt: int
    reason: AdmitFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstByte:
    """The engine's status and the first byte of its body are here (or its whole, empty body); nothing of it has been
    sent to the client yet. ``status`` is the engine's; ``is_stream``: its body is one of events."""

    request_id: str
    attempt: int
    status: int
    is_stream: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgeDue:
    """The engine has not begun to answer for as long as the settings wait before a request is sent twice."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgeAnswered:
    """Answer to `effects.AskHedge`; ``granted`` is absent where it was refused, or nobody said anything in time.
    ``attempt``: the one that the second sending is to be."""

    request_id: str
    attempt: int
    granted: Granted | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerProgress:
    """Still streaming; tell it at most once a second. ``chunks`` so far."""

    request_id: str
    attempt: int
    chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnded:
    """The engine's answer is complete, and everything of it was handed to the client's connection."""

    request_id: str
    attempt: int
    answer: AnswerFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFailed:
    """The engine did not answer, or broke off. ``answer``: what had been read. ``detail``: for the client to read."""

    request_id: str
    attempt: int
    reason: AnswerFailure
    answer: AnswerFacts | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientGone:
    """The client closed its connection, or did not read. ``answer``: what had been read of the engine's answer."""

    request_id: str
    answer: AnswerFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """A bug of ours ended this request; ``reason`` is an error's."""

    request_id: str
    reason: str = "internal_error"
    answer: AnswerFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHeard:
    """A `schemas.worker.WorkerState` fact."""

    state: WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class HintHeard:
    """A command on ``tg.v1.hint.*``, to some worker's bridge."""

    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Once a second. ``connected``: whether facts can reach us."""

    connected: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """No new requests from here on; those in flight go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """Nothing will be in flight any more; what still is ends as ``internal_error`` with reason ``stopping``."""


RequestEvent = (
    RequestReceived
    | PromptCounted
    | Recognised
    | AdmitReplied
    | AdmitFailed
    | FirstByte
    | HedgeDue
    | HedgeAnswered
    | AnswerProgress
    | AnswerEnded
    | AnswerFailed
    | ClientGone
    | RequestFailed
)
Event = RequestEvent | WorkerHeard | HintHeard | Tick | StopAsked | Stopped

"""``tg.v1.request.{accepted,dispatched,first_token,progress,end}.<model>``: a request's life, by its ingress."""

from __future__ import annotations

from typing import Literal

from schemas.admit import DecisionMode
from schemas.base import BodyDigest, Count, Fact, Message, Number, Tokens
from schemas.session import RequestKind, SessionIdentity

Outcome = Literal[
    "completed",
    "client_error",
    "refused",
    "client_disconnect",
    "upstream_error",
    "upstream_lost",
    "upstream_timeout",
    "ingress_lost",
    "internal_error",
]
"""``client_error``: the engine answered 4xx. ``upstream_error``: it answered 5xx or an in-band error.
``upstream_lost``: it died after the first byte. ``ingress_lost``: written by admission for a dead ingress."""


class Usage(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens as the engine reported them; ``estimated`` when it did not."""

    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None
    reasoning_tokens: Tokens | None = None
    estimated: bool = False


class RequestAccepted(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """The request was read and belongs to this session; from here on exactly one row is owed. ``digest``: of a turn's
    body, for those who count the same one sent again as one."""

    request_id: str
    model: str
    identity: SessionIdentity
    received_ms: Count
    kind: RequestKind = "turn"
    endpoint: str = "chat_completions"
    stream: bool = False
    x_request_id: str | None = None
    digest: BodyDigest = ""


class RequestDispatched(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """The request's bytes go to this worker. ``attempt`` counts from 0."""

    request_id: str
    model: str
    worker: str
    rank: Count
    attempt: Count = 0
    mode: DecisionMode = "policy"
    grant_id: str | None = None


class RequestFirstToken(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """First byte of the answer's body."""

    request_id: str
    model: str
    ttft_ms: float


class RequestProgress(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """Still streaming; at most once a second per request."""

    request_id: str
    model: str
    chunks: Count


class RequestEnd(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """The end, however it came. Releases the grant."""

    request_id: str
    model: str
    identity: SessionIdentity
    outcome: Outcome
    kind: RequestKind = "turn"
    endpoint: str = "chat_completions"
    reason: str | None = None
    status: Number | None = None
    worker: str | None = None
    rank: Count | None = None
    grant_id: str | None = None
    mode: DecisionMode | None = None
    usage: Usage = Usage()
    predicted_cached_tokens: Tokens | None = None
    predicted_shared_tokens: Tokens | None = None
    finish_reason: str | None = None
    tool_names: tuple[str, ...] = ()
    total_ms: float | None = None

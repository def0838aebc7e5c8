"""``tg.v1.admit.<model>`` (MessagePack): run now, where, or wait? Several replies: held*, then granted or refused."""

from __future__ import annotations

from typing import Literal

from schemas.base import Count, Message, Number, Tokens
from schemas.index import ChainUnit, SourceHealth
from schemas.session import RequestKind, SessionIdentity

DecisionMode = Literal["policy", "custom", "fallback"]
"""``policy``: the built-in policy chose. ``custom``: a user's route policy chose. ``fallback``: the ingress chose by
itself (rendezvous hash) because no leader answered."""


class Grant(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A turn admitted to a worker. ``owner`` is the ingress, ``epoch`` the leader's; it lapses at ``expires_ms``
    unless the owner's `IngressState` keeps naming it."""

    grant_id: str
    request_id: str
    worker: str
    rank: Count
    owner: str
    epoch: Number
    expires_ms: Count


class AdmitRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The question. Asking again with the same ``request_id`` (and ``attempt``) returns the same grant.

    ``chain``, ``chain_unit``, ``pages``, ``page_size``: as in `schemas.index.MatchRequest`; ``message_chain``,
    ``preamble``: as in `schemas.placed.Placed`. ``tokens_from`` says how ``input_tokens`` was counted. ``excluded``:
    workers that this request has already failed on; ``avoided``: those that have just failed on others (never all).
    ``sticky``: the worker that its client says its turn ran on, for whom nobody remembers it. ``priority``: the
    client's wish, lower for earlier; ``expected_output_tokens``: what it expects of the answer, at most
    ``max_output_tokens`` of which come. ``deadline_ms``: Unix ms after which the ingress listens no more. ``digest``:
    of the body, as the client sent it: a turn that did not come through and is sent again has the same (no harness says
    that it sends one again).

    ``hedge``: it runs, and its engine is slow; may it be sent once more, elsewhere? Granted at once or refused, never
    held, and booked beside the grant that it has, until its ingress says that one of the two has begun to answer
    (docs/adr/0037). ``attempt`` is the one that the second sending would be.
    """

    request_id: str
    model: str
    ingress: str
    ingress_epoch: Number
    identity: SessionIdentity
    received_ms: Count
    deadline_ms: Count
    attempt: Count = 0
    kind: RequestKind = "turn"
    endpoint: str = "chat_completions"
    input_tokens: Tokens = 0
    tokens_from: Literal["tokenizer", "engine", "estimate"] = "estimate"
    block_size: Count = 0
    chain: bytes = b""
    max_output_tokens: Number | None = None
    expected_output_tokens: Number | None = None
    priority: Number = 0
    excluded: tuple[str, ...] = ()
    chain_unit: ChainUnit = "tokens"
    pages: bytes = b""
    page_size: Count = 0
    preamble: Count = 0
    message_chain: bytes = b""
    avoided: tuple[str, ...] = ()
    sticky: str | None = None
    digest: bytes = b""
    hedge: bool = False


class AdmitCancel(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.admit.cancel.<model>`` (MessagePack): the client went while its turn waited; forget it. ``hedge``: only
    the second sending is over, or not wanted; the request goes on."""

    request_id: str
    ingress: str
    reason: str = "client_disconnect"
    hedge: bool = False


class Held(Message, frozen=True, kw_only=True, omit_defaults=True, tag="held"):
    """Wait: repeated at least once a second as keep-alive. ``place`` in line counts from 1."""

    request_id: str
    epoch: Number
    reason: str
    place: Count = 0


class Granted(Message, frozen=True, kw_only=True, omit_defaults=True, tag="granted"):
    """Run now, on ``grant.worker`` at ``url``. ``priority`` is the engine's field, decided by admission.

    ``predicted_cached_tokens``: what the rank's own tiers hold; ``predicted_shared_tokens``: what it should find in its
    shared pool beyond them.
    """

    request_id: str
    epoch: Number
    grant: Grant
    url: str
    mode: DecisionMode = "policy"
    policy: str = "kv"
    predicted_cached_tokens: Tokens = 0
    predicted_shared_tokens: Tokens = 0
    index_health: SourceHealth = "blind"
    index_reason: str | None = None
    hold_ms: Number = 0
    hold_reason: str | None = None
    priority: Number | None = None


class Refused(Message, frozen=True, kw_only=True, omit_defaults=True, tag="refused"):
    """Not now (429/503 with ``retry_after_s``) or not here (404): ``status`` is what the client should see.

    ``policy``, ``detail``: with reason ``policy_refused``, the user's policy that refused, and why in its own words.
    """

    request_id: str
    epoch: Number
    reason: str
    status: Number = 503
    retry_after_s: Number | None = None
    policy: str | None = None
    detail: str | None = None


AdmitReply = Held | Granted | Refused

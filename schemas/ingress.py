"""``tg.v1.ingress.state.<ingress>``: who is in flight, once a second: what a new leader rebuilds from."""

from __future__ import annotations

from schemas.admit import DecisionMode
from schemas.base import BodyDigest, Count, Fact, Message, Number, Tokens
from schemas.session import RequestKind, SessionIdentity


class HedgePlace(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Where a request was sent a second time, while neither engine answers."""

    worker: str
    rank: Count = 0
    grant_id: str = ""
    grant_epoch: Number = 0


class InFlight(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One accepted request of this ingress. ``worker``, ``grant_id``, ``attempt`` and ``predicted_cached_tokens`` are
    known once it is placed; ``hold_reason`` and ``held_since_ms`` while it is held. ``digest``: of a turn's body: one
    that did not come through and is sent again has the same. ``hedge``: where it was sent besides."""

    request_id: str
    model: str
    identity: SessionIdentity
    received_ms: Count
    kind: RequestKind = "turn"
    endpoint: str = "chat_completions"
    worker: str | None = None
    rank: Count | None = None
    grant_id: str | None = None
    grant_epoch: Number | None = None
    mode: DecisionMode | None = None
    input_tokens: Tokens = 0
    attempt: Count = 0
    predicted_cached_tokens: Tokens = 0
    hold_reason: str | None = None
    held_since_ms: Count | None = None
    digest: BodyDigest = ""
    hedge: HedgePlace | None = None


class IngressState(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """``final`` marks the last fact of a clean stop. ``part`` of ``parts`` when the table is larger than a message."""

    ingress: str
    in_flight: tuple[InFlight, ...] = ()
    final: bool = False
    part: Count = 0
    parts: Count = 1

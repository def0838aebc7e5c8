"""``tg.v1.placed.<worker>`` (MessagePack): what was sent where."""

from __future__ import annotations

from schemas.admit import DecisionMode
from schemas.base import Count, Fact
from schemas.index import ChainUnit
from schemas.session import SessionKey


class Placed(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt goes to this rank. Published once per grant, and by an ingress that places by itself (``fallback``).

    ``session`` and ``parent``: only of a turn that moves its session. ``chain``, ``block_size``, ``unit``: as in
    `schemas.index.MatchRequest`; empty where the prompt has none. ``indexed``: blocks of the chain that the rank held
    by its events when the decision was made, to be compared with what the engine reports; absent where its events
    were not to be trusted, or were not asked. ``message_chain``, ``preamble``: as in `schemas.index.RecogniseRequest`,
    of a session that is recognised by its content.
    """

    request_id: str
    model: str
    worker: str
    rank: Count
    session: SessionKey | None = None
    parent: SessionKey | None = None
    mode: DecisionMode = "policy"
    unit: ChainUnit = "tokens"
    block_size: Count = 0
    chain: bytes = b""
    indexed: Count | None = None
    preamble: Count = 0
    message_chain: bytes = b""

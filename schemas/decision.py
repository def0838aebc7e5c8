"""``tg.v1.decision.<worker>``: the whole decision, for GPU workers, hint planners and watchers."""

from __future__ import annotations

import msgspec

from schemas.admit import DecisionMode, Grant
from schemas.base import Count, Fact, Message, Number, Tokens
from schemas.index import SourceHealth, TierBlocks
from schemas.session import RequestKind, SessionIdentity


class Candidate(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One (worker, rank) as the policy saw it. ``cost`` in blocks, lower wins (spec: cost function, corrected);
    ``parts`` are its terms by name. ``excluded`` says why it could not be chosen."""

    worker: str
    rank: Count
    cost: float | None = None
    parts: dict[str, float] = msgspec.field(default_factory=dict)
    blocks: TierBlocks = TierBlocks()
    open_grants: Count = 0
    health: SourceHealth = "blind"
    health_reason: str | None = None
    sticky: bool = False
    excluded: str | None = None


class Decision(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """One decision. Published exactly once per grant, on the subject of the chosen worker."""

    request_id: str
    model: str
    worker: str
    rank: Count
    identity: SessionIdentity
    grant: Grant
    attempt: Count = 0
    kind: RequestKind = "turn"
    mode: DecisionMode = "policy"
    policy: str = "kv"
    input_tokens: Tokens = 0
    block_size: Count = 0
    predicted_cached_tokens: Tokens = 0
    previous_worker: str | None = None
    index_health: SourceHealth = "blind"
    index_reason: str | None = None
    hold_ms: Number = 0
    hold_reason: str | None = None
    decide_us: Number = 0
    candidates: tuple[Candidate, ...] = ()

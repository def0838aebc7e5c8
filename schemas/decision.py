"""``tg.v1.decision.<worker>``: the whole decision, for GPU workers, hint planners and watchers."""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.admit import DecisionMode, Grant
from schemas.base import Count, Fact, Message, Number, Tokens
from schemas.index import SourceHealth, TierBlocks
from schemas.session import RequestKind, SessionIdentity

PolicyAsk = Literal["route", "admit", "lease", "hint"]
"""What a user's policy may be asked: where a turn goes, whether it goes now, whether an idle session's KV is kept (all
by admission), and what caches are told (by the hint planner)."""


class PolicyAsked(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A user's policy that was asked about a decision, and what became of its answer (the last one; ``times``: how
    often it was asked while the turn waited; ``took_ms``: for the last answer).

    ``outcome``: for ``route`` ``used``, ``outvoted`` (another rank was better all the same), ``unusable`` (no such
    candidate, or not usable); for ``admit`` ``admit``, ``hold``, ``refuse``, ``overruled`` (a policy before it held or
    refused). Any: ``no_opinion``, and why nothing was heard: ``late``, ``absent``, ``malformed``, ``failed``, ``busy``
    (too many questions to it were open), ``resting`` (it was late too often), ``unsent`` (the bus was away).
    """

    policy: str
    ask: PolicyAsk
    outcome: str
    took_ms: float = 0.0
    times: Count = 1
    reason: str | None = None


class Candidate(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One (worker, rank) as the policy saw it. ``cost`` in blocks, lower wins (spec: cost function, corrected);
    ``parts`` are its terms by name; ``policy`` among them is what users' policies add, on top of ``cost``. ``excluded``
    says why it could not be chosen."""

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
    """One decision. Published exactly once per grant, on the subject of the chosen worker. ``policies``: those of users
    that were asked on the way to it."""

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
    predicted_shared_tokens: Tokens = 0
    previous_worker: str | None = None
    index_health: SourceHealth = "blind"
    index_reason: str | None = None
    hold_ms: Number = 0
    hold_reason: str | None = None
    decide_us: Number = 0
    candidates: tuple[Candidate, ...] = ()
    policies: tuple[PolicyAsked, ...] = ()

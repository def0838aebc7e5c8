"""The index: source health as facts, and the two questions (match a chain, describe a session)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import Count, Fact, Message, Sequence
from schemas.session import SessionKey

SourceHealth = Literal["synced", "catching_up", "approximate", "blind"]
"""``approximate``: known from what was sent there, or not in full; ``reason`` says which."""

ChainUnit = Literal["tokens", "text"]
"""What the blocks of a chain are made of: token ids, or UTF-8 text where nobody has counted the tokens."""


class IndexSource(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.index.source.<worker>.<rank>``: how far an indexer trusts its picture of one source, on change."""

    worker: str
    rank: Count
    health: SourceHealth
    reason: str | None = None
    incarnation: str = ""
    seq_applied: Sequence = -1
    blocks: Count = 0


class MatchRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.index.match`` (MessagePack): who holds how much of this chain?

    ``chain``: chain hashes of the prompt's full blocks, u64 little-endian back to back (8 bytes a block). ``unit``:
    what its blocks are made of; of ``text`` blocks ``block_size`` is about how many tokens one holds.
    ``session`` is not needed any more and is ignored: `schemas.placed.Placed` says where a session's prefix went.
    ``pages``: hashes of the prompt's full pages of ``page_size`` tokens by the shared pool's own rule, the first 16
    bytes of each digest back to back (`schemas.pool.PageHash` ``sha256_chain``); empty where no worker needs them.
    """

    model: str
    block_size: Count
    chain: bytes
    salt_rule: str = "cache_salt"
    session: SessionKey | None = None
    unit: ChainUnit = "tokens"
    pages: bytes = b""
    page_size: Count = 0


class TierBlocks(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Blocks of the reachable prefix per tier; each position counts once, at its best tier."""

    device: Count = 0
    host: Count = 0
    disk: Count = 0
    external: Count = 0

    @property
    def reach(self) -> int:
        """Length of the contiguous reachable prefix, in blocks."""
        return self.device + self.host + self.disk + self.external


class WorkerMatch(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One (worker, rank) of the pool: what it holds of the chain, and how far that can be trusted.

    ``indexed``: where ``blocks`` come from what was sent there and the rank has an event stream all the same, the
    reach that its events would give: what parity goes on to measure. ``pool``: the shared pool that it reads, where
    credit can be given for it.
    """

    worker: str
    rank: Count
    blocks: TierBlocks = TierBlocks()
    health: SourceHealth = "synced"
    reason: str | None = None
    resident_blocks: Count = 0
    indexed: Count | None = None
    pool: str | None = None


class PoolMatch(Message, frozen=True, kw_only=True, omit_defaults=True):
    """What one shared pool holds of the chain: half-open [start, end) ranges of positions in blocks, all of them.

    Only the run that continues a worker's own reachable prefix is of use to it (`WorkerMatch.pool`). ``age_ms``: since
    the pool's bridge agreed with the pool's own key list; what is said is likely, not sure (spec: pool-events §4.6).
    """

    pool: str
    ranges: tuple[tuple[int, int], ...] = ()
    health: SourceHealth = "synced"
    reason: str | None = None
    age_ms: Count | None = None


class MatchReply(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to `MatchRequest`: every source of the pool, also those that hold nothing.

    ``pools``: what each shared pool that a worker of the pool reads holds of the chain. ``shared``: the ranges of the
    only one, where there is only one that can be trusted.
    """

    indexer: str
    matches: tuple[WorkerMatch, ...] = ()
    shared: tuple[tuple[int, int], ...] = ()
    error: str | None = None
    pools: tuple[PoolMatch, ...] = ()


Relation = Literal["continues", "forks", "repeats", "new"]
"""What a prompt without identity is to a known session: its next turn; a branch off its history; a prompt that it has
been sent already (a retry, or somebody who asks the same); nothing."""


class RecogniseRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.index.recognise`` (MessagePack): whose next turn is this prompt, which names nobody?

    ``message_chain``: a hash of everything so far at the end of each part of the prompt's tools, system and messages,
    u64 little-endian back to back: two prompts have the same one exactly where the one begins with the other. Blocks of
    a `MatchRequest` would not say where a prompt ends. A hash's lowest bit: the model said that part. ``preamble``: how
    many of them are of tools and leading system messages, which every session of a harness shares. ``tenant``: only its
    sessions count. ``request_id``: the session that is named in the answer is taken for busy with it until its end.
    """

    model: str
    message_chain: bytes
    preamble: Count = 0
    tenant: str = "default"
    request_id: str = ""


class RecogniseReply(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The answer: ``session`` where it ``continues`` one (or ``repeats`` what one was sent and not answered),
    ``parent`` where it ``forks`` from one (or ``repeats`` what one was answered).

    ``confidence`` in 0..1; ``reason``: why it is not higher, or why nothing is said; ``depth``: how many hashes of its
    message chain are known.
    """

    indexer: str
    relation: Relation = "new"
    session: SessionKey | None = None
    parent: SessionKey | None = None
    confidence: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    reason: str | None = None
    depth: Count = 0
    error: str | None = None


class SessionQuery(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.index.session`` (JSON): what is known of one session's prefix; or, by ``block``, whose block it is."""

    session: SessionKey | None = None
    block: str | None = None


class SessionResidency(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to `SessionQuery`: where the session's chain ended last (hex of the chain hash, depth in blocks of
    ``unit``).

    ``unique_blocks``: of its tail, which no other known session has; ``shared_blocks``: the rest. ``sharing``: sessions
    of its tenant that have some of it too, the nearest first, at most 100. ``children``: those of its tenant that were
    forked from it, or name it as their parent. ``expected_blocks``: how long its next prompt is likely to be.
    ``resident`` is per tier; in ``pools`` what shared pools hold. ``block_size`` in tokens. ``truncated``: more of
    ``sessions``, ``sharing`` or ``children`` are known than are named.
    """

    session: SessionKey | None = None
    frontier: str | None = None
    depth: Count = 0
    parent: SessionKey | None = None
    sessions: tuple[SessionKey, ...] = ()
    resident: tuple[WorkerMatch, ...] = ()
    error: str | None = None
    unit: ChainUnit = "tokens"
    block_size: Count = 0
    unique_blocks: Count = 0
    shared_blocks: Count = 0
    expected_blocks: Count | None = None
    sharing: tuple[SessionKey, ...] = ()
    children: tuple[SessionKey, ...] = ()
    pools: tuple[PoolMatch, ...] = ()
    truncated: bool = False

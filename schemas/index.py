"""The index: source health as facts, and the two questions (match a chain, describe a session)."""

from __future__ import annotations

from typing import Literal

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
    """

    model: str
    block_size: Count
    chain: bytes
    salt_rule: str = "cache_salt"
    session: SessionKey | None = None
    unit: ChainUnit = "tokens"


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
    reach that its events would give: what parity goes on to measure.
    """

    worker: str
    rank: Count
    blocks: TierBlocks = TierBlocks()
    health: SourceHealth = "synced"
    reason: str | None = None
    resident_blocks: Count = 0
    indexed: Count | None = None


class MatchReply(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to `MatchRequest`: every source of the pool, also those that hold nothing.

    ``shared``: half-open [start, end) ranges of positions that the shared pool holds, only the run that can be reached.
    """

    indexer: str
    matches: tuple[WorkerMatch, ...] = ()
    shared: tuple[tuple[int, int], ...] = ()
    error: str | None = None


class SessionQuery(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.index.session`` (JSON): what is known of one session's prefix; or, by ``block``, whose block it is."""

    session: SessionKey | None = None
    block: str | None = None


class SessionResidency(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to `SessionQuery`: where the session's chain ended last (hex of the chain hash, depth in blocks of
    ``unit``)."""

    session: SessionKey | None = None
    frontier: str | None = None
    depth: Count = 0
    parent: SessionKey | None = None
    sessions: tuple[SessionKey, ...] = ()
    resident: tuple[WorkerMatch, ...] = ()
    error: str | None = None
    unit: ChainUnit = "tokens"

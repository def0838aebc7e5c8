"""Memory below the device of one rank: host memory and a disk, and the links over which blocks come and go.

What was computed is copied to the nearest tier (write-through, or only what the device evicts); what leaves a tier goes
to the next one, and from the last one it is gone. Each link does one copy after another, in both directions; what is
copied counts as there at once, and whoever wants it waits behind its copy. A shared pool has a link too; what lies in
it is asked of it when a request arrives (`EngineRequest.in_pool`). Times are seconds of the engine's clock.

The rules are those of the laboratory (`load.sim.tiers`). Source: spec scheduling §4.1 (5), engine-events §2.7, §4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from load.engine.free_queue import USUAL, FreeQueue
from load.engine.kv_cache import BlockContent, stored_events
from load.engine.kv_events import BlockRemoved, KvEvent, TierName

WritePolicy = Literal["through", "evict"]
Source = Literal["host", "disk", "pool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Sizes in blocks (0: there is none) and seconds that a link takes for one block. ``host_write``: when the device's
    blocks are copied down. ``cleared_with_device``: a reset of the prefix cache empties them too (SGLang)."""

    host_blocks: int = 0
    host_block_s: float = 0.0
    host_write: WritePolicy = "through"
    disk_blocks: int = 0
    disk_block_s: float = 0.0
    pool: bool = False
    pool_block_s: float = 0.0
    cleared_with_device: bool = False


class Link:
    """One copy after another; ``free_s``: when it has done all that it was asked for."""

    __slots__ = ("block_s", "free_s")

    def __init__(self, block_s: float) -> None:
        self.block_s = block_s
        self.free_s = 0.0

    def copy(self, blocks: int, now: float) -> float:
        """Asks for a copy of so many blocks; when it is done."""
        self.free_s = max(self.free_s, now) + blocks * self.block_s
        return self.free_s


class Tier:
    """``capacity`` blocks by digest. ``loaded``, ``stored``, ``evicted`` count blocks."""

    def __init__(self, name: TierName, capacity: int, block_s: float) -> None:
        self.name = name
        self.capacity = capacity
        self.link = Link(block_s)
        self.loaded = self.stored = self.evicted = 0
        self.arriving: dict[bytes, float] = {}
        """Of blocks that come from below: when they will be here."""
        self._contents: dict[bytes, BlockContent] = {}
        self._order: FreeQueue[bytes] = FreeQueue()

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._contents

    def resident(self) -> Iterator[BlockContent]:
        yield from self._contents.values()

    def touch(self, contents: Sequence[BlockContent]) -> None:
        """They are used last of all, the beginning last: a block is of no use without those before it."""
        for content in reversed(contents):
            if content.digest in self._contents:
                self._order.touch(content.digest)

    def touch_digest(self, digest: bytes) -> None:
        """It is used. It may have left meanwhile: what it made room for came down when its own copy up had begun."""
        if digest in self._contents:
            self._order.touch(digest)

    def set_level(self, digest: bytes, level: int) -> None:
        """How long it stays, against others."""
        if digest in self._contents:
            self._order.push(digest, level)

    def add(self, content: BlockContent) -> None:
        self._contents[content.digest] = content
        self._order.push(content.digest, USUAL)
        self.stored += 1

    def overflow(self) -> list[BlockContent]:
        """Takes out what is too much, the least wanted first."""
        gone = []
        while len(self._contents) > self.capacity:
            digest = self._order.pop()
            self.arriving.pop(digest, None)
            gone.append(self._contents.pop(digest))
        self.evicted += len(gone)
        return gone

    def clear(self) -> None:
        self._contents.clear()
        self.arriving.clear()
        self._order = FreeQueue()


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks ``first`` to ``end`` of a sequence that lie in one place."""

    source: Source
    first: int
    end: int

    @property
    def blocks(self) -> int:
        return self.end - self.first


class LowerTiers:
    """The tiers of one rank, the nearest first; there may be none. ``emit`` takes their events."""

    def __init__(self, config: TierConfig, emit: Callable[[KvEvent], None]) -> None:
        self.config = config
        self.tiers: list[Tier] = []
        if config.host_blocks:
            self.tiers.append(Tier("host", config.host_blocks, config.host_block_s))
        if config.disk_blocks:
            self.tiers.append(Tier("disk", config.disk_blocks, config.disk_block_s))
        self.pool_link = Link(config.pool_block_s)
        self.pool_loaded = 0
        self._emit = emit

    def tier(self, name: str) -> Tier | None:
        return next((tier for tier in self.tiers if tier.name == name), None)

    def pieces(self, digests: Sequence[bytes], first: int, limit: int, in_pool: range = range(0)) -> list[Piece]:
        """What follows the first ``first`` blocks without a gap, up to ``limit``, each at its nearest tier.
        ``in_pool``: the blocks that the shared pool is known to have."""
        pieces: list[Piece] = []
        for index in range(first, limit):
            source = self._source(digests[index], index, in_pool)
            if source is None:
                break
            if pieces and pieces[-1].source == source:
                pieces[-1] = Piece(source, pieces[-1].first, index + 1)
            else:
                pieces.append(Piece(source, index, index + 1))
        return pieces

    def _source(self, digest: bytes, index: int, in_pool: range) -> Source | None:
        for tier in self.tiers:
            if digest in tier:
                return "host" if tier.name == "host" else "disk"
        return "pool" if index in in_pool else None

    def load(self, digests: Sequence[bytes], pieces: Sequence[Piece], now: float) -> float:
        """Asks for ``pieces``; when all of them are on the device."""
        due = now
        for piece in pieces:
            tier = self.tier(piece.source)
            if tier is None:
                self.pool_loaded += piece.blocks
                due = max(due, self.pool_link.copy(piece.blocks, now))
                continue
            wanted = digests[piece.first : piece.end]
            tier.loaded += piece.blocks
            here = max((tier.arriving.get(digest, now) for digest in wanted), default=now)
            due = max(due, here, tier.link.copy(piece.blocks, now))
            for digest in reversed(wanted):
                tier.touch_digest(digest)
        return due

    def store(
        self, contents: Sequence[BlockContent], now: float, session_id: str | None = None, start: int = 0
    ) -> float:
        """Copies what is not there of ``contents`` to the nearest tier (or number ``start``); when that is done."""
        if start >= len(self.tiers):
            return now
        tier = self.tiers[start]
        contents = contents[: tier.capacity]
        missing = [content for content in contents if content.digest not in tier]
        for content in missing:
            tier.add(content)
        tier.touch(contents)
        self._tell(missing, tier, session_id)
        due = tier.link.copy(len(missing), now)
        self._settle(start, now)
        return due

    def fetch(self, contents: Sequence[BlockContent], pieces: Sequence[Piece], now: float) -> int:
        """Copies ``pieces`` of ``contents`` from below to the nearest tier; how many blocks. ``contents`` by index."""
        if not self.tiers:
            return 0
        near, fetched = self.tiers[0], 0
        for piece in pieces:
            source = self.tier(piece.source)
            if source is near:
                continue
            due = (self.pool_link if source is None else source.link).copy(piece.blocks, now)
            part = list(contents[piece.first : piece.end])
            for content in part:
                near.add(content)
                near.arriving[content.digest] = due
            self._tell(part, near, None)
            fetched += piece.blocks
        near.touch(contents)
        self._settle(0, now)
        return fetched

    def arrived(self, now: float) -> None:
        """Forget of what came from below that it was on its way."""
        for tier in self.tiers:
            if tier.arriving:
                tier.arriving = {digest: due for digest, due in tier.arriving.items() if due > now}

    def clear(self) -> None:
        for tier in self.tiers:
            tier.clear()

    def _tell(self, contents: Sequence[BlockContent], tier: Tier, session_id: str | None) -> None:
        for event in stored_events(contents, tier.name, session_id):
            self._emit(event)

    def _settle(self, number: int, now: float) -> None:
        """What is too much for a tier goes to the next one; it is there before it is told to be gone here."""
        tier = self.tiers[number]
        gone = sorted(tier.overflow(), key=lambda content: content.index)
        if not gone:
            return
        self.store(gone, now, start=number + 1)
        for content in gone:
            self._emit(BlockRemoved(content.digest, tier.name))

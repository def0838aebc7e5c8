"""Memory below a rank's KV cache: host memory, a disk, and a pool that all ranks share. What is there is loaded instead
of computed again.

Write-through to the nearest tier: when a request ends or is pre-empted, the full blocks that it computed are copied
there, but for those that are there already. What leaves a tier goes to the next one (write-back), the last one's is
gone; what is to go first of all is not written. A pool that is written through has a copy of everything from the
beginning. Each tier has one link for both directions, first come, first served; that of the pool is the rank's own. A
position of a prompt counts at its nearest tier. A copy holds no memory above while it lasts, and what is copied counts
as there at once: whoever wants it waits behind its copy on the link.

Source: spec scheduling §4.1 (5), policy §3 (ii), index-and-routing §4.1 (best tier once).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from load.sim.block_store import BlockStore
from load.sim.content import Chain
from load.sim.preferences import Preferences

TierName = Literal["host", "disk", "pool"]


class Link:
    """Takes ``block_ps`` picoseconds for a block; ``free_ps``: when it has done all that it was asked for."""

    __slots__ = ("block_ps", "free_ps")

    def __init__(self, block_ps: int) -> None:
        self.block_ps = block_ps
        self.free_ps = 0

    def copy(self, blocks: int, now: int) -> int:
        """Asks for a copy of so many blocks; when it is done."""
        self.free_ps = max(self.free_ps, now) + blocks * self.block_ps
        return self.free_ps


class Tier:
    """A store and the link to it. ``loaded`` and ``stored`` count blocks."""

    __slots__ = ("link", "loaded", "name", "store", "stored")

    def __init__(self, name: TierName, store: BlockStore, block_ps: int) -> None:
        self.name = name
        self.store = store
        self.link = Link(block_ps)
        self.loaded = self.stored = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks ``first`` to ``end`` of a prompt that lie in one tier."""

    tier: Tier
    first: int
    end: int

    @property
    def blocks(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class Depths:
    """Blocks of a prompt's prefix without a gap, each at its nearest tier."""

    device: int = 0
    host: int = 0
    disk: int = 0
    pool: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk + self.pool


class Memory:
    """The tiers of one rank, the nearest first; at least one. ``pool_through``: the pool is written through too."""

    def __init__(self, tiers: list[Tier], *, pool_through: bool = False) -> None:
        if not tiers:
            raise ValueError("a memory below the device has at least one tier")
        self.tiers = tiers
        self._pool_through = pool_through and len(tiers) > 1 and tiers[-1].name == "pool"
        self._coming: dict[Chain, int] = {}
        """When what was fetched into the nearest tier of a chain is there."""
        self._preferences = Preferences()

    # What is where

    def find(self, chain: Chain, first: int, limit: int) -> list[Piece]:
        """What follows the first ``first`` blocks of ``chain`` without a gap, up to ``limit``."""
        pieces: list[Piece] = []
        at = first
        for own, _, stop in chain.path:
            stop = min(stop, limit)
            while at < stop:
                tier, end = self._nearest(own, at, stop)
                if tier is None:
                    return pieces
                if pieces and pieces[-1].tier is tier:
                    pieces[-1] = Piece(tier, pieces[-1].first, end)
                else:
                    pieces.append(Piece(tier, at, end))
                at = end
        return pieces

    def _nearest(self, own: Chain, at: int, stop: int) -> tuple[Tier | None, int]:
        """The nearest tier that has the chain's block ``at``, and up to where it has those that follow."""
        for tier in self.tiers:
            end = tier.store.reach(own, at)
            if end > at:
                return tier, min(end, stop)
        return None, at

    # What is copied

    def load(self, chain: Chain, pieces: list[Piece], now: int) -> int:
        """Asks for ``pieces`` of `find`; when all of them are on the device."""
        due = now
        for piece in pieces:
            due = max(due, self._read(piece, now))
        for own, start, _ in reversed(chain.path):
            if pieces and start < pieces[-1].end:
                due = max(due, self._coming.get(own, 0))
                for tier in self.tiers:
                    tier.store.touch(own)
        return due

    def store(self, chain: Chain, end: int, now: int) -> None:
        """Copies what is not there of the first ``end`` blocks of ``chain`` to the nearest tier, and to a pool that is
        written through."""
        self._write(0, chain, 0, end, now)
        if self._pool_through:
            self._write(len(self.tiers) - 1, chain, 0, end, now)

    def fetch(self, chain: Chain, first: int, limit: int, now: int) -> int:
        """Copies what follows ``first`` from the tiers below to the nearest one; how many blocks."""
        near = self.tiers[0]
        fetched = 0
        for piece in self.find(chain, first, limit):
            if piece.tier is not near:
                due = self._read(piece, now)
                for own, lo, hi in _parts(chain, piece.first, piece.end):
                    self._coming[own] = max(due, self._coming.get(own, 0))
                    near.store.put(own, lo, hi, self._preferences.of(own))
                fetched += piece.blocks
        self._settle(0, now)
        self._coming = {own: due for own, due in self._coming.items() if due > now}
        return fetched

    def demote(self, chain: Chain, end: int, lowest: TierName, now: int) -> None:
        """The first ``end`` blocks of ``chain`` are to be in ``lowest``, or the last tier where that is not there: they
        are copied. Tiers above keep what they have as long as there is room."""
        place = next((at for at, tier in enumerate(self.tiers) if tier.name == lowest), len(self.tiers) - 1)
        self._write(place, chain, 0, end, now)

    # What is kept

    def prefer(self, chain: Chain, priority: int, *, pool: bool = True) -> None:
        """What is there of ``chain`` leaves its tier after all of lower ``priority`` (`Preferences`). Not ``pool``: in
        the rank's own tiers alone."""
        self._preferences.wish(chain, priority)
        for own, _, _ in chain.path:
            for tier in self.tiers:
                if pool or tier.name != "pool":
                    tier.store.prefer(own, self._preferences.of(own))

    def drop(self, chain: Chain) -> int:
        """The chain's own part is gone from all tiers; blocks."""
        self._preferences.wish(chain, 0)
        return sum(tier.store.drop(chain) for tier in self.tiers)

    def _read(self, piece: Piece, now: int) -> int:
        piece.tier.loaded += piece.blocks
        return piece.tier.link.copy(piece.blocks, now)

    def _write(self, place: int, chain: Chain, first: int, end: int, now: int) -> None:
        tier = self.tiers[place]
        added = 0
        for own, lo, hi in _parts(chain, first, end):
            added += tier.store.put(own, lo, hi, self._preferences.of(own))
        for own, lo, _ in reversed(chain.path):  # the beginning last: a fork is of no use without what it forks off
            if lo < end:
                tier.store.touch(own)
        tier.stored += added
        tier.link.copy(added, now)
        self._settle(place, now)

    def _settle(self, place: int, now: int) -> None:
        """What has no room in a tier goes to the next one that there is."""
        tier = self.tiers[place]
        below = self.tiers[place + 1] if place + 1 < len(self.tiers) else None
        for own, lo, hi in tier.store.shrink():
            if below is not None and self._preferences.of(own) >= 0:
                added = below.store.put(own, lo, hi, self._preferences.of(own))
                below.stored += added
                below.link.copy(added, now)
        if below is not None:
            self._settle(place + 1, now)


def _parts(chain: Chain, first: int, end: int) -> list[tuple[Chain, int, int]]:
    """The blocks from ``first`` to ``end`` by owner."""
    clipped = [(own, max(lo, first), min(hi, end)) for own, lo, hi in chain.path]
    return [(own, lo, hi) for own, lo, hi in clipped if lo < hi]

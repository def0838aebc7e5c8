"""What a memory below the device holds: ranges of a chain's blocks, and which of them leave first.

Blocks leave by (priority, last use): those of lower priority first, of equal ones the chain that was used longest ago,
its last blocks first. A chain here is its own part alone, from its fork on (`load.sim.content`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from load.sim.content import Chain

Part = tuple[Chain, int, int]
"""A chain, and its blocks from the first number to the second."""


@dataclass(slots=True)
class _Kept:
    """Of one chain: disjoint ranges in order, and its place in the order of leaving."""

    ranges: list[tuple[int, int]]
    priority: int
    used: int


class BlockStore:
    """At most ``blocks`` blocks after each `shrink`. ``used``: blocks that are there."""

    def __init__(self, blocks: int) -> None:
        if blocks < 1:
            raise ValueError("a memory has at least one block")
        self.blocks = blocks
        self.used = 0
        self._kept: dict[Chain, _Kept] = {}
        self._order: list[tuple[int, int, int, Chain]] = []
        """Heap of (priority, last use, number, chain); entries that are not a chain's present place are passed over."""
        self._uses = 0

    def __contains__(self, chain: Chain) -> bool:
        return chain in self._kept

    def reach(self, chain: Chain, first: int) -> int:
        """The end of the blocks of ``chain`` that are there without a gap from ``first`` on; ``first`` where none."""
        kept = self._kept.get(chain)
        if kept is not None:
            for lo, hi in kept.ranges:
                if lo <= first < hi:
                    return hi
        return first

    def put(self, chain: Chain, first: int, end: int, priority: int = 0) -> int:
        """The blocks from ``first`` to ``end`` are there from now on, and the chain was used now; how many are new.
        ``priority``: of a chain of which nothing was there."""
        if end <= first:
            return 0
        kept = self._kept.get(chain)
        if kept is None:
            kept = self._kept[chain] = _Kept([], priority, 0)
        lo, hi, before = first, end, 0
        apart = []
        for start, stop in kept.ranges:
            if stop < first or start > end:
                apart.append((start, stop))
                continue
            before += min(stop, end) - max(start, first)
            lo, hi = min(lo, start), max(hi, stop)
        kept.ranges = sorted([*apart, (lo, hi)])
        added = end - first - before
        self.used += added
        self.touch(chain)
        return added

    def touch(self, chain: Chain) -> None:
        """The chain is used now, if any of it is there."""
        kept = self._kept.get(chain)
        if kept is not None:
            self._uses += 1
            kept.used = self._uses
            self._enter(chain, kept)

    def prefer(self, chain: Chain, priority: int) -> None:
        """What is there of the chain leaves after all of lower ``priority``; its last use stays what it was."""
        kept = self._kept.get(chain)
        if kept is not None and kept.priority != priority:
            kept.priority = priority
            self._enter(chain, kept)

    def drop(self, chain: Chain, first: int = 0, end: int | None = None) -> int:
        """The blocks from ``first`` to ``end`` are gone; how many there were."""
        kept = self._kept.get(chain)
        if kept is None:
            return 0
        left = []
        for lo, hi in kept.ranges:
            left += [(lo, min(hi, first))] if lo < first else []
            left += [(max(lo, end), hi)] if end is not None and end < hi else []
        gone = sum(hi - lo for lo, hi in kept.ranges) - sum(hi - lo for lo, hi in left)
        kept.ranges = left
        self.used -= gone
        if not left:
            del self._kept[chain]
        return gone

    def shrink(self) -> Iterator[Part]:
        """Blocks leave until the others have room; what leaves, in the order in which it does."""
        while self.used > self.blocks:
            priority, used, _, chain = self._order[0]
            kept = self._kept.get(chain)
            if kept is None or (kept.priority, kept.used) != (priority, used):
                heapq.heappop(self._order)
                continue
            lo, hi = kept.ranges[-1]
            gone = min(self.used - self.blocks, hi - lo)
            self.drop(chain, hi - gone, hi)
            yield chain, hi - gone, hi

    def _enter(self, chain: Chain, kept: _Kept) -> None:
        if len(self._order) > 64 + 8 * len(self._kept):
            self._order = [(each.priority, each.used, each.used, own) for own, each in self._kept.items()]
            heapq.heapify(self._order)
        self._uses += 1
        heapq.heappush(self._order, (kept.priority, kept.used, self._uses, chain))

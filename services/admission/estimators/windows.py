"""Bounded collections of samples that stay sorted: a multiset, and the last n of a stream."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

BLOCK = 512
"""Half of what a block of a multiset holds: moving so much is no dearer than finding its place."""


class SortedMultiset:
    """Numbers in ascending order, equal ones as often as they were added; no larger than its owner makes it.

    In blocks of up to 2 * `BLOCK`: adding and removing move what is behind within one of them, however many there are.
    """

    __slots__ = ("_blocks", "_lasts", "_size")

    def __init__(self) -> None:
        self._blocks: list[list[float]] = []
        self._lasts: list[float] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, value: float) -> None:
        self._size += 1
        if not self._blocks:
            self._blocks, self._lasts = [[value]], [value]
            return
        at = min(bisect_left(self._lasts, value), len(self._lasts) - 1)
        block = self._blocks[at]
        insort(block, value)
        self._lasts[at] = block[-1]
        if len(block) > 2 * BLOCK:
            self._blocks[at : at + 1] = [block[:BLOCK], block[BLOCK:]]
            self._lasts.insert(at, block[BLOCK - 1])

    def remove(self, value: float) -> None:
        """Takes one ``value`` out. Raises `KeyError` where there is none."""
        at = bisect_left(self._lasts, value)
        block = self._blocks[at] if at < len(self._blocks) else []
        place = bisect_left(block, value)
        if place == len(block) or block[place] != value:
            raise KeyError(value)
        del block[place]
        self._size -= 1
        if block:
            self._lasts[at] = block[-1]
        else:
            del self._blocks[at], self._lasts[at]

    def counts_from(self, values: Sequence[float]) -> list[int]:
        """For each of ``values``, ascending, how many numbers are no smaller; O(log n) each."""
        counts, at, before = [], 0, 0
        for value in values:
            while at < len(self._lasts) and self._lasts[at] < value:
                before += len(self._blocks[at])
                at += 1
            inside = bisect_left(self._blocks[at], value) if at < len(self._blocks) else 0
            counts.append(self._size - before - inside)
        return counts


class SortedWindow:
    """The last ``size`` samples of a stream, in their order and ascending."""

    __slots__ = ("_ascending", "_ordered", "size")

    def __init__(self, size: int, samples: Iterable[float] = ()) -> None:
        self.size = size
        self._ordered: deque[float] = deque(samples, maxlen=size)
        self._ascending = sorted(self._ordered)

    def __len__(self) -> int:
        return len(self._ordered)

    @property
    def ascending(self) -> Sequence[float]:
        """The samples, ascending; not to be changed."""
        return self._ascending

    def ordered(self) -> tuple[float, ...]:
        """The samples, oldest first."""
        return tuple(self._ordered)

    def add(self, value: float) -> None:
        """Takes a sample in; the oldest leaves where the window is full."""
        if len(self._ordered) == self.size:
            del self._ascending[bisect_left(self._ascending, self._ordered[0])]
        self._ordered.append(value)
        insort(self._ascending, value)

    def remove_at(self, at: int) -> None:
        """Takes a sample out, by its place from the oldest. Raises `IndexError`."""
        value = self._ordered[at]
        del self._ordered[at]
        del self._ascending[bisect_left(self._ascending, value)]

    def quantile(self, share: float) -> float:
        """The smallest sample that at least ``share`` of all are not above (nearest rank).

        Raises `IndexError` of an empty window.
        """
        rank = max(1, math.ceil(share * len(self._ordered) - 1e-9))
        return self._ascending[rank - 1]

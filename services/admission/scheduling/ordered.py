"""Sorted containers that a decision can afford: finding is a binary search, moving what is behind a memory move."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

Key = tuple[float, int]
"""Rank (lower first), then a number that makes it unique."""

BLOCK = 64


class OrderedKeys:
    """Distinct keys in ascending order."""

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: list[Key] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def at(self, place: int) -> Key:
        """The key at ``place``, counted from 0. Raises `IndexError`."""
        return self._keys[place]

    def add(self, key: Key) -> None:
        insort(self._keys, key)

    def remove(self, key: Key) -> None:
        """Raises `KeyError` where it is not."""
        place = bisect_left(self._keys, key)
        if place == len(self._keys) or self._keys[place] != key:
            raise KeyError(key)
        del self._keys[place]


class OrderedSums:
    """Whole numbers by key, and the sum of all whose rank is no greater than a given one.

    In blocks of up to 2 * `BLOCK` entries whose sums are kept: changing and asking touch one block and the sums of the
    blocks, O(sqrt n) for as many as a rank ever holds.
    """

    __slots__ = ("_blocks", "_sums", "total")

    def __init__(self) -> None:
        self._blocks: list[tuple[list[Key], list[int]]] = []
        self._sums: list[int] = []
        self.total = 0

    def __len__(self) -> int:
        return sum(len(keys) for keys, _ in self._blocks)

    def _block(self, key: Key) -> int:
        return min(bisect_left(self._blocks, key, key=lambda block: block[0][-1]), len(self._blocks) - 1)

    def add(self, key: Key, value: int) -> None:
        if not self._blocks:
            self._blocks.append(([key], [value]))
            self._sums.append(value)
            self.total = value
            return
        at = self._block(key)
        keys, values = self._blocks[at]
        place = bisect_left(keys, key)
        keys.insert(place, key)
        values.insert(place, value)
        self._sums[at] += value
        self.total += value
        if len(keys) > 2 * BLOCK:
            self._blocks[at : at + 1] = [(keys[:BLOCK], values[:BLOCK]), (keys[BLOCK:], values[BLOCK:])]
            self._sums[at : at + 1] = [sum(values[:BLOCK]), sum(values[BLOCK:])]

    def remove(self, key: Key) -> None:
        """Raises `KeyError` where it is not."""
        at = self._block(key)
        keys, values = self._blocks[at] if self._blocks else ([], [])
        place = bisect_left(keys, key)
        if place == len(keys) or keys[place] != key:
            raise KeyError(key)
        self._sums[at] -= values[place]
        self.total -= values[place]
        del keys[place], values[place]
        if not keys:
            del self._blocks[at], self._sums[at]

    def through(self, rank: float) -> int:
        """The sum of the values whose rank is at most ``rank``."""
        end = (rank, 1 << 62)
        at = bisect_left(self._blocks, end, key=lambda block: block[0][-1])
        whole = sum(self._sums[:at])
        if at == len(self._blocks):
            return whole
        keys, values = self._blocks[at]
        return whole + sum(values[: bisect_right(keys, end)])

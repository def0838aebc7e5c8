"""Sorted containers that a decision can afford: finding is a binary search, moving what is behind a memory move."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

Key = tuple[float, int]
"""Rank (lower first), then a number that makes it unique."""

BLOCK = 64


class OrderedKeys:
    """Distinct keys in ascending order. ``is_of_seat``: for its owner, who waits at one seat and nowhere else."""

    __slots__ = ("_keys", "is_of_seat")

    def __init__(self, *, is_of_seat: bool = False) -> None:
        self._keys: list[Key] = []
        self.is_of_seat = is_of_seat

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def at(self, place: int) -> Key:
        """The key at ``place``, counted from 0. Raises `IndexError`."""
        return self._keys[place]

    def before(self, key: Key) -> int:
        """How many keys are less than ``key``; O(log n)."""
        return bisect_left(self._keys, key)

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

    In blocks of up to 2 * `BLOCK` entries whose last keys and sums are kept: changing and asking touch one block and
    the rows of those, O(sqrt n) for as many as a rank ever holds.
    """

    __slots__ = ("_keys", "_lasts", "_sums", "_values", "total")

    def __init__(self) -> None:
        self._lasts: list[Key] = []
        self._keys: list[list[Key]] = []
        self._values: list[list[int]] = []
        self._sums: list[int] = []
        self.total = 0

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    def add(self, key: Key, value: int) -> None:
        self.total += value
        if not self._keys:
            self._lasts, self._keys, self._values, self._sums = [key], [[key]], [[value]], [value]
            return
        at = min(bisect_left(self._lasts, key), len(self._lasts) - 1)
        keys, values = self._keys[at], self._values[at]
        place = bisect_left(keys, key)
        keys.insert(place, key)
        values.insert(place, value)
        self._sums[at] += value
        self._lasts[at] = keys[-1]
        if len(keys) > 2 * BLOCK:
            self._keys[at : at + 1] = [keys[:BLOCK], keys[BLOCK:]]
            self._values[at : at + 1] = [values[:BLOCK], values[BLOCK:]]
            self._sums[at : at + 1] = [sum(values[:BLOCK]), sum(values[BLOCK:])]
            self._lasts.insert(at, keys[BLOCK - 1])

    def remove(self, key: Key) -> None:
        """Raises `KeyError` where it is not."""
        at = bisect_left(self._lasts, key)
        keys = self._keys[at] if at < len(self._keys) else []
        place = bisect_left(keys, key)
        if place == len(keys) or keys[place] != key:
            raise KeyError(key)
        values = self._values[at]
        self._sums[at] -= values[place]
        self.total -= values[place]
        del keys[place], values[place]
        if keys:
            self._lasts[at] = keys[-1]
        else:
            del self._lasts[at], self._keys[at], self._values[at], self._sums[at]

    def through(self, rank: float) -> int:
        """The sum of the values whose rank is at most ``rank``."""
        end = (rank, 1 << 62)
        at = bisect_left(self._lasts, end)
        if at == len(self._lasts):
            return self.total
        whole = sum(self._sums[:at]) if at else 0
        return whole + sum(self._values[at][: bisect_right(self._keys[at], end)])

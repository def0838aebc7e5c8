"""Bounded collections of samples that stay sorted: a multiset, and the last n of a stream."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence


class SortedMultiset:
    """Numbers in ascending order, equal ones as often as they were added. Finding is O(log n), moving what is behind a
    memory move; no larger than its owner makes it."""

    __slots__ = ("_values",)

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._values = sorted(values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def ascending(self) -> Sequence[float]:
        """The numbers, ascending; not to be changed."""
        return self._values

    def add(self, value: float) -> None:
        insort(self._values, value)

    def remove(self, value: float) -> None:
        """Takes one ``value`` out. Raises `KeyError` where there is none."""
        at = bisect_left(self._values, value)
        if at == len(self._values) or self._values[at] != value:
            raise KeyError(value)
        del self._values[at]


class SortedWindow:
    """The last ``size`` samples of a stream, in their order and ascending."""

    __slots__ = ("_ascending", "_ordered", "size")

    def __init__(self, size: int, samples: Iterable[float] = ()) -> None:
        self.size = size
        self._ordered: deque[float] = deque(samples, maxlen=size)
        self._ascending = SortedMultiset(self._ordered)

    def __len__(self) -> int:
        return len(self._ordered)

    @property
    def ascending(self) -> Sequence[float]:
        """The samples, ascending; not to be changed."""
        return self._ascending.ascending

    def ordered(self) -> tuple[float, ...]:
        """The samples, oldest first."""
        return tuple(self._ordered)

    def add(self, value: float) -> None:
        """Takes a sample in; the oldest leaves where the window is full."""
        if len(self._ordered) == self.size:
            self._ascending.remove(self._ordered[0])
        self._ordered.append(value)
        self._ascending.add(value)

    def quantile(self, share: float) -> float:
        """The smallest sample that at least ``share`` of all are not above (nearest rank).

        Raises `IndexError` of an empty window.
        """
        rank = max(1, math.ceil(share * len(self._ordered) - 1e-9))
        return self.ascending[rank - 1]

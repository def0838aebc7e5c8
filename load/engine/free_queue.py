"""What can be taken, in the order in which it is: by level, the lowest first, and within a level the least recently
used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

LOWEST, USUAL, HIGHEST = -8, 0, 8
"""Levels that a hint may give; see `load.engine.hint_actions`."""
BLANK = LOWEST - 1
"""Of what holds nothing: it is taken before all else."""

Item = TypeVar("Item", bound=Hashable)


class FreeQueue(Generic[Item]):
    """Each item once, at one level."""

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._queues: dict[int, OrderedDict[Item, None]] = {}
        self._levels: dict[Item, int] = {}
        for item in items:
            self.push(item)

    def __len__(self) -> int:
        return len(self._levels)

    def __contains__(self, item: Item) -> bool:
        return item in self._levels

    def push(self, item: Item, level: int = USUAL, *, first: bool = False) -> None:
        """Put ``item`` at the end of ``level`` (or at its beginning); it leaves the place that it had."""
        self.discard(item)
        queue = self._queues.setdefault(level, OrderedDict())
        queue[item] = None
        self._levels[item] = level
        if first:
            queue.move_to_end(item, last=False)

    def touch(self, item: Item) -> None:
        """``item`` was used: the end of its level. What was to go early goes as usual again."""
        self.push(item, max(USUAL, self._levels[item]))

    def discard(self, item: Item) -> None:
        level = self._levels.pop(item, None)
        if level is not None:
            queue = self._queues[level]
            del queue[item]
            if not queue:
                del self._queues[level]

    def pop(self) -> Item:
        """The next one. Raises `KeyError` when there is none."""
        if not self._queues:
            raise KeyError("the queue is empty")
        item = next(iter(self._queues[min(self._queues)]))
        self.discard(item)
        return item

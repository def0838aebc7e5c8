"""A bounded table whose least recently used entry makes room: for keys that strangers choose."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LeastRecentlyUsed(Generic[K, V]):
    """Up to ``capacity`` (at least 1) entries, made by ``make`` on first use; ``evicted`` is told who had to leave."""

    __slots__ = ("_capacity", "_entries", "_evicted", "_make", "evictions")

    def __init__(
        self, capacity: int, make: Callable[[], V], evicted: Callable[[K, V], None] = lambda key, value: None
    ) -> None:
        self._capacity = capacity
        self._make = make
        self._evicted = evicted
        self._entries: OrderedDict[K, V] = OrderedDict()
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> Iterator[tuple[K, V]]:
        """Entries, the least recently used first."""
        return iter(self._entries.items())

    def peek(self, key: K) -> V | None:
        """The entry where there is one; looking is no use."""
        return self._entries.get(key)

    def use(self, key: K) -> V:
        """The entry, made where there is none; it is the last to leave now."""
        value = self._entries.get(key)
        if value is None:
            if len(self._entries) >= self._capacity:
                self.evict()
            value = self._entries[key] = self._make()
        else:
            self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        """An entry made elsewhere, as the most recently used one."""
        if key not in self._entries and len(self._entries) >= self._capacity:
            self.evict()
        self._entries[key] = value
        self._entries.move_to_end(key)

    def drop(self, key: K) -> V | None:
        """Takes the entry out, where there is one; ``evicted`` is not told."""
        return self._entries.pop(key, None)

    def evict(self) -> None:
        """The least recently used entry leaves. Raises `KeyError` of an empty table."""
        key, value = self._entries.popitem(last=False)
        self.evictions += 1
        self._evicted(key, value)

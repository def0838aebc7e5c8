"""Messages and tools that come again with every turn of a conversation, decoded once.

What a value decodes to depends on its bytes alone, so that it is known whose bytes are the same: they are compared, no
digest is believed (docs/adr/0027). Nobody changes what is decoded: whoever makes a prompt of it builds anew, and
templates cannot. Digests of the first few items only say with whom to compare. Nobody finds what was kept apart from
him.

`DecodedCache.find` and `DecodedCache.keep` are short and must not run at the same time in two threads. What takes its
time, and may run beside them, is `Found.with_values`: others wait for their lock, the event loop among them.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

LEAST_BYTES = 8 * 1024
"""Fewer are decoded sooner than they are looked up."""
MARKS = (1, 2, 4, 8, 16)
"""Numbers of items by which a list is known; two that differ only later share them all."""
AT_A_MARK = 16
"""Lists that are known by one beginning; the one seen longest ago is forgotten there."""
ENTRY_BYTES = 1_000
"""What one list costs beside its items, with its marks."""
ITEM_BYTES = 200
"""What one item costs beside its bytes and its value (measured: about 145)."""
MOST_PARTS = 1_000
"""An item of more parts is not measured, but taken for `PARTS_BYTES` as large as its bytes (its parts may be)."""
PARTS_BYTES = 40

Decode = Callable[[Sequence[msgspec.Raw]], list[Any]]
"""Values out of their bytes. Raises what `schemas.base.UNDECODABLE` names."""

_any = msgspec.json.Decoder()


def decode_all(raws: Sequence[msgspec.Raw]) -> list[Any]:
    """All of them anew."""
    return [_any.decode(raw) for raw in raws]


@dataclass(slots=True, eq=False)
class Entry:
    """One list as last seen, bytes and values; ``sizes``: what each item costs. ``follows``: the one whose place it
    takes."""

    apart: str
    raws: list[msgspec.Raw]
    items: list[Any]
    sizes: list[int]
    keys: list[int]
    follows: Entry | None = None

    @property
    def size_bytes(self) -> int:
        return ENTRY_BYTES + sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Found:
    """``items``: the values of the first so many, which are known."""

    items: list[Any]
    _apart: str = ""
    _keys: list[int] | None = None
    _entry: Entry | None = None

    def with_values(self, raws: Sequence[msgspec.Raw], items: Sequence[Any], most_bytes: int) -> Entry | None:
        """What is to be kept: ``items``, the values of ``raws``. ``None``: nothing new, or more than ``most_bytes``."""
        known, old = len(self.items), self._entry
        if self._keys is None or (old is not None and known == len(raws)):
            return None
        if ENTRY_BYTES + ITEM_BYTES * len(raws) + sum(map(len, raws)) > most_bytes:
            return None
        copies = [raw.copy() for raw in raws[known:]]  # a view would hold the whole body
        sizes = [ITEM_BYTES + len(raw) + _held(item, len(raw)) for raw, item in zip(copies, items[known:], strict=True)]
        if old is not None:
            copies, sizes = old.raws[:known] + copies, old.sizes[:known] + sizes
        follows = old if old is not None and known == len(old.raws) else None
        return Entry(self._apart, copies, list(items), sizes, self._keys, follows)


_NOTHING = Found([])


class DecodedCache:
    """Lists by their beginnings, at most ``max_bytes`` in all; the least recently used goes first."""

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._places: dict[int, tuple[Entry, ...]] = {}
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        """Lists kept."""
        return len(self._entries)

    def find(self, raws: Sequence[msgspec.Raw], apart: str = "") -> Found:
        """What of ``raws`` is known under ``apart``."""
        if sum(map(len, raws)) < LEAST_BYTES:
            return _NOTHING
        keys = _digests(raws, apart)
        for key in reversed(keys):
            best, most = None, 0
            for entry in self._places.get(key, ()):
                common = _common(entry.raws, raws) if entry.apart == apart else 0
                if common > most:
                    best, most = entry, common
            if best is not None:
                self._entries.move_to_end(id(best))
                return Found(best.items[:most], apart, keys, best)
        return Found([], apart, keys)

    def keep(self, entry: Entry) -> None:
        """Remember it in place of the list that it goes on from."""
        size_bytes, old, entry.follows = entry.size_bytes, entry.follows, None
        if size_bytes > self.max_bytes:
            return
        if old is not None and self._entries.get(id(old)) is old:
            self._forget(old)
        self._entries[id(entry)] = entry
        self.size_bytes += size_bytes
        for key in entry.keys:
            self._places[key] = (entry, *self._places.get(key, ())[: AT_A_MARK - 1])
        while self.size_bytes > self.max_bytes:
            self._forget(next(iter(self._entries.values())))

    def _forget(self, entry: Entry) -> None:
        del self._entries[id(entry)]
        self.size_bytes -= entry.size_bytes
        for key in entry.keys:
            others = tuple(other for other in self._places.get(key, ()) if other is not entry)
            if others:
                self._places[key] = others
            else:
                self._places.pop(key, None)


def _digests(raws: Sequence[msgspec.Raw], apart: str) -> list[int]:
    """Of so many items as `MARKS` says; how long they are is in it, so that no two lists run together."""
    running = xxh3_64(seed=xxh3_64_intdigest(apart.encode("utf-8", "surrogatepass")))
    digests = []
    for count, raw in enumerate(raws[: MARKS[-1]], 1):
        running.update(len(raw).to_bytes(8, "little"))
        running.update(raw)
        if count in MARKS:
            digests.append(running.intdigest())
    return digests


def _common(one: list[msgspec.Raw], other: Sequence[msgspec.Raw]) -> int:
    """How many items both begin with."""
    if len(one) <= len(other) and one == list(other[: len(one)]):
        return len(one)
    return next((at for at, (mine, theirs) in enumerate(zip(one, other, strict=False)) if mine != theirs), len(other))


def _held(item: Any, raw_bytes: int) -> int:
    """About what a decoded value takes of memory."""
    size, left, stack = 0, MOST_PARTS, [item]
    while stack:
        part = stack.pop()
        size += sys.getsizeof(part)
        if isinstance(part, dict | list):
            left -= len(part)
            if left < 0:
                return PARTS_BYTES * raw_bytes
            stack += chain(part, part.values()) if isinstance(part, dict) else part
    return size

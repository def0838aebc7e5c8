"""The pages of one deployment in a pool: everything under one tenant, scheme and key prefix.

Per page and medium a set of components, as the bits of a number: hash and bitset, never the keys themselves. An object
is present while it is in any medium. Pages stand in the order in which they were touched (stored, or found by a match),
the latest last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from kvcore.page_hash import PAGE_BYTES
from kvcore.pool_dump import Identity
from kvcore.pool_layout import TRAILING_PAGES, LayoutSet, PoolLayout

Masks = tuple[int, ...]
"""Components by medium: the n-th is the set in medium n; none at the end is empty."""

_NONE: Masks = ()
_MAX_COMPILED = 64

Run = tuple[int, int]
"""Half-open range of page positions."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A layout as masks. ``every``: needed of every page. ``trailing``: mask and pages, of those needed at the end.
    ``None``: nothing can satisfy it."""

    every: int | None
    trailing: tuple[tuple[int | None, int], ...]


@dataclass(slots=True, eq=False)
class Space:
    """``arrived``: stored events (or objects of lists and deltas) taken in. ``matched``: pages that matches found."""

    identity: Identity
    pages: OrderedDict[bytes, Masks] = field(default_factory=OrderedDict)
    components: dict[str, int] = field(default_factory=dict)
    objects: int = 0
    arrived: int = 0
    matched: int = 0
    _compiled: dict[PoolLayout, Wanted] = field(default_factory=dict)

    def intern(self, component: str) -> int:
        """The component's number, new if it must be."""
        number = self.components.setdefault(component, len(self.components))
        if number == len(self.components) - 1:
            self._compiled.clear()
        return number

    def change(self, page: bytes, added: Masks, removed: int) -> tuple[int, int]:
        """Add objects by medium, and take others from every medium. How many changed by each."""
        masks = self.pages.get(page, _NONE)
        before = union(masks)
        gone = removed & before
        if gone:
            masks = tuple(mask & ~gone for mask in masks)
        new = union(_less(added, masks))
        if new:
            masks = _more(masks, added)
        self._set(page, masks, before, touched=bool(added))
        return new.bit_count(), gone.bit_count()

    def store(self, page: bytes, component: int, medium: int) -> bool:
        """Add one object in one medium: as `change`, for what comes by the million. Whether it changed anything."""
        masks = self.pages.get(page, _NONE)
        bit = 1 << component
        new = medium >= len(masks) or not masks[medium] & bit
        if new:
            self.objects += not union(masks) & bit
            if medium or len(masks) > 1:
                masks = _more(masks, (0,) * medium + (bit,))
            else:
                masks = (masks[0] | bit,) if masks else (bit,)
            self.pages[page] = masks
        self.pages.move_to_end(page)
        return new

    def remove(self, page: bytes, component: int, medium: int) -> bool:
        """Take one object from one medium. Whether it was there."""
        masks = self.pages.get(page, _NONE)
        bit = 1 << component
        if medium >= len(masks) or not masks[medium] & bit:
            return False
        left = tuple(mask & ~bit if place == medium else mask for place, mask in enumerate(masks))
        self._set(page, left, union(masks), touched=False)
        return True

    def _set(self, page: bytes, masks: Masks, before: int, *, touched: bool) -> None:
        masks = _trimmed(masks)
        self.objects += union(masks).bit_count() - before.bit_count()
        if masks:
            self.pages[page] = masks
            if touched:
                self.pages.move_to_end(page)
        else:
            self.pages.pop(page, None)

    def evict(self, count: int) -> None:
        """Forget the ``count`` pages that were touched longest ago."""
        for _ in range(count):
            _, masks = self.pages.popitem(last=False)
            self.objects -= union(masks).bit_count()

    def media(self, page: bytes, component: str) -> list[int]:
        """Where one object is."""
        number = self.components.get(component)
        if number is None:
            return []
        return [medium for medium, mask in enumerate(self.pages.get(page, _NONE)) if mask >> number & 1]

    def match(self, layout: PoolLayout, pages: bytes) -> tuple[Run, ...]:
        """Ranges of positions that the layout can use (rules: `kvcore.pool_index.PoolIndex.match`)."""
        wanted = self._wanted(layout)
        if not wanted.every:
            return ()
        asked = [pages[at : at + PAGE_BYTES] for at in range(0, len(pages) // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES)]
        found = [union(masks) if masks else 0 for masks in map(self.pages.get, asked)]
        runs = tuple(_runs(found, wanted.every, wanted.trailing))
        for start, end in runs:
            self.matched += end - start
            for page in asked[start:end]:
                self.pages.move_to_end(page)
        return runs

    def _wanted(self, layout: PoolLayout) -> Wanted:
        wanted = self._compiled.get(layout)
        if wanted is None:
            if len(self._compiled) >= _MAX_COMPILED:
                self._compiled.clear()
            trailing = tuple(
                (self._mask([part]), part.trailing_pages) for part in layout.sets if part.hit_policy == TRAILING_PAGES
            )
            every = self._mask(part for part in layout.sets if part.hit_policy != TRAILING_PAGES)
            wanted = self._compiled[layout] = Wanted(every, trailing)
        return wanted

    def _mask(self, sets: Iterable[LayoutSet]) -> int | None:
        """All components of these sets; ``None``: one was never seen."""
        mask = 0
        for part in sets:
            for component in part.components:
                number = self.components.get(component)
                if number is None:
                    return None
                mask |= 1 << number
        return mask


def union(masks: Masks) -> int:
    """Components in any medium."""
    return masks[0] if len(masks) == 1 else reduce(or_, masks, 0)


def _runs(found: list[int], every: int, trailing: tuple[tuple[int | None, int], ...]) -> Iterator[Run]:
    """Runs of complete pages, each as long as what is needed at its end allows."""
    start = 0
    while start < len(found):
        if found[start] & every != every:
            start += 1
            continue
        missing = [start - 1] * len(trailing)
        usable = position = start
        while position < len(found) and found[position] & every == every:
            for place, (mask, _) in enumerate(trailing):
                if mask is None or found[position] & mask != mask:
                    missing[place] = position
            position += 1
            if all(last < max(start, position - pages) for last, (_, pages) in zip(missing, trailing, strict=True)):
                usable = position
        if usable > start:
            yield start, usable
        start = position


def _more(masks: Masks, added: Masks) -> Masks:
    size = max(len(masks), len(added))
    padded = masks + (0,) * (size - len(masks))
    return tuple(mask | (added[place] if place < len(added) else 0) for place, mask in enumerate(padded))


def _less(masks: Masks, known: Masks) -> Masks:
    return tuple(mask & ~(known[place] if place < len(known) else 0) for place, mask in enumerate(masks))


def _trimmed(masks: Masks) -> Masks:
    while masks and not masks[-1]:
        masks = masks[:-1]
    return masks

"""What must change for one pool index to be as another, and how it is cut into messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvcore.pool_dump import DELTA, Identity, SectionWriter, encode
from kvcore.pool_space import Masks, Space, union

Objects = tuple[tuple[str, int], ...]
"""Objects of a page: (component, media bits)."""


@dataclass(slots=True)
class Change:
    """A pattern of a delta or dump in an index's own numbers, to be applied to any page. ``objects`` in all, of which
    it ``stores`` some; those that cannot be taken in are ``refused``, by reason."""

    masks: list[int] = field(default_factory=list)
    removed: int = 0
    objects: int = 0
    stores: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def added(self) -> Masks:
        """What it stores, by medium."""
        return tuple(self.masks)

    def store(self, component: int, media: Sequence[int]) -> None:
        """One more object, in these media."""
        for medium in media:
            while medium >= len(self.masks):
                self.masks.append(0)
            self.masks[medium] |= 1 << component
        self.objects += 1
        self.stores += 1

    def remove(self, component: int | None) -> None:
        """One more object to remove; ``None``: nobody here knows it."""
        self.removed |= 1 << component if component is not None else 0
        self.objects += 1


class Deltas:
    """Collects changes, and cuts them into deltas of about ``part_bytes``."""

    def __init__(self, media: Sequence[str], part_bytes: int) -> None:
        self._media = media
        self._part_bytes = part_bytes
        self._writers: list[SectionWriter] = []
        self._closed = 0  # bytes of all writers but the last
        self._patterns: dict[Objects, int] = {}
        self._parts: list[bytes] = []

    def open(self, identity: Identity) -> None:
        """The identity of the pages that follow."""
        if self._writers and not self._writers[-1].section.pages:
            self._writers.pop()
        elif self._writers:
            self._closed += self._writers[-1].size
        self._writers.append(SectionWriter(identity))
        self._patterns = {}

    def add(self, page: bytes, objects: Objects) -> None:
        """One page and what changes of it."""
        writer = self._writers[-1]
        number = self._patterns.get(objects)
        if number is None:
            number = self._patterns[objects] = writer.pattern(objects)
        writer.page(page, number)
        if self._closed + writer.size >= self._part_bytes:
            self._cut()
            self.open(writer.section.identity)

    def finish(self) -> list[bytes]:
        """All of them."""
        self._cut()
        return self._parts

    def _cut(self) -> None:
        sections = [writer.section for writer in self._writers if writer.section.pages]
        if sections:
            self._parts.append(encode(DELTA, self._media, sections))
        self._writers = []
        self._closed = 0


def described(components: Sequence[str], masks: Masks) -> Objects:
    """Masks as (component, media bits)."""
    present = union(masks)
    return tuple(
        (name, sum(1 << medium for medium, mask in enumerate(masks) if mask >> number & 1))
        for number, name in enumerate(components)
        if present >> number & 1
    )


def changes(own: Space | None, target: Space | None) -> Iterator[tuple[bytes, Objects]]:
    """Pages whose objects differ, and what changes: (component, media bits as in ``target``), no media to remove."""
    own_pages = own.pages if own is not None else {}
    target_pages = target.pages if target is not None else {}
    own_names = tuple(own.components) if own is not None else ()
    target_names = tuple(target.components) if target is not None else ()
    known: dict[tuple[Masks, Masks], Objects] = {}
    for page in (*own_pages, *(page for page in target_pages if page not in own_pages)):
        pair = (own_pages.get(page, ()), target_pages.get(page, ()))
        objects = known.get(pair)
        if objects is None:
            here = dict(described(own_names, pair[0]))
            there = dict(described(target_names, pair[1]))
            gone = tuple((name, 0) for name in here if name not in there)
            objects = gone + tuple((name, media) for name, media in there.items() if name not in here)
            known[pair] = objects
        if objects:
            yield page, objects

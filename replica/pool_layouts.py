"""How workers' pages lie in the shared pools that they read, and whether the workers of one model agree about it.

What a pool holds can be told only by a layout that is right for all that write and read there: where two workers of one
model describe the same pool in different ways, one of them is wrong, or they cannot read each other's pages. Then
nothing is said of the pool for that model (spec: index-and-routing §5.1), until they have agreed for `AGREED_S`: a
worker that says now this, now that does not switch it on and off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from kvcore import LayoutSet, PoolLayout
from schemas.pool import MAX_COMPONENTS, SharedLayout
from schemas.worker import WorkerProfile

DISAGREE = "layouts_disagree"
"""Why nothing is said of a pool whose readers do not agree."""

AGREED_S = 10.0
"""How long workers must have agreed again, in seconds, before their word counts."""

_NEVER = float("-inf")


def compiled(layout: SharedLayout) -> PoolLayout:
    """``layout`` as the index of a pool asks by."""
    sets = tuple(LayoutSet(each.components, each.hit_policy, each.trailing_pages) for each in layout.sets)
    return PoolLayout(layout.scheme, layout.key_prefix, sets)


def _described(layout: SharedLayout) -> bytes:
    """A digest of all that two descriptions of the same layout have in common: the order in which they name objects is
    theirs. Made once for each description, which may have a thousand objects."""
    sets = {(tuple(sorted(set(each.components))), each.hit_policy, each.trailing_pages) for each in layout.sets}
    described = layout.scheme, layout.page_size, layout.key_prefix, sorted(sets), layout.page_hash, layout.pairs
    return blake2b(repr(described).encode(), digest_size=16).digest()


def _can_be_followed(layout: SharedLayout) -> bool:
    """Whether a page has no more objects than an index can follow. No bridge of ours sends more."""
    return sum(len(each.components) for each in layout.sets) <= MAX_COMPONENTS


@dataclass(slots=True, eq=False)
class PoolReaders:
    """The workers of one model that read one pool. ``layout`` (and ``asked`` by it): theirs, as long as they agree;
    ``described``: each one's layout as a digest. ``disagreed_at``: Unix seconds at which they were last known not to.
    ``usable``: whether their word counts. ``adapters``: names under which each of them serves adapters.

    ``found``: whether any page was; ``missed``: prompts in a row that should have been found and were not; ``alarmed``:
    keys arrive, and these readers find none (see `replica.pools`)."""

    model: str
    pool: str
    layouts: dict[str, SharedLayout] = field(default_factory=dict)
    described: dict[str, bytes] = field(default_factory=dict)
    layout: SharedLayout | None = None
    asked: PoolLayout | None = None
    disagreed_at: float = _NEVER
    usable: bool = False
    adapters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    found: bool = False
    missed: int = 0
    alarmed: bool = False
    _asked_as: bytes = b""

    def judge(self, now: float) -> bool:
        """Compare them anew. Returns whether they have become, or ceased to be, usable."""
        before = self.usable
        if self.differ:
            self.disagreed_at = now
            self.usable = False
        else:
            self.usable = bool(self.described) and now - self.disagreed_at >= AGREED_S
        first = next(iter(self.layouts), None)
        if first is not None and self.described[first] != self._asked_as:
            self._asked_as, self.layout = self.described[first], self.layouts[first]
            self.asked = compiled(self.layout)
            self.missed, self.found = 0, False
        return before != self.usable

    def is_adapter(self, model: str) -> bool:
        """Whether one of them serves an adapter under this name."""
        return any(model in names for names in self.adapters.values())

    @property
    def differ(self) -> bool:
        """Whether they do not agree now."""
        return len(set(self.described.values())) > 1

    def add(self, worker: str, layout: SharedLayout, adapters: tuple[str, ...]) -> None:
        """This worker reads the pool like that."""
        if layout != self.layouts.get(worker):
            self.described[worker] = _described(layout)
        self.layouts[worker], self.adapters[worker] = layout, adapters

    def remove(self, worker: str) -> None:
        """It does not any more."""
        del self.layouts[worker], self.described[worker], self.adapters[worker]


class PoolLayouts:
    """Every worker's layout. ``now`` is in Unix seconds everywhere."""

    def __init__(self) -> None:
        self._readers: dict[tuple[str, str], PoolReaders] = {}
        self._of: dict[str, tuple[str, str]] = {}
        self._unsettled: set[tuple[str, str]] = set()
        self.changes = 0
        """How often anything of it has changed that answers depend on."""

    def worker(self, name: str, profile: WorkerProfile | None, now: float) -> list[PoolReaders]:
        """A worker describes itself in another way than before, or is gone (``None``). Returns the readers that are
        usable now and were not, or were and are not."""
        shared = profile.shared if profile is not None else None
        shared = shared if shared is None or _can_be_followed(shared) else None
        key = (profile.model, shared.pool) if profile is not None and shared is not None else None
        before, changed = self._of.get(name), []
        self.changes += before is not None or key is not None
        if before is not None and before != key:
            del self._of[name]
            readers = self._readers[before]
            readers.remove(name)
            if readers.judge(now):
                changed.append(readers)
            if not readers.layouts:
                del self._readers[before]
                self._unsettled.discard(before)
        if key is not None and shared is not None:
            self._of[name] = key
            readers = self._readers.setdefault(key, PoolReaders(*key))
            readers.add(name, shared, profile.adapters if profile is not None else ())
            if readers.judge(now):
                changed.append(readers)
        for touched in {before, key}:
            if touched is not None and touched in self._readers and not self._readers[touched].usable:
                self._unsettled.add(touched)
        return changed

    def settle(self, now: float) -> list[PoolReaders]:
        """Time has passed. Returns the readers that have become usable."""
        settled = [self._readers[key] for key in self._unsettled if self._readers[key].judge(now)]
        self._unsettled = {key for key in self._unsettled if not self._readers[key].usable}
        self.changes += len(settled)
        return settled

    def of(self, worker: str) -> PoolReaders | None:
        """The readers that a worker is one of."""
        key = self._of.get(worker)
        return self._readers[key] if key is not None else None

    def reads(self, pool: str) -> bool:
        """Whether any worker reads this pool."""
        return any(name == pool for _, name in self._readers)

    def readers(self, pool: str | None = None) -> Iterator[PoolReaders]:
        """All of them, or those of one pool."""
        return (readers for readers in self._readers.values() if pool is None or readers.pool == pool)

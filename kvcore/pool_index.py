"""What lies in a shared pool: every object of every page that its master told of, and which pages a layout can use.

One class for the pool's bridge and for every index that follows it. Identity is (tenant, object key), taken apart by
`kvcore.pool_keys`; an object is present while it is in any medium. ``stored`` adds a medium, ``removed`` takes one away
(without a medium: all of them), ``cleared`` drops all of a tenant (spec: pool-events §4 rule 1). Told twice is told
once, and what happens to one object changes no other. A removal of what is not known changes nothing.

The master's stream cannot be trusted alone: it evicts silently (spec: pool-events §3, §4). So the bridge fills a second
index from the master's key list, and `difference` says what the first has to change: objects, not media, since the
list has none. A medium that nobody told is ``cpu``. Unknown media are carried under their names and counted.

Everything is bounded (`PoolLimits`), and nothing is ever cleared for being full (spec: index-and-routing §5.1 clears
all at its limit): over ``max_pages`` the deployment with most pages loses those touched longest ago; over
``max_prefixes`` the deployment touched longest ago goes. Stored pages are touched, and those that a match finds.
Answers are then too low, never too high, and `PoolIndex.stats` counts what went and all that could not be taken in.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcore.dump import SLICE_BLOCKS, Steps, at_once
from kvcore.errors import BadBatchError, BadDumpError
from kvcore.pool_delta import Change, Deltas, changes, described
from kvcore.pool_dump import (
    DELTA,
    DUMP,
    MAX_MEDIA,
    FormatError,
    Identity,
    Pattern,
    Section,
    SectionWriter,
    decode,
    encode,
)
from kvcore.pool_events import DEFAULT_TENANT, PoolEvent, decode_pool_batch
from kvcore.pool_keys import MAX_KEY_BYTES, PoolKey, parse_key
from kvcore.pool_layout import PoolLayout
from kvcore.pool_space import Masks, Run, Space

_MEDIA = ("cpu", "disk")
MAX_COMPONENTS_IN_ALL = 65_536
MAX_TENANTS_SHOWN = 16
_PAGE_MEMORY = 230
"""Bytes of this twin for one page, at most, of up to 60 components in one medium (tracemalloc: 167 to 230, by how full
its tables are)."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds: pages; deployments (tenant, scheme, prefix); components of one deployment; bytes of a key. Within one
    call there may be some thousand pages more."""

    max_pages: int = 20_000_000
    max_prefixes: int = 4096
    max_components: int = 1024
    max_key_bytes: int = MAX_KEY_BYTES


@dataclass(slots=True)
class PoolApplied:
    """What one call did. ``stored``, ``removed``: events (of lists and deltas: objects) that changed something,
    ``unchanged``: those that did not. ``cleared``: events. ``unparsed``: keys that name no page. ``unknown_media``:
    events applied under a medium that we do not know. ``evicted``: pages that had to go. ``rejected``, by reason: those
    of `kvcore.pool_events`, ``too_many_components``, ``too_many_media``."""

    stored: int = 0
    removed: int = 0
    unchanged: int = 0
    cleared: int = 0
    unparsed: int = 0
    unknown_media: int = 0
    evicted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class PoolStats:
    """``pages``, ``objects``, ``prefixes`` (deployments), ``components`` now; ``unparsed``, ``unknown_media``,
    ``evicted`` (pages), ``rejected`` (by reason) since the start. ``unmatched``: objects of deployments in which no
    match ever found a page: if there are only such, the prefix that is asked for is wrong. ``tenants``: with pages now,
    the first 16. ``backend_id``: what the master calls itself."""

    pages: int
    objects: int
    prefixes: int
    components: int
    unparsed: int
    unknown_media: int
    evicted: int
    unmatched: int
    memory_bytes: int
    rejected: dict[str, int]
    tenants: tuple[str, ...]
    backend_id: str | None


@dataclass(frozen=True, slots=True)
class PoolPrefix:
    """One deployment. ``arrived``: stored objects taken in, ``matched``: pages that matches found, since it is here."""

    tenant: str
    scheme: str
    prefix: str
    pages: int
    objects: int
    arrived: int
    matched: int


class PoolIndex:
    """Presence of every page of a pool."""

    def __init__(self, limits: PoolLimits | None = None) -> None:
        self.limits = limits or PoolLimits()
        self._spaces: OrderedDict[Identity, Space] = OrderedDict()
        self._media = list(_MEDIA)
        self._pages = 0
        self._components = 0
        self._unparsed = 0
        self._unknown_media = 0
        self._evicted = 0
        self._rejected: Counter[str] = Counter()
        self._evicting = 0  # pages, in the call that is at work
        self._backend_id: str | None = None

    # Writing

    def apply_payload(self, payload: bytes) -> PoolApplied:
        """Apply one message of a master (its last frame), its events in order. Raises `BadBatchError`, with nothing
        changed."""
        batch = decode_pool_batch(payload, self.limits.max_key_bytes)
        result = PoolApplied(rejected=Counter(batch.rejected))
        self._backend_id = batch.backend_id or self._backend_id
        for event in batch.events:
            if event.kind == "cleared":
                result.cleared += 1
                self.clear(event.tenant)
            elif (key := parse_key(event.object_key, self.limits.max_key_bytes)) is None:
                result.unparsed += 1
            elif event.kind == "stored":
                self._stored(event, key, result)
            else:
                self._removed(event, key, result)
        return self._finish(result)

    def add_keys(self, keys: bytes, *, known: PoolIndex | None = None) -> PoolApplied:
        """Take in a key list (``GET /get_all_keys``: one key per line, of the default tenant). It says nothing of
        media: an object keeps those it has here, else it gets those it has in ``known``, else ``cpu``."""
        result = PoolApplied()
        for line in keys.split(b"\n"):
            line = line.removesuffix(b"\r")
            if not line:
                continue
            key = parse_key(line, self.limits.max_key_bytes)
            if key is None:
                result.unparsed += 1
            else:
                media = self._where(DEFAULT_TENANT, key)
                if not media and known is not None:
                    media = known._where(DEFAULT_TENANT, key)
                self._store(DEFAULT_TENANT, key, media or _MEDIA[:1], result)
        return self._finish(result)

    def apply_delta(self, delta: bytes) -> PoolApplied:
        """Apply what `difference` gave. Raises `BadBatchError`, with nothing changed."""
        result = PoolApplied()
        try:
            media, sections = at_once(decode(DELTA, delta))
        except FormatError as error:
            raise BadBatchError(f"not a delta of a pool: {error}") from error
        for section in sections:
            at_once(self._apply(section, media, result))
        return self._finish(result)

    def clear(self, tenant: str | None = None) -> None:
        """Forget everything, or all of one tenant."""
        for identity in [identity for identity in self._spaces if tenant is None or identity[0] == tenant]:
            self._drop(identity)

    # Reading

    def match(self, layout: PoolLayout, pages: bytes, *, tenant: str = DEFAULT_TENANT) -> tuple[Run, ...]:
        """Half-open ranges of positions in ``pages`` (16 bytes each) that can be loaded from the pool, ascending.

        A position is complete if every component of every ``all_pages`` set of the layout is present (spec: pool-events
        §6, §8 no 5). Each longest run of complete positions [s, t) ends at the greatest e in (s, t] at which every
        ``trailing_pages`` set is there for the last N pages: all of max(s, e - N)..e-1 have its components; without
        such an e the run goes. So whoever loads a run loads to its end. A layout without any ``all_pages`` component
        matches nothing; 0 trailing pages ask for nothing.
        """
        identity = (tenant, layout.scheme, layout.key_prefix)
        space = self._spaces.get(identity)
        if space is None:
            return ()
        self._spaces.move_to_end(identity)
        return space.match(layout, pages)

    def present(self, object_key: str, *, tenant: str = DEFAULT_TENANT) -> frozenset[str]:
        """Media that hold the object; none: it is not there, or its key names no page."""
        key = parse_key(object_key, self.limits.max_key_bytes)
        return frozenset(self._where(tenant, key)) if key is not None else frozenset()

    def prefixes(self) -> tuple[PoolPrefix, ...]:
        """Every deployment, the one touched longest ago first."""
        return tuple(
            PoolPrefix(*space.identity, len(space.pages), space.objects, space.arrived, space.matched)
            for space in self._spaces.values()
        )

    def stats(self) -> PoolStats:
        """Sizes and counters."""
        spaces = self._spaces.values()
        return PoolStats(
            pages=self._pages,
            objects=sum(space.objects for space in spaces),
            prefixes=len(spaces),
            components=self._components,
            unparsed=self._unparsed,
            unknown_media=self._unknown_media,
            evicted=self._evicted,
            unmatched=sum(space.objects for space in spaces if not space.matched),
            memory_bytes=self._pages * _PAGE_MEMORY + self._components * 150 + len(spaces) * 1000,
            rejected=dict(self._rejected),
            tenants=tuple(sorted({identity[0] for identity in self._spaces})[:MAX_TENANTS_SHOWN]),
            backend_id=self._backend_id,
        )

    # Copies

    def difference(
        self, target: PoolIndex, *, tenant: str | None = DEFAULT_TENANT, part_bytes: int = 1_000_000
    ) -> list[bytes]:
        """Deltas after which this index holds the same objects as ``target``: those only there are added in their media
        there, those only here leave every medium, those in both keep their media.

        Each delta has about ``part_bytes`` at most and can be applied alone, in any order. ``tenant``: compare only
        its objects, as a key list has only those of one; ``None``: of all. Neither index may change meanwhile.
        """
        deltas = Deltas(target._media, part_bytes)
        identities = {**dict.fromkeys(self._spaces), **dict.fromkeys(target._spaces)}
        for identity in identities:
            if tenant is None or identity[0] == tenant:
                deltas.open(identity)
                for page, objects in changes(self._spaces.get(identity), target._spaces.get(identity)):
                    deltas.add(page, objects)
        return deltas.finish()

    def dump(self) -> Steps[bytes]:
        """Everything but the counters, as it is at the first step; the index may change before the last one."""
        media = list(self._media)
        copies = [(space, list(space.pages.items()), list(space.components)) for space in self._spaces.values()]
        sections: list[Section] = []
        for space, pages, components in copies:
            writer = SectionWriter(space.identity)
            patterns: dict[Masks, int] = {}
            for place, (page, masks) in enumerate(pages):
                number = patterns.get(masks)
                if number is None:
                    number = patterns[masks] = writer.pattern(described(components, masks))
                writer.page(page, number)
                if place % SLICE_BLOCKS == 0:
                    yield
            sections.append(writer.section)
        return encode(DUMP, media, sections)

    def load(self, dump: bytes) -> Steps[None]:
        """Hold what `dump` gave instead of everything held so far, from the last step on; until then nothing must be
        applied. Raises `BadDumpError`, with nothing changed."""
        aside = PoolIndex(self.limits)
        try:
            media, sections = yield from decode(DUMP, dump)
        except FormatError as error:
            raise BadDumpError(f"not a dump of a pool: {error}") from error
        result = PoolApplied()
        for section in sections:
            yield from aside._apply(section, media, result)
        aside._finish(result)
        self._spaces, self._media = aside._spaces, aside._media
        self._pages, self._components = aside._pages, aside._components
        self._evicted += result.evicted
        self._rejected.update(result.rejected)

    # Single objects

    def _stored(self, event: PoolEvent, key: PoolKey, result: PoolApplied) -> None:
        medium = event.medium or _MEDIA[0]
        if self._store(event.tenant, key, (medium,), result) and medium not in _MEDIA:
            result.unknown_media += 1

    def _store(self, tenant: str, key: PoolKey, media: Sequence[str], result: PoolApplied) -> bool:
        """One object in some media. Whether it could be taken in."""
        places = self._places(media)
        if not places:
            result.rejected["too_many_media"] += 1
            return False
        space = self._space((tenant, key.scheme, key.prefix))
        number = self._component(space, key.component)
        if number is None:
            result.rejected["too_many_components"] += 1
            self._drop_if_empty(space)
            return False
        before = len(space.pages)
        stored = sum(space.store(key.page, number, place) for place in places) > 0
        self._pages += len(space.pages) - before
        space.arrived += 1
        result.stored += stored
        result.unchanged += not stored
        self._make_room(space, SLICE_BLOCKS)
        return True

    def _removed(self, event: PoolEvent, key: PoolKey, result: PoolApplied) -> None:
        result.unknown_media += event.medium is not None and event.medium not in _MEDIA
        space = self._spaces.get((event.tenant, key.scheme, key.prefix))
        number = space.components.get(key.component) if space is not None else None
        changed = False
        if space is not None and number is not None:
            before = len(space.pages)
            if event.medium is None:
                changed = space.change(key.page, (), 1 << number)[1] > 0
            elif event.medium in self._media:
                changed = space.remove(key.page, number, self._media.index(event.medium))
            self._pages += len(space.pages) - before
            self._drop_if_empty(space)
        result.removed += changed
        result.unchanged += not changed

    def _where(self, tenant: str, key: PoolKey) -> list[str]:
        space = self._spaces.get((tenant, key.scheme, key.prefix))
        return [self._media[medium] for medium in space.media(key.page, key.component)] if space is not None else []

    # Deltas and dumps

    def _apply(self, section: Section, media: Sequence[str], result: PoolApplied) -> Steps[None]:
        """One identity's part of a delta or dump."""
        stores = any(bits for pattern in section.patterns for _, bits in pattern)
        space = self._space(section.identity) if stores else self._spaces.get(section.identity)
        compiled = [self._compiled(pattern, section, space, media) for pattern in section.patterns]
        for place, (page, pattern) in enumerate(section.entries()):
            change = compiled[pattern]
            stored = removed = 0
            if space is not None:
                stored, removed = self._change(space, page, change.added, change.removed)
                space.arrived += change.stores
            result.stored += stored
            result.removed += removed
            result.unchanged += change.objects - stored - removed
            result.rejected.update(change.refused)
            if place % SLICE_BLOCKS == 0:
                self._make_room(space, 0)
                yield
        if space is not None:
            self._make_room(space, 0)
            self._drop_if_empty(space)

    def _compiled(self, pattern: Pattern, section: Section, space: Space | None, media: Sequence[str]) -> Change:
        """A pattern in this index's numbers."""
        change = Change()
        places: dict[int, list[int]] = {}
        for component, bits in pattern:
            name = section.components[component]
            if not bits:
                change.remove(space.components.get(name) if space is not None else None)
                continue
            if bits not in places:
                places[bits] = self._places([medium for place, medium in enumerate(media) if bits >> place & 1])
            number = self._component(space, name) if space is not None else None
            if places[bits] and number is not None:
                change.store(number, places[bits])
            else:
                change.refused["too_many_components" if places[bits] else "too_many_media"] += 1
        return change

    # Bookkeeping

    def _space(self, identity: Identity) -> Space:
        """The deployment, new if it must be, as the last one touched."""
        space = self._spaces.get(identity)
        if space is None:
            while len(self._spaces) >= max(1, self.limits.max_prefixes):
                self._evict_space(next(iter(self._spaces)))
            space = self._spaces[identity] = Space(identity)
        else:
            self._spaces.move_to_end(identity)
        return space

    def _component(self, space: Space, name: str) -> int | None:
        """The component's number in ``space``, which was touched last; ``None``: there is no room."""
        number = space.components.get(name)
        if number is not None:
            return number
        if len(space.components) >= self.limits.max_components:
            return None
        while self._components >= MAX_COMPONENTS_IN_ALL:
            oldest = next(iter(self._spaces))
            if oldest == space.identity:
                return None
            self._evict_space(oldest)
        self._components += 1
        return space.intern(name)

    def _places(self, media: Sequence[str]) -> list[int]:
        """Numbers of these media; those for which there is no room are left out."""
        for medium in media:
            if medium not in self._media and len(self._media) < MAX_MEDIA:
                self._media.append(medium)
        return [self._media.index(medium) for medium in media if medium in self._media]

    def _change(self, space: Space, page: bytes, added: Masks, removed: int) -> tuple[int, int]:
        before = len(space.pages)
        changed = space.change(page, added, removed)
        self._pages += len(space.pages) - before
        return changed

    def _make_room(self, keep: Space | None, slack: int) -> None:
        """Down to the bound once it is exceeded by more than ``slack``. ``keep`` stays, with a page at least."""
        if self._pages <= self.limits.max_pages + slack:
            return
        while (excess := self._pages - max(1, self.limits.max_pages)) > 0:
            largest = max(self._spaces.values(), key=lambda space: len(space.pages) - (space is keep))
            count = min(excess, len(largest.pages) - (largest is keep))
            largest.evict(count)
            self._pages -= count
            self._evicting += count
            self._drop_if_empty(largest)

    def _evict_space(self, identity: Identity) -> None:
        self._evicting += len(self._spaces[identity].pages)
        self._drop(identity)

    def _drop_if_empty(self, space: Space) -> None:
        if not space.pages:
            self._drop(space.identity)

    def _drop(self, identity: Identity) -> None:
        space = self._spaces.pop(identity, None)
        if space is not None:
            self._pages -= len(space.pages)
            self._components -= len(space.components)

    def _finish(self, result: PoolApplied) -> PoolApplied:
        """Count one call's results. Of the deployment that was touched last something stays."""
        self._make_room(next(reversed(self._spaces.values()), None), 0)
        result.evicted = self._evicting
        self._evicted += self._evicting
        self._evicting = 0
        self._unparsed += result.unparsed
        self._unknown_media += result.unknown_media
        self._rejected.update(result.rejected)
        return result

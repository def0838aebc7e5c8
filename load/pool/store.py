"""The pool's objects: who put them, in which media they lie, who has a lease, and which leave when room is needed.

Pure: the owner tells the time. What a master publishes becomes a `PoolEvent` (`PoolStore.take_events`); what it keeps
to itself does not (spec: pool-events §3): eviction of an object that lies nowhere else, a client that closes or dies.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from load.pool.events import Medium, PoolEvent

OK = 0
NO_SPACE = -200
NO_SUCH_OBJECT = -704
HAS_LEASE = -706
NO_SUCH_CLIENT = -1
DEFAULT_TENANT = "default"

ObjectId = tuple[str, str]
"""(tenant, object key)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """``capacity_bytes``: of the master's own segment; clients add theirs. ``client_ttl_s``: silence after which a
    client's objects are hidden; ``client_suspicion_s`` more, and they are gone. ``lease_s``: what a read grants."""

    capacity_bytes: int = 1 << 40
    max_objects: int = 5_000_000
    client_ttl_s: float = 10.0
    client_suspicion_s: float = 20.0
    lease_s: float = 10.0
    offload: bool = False
    """Every object is copied to disk at once, as with the SSD tier."""


@dataclass(slots=True)
class PoolObject:
    """One object. ``client``: whose segment holds its memory copy; ``None``: the master's own."""

    key: str
    tenant: str
    size_bytes: int
    client: str | None
    group_id: str | None
    session_id: str | None
    media: set[Medium] = field(default_factory=set)
    lease_until: float = 0.0


@dataclass(slots=True)
class PoolClientState:
    """A client that mounted a segment. ``killed``: its pings count no more."""

    name: str
    segment: str
    capacity_bytes: int
    seen_s: float
    killed: bool = False
    suspected: bool = False


class PoolStore:
    """All objects of one master process. Counters: ``evicted_memory``, ``puts``, ``refused``, ``hits``, ``misses``; of
    clients ``suspicions``, ``recoveries``, ``lost_clients``."""

    def __init__(self, limits: StoreLimits) -> None:
        self.limits = limits
        self.clients: dict[str, PoolClientState] = {}
        self.evicted_memory = self.puts = self.refused = self.hits = self.misses = 0
        self.suspicions = self.recoveries = self.lost_clients = 0
        self.used_bytes = 0
        self._objects: OrderedDict[ObjectId, PoolObject] = OrderedDict()
        """The least recently used first."""
        self._events: list[PoolEvent] = []

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def capacity_bytes(self) -> int:
        return self.limits.capacity_bytes + sum(client.capacity_bytes for client in self.clients.values())

    def take_events(self) -> list[PoolEvent]:
        """What a master would publish of what happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    # Clients

    def mount(self, name: str, segment: str, capacity_bytes: int, now: float) -> None:
        """A client brings ``capacity_bytes``; again: it is alive."""
        known = self.clients.get(name)
        if known is None:
            self.clients[name] = PoolClientState(name, segment, capacity_bytes, now)
        else:
            known.segment, known.capacity_bytes = segment, capacity_bytes
            self.ping(name, now)

    def ping(self, name: str, now: float) -> bool:
        """Whether the client is known; it is alive then, and what was hidden is seen again, without an event."""
        client = self.clients.get(name)
        if client is None:
            return False
        if not client.killed:
            client.seen_s = now
            self.recoveries += client.suspected
            client.suspected = False
        return True

    def unmount(self, name: str) -> bool:
        """A client closes: what lay in its memory is gone at once, and nobody is told."""
        if self.clients.pop(name, None) is None:
            return False
        for entry in [entry for entry in self._objects.values() if entry.client == name]:
            self._drop_medium(entry, "cpu", tell=False)
        return True

    def tick(self, now: float) -> None:
        """Silent clients are suspected, then unmounted."""
        for client in list(self.clients.values()):
            silent_s = now - client.seen_s
            suspected = silent_s > self.limits.client_ttl_s
            self.suspicions += suspected and not client.suspected
            client.suspected = suspected
            if silent_s > self.limits.client_ttl_s + self.limits.client_suspicion_s:
                self.lost_clients += 1
                self.unmount(client.name)

    # Objects

    def put(
        self,
        keys: Sequence[str],
        size_bytes: int,
        now: float,
        *,
        client: str | None = None,
        tenant: str = DEFAULT_TENANT,
        group_ids: Sequence[str | None] = (),
        session_ids: Sequence[str | None] = (),
        upsert: bool = False,
    ) -> list[int]:
        """Result codes by key: 0 (there already: 0, and no event), `NO_SPACE`, `NO_SUCH_CLIENT`."""
        if client is not None and client not in self.clients:
            return [NO_SUCH_CLIENT] * len(keys)
        owner = client if client is not None and self.clients[client].capacity_bytes else None
        results = []
        for index, key in enumerate(keys):
            old = self._objects.get((tenant, key))
            if old is not None and not upsert:
                results.append(OK)
                continue
            if old is not None:
                self._remove(old, tell=True)
            if not self._make_room(size_bytes, now):
                self.refused += 1
                results.append(NO_SPACE)
                continue
            group = group_ids[index] if index < len(group_ids) else None
            session = session_ids[index] if index < len(session_ids) else None
            entry = PoolObject(key, tenant, size_bytes, owner, group, session)
            self._objects[tenant, key] = entry
            self._add_medium(entry, "cpu")
            if self.limits.offload:
                self._add_medium(entry, "disk")
            self.puts += 1
            results.append(OK)
        return results

    def offload(self, keys: Iterable[str], tenant: str = DEFAULT_TENANT) -> int:
        """Copy objects to disk; how many were."""
        copied = 0
        for key in keys:
            entry = self._objects.get((tenant, key))
            if entry is not None and "disk" not in entry.media:
                self._add_medium(entry, "disk")
                copied += 1
        return copied

    def touch(self, keys: Iterable[str], now: float, tenant: str = DEFAULT_TENANT, *, lease: bool = True) -> list[int]:
        """Size in bytes of each object that can be read, -1 for others. A read grants a lease and is a use; a probe
        (``lease`` off) is neither."""
        sizes = []
        for key in keys:
            entry = self.visible(key, tenant)
            if entry is None:
                sizes.append(-1)
                self.misses += 1
                continue
            self.hits += 1
            sizes.append(entry.size_bytes)
            if lease:
                entry.lease_until = now + self.limits.lease_s
                self._objects.move_to_end((tenant, key))
        return sizes

    def visible(self, key: str, tenant: str = DEFAULT_TENANT) -> PoolObject | None:
        """The object, unless all its copies are those of a suspected client."""
        entry = self._objects.get((tenant, key))
        return entry if entry is not None and self._readable(entry) else None

    def readable_keys(self, tenant: str = DEFAULT_TENANT) -> Iterator[str]:
        """Every key that can be read."""
        return (entry.key for entry in self._objects.values() if entry.tenant == tenant and self._readable(entry))

    def remove(self, keys: Iterable[str], now: float, tenant: str = DEFAULT_TENANT, *, force: bool = False) -> int:
        """How many objects were removed; those with a lease stay unless ``force``."""
        entries = [self._objects[tenant, key] for key in dict.fromkeys(keys) if (tenant, key) in self._objects]
        gone = [entry for entry in entries if force or entry.lease_until <= now]
        for entry in gone:
            self._remove(entry, tell=True)
        return len(gone)

    def remove_by_regex(self, pattern: str, now: float, tenant: str = DEFAULT_TENANT) -> int:
        """As `remove`, of every key that ``pattern`` is found in. Raises `re.error`."""
        found = re.compile(pattern)
        return self.remove([key for own, key in self._objects if own == tenant and found.search(key)], now, tenant)

    def remove_all(self, tenant: str = DEFAULT_TENANT) -> int:
        """Everything of ``tenant``: each object's removal is published, then that the tenant was cleared."""
        entries = [entry for entry in self._objects.values() if entry.tenant == tenant]
        for entry in entries:
            self._remove(entry, tell=True)
        self._events.append(PoolEvent("cleared", tenant))
        return len(entries)

    def evict(self, keys: Iterable[str] | None, count: int, tenant: str = DEFAULT_TENANT) -> int:
        """Memory copies leave: those of ``keys``, or the ``count`` least recently used. Told only if disk has them."""
        if keys is None:
            entries = [entry for entry in self._objects.values() if "cpu" in entry.media][:count]
        else:
            found = (self._objects.get((tenant, key)) for key in keys)
            entries = [entry for entry in found if entry is not None and "cpu" in entry.media]
        for entry in entries:
            self._evict(entry)
        return len(entries)

    def segments(self) -> list[tuple[str, str, int, int, bool]]:
        """(segment, client, capacity, used bytes, suspected) of the master's own segment and of every client's."""
        used: dict[str | None, int] = {}
        for entry in self._objects.values():
            if "cpu" in entry.media:
                used[entry.client] = used.get(entry.client, 0) + entry.size_bytes
        rows = [("pool-segment", "master", self.limits.capacity_bytes, used.get(None, 0), False)]
        rows += [
            (client.segment, client.name, client.capacity_bytes, used.get(client.name, 0), client.suspected)
            for client in self.clients.values()
            if client.capacity_bytes
        ]
        return rows

    # Inside

    def _readable(self, entry: PoolObject) -> bool:
        client = None if entry.client is None else self.clients.get(entry.client)
        return "disk" in entry.media or client is None or not client.suspected

    def _make_room(self, size_bytes: int, now: float) -> bool:
        if len(self._objects) >= self.limits.max_objects or size_bytes > self.capacity_bytes:
            return False
        if self.used_bytes + size_bytes <= self.capacity_bytes:
            return True
        victims = []
        freed = self.capacity_bytes - self.used_bytes
        for entry in self._objects.values():
            if "cpu" in entry.media and entry.lease_until <= now:
                victims.append(entry)
                freed += entry.size_bytes
                if freed >= size_bytes:
                    break
        if freed < size_bytes:
            return False
        for entry in victims:
            self._evict(entry)
        return True

    def _evict(self, entry: PoolObject) -> None:
        self.evicted_memory += 1
        self._drop_medium(entry, "cpu", tell="disk" in entry.media)

    def _add_medium(self, entry: PoolObject, medium: Medium) -> None:
        entry.media.add(medium)
        if medium == "cpu":
            self.used_bytes += entry.size_bytes
        self._tell("stored", entry, medium)

    def _remove(self, entry: PoolObject, *, tell: bool) -> None:
        for medium in sorted(entry.media):
            self._drop_medium(entry, medium, tell=tell)

    def _drop_medium(self, entry: PoolObject, medium: Medium, *, tell: bool) -> None:
        if medium not in entry.media:
            return
        entry.media.discard(medium)
        if medium == "cpu":
            self.used_bytes -= entry.size_bytes
            entry.client = None
        if not entry.media:
            del self._objects[entry.tenant, entry.key]
        if tell:
            self._tell("removed", entry, medium)

    def _tell(self, kind: str, entry: PoolObject, medium: Medium) -> None:
        stored = kind == "stored"
        self._events.append(
            PoolEvent(
                "stored" if stored else "removed",
                entry.tenant,
                entry.key,
                medium,
                entry.group_id,
                entry.session_id if stored else None,
            )
        )

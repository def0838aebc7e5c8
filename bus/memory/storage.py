"""What the in-memory broker stores: the trace stream, key-value buckets, objects. Times in seconds of the loop's clock.

They raise nothing for a broker that is away; the connection checks that first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

from bus.errors import ClosedError, KeyMissingError, WrongRevisionError
from bus.interface import KeyEntry, StoredRow
from bus.subjects import MESSAGE_ID
from bus.validation import check_publish_subject, subject_matches


class Changed:
    """Wakes everybody who waits for a change."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self, timeout_s: float | None) -> None:
        """Until `wake`, at most ``timeout_s``."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait({waiter}, timeout=timeout_s)
        finally:
            self._waiters.discard(waiter)


@dataclass(slots=True)
class DurableState:
    """How far a durable consumer has come: ``open`` holds (delivered at, times delivered) by stream
    sequence."""

    filter_subject: str
    ack_wait_s: float
    next_seq: int = 1
    open: dict[int, tuple[float, int]] = field(default_factory=dict)


class MemoryStream:
    """The rows of ``TG_TRACES``, in order, with their duplicate window."""

    def __init__(self, duplicate_window_s: float) -> None:
        self._window_s = duplicate_window_s
        self._seen: dict[str, float] = {}
        self.rows: list[tuple[str, bytes, Mapping[str, str]]] = []
        self.durables: dict[str, DurableState] = {}
        self.changed = Changed()
        self.generation = 0

    def add(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> bool:
        """``False`` for a message id seen within the window."""
        now = asyncio.get_running_loop().time()
        message_id = headers.get(MESSAGE_ID)
        if message_id is not None:
            for old in [key for key, at in self._seen.items() if at <= now - self._window_s]:
                del self._seen[old]
            if message_id in self._seen:
                return False
            self._seen[message_id] = now
        self.rows.append((subject, payload, headers))
        self.changed.wake()
        return True

    def clear(self) -> None:
        """The store is another one: no rows, no consumers, nothing seen."""
        self.rows.clear()
        self._seen.clear()
        self.durables.clear()
        self.generation += 1
        self.changed.wake()

    def row(self, seq: int, delivered: int) -> StoredRow:
        subject, payload, headers = self.rows[seq - 1]
        return StoredRow(subject, payload, headers, seq, delivered, seq)

    async def tail(self, filter_subject: str, from_start: bool) -> AsyncGenerator[StoredRow, None]:
        generation = self.generation
        seq = 0 if from_start else len(self.rows)
        while True:
            if generation != self.generation:
                generation, seq = self.generation, 0
            if seq >= len(self.rows):
                await self.changed.wait(None)
                continue
            seq += 1
            row = self.row(seq, 1)
            if subject_matches(filter_subject, row.subject):
                yield row


class MemoryConsumer:
    """See `bus.interface.Consumer`."""

    def __init__(self, stream: MemoryStream, durable: str, filter_subject: str, ack_wait_s: float) -> None:
        self._stream = stream
        self._durable = durable
        self._filter = filter_subject
        self._ack_wait_s = ack_wait_s
        self._closed = False
        self._state()

    def _state(self) -> DurableState:
        """The durable's state, made again when the broker lost it."""
        fresh = DurableState(self._filter, self._ack_wait_s)
        state = self._stream.durables.setdefault(self._durable, fresh)
        state.ack_wait_s = self._ack_wait_s
        return state

    async def fetch(self, limit: int, timeout_s: float) -> list[StoredRow]:
        if self._closed:
            raise ClosedError("the consumer is closed")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            rows = self._take(limit, loop.time())
            left = deadline - loop.time()
            if rows or left <= 0:
                return rows
            state = self._state()
            again = [at + state.ack_wait_s - loop.time() for at, _ in state.open.values()]
            await self._stream.changed.wait(max(0.001, min([left, *again])))

    def _take(self, limit: int, now: float) -> list[StoredRow]:
        state = self._state()
        late = sorted(seq for seq, (at, _) in state.open.items() if at + state.ack_wait_s <= now)
        taken = late[:limit]
        while len(taken) < limit and state.next_seq <= len(self._stream.rows):
            if subject_matches(state.filter_subject, self._stream.rows[state.next_seq - 1][0]):
                taken.append(state.next_seq)
            state.next_seq += 1
        rows = []
        for seq in taken:
            delivered = state.open.get(seq, (0.0, 0))[1] + 1
            state.open[seq] = (now, delivered)
            rows.append(self._stream.row(seq, delivered))
        return rows

    async def ack(self, row: StoredRow) -> None:
        self._state().open.pop(row.stream_seq, None)

    async def ack_rows(self, rows: Sequence[StoredRow]) -> None:
        for row in rows:
            await self.ack(row)

    @property
    def lost(self) -> int:
        return 0  # this stream has no limits

    async def pending(self) -> int:
        state = self._state()
        rest = self._stream.rows[state.next_seq - 1 :]
        return len(state.open) + sum(subject_matches(state.filter_subject, subject) for subject, _, _ in rest)

    async def close(self) -> None:
        self._closed = True


class MemoryBucket:
    """Keys with revisions; a deletion, asked or by age, has one too."""

    def __init__(self, ttl_s: float | None) -> None:
        self._ttl_s = ttl_s
        self._revision = 0
        self._entries: dict[str, KeyEntry] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._watchers: list[tuple[deque[KeyEntry], Changed]] = []

    def last(self, key: str) -> KeyEntry:
        """The last entry, or one of revision 0."""
        check_publish_subject(key)
        return self._entries.get(key) or KeyEntry(key, None, 0)

    def write(self, key: str, value: bytes | None, expected: int | None = None) -> int:
        last = self.last(key)
        if expected is not None and last.revision != expected:
            raise WrongRevisionError(f"{key}: revision {last.revision}, not {expected}")
        self._revision += 1
        self._store(KeyEntry(key, value, self._revision))
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        if value is not None and self._ttl_s is not None:
            self._timers[key] = asyncio.get_running_loop().call_later(self._ttl_s, self._expire, key)
        return self._revision

    def _expire(self, key: str) -> None:
        self._timers.pop(key, None)
        self._revision += 1
        self._store(KeyEntry(key, None, self._revision))

    def _store(self, entry: KeyEntry) -> None:
        self._entries[entry.key] = entry
        for waiting, changed in self._watchers:
            waiting.append(entry)
            changed.wake()

    def present(self) -> list[KeyEntry]:
        """Entries that are not deletions, in order of writing."""
        found = [entry for entry in self._entries.values() if entry.value is not None]
        return sorted(found, key=lambda entry: entry.revision)

    def clear(self) -> None:
        """The store is another one."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for entry in self.present():
            self._store(KeyEntry(entry.key, None, 0))
        self._entries.clear()
        self._revision = 0

    async def watch(self, prefix: str) -> AsyncGenerator[KeyEntry, None]:
        below = prefix.rstrip(".")
        waiting: deque[KeyEntry] = deque(self.present())
        changed = Changed()
        watcher = (waiting, changed)
        self._watchers.append(watcher)
        try:
            while True:
                while waiting:
                    entry = waiting.popleft()
                    if not below or entry.key == below or entry.key.startswith(f"{below}."):
                        yield entry
                await changed.wait(None)
        finally:
            self._watchers = [other for other in self._watchers if other is not watcher]


class MemoryObjects:
    """Objects by key, with the time at which each was written."""

    def __init__(self, ttl_s: float | None) -> None:
        self._ttl_s = float("inf") if ttl_s is None else ttl_s
        self._objects: dict[str, tuple[bytes, float]] = {}

    def put(self, key: str, data: bytes) -> None:
        now = asyncio.get_running_loop().time()
        self._objects = {old: kept for old, kept in self._objects.items() if now - kept[1] < self._ttl_s}
        self._objects[key] = (data, now)

    def get(self, key: str) -> bytes:
        data, written_at = self._objects.get(key, (b"", float("-inf")))
        if asyncio.get_running_loop().time() - written_at < self._ttl_s:
            return data
        raise KeyMissingError(f"no object {key}")

    def delete(self, key: str) -> None:
        self._objects.pop(key, None)

    def clear(self) -> None:
        self._objects.clear()

"""Key-value buckets and object stores on JetStream, in NATS's own format: any NATS client reads them.

Keys are written with plain stream messages, because nats-py's `KeyValue` takes the server's expiry markers for values
and its watchers end for good when the bucket is lost. Objects use nats-py's `ObjectStore`; only their chunks are read
here (it waits for ever for a chunk that an overwriting put has purged).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING

from nats.js import api
from nats.js.object_store import OBJ_DEFAULT_CHUNK_SIZE
from nats.js.object_store import ObjectStore as RawObjectStore

from bus.answers import STATUS
from bus.errors import KeyMissingError, NoRespondersError, StreamError, WrongRevisionError
from bus.interface import KeyEntry
from bus.nats.pull import SETTLE_S
from bus.nats.streams import API_TIMEOUT_S, NotThereError, OrderedReader
from bus.validation import check_publish_subject

if TYPE_CHECKING:
    from bus.nats.connection import NatsBus

_OPERATION = "KV-Operation"
_MARKER = "Nats-Marker-Reason"
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_SEQUENCE = "Nats-Sequence"
_IMPOSSIBLE = str((1 << 53) - 1)
"""A revision that no key reaches."""


def _is_deletion(headers: Mapping[str, str]) -> bool:
    return headers.get(_OPERATION) in ("DEL", "PURGE") or _MARKER in headers


class NatsKeyValue:
    """See `bus.interface.KeyValue`. ``ttl_s``: every value's age limit; watchers see what expires as deleted."""

    def __init__(self, bus: NatsBus, bucket: str, ttl_s: float | None) -> None:
        self._bus = bus
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."
        self._config = api.StreamConfig(
            name=self._stream,
            subjects=[f"{self._prefix}>"],
            max_msgs_per_subject=1,
            max_age=ttl_s or 0.0,
            duplicate_window=min(ttl_s, 120.0) if ttl_s else 120.0,
            subject_delete_marker_ttl=max(ttl_s, 60.0) if ttl_s else None,
            allow_msg_ttl=True,
            allow_rollup_hdrs=True,
            allow_direct=True,
            deny_delete=True,
            discard=api.DiscardPolicy.NEW,
            storage=api.StorageType.FILE,
            num_replicas=bus.options.replicas,
        )

    async def open(self) -> None:
        await self._ensure()

    async def _ensure(self) -> api.StreamInfo:
        return await self._bus.js.ensure_stream(self._config)

    async def check_writable(self, key: str) -> None:
        """By a write that must be refused: only the server that leads the stream can refuse it."""
        with contextlib.suppress(WrongRevisionError):
            await self._bus.js.publish(self._subject(key), b"", {_EXPECTED: _IMPOSSIBLE}, API_TIMEOUT_S)

    def _subject(self, key: str) -> str:
        check_publish_subject(key)
        return self._prefix + key

    async def get(self, key: str) -> KeyEntry | None:
        revision, value = await self._last(key)
        return None if value is None else KeyEntry(key, value, revision)

    async def _last(self, key: str) -> tuple[int, bytes | None]:
        """(revision, value) of the key's last message; value ``None`` for a deletion, revision 0 for none at all."""
        ask = f"$JS.API.DIRECT.GET.{self._stream}.{self._subject(key)}"
        try:
            found = await self._bus.request(ask, b"", timeout_s=API_TIMEOUT_S)
        except NoRespondersError:
            await self._ensure()
            return 0, None
        if STATUS in found.headers:
            if found.headers[STATUS] != "404":
                raise StreamError(f"{self._stream}: {found.headers.get('Description', found.headers[STATUS])}")
            return 0, None
        revision = int(found.headers[_SEQUENCE])
        return revision, None if _is_deletion(found.headers) else found.payload

    async def _write(self, key: str, value: bytes, headers: dict[str, str]) -> int:
        subject = self._subject(key)
        try:
            ack = await self._bus.js.publish(subject, value, headers or None, API_TIMEOUT_S)
        except NoRespondersError:
            await asyncio.sleep(SETTLE_S)
            await self._ensure()
            ack = await self._bus.js.publish(subject, value, headers or None, API_TIMEOUT_S)
        return ack.seq

    async def put(self, key: str, value: bytes) -> int:
        return await self._write(key, value, {})

    async def create(self, key: str, value: bytes) -> int:
        try:
            return await self.update(key, value, 0)
        except WrongRevisionError:
            revision, present = await self._last(key)
            if present is not None or revision == 0:
                raise
        return await self.update(key, value, revision)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        return await self._write(key, value, {_EXPECTED: str(revision)})

    async def delete(self, key: str, revision: int | None = None) -> None:
        headers = {_OPERATION: "DEL"}
        if revision is not None:
            headers[_EXPECTED] = str(revision)
        await self._write(key, b"", headers)

    def _reader(self) -> OrderedReader:
        return OrderedReader(self._bus, self._stream, f"{self._prefix}>", "last_per_subject", self._ensure)

    async def keys(self) -> list[str]:
        self._bus.js.check_connected()
        reader = self._reader()
        found: list[str] = []
        try:
            await reader.open()
            left = reader.pending_at_start
            while left > 0:
                item = await reader.next(API_TIMEOUT_S)
                if item is None:
                    raise StreamError(f"{self._stream}: its keys could not be read in time")
                row, place = item
                if not _is_deletion(row.headers):
                    found.append(row.subject[len(self._prefix) :])
                left = place.pending
        finally:
            await reader.close()
        return sorted(found)

    async def watch(self, prefix: str = "") -> AsyncGenerator[KeyEntry, None]:
        below = prefix.rstrip(".")
        reader = self._reader()
        known: set[str] = set()
        stale: set[str] = set()
        current = True
        restarts = 0
        try:
            while True:
                item = await reader.next()
                if reader.restarts != restarts:
                    restarts = reader.restarts
                    stale |= known
                    current = True
                if item is None:
                    if not reader.pending_at_start:
                        for gone in _forgotten(stale, known):
                            yield gone
                    continue
                row, place = item
                key = row.subject[len(self._prefix) :]
                stale.discard(key)
                if not below or key == below or key.startswith(f"{below}."):
                    deleted = _is_deletion(row.headers)
                    if not (deleted and current and key not in known):
                        (known.discard if deleted else known.add)(key)
                        yield KeyEntry(key, None if deleted else row.payload, row.stream_seq)
                if place.pending == 0:
                    current = False
                    for gone in _forgotten(stale, known):
                        yield gone
        finally:
            await reader.close()


def _forgotten(stale: set[str], known: set[str]) -> list[KeyEntry]:
    """Keys of a bucket that was lost and made again without them: deletions nobody published."""
    entries = [KeyEntry(key, None, 0) for key in sorted(stale)]
    known -= stale
    stale.clear()
    return entries


class NatsObjectStore:
    """See `bus.interface.ObjectStore`. ``ttl_s``: every object's age limit; a bucket that exists keeps its own."""

    def __init__(self, bus: NatsBus, bucket: str, ttl_s: float | None) -> None:
        self._bus = bus
        self._bucket = bucket
        self._stream = f"OBJ_{bucket}"
        self._config = api.StreamConfig(
            name=self._stream,
            subjects=[f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"],
            max_age=ttl_s or 0.0,
            duplicate_window=min(ttl_s, 120.0) if ttl_s else 120.0,
            discard=api.DiscardPolicy.NEW,
            allow_rollup_hdrs=True,
            allow_direct=True,
            storage=api.StorageType.FILE,
            num_replicas=bus.options.replicas,
        )
        self._raw = RawObjectStore(name=bucket, stream=self._stream, js=bus.js.manager)

    async def open(self) -> None:
        await self._ensure()

    async def _ensure(self) -> api.StreamInfo:
        return await self._bus.js.ensure_stream(self._config)

    async def put(self, key: str, data: bytes) -> None:
        await self._ensure()
        chunk_bytes = min(OBJ_DEFAULT_CHUNK_SIZE, self._bus.max_payload)
        meta = api.ObjectMeta(name=key, options=api.ObjectMetaOptions(max_chunk_size=chunk_bytes))
        await self._bus.js.call(key, self._raw.put(key, data, meta))

    async def get(self, key: str) -> bytes:
        """An object that is overwritten while it is read is read again. Raises `KeyMissingError`, `StreamError`."""
        for _ in range(3):
            info = await self._info(key)
            data = await self._chunks(info)
            if data is not None:
                return data
        raise StreamError(f"{self._bucket}/{key} is incomplete, or overwritten faster than it is read")

    async def _info(self, key: str) -> api.ObjectInfo:
        self._bus.js.check_connected()
        try:
            return await self._bus.js.call(key, self._raw.get_info(key))
        except NotThereError as error:
            raise KeyMissingError(f"no object {key} in {self._bucket}") from error

    async def _chunks(self, info: api.ObjectInfo) -> bytes | None:
        """The object's bytes, or ``None`` when a chunk is missing or the whole has another digest."""
        chunks: list[bytes] = []
        wanted = info.chunks or 0
        reader = OrderedReader(self._bus, self._stream, f"$O.{self._bucket}.C.{info.nuid}", "all", self._ensure)
        try:
            await reader.open()
            while len(chunks) < wanted:
                item = await reader.next(API_TIMEOUT_S) if reader.pending_at_start == wanted else None
                if item is None:
                    return None
                chunks.append(item[0].payload)
        finally:
            await reader.close()
        data = b"".join(chunks)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
        return data if not wanted or info.digest == f"SHA-256={digest}" else None

    async def delete(self, key: str) -> None:
        """An object that is not there is as good as deleted."""
        self._bus.js.check_connected()
        try:
            await self._bus.js.call(key, self._raw.delete(key))
        except NotThereError:
            return

"""Answers ``tg.v1.kv.snapshot.<worker>``: the index's dump into the object store, its place and marks to the asker.

Askers who come while a dump is being written are answered together by the next one, and an unchanged index is not
written again within `REUSE_S`: later the store may have lost it, and only who fetches it would notice. A dump is made
in slices, between which the bridge goes on. Dumps go round through `SLOTS` keys, so that one is not overwritten while
somebody reads it. Where the store does not take a small dump at once (its servers elect for 5 to 10 s), the answer has
it with it.

The newest dump is also the checkpoint (`services.bridge.checkpoint`) with which the next bridge of this worker begins;
without askers one is made now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator

from msgspec import structs
from xxhash import xxh3_64_hexdigest

from bus import subjects
from bus.errors import BusError, KeyMissingError
from bus.interface import Bus, BusMessage, ObjectStore
from bus.log import EventLog
from bus.slices import in_slices
from schemas.base import from_json, to_json
from schemas.kv import SnapshotReply
from services.bridge.checkpoint import Checkpoint, RankCheckpoint
from services.bridge.errors import CheckpointError
from services.bridge.shell.askers import Askers

log = EventLog(__name__)

SLOTS = 4
REUSE_S = 1.0
"""How long a dump that has been written is taken to be still there."""
INLINE_BYTES = 2 * 1024 * 1024
"""Of a dump that an answer may have with it: some 30,000 blocks."""
STORE_S = 1.0
"""How long the store may take for such a dump before who asked is answered without it."""
UNASKED_STORE_S = 4.0
"""How long it may take for one that nobody waits for; who asks meanwhile waits behind it."""

KEEP_POLL_S = 1.0
KEEP_SHARE = 0.05
"""Of the time, spent at most on dumps that nobody asked for."""

KEPT_S = subjects.SNAPSHOTS_TTL_S / 4
"""A checkpoint of an idle engine is renewed before the store forgets it."""

Marks = tuple[RankCheckpoint, ...]
Dump = Callable[[], Generator[None, None, tuple[bytes, Marks] | None]]


class SnapshotDesk:
    """``dump`` gives the index and its marks, or ``None`` when its engine was too busy for that."""

    def __init__(self, bus: Bus, objects: ObjectStore, worker: str, dump: Dump, marks: Callable[[], Marks]) -> None:
        self._bus = bus
        self._objects = objects
        self._worker = worker
        self._dump = dump
        self._marks = marks
        self._askers = Askers(bus, SnapshotReply(worker=worker, error="too_many_askers"))
        self._slot = 0
        self._last: SnapshotReply | None = None
        self._kept: Marks = ()
        self._written_at = float("-inf")
        self._tried_at = float("-inf")
        self._took_s = 0.0
        self._failing = False
        self.written = 0

    def asked(self, message: BusMessage) -> None:
        """One question. Beyond the bound it is refused, and the asker comes back later."""
        self._askers.add(message)

    async def serve(self) -> None:
        """Answer for ever; ends by being cancelled."""
        await self._askers.serve(self._answer)

    async def keep(self, interval_s: float, batches: int) -> None:
        """Make a dump now and then, for ever: the newest is at most ``interval_s`` or ``batches`` behind, as far as
        that costs little."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        while True:
            await asyncio.sleep(min(KEEP_POLL_S, interval_s))
            age = loop.time() - max(self._tried_at, began_at)
            if self._bus.connected and not self._askers and self._due(age, interval_s, batches):
                self._askers.add_nobody()

    def _due(self, age: float, interval_s: float, batches: int) -> bool:
        marks = self._marks()
        if not any(mark.seq >= 0 for mark in marks) or age * KEEP_SHARE < self._took_s:
            return False
        if marks == self._kept:
            return age >= KEPT_S
        before = {(mark.rank, mark.incarnation): mark.seq for mark in self._kept}
        behind = sum(mark.seq - before.get((mark.rank, mark.incarnation), -1) for mark in marks)
        return age >= interval_s or (behind >= batches and not self._failing)

    async def read(self) -> tuple[Checkpoint, bytes] | None:
        """What the bridge before left behind. Raises `CheckpointError`, `BadMessageError`, `BusError`."""
        try:
            checkpoint = from_json(await self._objects.get(self._pointer), Checkpoint)
            dump = await self._objects.get(checkpoint.key)
        except KeyMissingError:
            return None
        if xxh3_64_hexdigest(dump) != checkpoint.digest or checkpoint.worker != self._worker:
            raise CheckpointError(f"{checkpoint.key} is not the dump that the checkpoint speaks of")
        slots = [slot for slot in range(SLOTS) if self._key(slot) == checkpoint.key]
        self._slot = slots[0] if slots else 0
        self._kept = checkpoint.ranks
        return checkpoint, dump

    async def _answer(self, is_waited_for: bool) -> SnapshotReply:
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        if not self._marks():
            # Nobody knows yet whose index it is. The checkpoint of the bridge before may still be needed.
            return SnapshotReply(worker=self._worker, error="engine_unknown")
        if self._last is not None and self._kept == self._marks() and began_at - self._written_at < REUSE_S:
            return self._last
        self._tried_at = began_at
        self._failing = True
        made = await in_slices(self._dump())
        self._took_s = loop.time() - began_at
        if made is None:
            log.warning("snapshot_not_made", worker=self._worker, reason="index_busy")
            return SnapshotReply(worker=self._worker, error="index_busy")
        dump, kept = made
        self._slot = (self._slot + 1) % SLOTS
        key = self._key(self._slot)
        checkpoint = Checkpoint(worker=self._worker, key=key, digest=xxh3_64_hexdigest(dump), ranks=kept)
        reply = SnapshotReply(
            worker=self._worker,
            bucket=subjects.OBJECTS_SNAPSHOTS,
            key=key,
            size_bytes=len(dump),
            digest=checkpoint.digest,
            marks=tuple(rank.mark for rank in kept),
        )
        goes_inline = len(dump) <= min(INLINE_BYTES, self._bus.max_payload // 2)
        limit_s = (STORE_S if is_waited_for else UNASKED_STORE_S) if goes_inline else None
        problem = await self._store(dump, checkpoint, limit_s)
        if problem is not None:
            log.warning("snapshot_not_written", worker=self._worker, reason=problem, size=len(dump), inline=goes_inline)
            if goes_inline:
                return structs.replace(reply, bucket="", key="", dump=dump)
            return SnapshotReply(worker=self._worker, error=problem)
        self.written += 1
        self._failing = False
        self._kept = kept
        self._written_at = loop.time()
        self._took_s = self._written_at - began_at
        self._last = reply
        return reply

    async def _store(self, dump: bytes, checkpoint: Checkpoint, timeout_s: float | None) -> str | None:
        """Why it could not be written; ``None``: it is."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._objects.put(checkpoint.key, dump)
                await self._objects.put(self._pointer, to_json(checkpoint))
        except TimeoutError:
            return "store_slow"
        except BusError as error:
            return error.reason
        return None

    async def clear(self) -> None:
        """The worker leaves: what nobody will ask for any more goes. The newest dump stays until the store forgets it,
        for a bridge that is only being replaced. Raises `BusError`."""
        for slot in range(SLOTS):
            if self._last is None or self._key(slot) != self._last.key:
                await self._objects.delete(self._key(slot))

    @property
    def _pointer(self) -> str:
        return f"{subjects.encode_id(self._worker)}.checkpoint"

    def _key(self, slot: int) -> str:
        return f"{subjects.encode_id(self._worker)}.{slot}"

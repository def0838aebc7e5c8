"""Answers ``tg.v1.pool.snapshot.<pool>``: the picture's dump into the object store, its place and number to the asker.

Askers who come while a dump is being written are answered together by the next one. A dump is made in slices, between
which the bridge goes on; dumps go round through `SLOTS` keys, so that one is not overwritten while somebody reads it.
"""

from __future__ import annotations

import asyncio

from xxhash import xxh3_64_hexdigest

from bus import subjects
from bus.errors import BusError
from bus.interface import Bus, BusMessage, ObjectStore
from bus.log import EventLog
from bus.slices import in_slices
from schemas.pool import PoolSnapshotReply
from services.bridge.pool.core import PoolCore
from services.bridge.shell.askers import Askers

log = EventLog(__name__)

SLOTS = 4
REUSE_S = 1.0
"""How long a dump that has been written is taken to be still there."""


class PoolSnapshotDesk:
    """The snapshots of one pool."""

    def __init__(self, bus: Bus, objects: ObjectStore, core: PoolCore) -> None:
        self._bus = bus
        self._objects = objects
        self._core = core
        self._askers = Askers(bus, PoolSnapshotReply(pool=core.pool, error="too_many_askers"))
        self._slot = 0
        self._last: PoolSnapshotReply | None = None
        self._written_at = float("-inf")
        self.written = 0

    def asked(self, message: BusMessage) -> None:
        """One question. Beyond the bound it is refused, and the asker comes back later."""
        self._askers.add(message)

    async def serve(self) -> None:
        """Answer for ever; ends by being cancelled."""
        await self._askers.serve(self._answer)

    async def clear(self) -> None:
        """The bridge leaves, and its numbers with it: nobody can use its dumps any more. Raises `BusError`."""
        for slot in range(SLOTS):
            await self._objects.delete(self._key(slot))

    async def _answer(self, _: bool) -> PoolSnapshotReply:
        core, loop = self._core, asyncio.get_running_loop()
        fresh = loop.time() - self._written_at < REUSE_S
        if self._last is not None and fresh and self._last.pool_seq == core.seq:
            return self._last
        dump, seq = await in_slices(core.snapshot())
        self._slot = (self._slot + 1) % SLOTS
        key = self._key(self._slot)
        try:
            await self._objects.put(key, dump)
        except BusError as error:
            log.warning("pool_snapshot_not_written", pool=core.pool, reason=error.reason, size=len(dump))
            return PoolSnapshotReply(pool=core.pool, error=error.reason)
        self.written += 1
        self._written_at = loop.time()
        self._last = PoolSnapshotReply(
            pool=core.pool,
            epoch=core.epoch,
            pool_seq=seq,
            bucket=subjects.OBJECTS_SNAPSHOTS,
            key=key,
            size_bytes=len(dump),
            digest=xxh3_64_hexdigest(dump),
        )
        return self._last

    def _key(self, slot: int) -> str:
        # A worker's keys have one token before the slot (`services.bridge.shell.snapshots`).
        return f"pool.{subjects.encode_id(self._core.pool)}.{slot}"

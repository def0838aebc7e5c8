"""Answers ``tg.v1.kv.snapshot.<worker>``: the index's dump into the object store, its place and marks to the asker.

Askers who come while a dump is being written are answered together by the next one, and an unchanged index is not
written again within `REUSE_S`: later the store may have lost it, and only who fetches it would notice. A dump is made
in slices, between which the bridge goes on. Dumps go round through `SLOTS` keys, so that one is not overwritten while
somebody reads it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator

from bus import subjects
from bus.errors import BusError
from bus.interface import Bus, BusMessage, ObjectStore
from bus.log import EventLog
from bus.slices import in_slices
from schemas.base import to_json
from schemas.kv import RankMark, SnapshotReply

log = EventLog(__name__)

SLOTS = 4
REUSE_S = 1.0
"""How long a dump that has been written is taken to be still there."""

MAX_WAITING = 256

Dump = Callable[[], Generator[None, None, tuple[bytes, tuple[RankMark, ...]] | None]]


class SnapshotDesk:
    """``dump`` gives the index and its marks, or ``None`` when its engine was too busy for that."""

    def __init__(
        self, bus: Bus, objects: ObjectStore, worker: str, dump: Dump, marks: Callable[[], tuple[RankMark, ...]]
    ) -> None:
        self._bus = bus
        self._objects = objects
        self._worker = worker
        self._dump = dump
        self._marks = marks
        self._waiting: deque[str] = deque()
        self._asked = asyncio.Event()
        self._slot = 0
        self._last: SnapshotReply | None = None
        self._written_at = float("-inf")
        self.written = 0
        self.refused = 0

    def asked(self, message: BusMessage) -> None:
        """One question. Beyond the bound it is refused, and the asker comes back later."""
        if len(self._waiting) >= MAX_WAITING:
            self.refused += 1
            self._reply([message.reply], SnapshotReply(worker=self._worker, error="too_many_askers"))
            return
        self._waiting.append(message.reply)
        self._asked.set()

    async def serve(self) -> None:
        """Answer for ever; ends by being cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            askers = list(self._waiting)
            self._waiting.clear()
            if askers:
                self._reply(askers, await self._answer())

    async def _answer(self) -> SnapshotReply:
        marks = self._marks()
        loop = asyncio.get_running_loop()
        if self._last is not None and self._last.marks == marks and loop.time() - self._written_at < REUSE_S:
            return self._last
        made = await in_slices(self._dump())
        if made is None:
            log.warning("snapshot_not_made", worker=self._worker, reason="index_busy")
            return SnapshotReply(worker=self._worker, error="index_busy")
        dump, marks = made
        self._slot = (self._slot + 1) % SLOTS
        key = self._key(self._slot)
        try:
            await self._objects.put(key, dump)
        except BusError as error:
            log.warning("snapshot_not_written", worker=self._worker, reason=error.reason, size=len(dump))
            return SnapshotReply(worker=self._worker, error=error.reason)
        self.written += 1
        self._written_at = loop.time()
        self._last = SnapshotReply(
            worker=self._worker,
            bucket=subjects.OBJECTS_SNAPSHOTS,
            key=key,
            size_bytes=len(dump),
            marks=marks,
        )
        return self._last

    async def clear(self) -> None:
        """The worker leaves: its dumps would stay in the store for ever. Raises `BusError`."""
        for slot in range(SLOTS):
            await self._objects.delete(self._key(slot))

    def _key(self, slot: int) -> str:
        return f"{subjects.encode_id(self._worker)}.{slot}"

    def _reply(self, askers: list[str], reply: SnapshotReply) -> None:
        payload = to_json(reply)
        for asker in askers:
            if asker:
                self._bus.publish(asker, payload)

"""The buckets of a scheduling policy: what pools have learned (read once, written by the leader), and the reload curves
that `tidegate calibrate` measured (watched). Without them everything runs, with less known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from bus.errors import BusError
from bus.interface import Bus
from bus.log import EventLog
from bus.subjects import BUCKET_CALIBRATIONS, BUCKET_LEARNED
from bus.tasks import Tasks
from services.admission.events import CalibrationTold, Event, LearnedRead, LearnedUnwritten
from services.admission.remembered import MAX_STORED, Stored

log = EventLog(__name__)

FIRST_READ_S = 2.0
"""The start waits so long for what is stored; later it is read when the bus answers."""
AGAIN_S = 5.0


class Stores:
    """``handle`` takes the events. ``written``: values stored; ``failed``: reads and writes that were refused."""

    def __init__(self, handle: Callable[[Event], None]) -> None:
        self._handle = handle
        self._bus: Bus
        self._writes: asyncio.Queue[Stored] = asyncio.Queue(MAX_STORED)
        self.written = 0
        self.failed = 0

    async def start(self, bus: Bus, tasks: Tasks) -> None:
        """Reads what is stored, or goes on trying; writes and watches from then on."""
        self._bus = bus
        try:
            async with asyncio.timeout(FIRST_READ_S):
                await self._read()
        except (BusError, TimeoutError) as error:
            self._failed("read", error)
            tasks.start("learned-read", self._read_later())
        tasks.start("learned-write", self._write_all())
        tasks.start("calibrations", self._watch())

    def store(self, value: Stored) -> None:
        """Write it, in turn."""
        try:
            self._writes.put_nowait(value)
        except asyncio.QueueFull:
            self._handle(LearnedUnwritten(value.key))

    async def write(self, value: Stored) -> None:
        """Write it now."""
        try:
            bucket = await self._bus.key_value(BUCKET_LEARNED)
            await bucket.put(value.key, value.payload)
            self.written += 1
        except BusError as error:
            self._failed("write", error)
            self._handle(LearnedUnwritten(value.key))

    async def _write_all(self) -> None:
        while True:
            await self.write(await self._writes.get())

    async def _read(self) -> None:
        bucket = await self._bus.key_value(BUCKET_LEARNED)
        entries = [await bucket.get(key) for key in (await bucket.keys())[:MAX_STORED]]
        values = {entry.key: entry.value for entry in entries if entry is not None and entry.value is not None}
        self._handle(LearnedRead(values))

    async def _read_later(self) -> None:
        while True:
            await asyncio.sleep(AGAIN_S)
            try:
                await self._read()
            except BusError as error:
                self._failed("read", error)
            else:
                return

    async def _watch(self) -> None:
        while True:
            try:
                bucket = await self._bus.key_value(BUCKET_CALIBRATIONS)
                async with aclosing(bucket.watch()) as entries:
                    async for entry in entries:
                        self._handle(CalibrationTold(entry.key, entry.value))
            except BusError as error:
                self._failed("watch", error)
            await asyncio.sleep(AGAIN_S)

    def _failed(self, what: str, error: BusError | TimeoutError) -> None:
        self.failed += 1
        reason = error.reason if isinstance(error, BusError) else "timeout"
        log.warning("policy_store_failed", what=what, reason=reason)

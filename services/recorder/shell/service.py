"""One loop: fetch rows, let the core decide, write, acknowledge. JetStream is the queue, so nothing else queues.

While the disk refuses a write the loop stands still: the member is tried again, the process is not ready, and the rows
stay in the stream.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from bus.errors import BusError, SettingsError
from bus.interface import Bus, Consumer, StoredRow
from bus.log import EventLog
from bus.tasks import Tasks
from services.recorder.config import RecorderSettings
from services.recorder.core import RecorderCore, RollingRules
from services.recorder.effects import Acknowledge, DropRow, Effect, WriteMember
from services.recorder.errors import RecorderError, SinkError
from services.recorder.events import Event, MemberWritten, RowReceived, StopAsked, TimePassed
from services.recorder.shell import metrics
from services.recorder.shell.file import FileSink

log = EventLog(__name__)

_IDLE_FETCH_S = 1.0
_DRAIN_FETCH_S = 0.25
_RETRY_S = 1.0


class RecorderService:
    """The recorder as `bus.service.run_service` runs it."""

    def __init__(self, settings: RecorderSettings) -> None:
        self._settings = settings
        self._file: FileSink | None = None
        if "file" in settings.sinks:
            self._file = FileSink(Path(settings.directory), settings.prefix, settings.fsync)
        self._stdout = "stdout" in settings.sinks
        self._consumer: Consumer | None = None
        self._trouble: str | None = "opening"
        self._stopping = asyncio.Event()
        self._recording: asyncio.Task[None] | None = None

    async def start(self, bus: Bus, tasks: Tasks) -> None:
        """Open the sink, resume the consumer. Raises `SettingsError` for a directory or prefix that cannot be used."""
        settings = self._settings
        first_segment = 0
        written: tuple[bytes, ...] = ()
        if self._file is not None:
            try:
                recovered = await asyncio.to_thread(self._file.open, settings.recent_rows)
            except RecorderError as error:
                key = "directory" if isinstance(error, SinkError) else "prefix"
                raise SettingsError(key, str(error)) from error
            first_segment, written = recovered.next_segment, recovered.fingerprints
            metrics.TORN_BYTES.inc(recovered.torn_bytes)
            if recovered.torn_bytes:
                log.warning("torn_member_cut", bytes=recovered.torn_bytes, directory=settings.directory)
        rules = RollingRules(
            flush_bytes=settings.flush_bytes,
            flush_interval_s=settings.flush_interval_ms / 1000,
            roll_bytes=settings.roll_bytes,
            roll_lines=settings.roll_lines,
        )
        core = RecorderCore(rules, first_segment, time.time(), written, settings.recent_rows)
        self._consumer = await bus.consume(settings.durable, settings.filter_subject, ack_wait_s=settings.ack_wait_s)
        self._trouble = None
        self._recording = tasks.start("record", self._record(core, self._consumer))

    def not_ready(self) -> str | None:
        return self._trouble

    async def stop(self, timeout_s: float) -> None:
        """Take what the stream still holds, flush, acknowledge, close the segment."""
        self._stopping.set()
        if self._recording is not None:
            _, late = await asyncio.wait({self._recording}, timeout=timeout_s * 0.9)
            if late:
                log.error("drain_timed_out", timeout_s=timeout_s)
                self._recording.cancel()
                await asyncio.wait({self._recording}, timeout=timeout_s * 0.1)
        if self._consumer is not None:
            await self._consumer.close()
        if self._file is not None:
            await asyncio.to_thread(self._file.close)

    async def _record(self, core: RecorderCore, consumer: Consumer) -> None:
        while not self._stopping.is_set():
            due_s = core.next_flush_in_s(time.time())
            rows = await self._fetch(consumer, _IDLE_FETCH_S if due_s is None else min(_IDLE_FETCH_S, due_s))
            await self._handle(core, consumer, rows or [None])
        await self._drain(core, consumer)

    async def _drain(self, core: RecorderCore, consumer: Consumer) -> None:
        """What the stream holds now, rows included that a killed predecessor took and that come again after
        ``ack_wait_s``; not what is published meanwhile."""
        give_up = time.monotonic() + self._settings.ack_wait_s + _DRAIN_FETCH_S
        left = await self._pending(consumer) - core.waiting_rows
        while left > 0 and time.monotonic() < give_up:
            rows = await self._fetch(consumer, _DRAIN_FETCH_S)
            await self._handle(core, consumer, rows or [None])
            left -= len(rows)
            if not rows:
                left = min(left, await self._pending(consumer) - core.waiting_rows)
        await self._perform(core, consumer, core.handle(StopAsked(), time.time()))

    async def _pending(self, consumer: Consumer) -> int:
        """Rows that are not acknowledged; 0 while the bus is away, for then nothing can be drained."""
        try:
            return await consumer.pending()
        except BusError as error:
            log.warning("drain_without_bus", reason=error.reason)
            return 0

    async def _fetch(self, consumer: Consumer, timeout_s: float) -> list[StoredRow]:
        """Rows, or nothing. A bus that is away is waited for; the bus layer says when it is gone for good."""
        try:
            rows = await consumer.fetch(self._settings.fetch_rows, max(0.01, timeout_s))
            self._trouble = None
            return rows
        except BusError as error:
            self._trouble = f"{error.reason}: {error}"
            try:
                async with asyncio.timeout(_RETRY_S):
                    await self._stopping.wait()
            except TimeoutError:
                pass
            return []

    async def _handle(self, core: RecorderCore, consumer: Consumer, rows: list[StoredRow] | list[None]) -> None:
        for row in rows:
            event: Event = TimePassed() if row is None else RowReceived(row.payload, token=row)
            await self._perform(core, consumer, core.handle(event, time.time()))
        metrics.WAITING.set(core.waiting_rows)

    async def _perform(self, core: RecorderCore, consumer: Consumer, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, WriteMember):
                await self._write(effect)
                await self._perform(core, consumer, core.handle(MemberWritten(effect.number), time.time()))
            elif isinstance(effect, Acknowledge):
                await self._acknowledge(consumer, effect)
            else:
                self._drop(effect)

    async def _write(self, effect: WriteMember) -> None:
        """Until it is written; ends otherwise only by being cancelled, with the rows still in the stream."""
        while self._file is not None:
            started = time.monotonic()
            try:
                size = await asyncio.to_thread(self._file.append, effect.segment, effect.lines)
            except SinkError as error:
                metrics.FAILED_WRITES.inc()
                self._trouble = f"{error.reason}: {error}"
                log.warning("write_failed", reason=error.reason, detail=str(error), segment=effect.segment)
                await asyncio.sleep(_RETRY_S)
                continue
            self._trouble = None
            metrics.WRITE_SECONDS.observe(time.monotonic() - started)
            metrics.MEMBERS.inc()
            metrics.BYTES.inc(size)
            metrics.SEGMENT.set(effect.segment)
            metrics.ROWS.labels("file").inc(len(effect.rows))
            break
        if self._stdout:
            await asyncio.to_thread(_print_rows, effect.rows)
            metrics.ROWS.labels("stdout").inc(len(effect.rows))

    async def _acknowledge(self, consumer: Consumer, effect: Acknowledge) -> None:
        for token in effect.tokens:
            assert isinstance(token, StoredRow)
            try:
                await consumer.ack(token)
            except BusError as error:
                metrics.FAILED_ACKS.inc()
                log.warning("ack_failed", reason=error.reason, stream_seq=token.stream_seq)

    def _drop(self, effect: DropRow) -> None:
        metrics.DROPPED.labels(effect.reason).inc()
        if effect.reason != "duplicate":
            log.warning("row_dropped", reason=effect.reason, detail=effect.detail)


def _print_rows(rows: tuple[bytes, ...]) -> None:
    sys.stdout.buffer.write(b"".join(row + b"\n" for row in rows))
    sys.stdout.buffer.flush()

"""One sink and its consumer: rows are fetched and batched by one task and written by another. JetStream is the queue:
what waits here is bounded by `BUFFER_ROWS` and `BUFFER_BYTES` (and one fetch more), and while the sink refuses nothing
more is fetched.

The process knows several of these; none waits for another.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from bus.errors import BusError
from bus.interface import Bus, Consumer, StoredRow
from bus.log import EventLog
from bus.tasks import Tasks
from services.recorder.config import MOST_FLUSH_BYTES, RecorderSettings
from services.recorder.core import BatchRules, RecorderCore
from services.recorder.effects import Acknowledge, DropRow, Effect, WriteBatch
from services.recorder.errors import SinkError
from services.recorder.events import BatchWritten, RowsReceived, StopAsked, TimePassed
from services.recorder.shell import metrics
from services.recorder.shell.sink import Batch, Sink

log = EventLog(__name__)

BUFFER_ROWS, BUFFER_BYTES = 4_096, 2 * MOST_FLUSH_BYTES
"""What of a sink waits or is being written, above which nothing is fetched. A batch is flushed at half of it at the
latest: so something is being written whenever the buffer is full."""
_IDLE_FETCH_S = 1.0
_DRAIN_FETCH_S = 0.25
_RETRY_S = 1.0


class SinkLoop:
    """Runs between `start` and `stop`. ``durable``: name of the consumer."""

    def __init__(self, settings: RecorderSettings, sink: Sink, durable: str) -> None:
        self._settings = settings
        self._sink = sink
        self._durable = durable
        self._name = sink.name
        self._trouble: str | None = "opening"
        self._refusing = False
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self._to_write: deque[WriteBatch] = deque()
        self._finished = False
        self._lost = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._consumer: Consumer | None = None
        self._core: RecorderCore
        for counter in (metrics.ROWS, metrics.LOST, metrics.FAILED_WRITES, metrics.WAITING):
            counter.labels(self._name)  # shown from the beginning, as 0

    async def start(self, bus: Bus, tasks: Tasks) -> None:
        """Open the sink, resume the consumer. Raises `SettingsError`, and what `Bus.consume` raises."""
        settings = self._settings
        written = await self._sink.open()
        rules = BatchRules(settings.flush_bytes, BUFFER_ROWS // 2, settings.flush_interval_ms / 1000)
        self._core = RecorderCore(rules, written, settings.recent_rows)
        self._consumer = await bus.consume(self._durable, settings.filter_subject, ack_wait_s=settings.ack_wait_s)
        self._trouble = None
        self._tasks = {
            tasks.start(f"record-{self._name}", self._record(self._consumer)),
            tasks.start(f"write-{self._name}", self._write_all(self._consumer)),
        }

    def not_ready(self) -> str | None:
        """What is wrong, or ``None``."""
        return self._trouble

    async def stop(self, timeout_s: float) -> None:
        """Take what the stream still holds, write it, acknowledge, close the sink."""
        self._stopping.set()
        self._changed.set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s * 0.85)
            if late:
                log.error("drain_timed_out", sink=self._name, timeout_s=timeout_s)
                for task in late:
                    task.cancel()
                await asyncio.wait(late, timeout=timeout_s * 0.1)
        if self._consumer is not None:
            await self._consumer.close()
        try:
            await self._sink.close()
        except SinkError as error:
            log.warning("sink_not_closed", sink=self._name, reason=error.reason, detail=str(error))

    # In

    async def _record(self, consumer: Consumer) -> None:
        while not self._stopping.is_set():
            if self._is_full():
                await self._wait_for_change()
                continue
            due_s = self._core.next_flush_in_s(time.time())
            rows = await self._fetch(consumer, _IDLE_FETCH_S if due_s is None else min(_IDLE_FETCH_S, due_s))
            await self._handle(consumer, rows)
        await self._drain(consumer)
        self._finished = True
        self._changed.set()

    def _is_full(self) -> bool:
        core = self._core
        return self._refusing or core.waiting_rows >= BUFFER_ROWS or core.waiting_bytes >= BUFFER_BYTES

    async def _wait_for_change(self) -> None:
        """Until a batch is written or the stop is asked."""
        self._changed.clear()
        await self._changed.wait()

    async def _drain(self, consumer: Consumer) -> None:
        """What the stream holds now, rows included that a killed predecessor took and that come again after
        ``ack_wait_s``; not what is published meanwhile."""
        give_up = time.monotonic() + self._settings.ack_wait_s + _DRAIN_FETCH_S
        left = await self._pending(consumer) - self._core.waiting_rows
        while left > 0 and time.monotonic() < give_up:
            if self._is_full():
                await self._wait_for_change()
                continue
            rows = await self._fetch(consumer, _DRAIN_FETCH_S)
            await self._handle(consumer, rows)
            left -= len(rows)
            if not rows:
                left = min(left, await self._pending(consumer) - self._core.waiting_rows)
        await self._perform(consumer, self._core.handle(StopAsked(), time.time()))

    async def _pending(self, consumer: Consumer) -> int:
        """Rows that are not acknowledged; 0 while the bus is away, for then nothing can be drained."""
        try:
            return await consumer.pending()
        except BusError as error:
            log.warning("drain_without_bus", sink=self._name, reason=error.reason)
            return 0

    async def _fetch(self, consumer: Consumer, timeout_s: float) -> list[StoredRow]:
        """Rows, or nothing. A bus that is away is waited for; the bus layer says when it is gone for good."""
        try:
            rows = await consumer.fetch(self._settings.fetch_rows, max(0.01, timeout_s))
        except BusError as error:
            self._trouble = f"{error.reason}: {error}"
            try:
                async with asyncio.timeout(_RETRY_S):
                    await self._stopping.wait()
            except TimeoutError:
                pass
            return []
        if not self._refusing:
            self._trouble = None
        if consumer.lost > self._lost:
            lost, self._lost = consumer.lost - self._lost, consumer.lost
            metrics.LOST.labels(self._name).inc(lost)
            log.error("rows_lost", sink=self._name, rows=lost, reason="stream_full")
        return rows

    async def _handle(self, consumer: Consumer, rows: list[StoredRow]) -> None:
        event = RowsReceived([row.payload for row in rows], rows) if rows else TimePassed()
        await self._perform(consumer, self._core.handle(event, time.time()))
        metrics.WAITING.labels(self._name).set(self._core.waiting_rows)

    async def _perform(self, consumer: Consumer, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, WriteBatch):
                self._to_write.append(effect)
                self._changed.set()
            elif isinstance(effect, Acknowledge):
                await self._acknowledge(consumer, effect)
            else:
                self._drop(effect)

    async def _acknowledge(self, consumer: Consumer, effect: Acknowledge) -> None:
        rows = [token for token in effect.tokens if isinstance(token, StoredRow)]
        try:
            await consumer.ack_rows(rows)
        except BusError as error:
            metrics.FAILED_ACKS.labels(self._name).inc(len(rows))
            log.warning("ack_failed", sink=self._name, reason=error.reason, rows=len(rows))

    def _drop(self, effect: DropRow) -> None:
        metrics.DROPPED.labels(self._name, effect.reason).inc()
        if effect.reason != "duplicate":
            log.warning("row_dropped", sink=self._name, reason=effect.reason, detail=effect.detail)

    # Out

    async def _write_all(self, consumer: Consumer) -> None:
        """Batches in their order, one at a time, until the reader has finished and all are written."""
        while True:
            if self._to_write:
                number = self._to_write[0].number
                await self._write(self._to_write[0])
                self._to_write.popleft()
                await self._perform(consumer, self._core.handle(BatchWritten(number), time.time()))
                metrics.WAITING.labels(self._name).set(self._core.waiting_rows)
                self._changed.set()
            elif self._finished:
                return
            else:
                await self._wait_for_change()

    async def _write(self, effect: WriteBatch) -> None:
        """Until it is written; ends otherwise only by being cancelled, with the rows still in the stream."""
        batch = Batch(effect.rows, effect.received_s)
        while True:
            started = time.monotonic()
            try:
                written = await self._sink.write(batch)
            except SinkError as error:
                metrics.FAILED_WRITES.labels(self._name).inc()
                self._refusing = True
                self._trouble = f"{error.reason}: {self._name}: {error}"
                log.warning("write_failed", sink=self._name, reason=error.reason, detail=str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            break
        if self._refusing:
            self._refusing, self._trouble = False, None
        metrics.WRITE_SECONDS.labels(self._name).observe(time.monotonic() - started)
        metrics.BATCHES.labels(self._name).inc()
        metrics.BYTES.labels(self._name).inc(written.bytes)
        metrics.ROWS.labels(self._name).inc(len(batch.rows) - written.refused)
        if written.refused:
            metrics.DROPPED.labels(self._name, "refused").inc(written.refused)
            log.warning("rows_refused", sink=self._name, rows=written.refused)

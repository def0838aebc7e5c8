"""The sink ``otlp``: rows as spans and log records to a collector."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec

from bus.errors import SettingsError
from schemas.base import UNDECODABLE
from schemas.trace import TraceRow
from services.recorder.config import OtlpSignal, RecorderSettings
from services.recorder.errors import SinkError
from services.recorder.shell.sink import Batch, Written
from services.recorder.span_builder import LogRecord, SpanBuilder, log_records
from services.recorder.spans import Runs, Span

if TYPE_CHECKING:
    from services.recorder.shell.otlp_sender import OtlpSender

MISSING = "the sink otlp needs OpenTelemetry's SDK: pip install 'tidegate[otlp]'"
_decoder = msgspec.json.Decoder(TraceRow)
T = TypeVar("T")


@dataclass(slots=True)
class _Prepared:
    """A batch and what is still to be sent of it: one that is given again is not sent twice where it was taken."""

    batch: Batch
    spans: list[Span] | None = None
    records: list[LogRecord] | None = None
    refused: int = field(default=0)


class OtlpSink:
    """See `services.recorder.shell.sink.Sink`. Every request to the collector has a deadline, in a thread of ours."""

    name = "otlp"

    def __init__(self, settings: RecorderSettings) -> None:
        self._endpoint = settings.otlp_endpoint
        self._timeout_s = settings.otlp_timeout_s
        self._signals: frozenset[OtlpSignal] = frozenset(settings.otlp_signals)
        self._runs = Runs(settings.tenant)
        self._builder = SpanBuilder(self._runs)
        self._sender: OtlpSender | None = None
        self._prepared: _Prepared | None = None

    async def open(self) -> tuple[bytes, ...]:
        """Raises `SettingsError` where the SDK is not installed."""
        try:
            self._sender = await _in_thread(self._connect)
        except ImportError as error:
            raise SettingsError("sinks", f"{MISSING} ({error})") from error
        return ()

    def _connect(self) -> OtlpSender:
        from services.recorder.shell.otlp_sender import OtlpSender

        return OtlpSender(self._endpoint, self._timeout_s)

    async def write(self, batch: Batch) -> Written:
        return await _in_thread(lambda: self._write(batch))

    def _write(self, batch: Batch) -> Written:
        if self._sender is None:
            raise SinkError("the sink otlp is not open")
        todo = self._prepared
        if todo is None or todo.batch is not batch:
            todo = self._prepared = self._prepare(batch)
        if todo.spans is not None:
            todo.refused += self._sender.send_spans(todo.spans)
            todo.spans = None
        if todo.records is not None:
            todo.refused += self._sender.send_logs(todo.records)
            todo.records = None
        self._prepared = None
        return Written(bytes=sum(map(len, batch.rows)), refused=min(todo.refused, len(batch.rows)))

    def _prepare(self, batch: Batch) -> _Prepared:
        todo = _Prepared(batch)
        rows = []
        for line in batch.rows:
            try:
                rows.append(_decoder.decode(line))
            except UNDECODABLE:
                todo.refused += 1
        bad_spans = bad_records = 0
        if "traces" in self._signals:
            todo.spans, bad_spans = self._builder.spans(rows)
        if "logs" in self._signals:
            todo.records, bad_records = log_records(rows, self._runs)
        todo.refused += max(bad_spans, bad_records)
        return todo

    async def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


async def _in_thread(work: Callable[[], T]) -> T:
    """What ``work`` returns or raises, done in a thread that the end of the process does not wait for: nobody can call
    a request back, and a collector that hangs would hold a stop up for as long as its deadline."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
            done.set_exception(error)

    done.set_running_or_notify_cancel()  # from now on a cancelled waiter leaves it alone
    threading.Thread(target=run, name="otlp", daemon=True).start()
    return await asyncio.wrap_future(done)

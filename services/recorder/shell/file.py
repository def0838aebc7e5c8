"""The sink ``file``: rolled segments in a directory, each row in its envelope."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from bus.errors import SettingsError
from bus.log import EventLog
from segments.errors import BadLineError, PrefixTakenError, SegmentsError, WriteError
from segments.format import unwrap, wrap
from segments.rules import Retention, Rolling
from segments.writer import SegmentWriter
from services.recorder.config import RecorderSettings
from services.recorder.errors import SinkError
from services.recorder.rows import fingerprint
from services.recorder.shell import metrics
from services.recorder.shell.sink import Batch, Written

log = EventLog(__name__)


class FileSink:
    """See `services.recorder.shell.sink.Sink`. The envelope's time counts from `open`."""

    name = "file"

    def __init__(self, settings: RecorderSettings) -> None:
        self._settings = settings
        self._writer = SegmentWriter(
            Path(settings.directory),
            settings.prefix,
            Rolling(settings.roll_bytes, settings.roll_lines, settings.roll_age_s),
            Retention(settings.keep_segments, settings.keep_bytes, settings.keep_age_s),
            settings.fsync,
        )
        self._opened_s = time.time()
        self._batch: Batch | None = None
        self._lines: list[bytes] = []
        self._bytes = 0
        self._removed = self._remove_failures = 0

    async def open(self) -> tuple[bytes, ...]:
        try:
            found = await asyncio.to_thread(self._writer.open, self._settings.recent_rows, _key)
        except SegmentsError as error:
            raise SettingsError("prefix" if isinstance(error, PrefixTakenError) else "directory", str(error)) from error
        self._opened_s = time.time()
        metrics.TORN_BYTES.inc(found.torn_bytes)
        if found.torn_bytes:
            log.warning("torn_member_cut", bytes=found.torn_bytes, directory=self._settings.directory)
        for index in found.damaged:
            log.warning("segment_damaged", segment=index, directory=self._settings.directory)
        return found.keys

    async def write(self, batch: Batch) -> Written:
        """A batch that is given again goes on where it failed: what is in a segment already is not written twice."""
        if batch is not self._batch:
            self._batch, self._bytes = batch, 0
            since = self._opened_s
            self._lines = [
                wrap(row, max(0, round((at - since) * 1000)))
                for row, at in zip(batch.rows, batch.received_s, strict=True)
            ]
        try:
            while self._lines:
                appended = await asyncio.to_thread(self._writer.append, self._lines, time.time())
                del self._lines[: appended.lines]
                self._bytes += appended.bytes
                metrics.MEMBERS.inc()
                metrics.SEGMENT.set(appended.segment)
        except SegmentsError as error:
            raise SinkError(str(error)) from error
        finally:
            self._tell_removed()
        self._batch = None
        return Written(bytes=self._bytes)

    async def close(self) -> None:
        try:
            await asyncio.to_thread(self._writer.close)
        except WriteError as error:
            raise SinkError(str(error)) from error

    def _tell_removed(self) -> None:
        writer = self._writer
        metrics.REMOVED.inc(writer.removed - self._removed)
        metrics.FAILED_REMOVALS.inc(writer.remove_failures - self._remove_failures)
        self._removed, self._remove_failures = writer.removed, writer.remove_failures


def _key(line: bytes) -> bytes | None:
    try:
        return fingerprint(unwrap(line))
    except BadLineError:
        return None  # a foreign line in our file: it is no row that could come again

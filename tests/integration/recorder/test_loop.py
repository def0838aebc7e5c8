"""A sink's loop over the bus in memory: what waits is bounded, and goes on."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path

import pytest

from bus.memory import MemoryBroker
from bus.tasks import Tasks
from services.recorder.config import MOST_FLUSH_BYTES, RecorderSettings
from services.recorder.shell.file import FileSink
from services.recorder.shell.loop import BUFFER_BYTES, BUFFER_ROWS, SinkLoop


def written(directory: Path) -> int:
    return sum(len(gzip.decompress(path.read_bytes()).splitlines()) for path in directory.glob("*.gz"))


@pytest.mark.parametrize(("rows", "size"), [(BUFFER_ROWS + 100, 1), (24, BUFFER_BYTES // 20)], ids=["many", "large"])
async def test_a_full_buffer_is_written_before_its_time(tmp_path: Path, rows: int, size: int) -> None:
    """More rows, or bytes, than may wait, and neither the flush's bytes nor its time come: they are written all the
    same, and nothing stands still."""
    broker, tasks = MemoryBroker(), Tasks()
    bus = await broker.connect()
    settings = RecorderSettings(
        directory=str(tmp_path), flush_bytes=MOST_FLUSH_BYTES, flush_interval_ms=100_000, ack_wait_s=600.0
    )
    for number in range(rows):
        row = b'{"request_id":"%d","pad":"%s"}' % (number, b"x" * size)
        await bus.publish_row("tg.v1.trace.request_end.m.s", row, str(number))
    loop = SinkLoop(settings, FileSink(settings), "recorder")
    await loop.start(bus, tasks)
    async with asyncio.timeout(30):
        while await asyncio.to_thread(written, tmp_path) < rows // 2:  # noqa: ASYNC110 - files tell nobody
            await asyncio.sleep(0.05)
    await loop.stop(10.0)
    await tasks.stop()
    assert written(tmp_path) == rows
    await bus.close()


def test_a_flush_fits_into_the_buffer() -> None:
    with pytest.raises(ValueError, match="flush_bytes must be at most 8388608"):
        RecorderSettings(flush_bytes=MOST_FLUSH_BYTES + 1)

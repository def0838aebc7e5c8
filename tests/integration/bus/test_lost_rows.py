"""A consumer that lags behind what the stream keeps: what it was never given is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.nats import NatsBus, NatsOptions, connect
from bus.nats.streams import TraceStreamLimits
from bus.subjects import TRACE_SUBJECTS, trace
from tests.integration.bus.support import taken
from tests.support.nats import NatsServer

OPTIONS = NatsOptions(traces=TraceStreamLimits(max_bytes=40_000))


async def publish(bus: NatsBus, first: int, count: int) -> None:
    for number in range(first, first + count):
        await bus.publish_row(trace("request_end", "m", "s"), b"x" * 1_000, message_id=f"r{number}")


@pytest.mark.parametrize("restarted", [False, True])
async def test_rows_that_the_stream_could_not_keep_are_counted(tmp_path: Path, restarted: bool) -> None:
    """Of 200 rows the stream holds some 30. The consumer was given 5 before, acknowledged or not; afterwards it, or the
    one of a new process, is given what is left and says how many it never saw."""
    server = NatsServer(tmp_path).start()
    try:
        await look(server.url, restarted)
    finally:
        server.stop()


async def look(url: str, restarted: bool) -> None:
    bus = await connect(url, name="test", timeout_s=30, options=OPTIONS)
    try:
        consumer = await bus.consume("recorder", TRACE_SUBJECTS)
        await publish(bus, 0, 5)
        first = await taken(consumer, 5)
        await consumer.ack_rows(first[:3])
        assert (len(first), consumer.lost) == (5, 0)
        await publish(bus, 5, 200)
        if restarted:
            await consumer.close()
            consumer = await bus.consume("recorder", TRACE_SUBJECTS)
        given: list[int] = []
        while 205 not in given:
            given += [row.stream_seq for row in await consumer.fetch(64, 5) if row.delivered == 1]
        assert 0 < len(given) < 100
        assert consumer.lost == 200 - len(given)
    finally:
        await bus.close()

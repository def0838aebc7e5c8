"""What one request for rows may bring."""

from __future__ import annotations

from pathlib import Path

from bus.nats import connect
from bus.subjects import TRACE_STREAM, TRACE_SUBJECTS, trace
from tests.support.nats import NatsServer


async def test_a_request_brings_no_more_bytes_than_it_may(tmp_path: Path) -> None:
    """Six rows of 7 MB: two come at once, however many were asked for, and then the others, in order, each once."""
    server = NatsServer(tmp_path).start()
    bus = await connect(server.url, name="test", timeout_s=30)
    try:
        for number in range(6):
            row = b"%d" % number + b"x" * 7_000_000
            await bus.publish_row(trace("request_end", "m", "s"), row, message_id=f"r{number}")
        consumer = await bus.consume("recorder", TRACE_SUBJECTS)
        rows = await consumer.fetch(256, 30)
        given = await bus.js.manager.consumer_info(TRACE_STREAM, "recorder")
        assert given.num_ack_pending == 2
        while len(rows) < 6:
            found = await consumer.fetch(256, 30)
            assert 0 < len(found) <= 2
            rows += found
        assert [row.payload[:1] for row in rows] == [b"%d" % number for number in range(6)]
        assert {row.delivered for row in rows} == {1}
    finally:
        await bus.close()
        server.stop()

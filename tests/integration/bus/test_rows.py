"""Trace rows until acknowledged: outages, duplicates, a full window, the drain at stop. Both implementations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from bus import subjects
from bus.interface import Bus
from bus.rows import RowCollector, RowPublisher
from bus.tasks import Tasks
from tests.integration.bus.support import Server
from tests.support.processes import eventually

ROW = subjects.trace("request_end", "model", "default/request/a/")


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    """The tasks of one process; none may have failed."""
    made = Tasks()
    yield made
    await made.stop()
    assert not made.failed.done()


async def stored(bus: Bus) -> list[bytes]:
    """Every row in the stream."""
    consumer = await bus.consume("check", subjects.TRACE_SUBJECTS)
    rows = []
    while found := await consumer.fetch(1_000, 0.3):
        rows += [row.payload for row in found]
    await consumer.close()
    return rows


async def test_rows_are_stored_and_counted(server: Server, tasks: Tasks) -> None:
    """Every row once, though one was published twice; nothing waits after the drain."""
    bus = await server.connect()
    rows = RowPublisher(bus, tasks)
    for number in range(200):
        assert rows.publish(ROW, b"%d" % number, f"request-{number}")
    rows.publish(ROW, b"0", "request-0")
    assert rows.stats().depth == 201
    assert await rows.drain(10) == 0
    stats = rows.stats()
    assert (stats.depth, stats.acknowledged, stats.duplicates, stats.dropped.get("window_full", 0)) == (0, 201, 1, 0)
    assert sorted(await stored(bus), key=int) == [b"%d" % number for number in range(200)]
    assert rows.publish(ROW, b"late", "late") is False
    assert rows.stats().dropped["stopped"] == 1


async def test_a_row_leaves_at_once(server: Server, tasks: Tasks) -> None:
    """Once the stream is known a row is sent where it is published: what is said before it leaves with it."""
    bus = await server.connect()
    rows = RowPublisher(bus, tasks)
    rows.publish(ROW, b"first", "first")
    await eventually(lambda: rows.depth == 0)
    sent = bus.stats().published
    for number in range(3):
        rows.publish(ROW, b"%d" % number, f"request-{number}")
    rows.publish(ROW, b"0", "request-0")
    assert (bus.stats().published - sent, rows.depth) == (4, 4)
    assert await rows.drain(10) == 0
    assert (rows.stats().acknowledged, rows.stats().duplicates, rows.stats().resent) == (5, 1, 0)
    assert await stored(bus) == [b"first", b"0", b"1", b"2"]


@pytest.mark.parametrize("stream_is_known", [False, True])
async def test_rows_wait_for_the_server_and_are_stored_once(
    server: Server, tasks: Tasks, stream_is_known: bool
) -> None:
    """User case E1: the server goes while rows are on their way; all are there after it is back, none twice."""
    bus = await server.connect()
    rows = RowPublisher(bus, tasks, timeout_s=1.0, retry_first_s=0.02, retry_most_s=0.05)
    if stream_is_known:
        rows.publish(ROW, b"0", "request-0")
        await eventually(lambda: rows.depth == 0)
    for number in range(50):
        rows.publish(ROW, b"%d" % number, f"request-{number}")
    server.stop()
    await eventually(lambda: not bus.connected)
    for number in range(50, 100):
        rows.publish(ROW, b"%d" % number, f"request-{number}")
    await eventually(lambda: rows.stats().resent > 0)
    assert rows.stats().depth >= 50
    await asyncio.to_thread(server.start) if server.kind == "nats" else server.start()
    assert await rows.drain(15) == 0
    assert sorted(await stored(bus), key=int) == [b"%d" % number for number in range(100)]


async def test_a_full_window_refuses_and_counts(server: Server, tasks: Tasks) -> None:
    """The server is away: the window fills, further rows are refused, and what is left at stop is counted."""
    bus = await server.connect()
    rows = RowPublisher(bus, tasks, window=10)
    server.stop()
    await eventually(lambda: not bus.connected)
    taken = [rows.publish(ROW, b"", f"request-{number}") for number in range(14)]
    assert taken == [True] * 10 + [False] * 4
    assert rows.stats().dropped["window_full"] == 4
    registry = CollectorRegistry()
    registry.register(RowCollector(rows))
    page = generate_latest(registry).decode()
    assert "tidegate_trace_rows_waiting 10.0" in page
    assert 'tidegate_trace_rows_dropped_total{reason="window_full"} 4.0' in page
    assert await rows.drain(0.1) == 10
    assert rows.stats().dropped["stopped"] == 10
    assert rows.stats().depth == 0


async def test_a_row_that_cannot_be_sent_is_dropped_and_ends_nothing(server: Server, tasks: Tasks) -> None:
    """Larger than the server takes: counted by its reason, the others pass."""
    bus = await server.connect()
    rows = RowPublisher(bus, tasks, senders=1)
    rows.publish(ROW, b"a" * 70_000, "large")
    rows.publish(ROW, b"small", "small")
    assert await rows.drain(10) == 0
    assert rows.stats().dropped["payload_too_large"] == 1
    assert await stored(bus) == [b"small"]

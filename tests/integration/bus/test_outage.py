"""The server goes and comes back, with its store or with another. Both implementations. User case E1."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from bus import subjects
from bus.errors import KeyMissingError, NotConnectedError
from bus.interface import Bus, KeyEntry
from tests.integration.bus.support import Collector, Server, taken
from tests.support.pace import Stopwatch
from tests.support.processes import eventually

ROW = subjects.trace("request_end", "model", "default/request/a/")


async def go_away(server: Server, *connections: Bus) -> None:
    server.stop()
    await eventually(lambda: not any(connection.connected for connection in connections))


async def come_back(server: Server, *connections: Bus, fresh: bool = False) -> None:
    await asyncio.to_thread(server.start, fresh=fresh) if server.kind == "nats" else server.start(fresh=fresh)
    await eventually(lambda: all(connection.connected for connection in connections))


async def test_what_is_published_meanwhile_arrives_later_in_order(server: Server) -> None:
    """Facts wait in a buffer while the server is away; subscriptions, the services API too, live on."""
    sender, receiver = await server.connect(), await server.connect()
    got = Collector()
    await receiver.subscribe("facts.>", got)
    await receiver.serve("service", "1.0.0", "", [], {})
    sender.publish("facts.x", b"before")
    await got.wait_for(1)
    await go_away(server, sender, receiver)
    for number in range(100):
        sender.publish("facts.x", b"%d" % number)
    await come_back(server, receiver)
    await eventually(lambda: sender.connected)
    await sender.flush()
    sender.publish("facts.x", b"after")
    # The sender may be back before the receiver: what it sent in between is lost, which at most once allows.
    await eventually(lambda: b"after" in got.payloads)
    numbers = [payload for payload in got.payloads if payload not in (b"before", b"after")]
    assert numbers == sorted(numbers, key=int)
    assert (await sender.request("$SRV.PING.service", b"", timeout_s=30)).payload
    assert sender.stats().reconnects == 1
    assert sender.stats().publish_failed == 0


async def test_the_buffer_while_away_is_bounded_and_counted(server: Server) -> None:
    """2 MiB wait; the rest is counted as lost and never blocks the caller."""
    bus = await server.connect()
    before = bus.stats().published
    await go_away(server, bus)
    since = Stopwatch()
    for _ in range(100):
        bus.publish("facts.x", b"a" * 60_000)
    await since.within(2)
    stats = bus.stats()
    assert stats.published - before + stats.publish_failed == 100
    assert 30 <= stats.published - before <= 35


async def test_questions_fail_at_once_while_away(server: Server) -> None:
    """So that an ingress falls back without waiting: new questions, and those that were open."""
    bus = await server.connect()
    await bus.subscribe("q.silent", lambda message: None)
    bucket = await bus.key_value("TG_TEST")
    objects = await bus.objects("TG_TEST_OBJECTS")
    consumer = await bus.consume("recorder", subjects.TRACE_SUBJECTS)
    waiting = asyncio.ensure_future(bus.request("q.silent", b"", timeout_s=60))
    await bus.flush()
    since = Stopwatch()
    await go_away(server, bus)
    with pytest.raises(NotConnectedError):
        await waiting
    with pytest.raises(NotConnectedError) as caught:
        await bus.request("q.silent", b"", timeout_s=60)
    assert caught.value.reason == "bus_down"
    with pytest.raises(NotConnectedError):
        async with aclosing(bus.request_many("q.silent", b"", idle_timeout_s=60, deadline_s=60)) as answers:
            await anext(answers)
    for attempt in (
        bus.publish_row(ROW, b"", "request-1", timeout_s=60),
        bus.flush(60),
        bucket.get("a"),
        bucket.put("a", b""),
        bucket.keys(),
        objects.get("a"),
        objects.put("a", b""),
        bus.key_value("TG_OTHER"),
        bus.consume("other", subjects.TRACE_SUBJECTS),
    ):
        with pytest.raises(NotConnectedError):
            await attempt
    await since.within(10)
    assert await consumer.fetch(1, 0.05) == []


async def test_another_connection_comes_back_by_itself(server: Server) -> None:
    """What it subscribed to is there again; while the server is away none can be opened."""
    bus = await server.connect()
    other = await bus.another("kv")
    got = Collector()
    await other.subscribe("facts.x", got)
    await go_away(server, bus, other)
    with pytest.raises(NotConnectedError):
        await bus.another("late", timeout_s=0.2)
    await come_back(server, bus, other)
    bus.publish("facts.x", b"1")
    assert await got.wait_for(1) == [b"1"]


async def test_restart_on_the_same_store(server: Server) -> None:
    """Rows, duplicates, acknowledgements, keys and objects are as before; consumer and tail go on where they were."""
    bus = await server.connect()
    bucket = await bus.key_value("TG_TEST")
    revision = await bucket.put("leader", b"a")
    objects = await bus.objects("TG_TEST_OBJECTS")
    await objects.put("snapshot", b"bytes")
    consumer = await bus.consume("recorder", subjects.TRACE_SUBJECTS)
    for number in range(3):
        await bus.publish_row(ROW, b"%d" % number, f"request-{number}")
    rows = await taken(consumer, 3)
    for row in rows[:2]:
        await consumer.ack(row)
    await bus.flush()
    async with aclosing(bus.tail(subjects.TRACE_SUBJECTS, from_start=True)) as tail:
        seen = [(await asyncio.wait_for(anext(tail), 30)).payload for _ in range(3)]
        await go_away(server, bus)
        await come_back(server, bus)
        assert await bus.publish_row(ROW, b"2", "request-2") is False
        assert await bus.publish_row(ROW, b"3", "request-3") is True
        seen.append((await asyncio.wait_for(anext(tail), 30)).payload)
    assert seen == [b"0", b"1", b"2", b"3"]
    assert await consumer.pending() == 2
    await consumer.close()
    again = await bus.consume("recorder", subjects.TRACE_SUBJECTS, ack_wait_s=0.2)
    got: dict[bytes, int] = {}
    async with asyncio.timeout(30):
        while len(got) < 2:
            for row in await again.fetch(10, 1):
                got[row.payload] = row.stream_seq
                await again.ack(row)
    assert got == {b"2": 3, b"3": 4}
    assert await bucket.get("leader") == KeyEntry("leader", b"a", revision)
    assert await bucket.update("leader", b"b", revision) > revision
    assert await objects.get("snapshot") == b"bytes"


async def test_an_open_consumer_goes_on_after_a_restart(server: Server) -> None:
    """A recorder that waits in `fetch` while the server restarts gets the next row from the same call."""
    bus = await server.connect()
    consumer = await bus.consume("recorder", subjects.TRACE_SUBJECTS)
    waiting = asyncio.ensure_future(consumer.fetch(10, 30))
    await bus.flush()
    await go_away(server, bus)
    await come_back(server, bus)
    await bus.publish_row(ROW, b"1", "request-1")
    assert [row.payload for row in await asyncio.wait_for(waiting, 10)] == [b"1"]


async def test_restart_on_an_empty_store(server: Server) -> None:
    """The store is lost: streams, buckets and consumers are made again by those who use them; nobody is stuck."""
    bus = await server.connect()
    bucket = await bus.key_value("TG_TEST")
    await bucket.put("w.old", b"1")
    objects = await bus.objects("TG_TEST_OBJECTS")
    await objects.put("snapshot", b"bytes")
    consumer = await bus.consume("recorder", subjects.TRACE_SUBJECTS)
    await bus.publish_row(ROW, b"old", "request-1")
    assert len(await consumer.fetch(10, 5)) == 1
    entries: list[KeyEntry] = []
    changed = asyncio.Event()

    async def watch() -> None:
        async with aclosing(bucket.watch("w")) as watching:
            async for entry in watching:
                entries.append(entry)
                changed.set()

    watcher = asyncio.ensure_future(watch())
    await asyncio.wait_for(changed.wait(), 30)
    async with aclosing(bus.tail(subjects.TRACE_SUBJECTS, from_start=True)) as tail:
        assert (await asyncio.wait_for(anext(tail), 30)).payload == b"old"
        await go_away(server, bus)
        await come_back(server, bus, fresh=True)
        assert await bus.publish_row(ROW, b"new", "request-1") is True
        row = await asyncio.wait_for(anext(tail), 30)
        assert (row.payload, row.stream_seq) == (b"new", 1)
    assert [row.payload for row in await consumer.fetch(10, 10)] == [b"new"]
    assert await bucket.get("w.old") is None
    await bucket.put("w.new", b"2")
    await eventually(lambda: len(entries) >= 3)
    seen = [(entry.key, entry.value) for entry in entries]
    # What is gone is known once what is there has been read, so that a new key may come before a lost one's deletion.
    assert (seen[0], set(seen[1:])) == (("w.old", b"1"), {("w.old", None), ("w.new", b"2")})
    with pytest.raises(KeyMissingError):
        await objects.get("snapshot")
    await objects.put("snapshot", b"again")
    assert await objects.get("snapshot") == b"again"
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)

"""What is stored: trace rows, durable consumers, tails, keys, objects. Both implementations."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest

from bus import subjects
from bus.errors import ClosedError, KeyMissingError, PayloadTooLargeError, StreamError, WrongRevisionError
from bus.interface import Bus, KeyEntry, KeyValue
from tests.integration.bus.support import Collector, Server, taken
from tests.support.processes import eventually

pytestmark = pytest.mark.usefixtures("no_blocking_calls")

ROW = subjects.trace("request_end", "model", "default/request/a/")
OTHER = subjects.trace("tool", "model", "default/request/a/")


async def test_a_repeated_row_is_stored_once(bus: Bus) -> None:
    """The message id is the request id: a re-sent row is told apart and not stored again."""
    assert await bus.publish_row(ROW, b"1", "request-1") is True
    assert await bus.publish_row(ROW, b"1", "request-1") is False
    assert await bus.publish_row(ROW, b"2", "request-2") is True
    consumer = await bus.consume("recorder", subjects.TRACE_SUBJECTS)
    assert [row.payload for row in await taken(consumer, 2)] == [b"1", b"2"]
    assert await consumer.fetch(10, 0.3) == []


async def test_rows_are_seen_by_plain_subscribers_too(bus: Bus) -> None:
    """A row is also a message on its subject."""
    got = Collector()
    await bus.subscribe("tg.v1.trace.>", got)
    await bus.publish_row(ROW, b"1", "request-1")
    await got.wait_for(1)
    assert got.messages[0].subject == ROW
    assert got.messages[0].headers["Nats-Msg-Id"] == "request-1"


async def test_a_row_too_large_is_refused(bus: Bus) -> None:
    """The named error, as for any message."""
    with pytest.raises(PayloadTooLargeError):
        await bus.publish_row(ROW, b"a" * 65_536, "request-1")


async def test_consumer_gives_what_is_not_acknowledged_again(bus: Bus) -> None:
    """Two rows, one acknowledged: the other comes again after ``ack_wait_s``, counted; then nothing is left."""
    for number in range(2):
        await bus.publish_row(ROW, b"%d" % number, f"request-{number}")
    consumer = await bus.consume("recorder", subjects.TRACE_SUBJECTS, ack_wait_s=1.0)
    assert await consumer.pending() == 2
    first = await taken(consumer, 2)
    assert [(row.payload, row.delivered, row.stream_seq) for row in first] == [(b"0", 1, 1), (b"1", 1, 2)]
    await consumer.ack(first[0])
    again = await consumer.fetch(10, 30)
    assert [(row.payload, row.delivered) for row in again] == [(b"1", 2)]
    await consumer.ack(again[0])
    assert await consumer.fetch(10, 1.2) == []
    assert await consumer.pending() == 0
    await consumer.close()
    with pytest.raises(ClosedError):
        await consumer.fetch(1, 1)


async def test_consumer_gives_at_most_the_limit_and_in_order(bus: Bus) -> None:
    """Ninety rows in portions."""
    for number in range(90):
        await bus.publish_row(ROW, b"%d" % number, f"request-{number}")
    consumer = await bus.consume("recorder", subjects.TRACE_SUBJECTS)
    got: list[bytes] = []
    while len(got) < 90:
        rows = await consumer.fetch(40, 30)
        assert 0 < len(rows) <= 40
        for row in rows:
            await consumer.ack(row)
        got += [row.payload for row in rows]
    assert got == [b"%d" % number for number in range(90)]


async def test_fetch_waits_for_the_first_row_and_not_for_the_limit(bus: Bus) -> None:
    """A row that comes while somebody waits is given at once, although more were asked for."""
    consumer = await bus.consume("recorder", subjects.TRACE_SUBJECTS)
    waiting = asyncio.ensure_future(consumer.fetch(100, 20))
    await bus.publish_row(ROW, b"1", "request-1")
    rows = await asyncio.wait_for(waiting, 30)
    assert [row.payload for row in rows] == [b"1"]


async def test_a_durable_consumer_resumes_by_name(server: Server) -> None:
    """Another process with the same name goes on after the acknowledged rows; another name starts at the beginning."""
    bus = await server.connect()
    for number in range(4):
        await bus.publish_row(ROW, b"%d" % number, f"request-{number}")
    consumer = await bus.consume("recorder", subjects.TRACE_SUBJECTS)
    for row in await taken(consumer, 2):
        await consumer.ack(row)
    await bus.flush()
    await consumer.close()
    await bus.close()
    later = await server.connect()
    resumed = await later.consume("recorder", subjects.TRACE_SUBJECTS)
    assert [row.payload for row in await taken(resumed, 2)] == [b"2", b"3"]
    other = await later.consume("export", subjects.TRACE_SUBJECTS)
    assert [row.payload for row in await taken(other, 4)] == [b"0", b"1", b"2", b"3"]


async def test_consumer_filters_by_subject(bus: Bus) -> None:
    """Only the rows asked for."""
    await bus.publish_row(OTHER, b"tool", "tool-1")
    await bus.publish_row(ROW, b"row", "request-1")
    consumer = await bus.consume("recorder", "tg.v1.trace.request_end.>")
    rows = await consumer.fetch(10, 30)
    assert [(row.subject, row.payload) for row in rows] == [(ROW, b"row")]


async def test_tail_from_the_start_goes_on_live(server: Server) -> None:
    """Stored rows first, then new ones as they come, in order and filtered."""
    bus, sender = await server.connect(), await server.connect()
    await sender.publish_row(ROW, b"0", "request-0")
    await sender.publish_row(OTHER, b"tool", "tool-0")
    got = []
    async with aclosing(bus.tail("tg.v1.trace.request_end.>", from_start=True)) as rows:
        got.append((await asyncio.wait_for(anext(rows), 30)).payload)
        for number in range(1, 40):
            await sender.publish_row(ROW, b"%d" % number, f"request-{number}")
        got += [(await asyncio.wait_for(anext(rows), 30)).payload for _ in range(39)]
    assert got == [b"%d" % number for number in range(40)]


async def test_tail_of_what_is_new(bus: Bus) -> None:
    """Without ``from_start``, earlier rows are not shown, and none after the first look is missed."""
    await bus.publish_row(ROW, b"old", "request-old")
    async with aclosing(bus.tail(subjects.TRACE_SUBJECTS)) as rows:
        first = asyncio.ensure_future(anext(rows))
        number = 0
        while not first.done():
            await bus.publish_row(ROW, b"%d" % number, f"request-{number}")
            number += 1
        start = int((await first).payload)
        second = await asyncio.wait_for(anext(rows), 30) if start + 1 < number else None
    assert 0 <= start < number
    assert second is None or second.payload == b"%d" % (start + 1)


async def test_keys_have_revisions(bus: Bus) -> None:
    """put, create, update and delete by revision: a loser is told, whatever it tried."""
    bucket = await bus.key_value("TG_TEST")
    assert await bucket.get("a") is None
    assert await bucket.keys() == []
    first = await bucket.create("a", b"1")
    with pytest.raises(WrongRevisionError):
        await bucket.create("a", b"2")
    second = await bucket.update("a", b"2", first)
    assert second > first
    with pytest.raises(WrongRevisionError):
        await bucket.update("a", b"3", first)
    with pytest.raises(WrongRevisionError):
        await bucket.delete("a", first)
    assert await bucket.get("a") == KeyEntry("a", b"2", second)
    third = await bucket.put("b", b"")
    assert await bucket.get("b") == KeyEntry("b", b"", third)
    assert await bucket.keys() == ["a", "b"]
    await bucket.delete("a", second)
    assert await bucket.get("a") is None
    assert await bucket.keys() == ["b"]
    fifth = await bucket.create("a", b"5")
    assert fifth > third
    await bucket.delete("unknown")
    assert await bucket.get("a") == KeyEntry("a", b"5", fifth)


async def test_whether_a_key_can_be_written_is_found_out_without_writing(bus: Bus) -> None:
    """There and absent alike: nothing is stored, and no revision passes."""
    bucket = await bus.key_value("TG_TEST")
    revision = await bucket.create("a", b"1")
    for key in ("a", "absent"):
        await bucket.check_writable(key)
    assert await bucket.keys() == ["a"]
    assert await bucket.update("a", b"2", revision) == revision + 1


async def test_one_of_many_wins_a_compare_and_set(server: Server) -> None:
    """Leadership depends on it: of ten candidates exactly one creates the key, and one renews per revision."""
    buckets: list[KeyValue] = []
    for _ in range(10):
        connection = await server.connect()
        buckets.append(await connection.key_value("TG_TEST"))

    async def outcome(attempt: int, revision: int | None) -> int | None:
        bucket, value = buckets[attempt], b"%d" % attempt
        try:
            return await (bucket.create("k", value) if revision is None else bucket.update("k", value, revision))
        except WrongRevisionError:
            return None

    won = [found for found in await asyncio.gather(*(outcome(n, None) for n in range(10))) if found is not None]
    assert len(won) == 1
    again = [found for found in await asyncio.gather(*(outcome(n, won[0]) for n in range(10))) if found is not None]
    assert len(again) == 1
    assert again[0] > won[0]


async def take(watch_of: KeyValue, prefix: str, count: int, entries: list[KeyEntry], ready: asyncio.Event) -> None:
    """The first ``count`` entries of a watch; ``ready`` once the first has come."""
    async with aclosing(watch_of.watch(prefix)) as watch:
        async for entry in watch:
            entries.append(entry)
            ready.set()
            if len(entries) == count:
                return


async def test_watch_shows_the_present_then_changes(server: Server) -> None:
    """Current entries (no old deletions), then every change, deletions included, below the prefix only."""
    bus, other = await server.connect(), await server.connect()
    bucket = await bus.key_value("TG_TEST")
    await bucket.put("w.gone", b"x")
    await bucket.delete("w.gone")
    await bucket.put("w.a", b"1")
    await bucket.put("wide", b"another prefix")
    entries: list[KeyEntry] = []
    ready = asyncio.Event()
    watching = asyncio.ensure_future(take(await other.key_value("TG_TEST"), "w", 4, entries, ready))
    await asyncio.wait_for(ready.wait(), 30)
    await bucket.put("wide", b"again")
    await bucket.put("w.b.c", b"2")
    await bucket.put("w.a", b"3")
    await eventually(lambda: len(entries) == 3)  # a bucket keeps one value of a key: a slow watcher misses the others
    await bucket.delete("w.a")
    await asyncio.wait_for(watching, 30)
    assert [(entry.key, entry.value) for entry in entries] == [
        ("w.a", b"1"),
        ("w.b.c", b"2"),
        ("w.a", b"3"),
        ("w.a", None),
    ]
    revisions = [entry.revision for entry in entries]
    assert revisions == sorted(revisions)


async def test_values_expire_and_watchers_see_it(bus: Bus) -> None:
    """A bucket with ``ttl_s``: a lease that is not renewed ends; its key can be created again."""
    bucket = await bus.key_value("TG_TEST", ttl_s=1.0)
    first = await bucket.create("leader", b"a")
    entries: list[KeyEntry] = []
    await asyncio.wait_for(take(bucket, "", 2, entries, asyncio.Event()), 30)
    assert [(entry.key, entry.value) for entry in entries] == [("leader", b"a"), ("leader", None)]
    assert await bucket.get("leader") is None
    assert await bucket.keys() == []
    assert await bucket.create("leader", b"b") > first


HOSTILE = [
    "",
    " ",
    ".",
    "..",
    "*",
    ">",
    "a.b",
    "research-run-42:researcher",
    "with space",
    "tab\tline\r\nbreak",
    "h_x",
    "h_" + "0" * 32,
    "=",
    "=68",
    "_",
    "$SYS",
    "é",
    "会话",
    "🙂",
    "\ud800",
    "a\x00b",
    "../../etc/passwd",
    "http://169.254.169.254/",
    "x" * 128,
    "é" * 65,
    "y" * 4_096,
    "A",
    "a",
    *(chr(number) for number in range(1, 256, 7)),
]


async def test_hostile_ids_as_subjects_keys_and_objects(bus: Bus) -> None:
    """Whatever a harness calls its session: it is one token, arrives as itself, and is a legal key and object name."""
    got = Collector()
    await bus.subscribe("tg.v1.session.opened.*", got)
    bucket = await bus.key_value("TG_TEST")
    objects = await bus.objects("TG_TEST_OBJECTS")
    for number, text in enumerate(HOSTILE):
        bus.publish(subjects.session("opened", text), b"%d" % number)
        await bucket.put(f"sessions.{subjects.encode_id(text)}", b"%d" % number)
        await objects.put(subjects.encode_id(text), b"%d" % number)
    await got.wait_for(len(HOSTILE))
    for number, (text, message) in enumerate(zip(HOSTILE, got.messages, strict=True)):
        token = message.subject.rpartition(".")[2]
        assert message.payload == b"%d" % number
        assert subjects.decode_id(token) == (text if len(text.encode("utf-8", "surrogatepass")) <= 128 else None)
        entry = await bucket.get(f"sessions.{token}")
        assert entry is not None
        assert entry.value == b"%d" % number
        assert await objects.get(token) == b"%d" % number
    assert len(await bucket.keys()) == len(HOSTILE)


async def test_objects_expire(bus: Bus) -> None:
    """A bucket with ``ttl_s``: what nobody writes again is gone, and what is written again stays. A look at it that
    came too late (the machine stood still) says nothing, and is made again."""
    ttl_s = 2.0
    objects = await bus.objects("TG_TEST_OBJECTS", ttl_s=ttl_s)
    await objects.put("gone", b"of a bridge that is no more")

    async def is_gone(key: str) -> bool:
        try:
            await objects.get(key)
        except KeyMissingError:
            return True
        except StreamError:
            return False  # half of it is gone: read between the ends of its messages
        return False

    async with asyncio.timeout(30):
        in_time = False
        while not in_time or not await is_gone("gone"):
            written = time.monotonic()
            await objects.put("kept", b"of a bridge that lives")
            kept = not await is_gone("kept")
            in_time = time.monotonic() - written < ttl_s * 0.9
            assert kept or not in_time
            await asyncio.sleep(0.05)


async def test_objects(bus: Bus) -> None:
    """Of any size (many messages), overwritten, deleted, and missing by name."""
    objects = await bus.objects("TG_TEST_OBJECTS")
    with pytest.raises(KeyMissingError):
        await objects.get("snapshot")
    await objects.put("snapshot", b"old" * 100_000)
    large = bytes(range(256)) * 4_000
    await objects.put("snapshot", large)
    await objects.put("empty", b"")
    assert await objects.get("snapshot") == large
    assert await objects.get("empty") == b""
    await objects.delete("snapshot")
    await objects.delete("snapshot")
    with pytest.raises(KeyMissingError):
        await objects.get("snapshot")

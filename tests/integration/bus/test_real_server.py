"""What only a real nats-server can show: hanging, crashing, other limits after a restart, revoked access, absence."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.js import api

from bus import subjects
from bus.errors import BusTimeoutError, NotConnectedError, PayloadTooLargeError, SettingsError, StreamError
from bus.interface import Bus
from bus.nats import NatsBus, NatsOptions, connect
from bus.rows import RowPublisher
from bus.tasks import Tasks
from tests.integration.bus.support import Collector
from tests.support.nats import NatsServer
from tests.support.pace import Stopwatch
from tests.support.processes import eventually

QUICK = NatsOptions(ping_interval_s=0.2, retry_most_s=0.05, connect_timeout_s=0.5)
ROW = subjects.trace("request_end", "model", "default/request/a/")


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    """A connection that notices a hanging server within half a second."""
    connection = await connect(nats_server.url, name="test", timeout_s=30, options=QUICK)
    yield connection
    await connection.close()


@pytest.fixture
async def client(nats_server: NatsServer) -> AsyncIterator[Client]:
    """Another program: nats-py as it is."""
    connection = Client()
    await connection.connect(nats_server.url)
    yield connection
    await connection.close()


async def test_a_hanging_server_blocks_nobody(nats_server: NatsServer) -> None:
    """User case E1, SIGSTOP: questions time out at their deadline, publishing goes on, all arrives after CONT."""
    bus = await connect(nats_server.url, name="test", timeout_s=30)
    got = Collector()
    await bus.subscribe("facts.x", got)
    nats_server.pause()
    since = Stopwatch()
    for number in range(2_000):
        bus.publish("facts.x", b"%d" % number + b"." * 2_000)
    with pytest.raises(BusTimeoutError):
        await bus.request("q.x", b"", timeout_s=0.2)
    with pytest.raises(BusTimeoutError):
        await bus.flush(0.2)
    assert bus.connected
    nats_server.resume()
    await since.within(5)
    payloads = await got.wait_for(2_000)
    assert [payload.split(b".")[0] for payload in payloads] == [b"%d" % number for number in range(2_000)]
    await bus.close()


async def test_a_server_that_hangs_for_long_is_lost_and_found_again(nats_server: NatsServer, bus: NatsBus) -> None:
    """No answer to two pings: the connection counts as lost, open questions fail, and it heals after CONT."""
    await bus.subscribe("q.silent", lambda message: None)
    waiting = asyncio.ensure_future(bus.request("q.silent", b"", timeout_s=60))
    await bus.flush()
    nats_server.pause()
    with pytest.raises(NotConnectedError):
        await asyncio.wait_for(waiting, 30)
    assert not bus.connected
    nats_server.resume()
    await eventually(lambda: bus.connected)
    await bus.flush()
    assert bus.stats().reconnects == 1


async def test_a_crash_loses_no_stored_row(nats_server: NatsServer, bus: NatsBus) -> None:
    """User case E1, SIGKILL: acknowledged rows are there after the restart; acknowledgements may be asked for again."""
    consumer = await bus.consume("recorder", subjects.TRACE_SUBJECTS, ack_wait_s=0.5)
    for number in range(50):
        await bus.publish_row(ROW, b"%d" % number, f"request-{number}")
    nats_server.kill()
    await eventually(lambda: not bus.connected)
    await asyncio.to_thread(nats_server.start)
    got: set[bytes] = set()
    async with asyncio.timeout(30):
        while len(got) < 50:
            for row in await consumer.fetch(100, 1):
                got.add(row.payload)
                await consumer.ack(row)
    assert got == {b"%d" % number for number in range(50)}
    assert await bus.publish_row(ROW, b"0", "request-0") is False


async def test_the_limit_is_the_server_s_own_after_a_restart(nats_server: NatsServer, bus: NatsBus) -> None:
    """User case E1: a server that comes back with 64 KB is believed at once."""
    assert bus.max_payload == 8 * 1024 * 1024
    bus.publish("x", b"a" * 1_000_000)
    nats_server.stop()
    await eventually(lambda: not bus.connected)
    await asyncio.to_thread(nats_server.restart, max_payload=65_536)
    await eventually(lambda: bus.connected)
    with pytest.raises(PayloadTooLargeError) as caught:
        bus.publish("x", b"a" * 65_537)
    assert caught.value.limit_bytes == 65_536


async def test_no_server_then_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """User case E4: connecting waits with growing pauses and a clear message, and succeeds when the bus appears."""
    server = NatsServer(tmp_path / "nats").start()
    server.stop()
    with pytest.raises(NotConnectedError, match="no bus at"):
        await connect(server.url, name="test", timeout_s=0.3)
    connecting = asyncio.ensure_future(connect(server.url, name="test", options=QUICK))
    await eventually(lambda: "bus_unreachable" in caplog.text)
    assert not connecting.done()
    await asyncio.to_thread(server.start)
    bus = await asyncio.wait_for(connecting, 30)
    assert bus.connected
    assert "Traceback" not in caplog.text
    await bus.close()
    server.kill()


async def test_one_of_two_addresses_is_gone_for_good(tmp_path: Path) -> None:
    """Whichever each connection was at, and whichever it tries first (nats-py shuffles them): all end at the other."""
    gone, other = (NatsServer(tmp_path / name).start() for name in ("gone", "other"))
    connections = [await connect(f"{gone.url},{other.url}", name="test", timeout_s=30, options=QUICK) for _ in range(8)]

    def is_at_the_other(bus: NatsBus) -> bool:
        at = bus.client.connected_url
        return bus.connected and at is not None and at.port == other.port

    try:
        gone.kill()
        await eventually(lambda: all(map(is_at_the_other, connections)))
        for bus in connections:
            await bus.flush(10)
    finally:
        for bus in connections:
            await bus.close()
        other.kill()


@pytest.mark.parametrize("url", ["nats://", "nats://host:port", "http://127.0.0.1:1"])
async def test_a_wrong_address_is_a_wrong_setting(url: str) -> None:
    """No retry can help: told at once."""
    with pytest.raises(SettingsError, match="nats_url"):
        await connect(url, name="test", timeout_s=5)


async def test_a_changed_password_is_retried_until_it_is_right_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server no longer takes ours: not connected, told why in the log, and connected when it is put right."""
    config = "authorization { user: tidegate, password: first }"
    server = NatsServer(tmp_path / "nats", config=config).start()
    bus = await connect(server.url.replace("nats://", "nats://tidegate:first@"), name="test", options=QUICK)
    file = tmp_path / "nats" / "nats.conf"
    right = file.read_text()
    await asyncio.to_thread(file.write_text, right.replace("first", "second"))
    server.send_signal(signal.SIGHUP)
    await eventually(lambda: "Authorization Violation" in str(bus.client.last_error))
    assert not bus.connected
    await asyncio.to_thread(file.write_text, right)
    server.send_signal(signal.SIGHUP)
    await eventually(lambda: bus.connected)
    await bus.flush()
    await bus.close()
    server.kill()


async def test_a_connection_that_the_server_ends_for_good(tmp_path: Path) -> None:
    """nats-py gives up after an error such as an expired account: `wait_lost` tells, so that the process can end."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.12.0","max_payload":1048576,"headers":true}\r\n')
        published = False
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
            elif line.startswith(b"PUB"):
                published = True
            elif published:
                writer.write(b"-ERR 'Account Authentication Expired'\r\n")
                break
        await reader.read()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    bus = await connect(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", name="test", timeout_s=30)
    lost = asyncio.ensure_future(bus.wait_lost())
    bus.publish("x", b"")
    reason = await asyncio.wait_for(lost, 30)
    connected = bus.connected
    bus.publish("x", b"")
    stats = bus.stats()
    await bus.close()
    server.close()
    await server.wait_closed()
    assert "authentication expired" in reason
    assert not connected
    assert (stats.published, stats.publish_failed) == (1, 1)


async def test_secrets_of_the_address_are_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The password in the URL stays out of logs and errors."""
    server = NatsServer(tmp_path / "nats").start()
    server.stop()
    with pytest.raises(NotConnectedError) as caught:
        await connect(server.url.replace("nats://", "nats://me:hunter2@"), name="test", timeout_s=0.2)
    assert "hunter2" not in str(caught.value)
    records = "".join(str(record.__dict__) for record in caplog.records)
    assert "bus_unreachable" in records
    assert "hunter2" not in records


async def test_a_stream_with_other_limits_is_taken_as_it_is(bus: NatsBus, client: Client) -> None:
    """Somebody configured ``TG_TRACES`` by hand: we use it and leave its settings alone."""
    js = client.jetstream()
    await js.add_stream(
        api.StreamConfig(name=subjects.TRACE_STREAM, subjects=[subjects.TRACE_SUBJECTS], max_msgs=7, max_age=60.0)
    )
    assert await bus.publish_row(ROW, b"1", "request-1") is True
    info = await js.stream_info(subjects.TRACE_STREAM)
    assert (info.config.max_msgs, info.config.max_age, info.state.messages) == (7, 60.0, 1)


async def test_our_stream_is_durable_and_bounded(bus: NatsBus, client: Client) -> None:
    """On disk, with a duplicate window of ten minutes, an age and a size limit."""
    await bus.publish_row(ROW, b"1", "request-1")
    config = (await client.jetstream().stream_info(subjects.TRACE_STREAM)).config
    assert config.storage == api.StorageType.FILE
    assert config.duplicate_window == 600.0
    assert config.subjects == [subjects.TRACE_SUBJECTS]
    assert (config.max_age or 0) > 0
    assert (config.max_bytes or 0) > 0


async def test_a_server_without_jetstream_is_named(tmp_path: Path) -> None:
    """Facts and questions work; what needs JetStream says what is missing."""
    server = NatsServer(tmp_path / "nats", jetstream=False).start()
    bus = await connect(server.url, name="test", timeout_s=30)
    for attempt in (
        bus.publish_row(ROW, b"", "request-1"),
        bus.key_value("TG_TEST"),
        bus.objects("TG_TEST"),
        bus.consume("recorder", subjects.TRACE_SUBJECTS),
    ):
        with pytest.raises(StreamError, match="JetStream"):
            await attempt
    await bus.flush()
    await bus.close()
    server.kill()


async def test_a_lost_consumer_is_made_again(bus: NatsBus, client: Client) -> None:
    """Somebody deletes consumer or stream while we are connected: fetch goes on, rows are taken again."""
    # The server may give the new consumer the old one's open deliveries: they come again after `ack_wait_s`.
    consumer = await bus.consume("recorder", subjects.TRACE_SUBJECTS, ack_wait_s=0.5)
    await bus.publish_row(ROW, b"1", "request-1")
    assert len(await consumer.fetch(10, 5)) == 1
    waiting = asyncio.ensure_future(consumer.fetch(10, 30))
    js = client.jetstream()
    await js.delete_consumer(subjects.TRACE_STREAM, "recorder")
    assert [row.payload for row in await asyncio.wait_for(waiting, 20)] == [b"1"]
    waiting = asyncio.ensure_future(consumer.fetch(10, 40))
    await js.delete_stream(subjects.TRACE_STREAM)
    tasks = Tasks()
    rows = RowPublisher(bus, tasks, timeout_s=1.0)
    rows.publish(ROW, b"2", "request-2")
    assert await rows.drain(20) == 0
    while (got := [row.payload for row in await asyncio.wait_for(waiting, 30)]) == [b"1"]:
        waiting = asyncio.ensure_future(consumer.fetch(10, 30))
    assert got == [b"2"]
    await tasks.stop()


async def test_other_clients_read_our_buckets_and_objects(bus: NatsBus, client: Client) -> None:
    """Keys and objects are in NATS's own format: nats-py reads what we wrote, and the other way round."""
    js = client.jetstream()
    ours = await bus.key_value("TG_TEST")
    await ours.put("a", b"1")
    theirs = await js.key_value("TG_TEST")
    assert (await theirs.get("a")).value == b"1"
    await theirs.put("a", b"2")
    entry = await ours.get("a")
    assert entry is not None
    assert entry.value == b"2"
    await theirs.delete("a")
    assert await ours.get("a") is None
    assert await ours.create("a", b"3") > entry.revision
    objects = await bus.objects("TG_OBJECTS")
    await objects.put("snapshot", b"x" * 300_000)
    assert (await (await js.object_store("TG_OBJECTS")).get("snapshot")).data == b"x" * 300_000


async def test_a_bucket_that_goes_while_an_object_is_written_is_our_error(bus: NatsBus, client: Client) -> None:
    """Somebody deletes its stream under the chunks: what the writer gets is of the bus' own errors, and the next write
    makes the bucket again."""
    objects = await bus.objects("TG_TEST_OBJECTS")
    manager = client.jetstream()
    writing = asyncio.ensure_future(objects.put("large", bytes(64 * 1024 * 1024)))
    while (await manager.stream_info("OBJ_TG_TEST_OBJECTS")).state.messages == 0:
        assert not writing.done()
    await manager.delete_stream("OBJ_TG_TEST_OBJECTS")
    with pytest.raises(StreamError):
        await writing
    await objects.put("small", b"whole")
    assert await objects.get("small") == b"whole"


async def test_many_connections_under_load_keep_order(nats_server: NatsServer) -> None:
    """Four publishers at once: per publisher the order holds, nothing is lost below the bounds."""
    receiver: Bus = await connect(nats_server.url, name="receiver", timeout_s=30)
    senders = [await connect(nats_server.url, name=f"sender-{number}", timeout_s=30) for number in range(4)]
    got = Collector()
    await receiver.subscribe("load.*", got)

    async def send(number: int) -> None:
        for place in range(2_500):
            senders[number].publish(f"load.{number}", b"%d" % place)
            if place % 100 == 0:
                await asyncio.sleep(0)

    await asyncio.gather(*(send(number) for number in range(4)))
    await got.wait_for(10_000)
    for number in range(4):
        mine = [int(message.payload) for message in got.messages if message.subject == f"load.{number}"]
        assert mine == list(range(2_500))
    for connection in (receiver, *senders):
        await connection.close()


@pytest.mark.parametrize(
    "message",
    [
        b"PUB tg.facts.\xff 1\r\nx\r\n",
        b"HPUB tg.facts.x 16 17\r\nNATS/1.0 \xff\xff\xff\r\n\r\nx\r\n",
    ],
    ids=["subject", "status"],
)
async def test_a_message_that_cannot_be_read_is_counted_and_ends_nothing(
    nats_server: NatsServer, bus: NatsBus, message: bytes
) -> None:
    """Anybody may send a subject or a header that is not UTF-8; everything after it is still heard."""
    got = Collector()
    await bus.subscribe("tg.facts.*", got)
    reader, writer = await asyncio.open_connection("127.0.0.1", nats_server.port)
    await reader.readline()
    writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n' + message + b"PUB tg.facts.end 1\r\ny\r\n")
    await writer.drain()
    try:
        await got.wait_for(1)
    finally:
        writer.close()
        await writer.wait_closed()
    assert got.payloads == [b"y"]
    assert bus.stats().handler_failed == 1
    assert bus.stats().reconnects == 0
    await bus.flush()


async def test_publishing_on_a_socket_that_has_just_died_raises_nothing_and_loses_nothing(
    nats_server: NatsServer, bus: NatsBus
) -> None:
    """Between the end of the socket and the reader's noticing, a heartbeat is published all the same: that is nobody's
    error, and it arrives after the reconnection."""
    got = Collector()
    errors: list[object] = []
    sent: list[bytes] = []
    other = await connect(nats_server.url, name="other", timeout_s=30)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    try:
        await other.subscribe("facts.x", got)
        transport = bus.client._transport
        assert isinstance(transport, TcpTransport)
        assert transport._io_writer is not None
        transport._io_writer.transport.abort()
        while bus.client.is_connected:
            sent.append(b"%d" % len(sent))
            bus.publish("facts.x", sent[-1])
            await asyncio.sleep(0)
        assert sent
        await got.wait_for(len(sent))
    finally:
        await other.close()
    assert got.payloads == sent
    assert not errors


async def test_without_echo_a_connection_hears_all_but_itself(nats_server: NatsServer) -> None:
    """What others say comes, what it says itself does not; rows are acknowledged, questions answered, and `flush` waits
    for the server as ever."""
    deaf = await connect(nats_server.url, name="deaf", timeout_s=30, options=NatsOptions(echo=False))
    other = await connect(nats_server.url, name="other", timeout_s=30)
    got, heard = Collector(), Collector()
    try:
        await deaf.subscribe("facts.x", got)
        await other.subscribe("facts.x", heard)
        deaf.publish("facts.x", b"own")
        await deaf.flush()
        await other.flush()
        other.publish("facts.x", b"another's")
        await got.wait_for(1)
        assert got.payloads == [b"another's"]
        assert heard.payloads == [b"own", b"another's"]
        await other.subscribe("question", lambda message: other.publish(message.reply, b"answer"))
        assert (await deaf.request("question", b"", timeout_s=30)).payload == b"answer"
        assert await deaf.publish_row(ROW, b"{}", "row-1", timeout_s=30)
    finally:
        await deaf.close()
        await other.close()


async def test_what_lingers_leaves_with_the_next_that_does_not(nats_server: NatsServer, bus: NatsBus) -> None:
    """Order stays; a question, an answer or a `flush` takes along what lingers before it, however long it may."""
    other = await connect(nats_server.url, name="other", timeout_s=30)
    got = Collector()
    await other.subscribe("facts.>", got)
    try:
        for number in range(100):
            bus.publish("facts.x", b"fact %d" % number, linger_s=3600.0)
        assert bus.client.pending_data_size > 0
        bus.publish("facts.y", b"at once")
        assert bus.client.pending_data_size == 0
        bus.publish("facts.x", b"last", linger_s=3600.0)
        await bus.flush(30)
        await other.flush(30)
    finally:
        await other.close()
    assert got.payloads == [*(b"fact %d" % number for number in range(100)), b"at once", b"last"]


async def test_what_lingers_alone_leaves_by_itself(nats_server: NatsServer, bus: NatsBus) -> None:
    """Nobody publishes anything else: it goes when its time is over; what lingers while the socket dies goes with the
    reconnection; what is much goes at once."""
    other = await connect(nats_server.url, name="other", timeout_s=30)
    got = Collector()
    await other.subscribe("facts.x", got)
    try:
        bus.publish("facts.x", b"1", linger_s=0.001)
        await got.wait_for(1)
        bus.publish("facts.x", b"2", linger_s=3600.0)
        transport = bus.client._transport
        assert isinstance(transport, TcpTransport)
        assert transport._io_writer is not None
        transport._io_writer.transport.abort()
        await got.wait_for(2)
        bus.publish("facts.x", b"." * 100_000, linger_s=3600.0)
        await got.wait_for(3)
    finally:
        await other.close()
    assert [payload[:1] for payload in got.payloads] == [b"1", b"2", b"."]


async def _answers_pings(bus: NatsBus) -> bool:
    try:
        await bus.flush(1.0)
    except BusTimeoutError:
        return False
    return True


async def test_a_flush_fails_with_its_connection(nats_server: NatsServer) -> None:
    """Who waits for a server that is gone hears it at once, not at his deadline; many may wait at the same time."""
    bus = await connect(nats_server.url, name="test", timeout_s=30)
    try:
        nats_server.pause()
        while await _answers_pings(bus):
            pass  # it has not stopped yet
        waiting = [asyncio.ensure_future(bus.flush(600)) for _ in range(5)]
        await asyncio.sleep(0)
        nats_server.kill()
        async with asyncio.timeout(60):
            ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in ended] == [NotConnectedError] * 5
        nats_server.start()
        await eventually(lambda: bus.connected)
        await bus.flush(30)
    finally:
        await bus.close()

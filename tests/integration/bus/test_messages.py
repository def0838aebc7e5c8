"""Publish and subscribe: order, wildcards, queue groups, failures of handlers, bounds. Both implementations."""

from __future__ import annotations

import time

import pytest

from bus.errors import ClosedError, PayloadTooLargeError
from bus.interface import TURN_S, Bus, BusMessage
from tests.integration.bus.support import Collector, Server
from tests.support.processes import eventually

pytestmark = pytest.mark.usefixtures("no_blocking_calls")


async def test_messages_arrive_in_order_with_headers(bus: Bus) -> None:
    """What one connection publishes, a subscriber of the wildcard gets whole and in order."""
    got = Collector()
    await bus.subscribe("facts.*.x", got)
    for number in range(2_000):
        bus.publish(f"facts.{number % 3}.x", b"%d" % number, {"Tg-Number": str(number)})
    bus.publish("facts.0.y", b"another subject")
    await got.wait_for(2_000)
    await bus.flush()
    assert [b"%d" % number for number in range(2_000)] == got.payloads
    assert got.messages[7] == BusMessage("facts.1.x", b"7", {"Tg-Number": "7"}, "")
    assert bus.stats().delivered == 2_000
    assert bus.stats().published >= 2_001


@pytest.mark.parametrize(
    ("pattern", "subject", "matches"),
    [
        ("a.>", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        (">", "a", True),
        ("a.b", "a.B", False),
    ],
)
async def test_wildcards(bus: Bus, pattern: str, subject: str, matches: bool) -> None:
    """``*`` is one token, ``>`` one or more at the end; tokens are compared byte for byte."""
    got = Collector()
    other = Collector()
    await bus.subscribe(pattern, got)
    await bus.subscribe("end", other)
    bus.publish(subject, b"1")
    bus.publish("end", b"2")
    await other.wait_for(1)
    await bus.flush()
    assert (b"1" in got.payloads) == matches


async def test_queue_group_shares_and_plain_subscribers_see_all(server: Server) -> None:
    """Each message reaches exactly one member of a group, whatever its pattern, and every plain subscriber."""
    first, second, sender = await server.connect(), await server.connect(), await server.connect()
    one, two, plain = Collector(), Collector(), Collector()
    await first.subscribe("work.*", one, queue="workers")
    await second.subscribe("work.*", two, queue="workers")
    await second.subscribe("work.>", plain)
    for number in range(300):
        sender.publish("work.x", b"%d" % number)
    await plain.wait_for(300)
    await eventually(lambda: len(one.messages) + len(two.messages) == 300)
    assert {b"%d" % number for number in range(300)} == set(one.payloads) | set(two.payloads)
    assert one.messages
    assert two.messages
    assert plain.payloads == [b"%d" % number for number in range(300)]


async def test_a_handler_that_raises_is_counted_and_ends_nothing(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    """Later messages still arrive; the failure is in both counters and in the log."""
    got = Collector()

    def handler(message: BusMessage) -> None:
        if message.payload == b"bad":
            raise LookupError("handler's bug")
        got(message)

    subscription = await bus.subscribe("x", handler)
    for payload in (b"1", b"bad", b"2"):
        bus.publish("x", payload)
    assert await got.wait_for(2) == [b"1", b"2"]
    assert subscription.stats().failed == 1
    assert subscription.stats().delivered == 3
    assert bus.stats().handler_failed == 1
    assert "handler_failed" in caplog.text


async def test_nothing_is_delivered_after_unsubscribe(bus: Bus) -> None:
    """Messages that were under way are dropped; counters of the subscription stay in the connection's."""
    got, end = Collector(), Collector()
    subscription = await bus.subscribe("x", got)
    await bus.subscribe("x", end)
    bus.publish("x", b"1")
    await got.wait_for(1)
    bus.publish("x", b"2")
    await subscription.unsubscribe()
    await end.wait_for(2)
    bus.publish("x", b"3")
    await end.wait_for(3)
    assert got.payloads == [b"1"]
    assert bus.stats().delivered == 4
    await subscription.unsubscribe()


async def test_too_large_is_refused_before_it_is_sent(server: Server) -> None:
    """User case E1: a 64 KB server; the named error carries the sizes, the connection lives, nothing else is lost."""
    bus = await server.connect()
    got = Collector()
    await bus.subscribe("x", got)
    assert bus.max_payload == 65_536
    bus.publish("x", b"a" * 65_536)
    with pytest.raises(PayloadTooLargeError) as caught:
        bus.publish("x", b"a" * 65_537)
    assert (caught.value.size_bytes, caught.value.limit_bytes) == (65_537, 65_536)
    assert caught.value.reason == "payload_too_large"
    with pytest.raises(PayloadTooLargeError):
        bus.publish("x", b"a" * 65_530, {"Tg-Seq": "1"})
    bus.publish("x", b"after")
    assert [len(payload) for payload in await got.wait_for(2)] == [65_536, 5]
    assert bus.stats().reconnects == 0


async def test_headers_count_exactly(bus: Bus) -> None:
    """A message that fills the server's limit to the byte, headers included, passes; the server agrees on the sum."""
    got = Collector()
    await bus.subscribe("x", got)
    headers = {"Tg-Worker": "w-ü", "Tg-Seq": "12"}
    size = len("NATS/1.0\r\nTg-Worker: w-ü\r\nTg-Seq: 12\r\n\r\n".encode())
    bus.publish("x", b"a" * (65_536 - size), headers)
    with pytest.raises(PayloadTooLargeError):
        bus.publish("x", b"a" * (65_537 - size), headers)
    await got.wait_for(1)
    assert got.messages[0].headers == headers


@pytest.mark.parametrize("subject", ["", "a b", "a.*", "a.>", "a\r\nPUB b 0", "a..b", ".a", "a."])
async def test_a_subject_nobody_may_publish_on(bus: Bus, subject: str) -> None:
    """An id that was not encoded is a bug of the caller, told at once, and cannot inject protocol."""
    with pytest.raises(ValueError, match="subject"):
        bus.publish(subject, b"")


@pytest.mark.parametrize("subject", ["", "a b", "a.>.b", "a*", "a..b", "a.", "a.b>"])
async def test_a_subject_nobody_may_subscribe_to(bus: Bus, subject: str) -> None:
    """As above, for subscriptions."""
    with pytest.raises(ValueError, match="subject"):
        await bus.subscribe(subject, Collector())


async def test_slow_consumer_drops_are_counted(server: Server) -> None:
    """User case E1: with a bound of 2, a burst to who is slow loses messages; each is delivered or counted, others get
    all."""
    receiver, sender = await server.connect(), await server.connect()
    slow, fast = Collector(), Collector()

    def slowly(message: BusMessage) -> None:
        slow(message)
        ends = time.perf_counter() + 2 * TURN_S
        while time.perf_counter() < ends:
            pass

    subscription = await receiver.subscribe("burst", slowly, pending_limit=2)
    await receiver.subscribe("burst", fast)
    for number in range(1_000):
        sender.publish("burst", b"%d" % number)
    await fast.wait_for(1_000)
    await eventually(lambda: sum((subscription.stats().delivered, subscription.stats().dropped)) == 1_000)
    stats = subscription.stats()
    assert stats.dropped > 0
    assert stats.delivered == len(slow.messages)
    assert receiver.stats().dropped_slow_consumer == stats.dropped


async def test_a_closed_bus_says_so(server: Server) -> None:
    """Use after close is a bug with a name; close twice is fine; what was published before it has left."""
    bus, other = await server.connect(), await server.connect()
    got = Collector()
    await other.subscribe("x", got)
    bus.publish("x", b"last words")
    await bus.close()
    await bus.close()
    assert await got.wait_for(1) == [b"last words"]
    assert not bus.connected
    with pytest.raises(ClosedError):
        bus.publish("x", b"")
    with pytest.raises(ClosedError):
        await bus.subscribe("x", got)
    with pytest.raises(ClosedError):
        await bus.flush()


async def test_another_connection_lives_by_itself_and_is_closed_with_the_first(server: Server) -> None:
    """Subscriptions and questions of its own; its counters are in the first one's; its end is not the first one's."""
    bus = await server.connect("admission-1")
    one, two = await bus.another("kv"), await bus.another("kv")
    got = Collector()
    await one.subscribe("facts.x", got)
    bus.publish("facts.x", b"1")
    assert await got.wait_for(1) == [b"1"]
    assert (bus.stats().delivered, one.stats().delivered, two.stats().delivered) == (1, 1, 0)
    await one.close()
    assert (one.closed, bus.closed, bus.connected, two.connected) == (True, False, True, True)
    await bus.flush()
    third = await bus.another("kv")
    assert bus.stats().delivered == 1, "what a closed one counted stays"
    await bus.close()
    assert (two.closed, third.closed, third.connected) == (True, True, False)
    with pytest.raises(ClosedError):
        await bus.another("kv")


async def test_a_flood_on_another_connection_does_not_delay_this_one(server: Server) -> None:
    """A tester's case: 100,000 batches within 2 s kept the answers to a leader's renewals behind them, and the lease
    was lost. What waits in the other connection is no hurdle for a question here."""
    bus, sender = await server.connect(), await server.connect()
    other = await bus.another("kv")
    handled = 0

    def slowly(message: BusMessage) -> None:
        nonlocal handled
        handled += 1
        until = time.perf_counter() + 0.0001
        while time.perf_counter() < until:
            pass

    await bus.subscribe("q.x", lambda message: bus.publish(message.reply, b"here"))
    waiting = await other.subscribe("flood", slowly, pending_limit=5_000)
    payload = b"x" * 100
    for _ in range(20_000):
        sender.publish("flood", payload)
    await sender.flush()
    answered = 0
    while waiting.stats().delivered + waiting.stats().dropped < 20_000:
        assert (await bus.request("q.x", b"", timeout_s=30)).payload == b"here"
        answered += 1
    assert answered >= 20, "questions are answered while the flood is read"
    assert waiting.stats().pending <= 5_000
    await eventually(lambda: waiting.stats().pending == 0)
    assert handled == waiting.stats().delivered
    assert waiting.stats().delivered + waiting.stats().dropped == 20_000
    assert bus.stats().dropped_slow_consumer == waiting.stats().dropped


async def test_a_flood_on_one_subject_lets_the_others_have_their_turn(server: Server) -> None:
    """A thousand messages that each take a while to handle: a question that comes behind them is answered long before
    the last of them was handled; none is lost, and all come in order, whether they had to wait or not (user case: a
    fleet's KV events must not delay decisions)."""
    bus, sender = await server.connect(), await server.connect()
    handled: list[bytes] = []
    handled_before_the_question: list[int] = []

    def slowly(message: BusMessage) -> None:
        until = time.perf_counter() + 0.0005
        while time.perf_counter() < until:
            pass
        handled.append(message.payload)

    await bus.subscribe("flood", slowly)
    await bus.subscribe("question", lambda message: handled_before_the_question.append(len(handled)))
    sent = [b"%0100d" % number for number in range(1_000)]
    for payload in sent:
        sender.publish("flood", payload)
    sender.publish("question", b"")
    await eventually(lambda: len(handled) == len(sent), what="all are handled")
    assert handled == sent
    assert handled_before_the_question[0] < 900

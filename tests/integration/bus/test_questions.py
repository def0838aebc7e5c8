"""Questions: one answer, several, none, too late; served endpoints and the services API. Both implementations."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import msgspec
import pytest
from nats.micro.service import ServiceInfo, ServicePing, ServiceStats

from bus.errors import AnswerFailedError, BusError, BusTimeoutError, NoRespondersError
from bus.interface import Bus, BusMessage, Endpoint
from tests.integration.bus.support import Server, answers_until_silence
from tests.support.pace import Stopwatch

pytestmark = pytest.mark.usefixtures("no_blocking_calls")


def echo(bus: Bus) -> Endpoint:
    """Answers with what it was asked."""
    return Endpoint("echo", "q.echo", lambda message: bus.publish(message.reply, message.payload, message.headers))


async def test_request_gets_its_own_answer(server: Server) -> None:
    """A hundred questions at once, each answered with its own payload and headers."""
    answerer, asker = await server.connect(), await server.connect()
    served = await answerer.serve("echo", "1.0.0", "", [echo(answerer)], {})
    answers = await asyncio.gather(
        *(asker.request("q.echo", b"%d" % number, timeout_s=30, headers={"N": str(number)}) for number in range(100))
    )
    assert [answer.payload for answer in answers] == [b"%d" % number for number in range(100)]
    assert answers[42].headers == {"N": "42"}
    await served.stop()


async def test_no_responders_at_once(bus: Bus) -> None:
    """Nobody subscribes: the error comes at once, not at the deadline."""
    since = Stopwatch()
    with pytest.raises(NoRespondersError) as caught:
        await bus.request("q.nobody", b"", timeout_s=30)
    assert caught.value.subject == "q.nobody"
    with pytest.raises(NoRespondersError):
        async with aclosing(bus.request_many("q.nobody", b"", idle_timeout_s=30, deadline_s=30)) as answers:
            await anext(answers)
    await since.within(5)


async def test_silence_is_a_timeout(bus: Bus) -> None:
    """Somebody subscribes and says nothing."""
    await bus.subscribe("q.silent", lambda message: None)
    with pytest.raises(BusTimeoutError) as caught:
        await bus.request("q.silent", b"", timeout_s=0.05)
    assert (caught.value.subject, caught.value.timeout_s, caught.value.reason) == ("q.silent", 0.05, "bus_timeout")


async def test_several_replies_until_closed(bus: Bus) -> None:
    """As `admit`: held, held, granted; the asker stops listening when it has what it wants."""

    def answer(message: BusMessage) -> None:
        for payload in (b"held", b"held", b"granted", b"too much"):
            bus.publish(message.reply, payload)

    await bus.subscribe("q.admit", answer)
    got = []
    async with aclosing(bus.request_many("q.admit", b"", idle_timeout_s=30, deadline_s=30)) as answers:
        async for message in answers:
            got.append(message.payload)
            if message.payload == b"granted":
                break
    assert got == [b"held", b"held", b"granted"]


async def test_several_replies_then_silence(bus: Bus) -> None:
    """The idle deadline starts anew with each answer."""
    loop = asyncio.get_running_loop()

    def answer(message: BusMessage) -> None:
        for place in range(4):
            loop.call_later(0.4 * place, bus.publish, message.reply, b"%d" % place)

    await bus.subscribe("q.admit", answer)
    got, error = await answers_until_silence(bus, "q.admit", idle_timeout_s=1.0, deadline_s=30)
    assert got == [b"0", b"1", b"2", b"3"]
    assert error.timeout_s == pytest.approx(1.0)


async def test_keep_alives_do_not_outlive_the_deadline(bus: Bus) -> None:
    """Answers for ever: the whole question ends at its deadline."""
    loop = asyncio.get_running_loop()

    def again(reply: str) -> None:
        bus.publish(reply, b"held")
        timers.append(loop.call_later(0.02, again, reply))

    timers: list[asyncio.TimerHandle] = []
    await bus.subscribe("q.admit", lambda message: again(message.reply))
    since = Stopwatch()
    got, _ = await answers_until_silence(bus, "q.admit", idle_timeout_s=30, deadline_s=1.0)
    timers[-1].cancel()
    assert len(got) > 3
    assert since.took_s > 0.9
    await since.within(5)


async def test_a_failed_answer_reaches_the_asker(bus: Bus) -> None:
    """The handler raised: the asker hears it at once, the handler's side counts it."""

    def answer(message: BusMessage) -> None:
        raise KeyError("bug")

    served = await bus.serve("broken", "1.0.0", "", [Endpoint("broken", "q.broken", answer)], {})
    with pytest.raises(AnswerFailedError, match="KeyError") as caught:
        await bus.request("q.broken", b"", timeout_s=30)
    assert isinstance(caught.value, BusError)
    assert bus.stats().handler_failed == 1
    await served.stop()


async def test_queue_endpoints_answer_once_and_others_all(server: Server) -> None:
    """Two instances: an endpoint with a queue answers once, one without answers from both."""
    first, second, asker = await server.connect(), await server.connect(), await server.connect()

    def endpoints(bus: Bus, name: bytes) -> list[Endpoint]:
        def answer(message: BusMessage) -> None:
            bus.publish(message.reply, name)

        return [Endpoint("one", "q.one", answer), Endpoint("all", "q.all", answer, queue="")]

    await first.serve("twin", "1.0.0", "", endpoints(first, b"first"), {})
    await second.serve("twin", "1.0.0", "", endpoints(second, b"second"), {})

    async def answers(subject: str) -> list[bytes]:
        got, _ = await answers_until_silence(asker, subject, idle_timeout_s=1.0, deadline_s=5)
        return sorted(got)

    assert await answers("q.all") == [b"first", b"second"]
    assert await answers("q.one") in ([b"first"], [b"second"])


async def test_services_api(server: Server) -> None:
    """``$SRV.PING|INFO|STATS`` for all, by name and by id, in the shapes that nats.micro's own classes read."""
    bus, asker = await server.connect(), await server.connect()
    served = await bus.serve("tidegate-indexer", "1.2.3", "who holds what", [echo(bus)], {"instance": "indexer-1"})
    assert list(bus.serving) == ["tidegate-indexer"]
    await asker.request("q.echo", b"", timeout_s=30)

    ping = ServicePing.from_dict(msgspec.json.decode((await asker.request("$SRV.PING", b"", timeout_s=30)).payload))
    assert (ping.name, ping.version, ping.metadata) == ("tidegate-indexer", "1.2.3", {"instance": "indexer-1"})
    answer = await asker.request(f"$SRV.INFO.tidegate-indexer.{ping.id}", b"", timeout_s=30)
    info = ServiceInfo.from_dict(msgspec.json.decode(answer.payload))
    assert info.description == "who holds what"
    assert [(endpoint.name, endpoint.subject, endpoint.queue_group) for endpoint in info.endpoints] == [
        ("echo", "q.echo", "q")
    ]
    answer = await asker.request("$SRV.STATS.tidegate-indexer", b"", timeout_s=30)
    stats = ServiceStats.from_dict(msgspec.json.decode(answer.payload))
    assert (stats.endpoints[0].num_requests, stats.endpoints[0].num_errors) == (1, 0)
    assert stats.endpoints[0].processing_time > 0

    await served.stop()
    assert list(bus.serving) == []
    for subject in ("q.echo", "$SRV.PING"):
        with pytest.raises(NoRespondersError):
            await asker.request(subject, b"", timeout_s=30)


@pytest.mark.parametrize(("name", "version"), [("with space", "1.0.0"), ("ok", "1.0"), ("", "1.0.0")])
async def test_a_service_nobody_could_find(bus: Bus, name: str, version: str) -> None:
    """The services API's own rules for names and versions, told before anything is subscribed."""
    with pytest.raises(ValueError, match="service's"):
        await bus.serve(name, version, "", [], {})

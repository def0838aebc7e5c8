"""How far streams are is asked of a few at a time; what somebody waits for goes before what is said of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from bus.interface import BusMessage
from bus.memory import MemoryBroker
from bus.rows import RowPublisher
from bus.tasks import Tasks
from schemas.trace import TraceRow
from services.ingress import events
from services.ingress.core import IngressCore, IngressRules
from services.ingress.effects import AskAdmission, Effect, Forward, Relay
from services.ingress.shell.dispatcher import Dispatcher
from services.ingress.shell.metrics import IngressMetrics
from tests.unit.ingress.builders import GOOD, counted, granted, received, worker


class _Stream:
    """Counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def progress(self) -> None:
        self.asked += 1

    def take(self, effect: Effect) -> None:
        raise NotImplementedError

    def ended(self, row: TraceRow) -> None:
        raise NotImplementedError


async def test_everyone_is_asked_once_in_parts_and_nobody_who_is_gone() -> None:
    """Ten streams in four parts; who left meanwhile is not asked, who came waits for the next round."""
    bus = await MemoryBroker().connect()
    tasks = Tasks()
    core = IngressCore("ingress-1", 1, IngressRules())
    dispatcher = Dispatcher(core, bus, RowPublisher(bus, tasks), IngressMetrics(CollectorRegistry()))
    streams = {f"r{number}": _Stream() for number in range(10)}
    for name, stream in streams.items():
        dispatcher.enter(name, stream)
    asked = []
    for _ in dispatcher.progress(4):
        asked.append(sum(stream.asked for stream in streams.values()))
        if len(asked) == 1:
            dispatcher.leave("r1")
            dispatcher.enter("late", late := _Stream())
    assert asked == [3, 5, 7, 9]
    assert [stream.asked for stream in streams.values()] == [1, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert late.asked == 0
    assert list(dispatcher.progress(2)) == [None, None]
    assert late.asked == 1
    await tasks.stop()
    await bus.close()


class _Request:
    """Takes its effects, and notes how many facts had left by then."""

    def __init__(self, published: Callable[[], int]) -> None:
        self._published = published
        self.taken: list[tuple[type[Effect], int]] = []

    def progress(self) -> None:
        raise NotImplementedError

    def take(self, effect: Effect) -> None:
        self.taken.append((type(effect), self._published()))

    def ended(self, row: TraceRow) -> None:
        """Its row."""


async def test_an_engine_and_a_client_are_served_before_facts_are_made_and_facts_keep_their_order() -> None:
    """`dispatched` is not made before the request is handed over, nor `first_token` before the answer; but `accepted`
    is before admission is asked. Whoever hears them, hears them in the order of what happened."""
    broker = MemoryBroker()
    bus, hearer = await broker.connect(), await broker.connect()
    heard: list[str] = []
    ended = asyncio.Event()

    def hear(message: BusMessage) -> None:
        heard.append(message.subject.split(".")[3])
        if heard[-1] == "end":
            ended.set()

    await hearer.subscribe("tg.v1.request.*.*", hear)
    tasks = Tasks()
    core = IngressCore("ingress-1", 1, IngressRules())
    dispatcher = Dispatcher(core, bus, RowPublisher(bus, tasks), IngressMetrics(CollectorRegistry()))
    request = _Request(lambda: bus.stats().published)
    dispatcher.enter("r1", request)
    for event in (
        worker("w1"),
        received("r1"),
        counted("r1"),
        granted("r1", "w1"),
        events.FirstByte(request_id="r1", attempt=0, status=200, is_stream=False),
        events.AnswerEnded(request_id="r1", attempt=0, answer=GOOD),
    ):
        dispatcher.deliver(event)
    assert [each for each in request.taken if each[0] in (AskAdmission, Forward, Relay)] == [
        (AskAdmission, 1),
        (Forward, 1),
        (Relay, 1),
    ]
    async with asyncio.timeout(10):
        await ended.wait()
    assert heard == ["accepted", "dispatched", "first_token", "end"]
    await tasks.stop()
    await bus.close()
    await hearer.close()

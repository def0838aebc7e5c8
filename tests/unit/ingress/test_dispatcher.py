"""How far streams are is asked of a few at a time."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from bus.memory import MemoryBroker
from bus.rows import RowPublisher
from bus.tasks import Tasks
from schemas.trace import TraceRow
from services.ingress.core import IngressCore, IngressRules
from services.ingress.effects import Effect
from services.ingress.shell.dispatcher import Dispatcher
from services.ingress.shell.metrics import IngressMetrics


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

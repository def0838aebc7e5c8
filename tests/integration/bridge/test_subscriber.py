"""The polling thread on real sockets: what it says of the order of batches and connections can be relied upon."""

from __future__ import annotations

import threading

import zmq

from services.bridge.endpoints import RankSource
from services.bridge.events import EngineBatch, EngineConnected, EngineDisconnected, SubscriberEvent
from services.bridge.shell.subscriber import EventSubscriber
from tests.integration.bridge.house import until, until_async
from tests.integration.bridge.scripted_engine import ScriptedEngine
from tests.integration.bridge.test_bridge import block


class HeldUp(EventSubscriber):
    """Its thread stays in the middle of a reading from `hold` on, until more has arrived and `go` is set."""

    hold = threading.Event()
    go = threading.Event()
    arrived = threading.Event()

    def _drain(self, source: RankSource, subscriber: zmq.Socket[bytes], drained: list[SubscriberEvent]) -> bool:
        more = super()._drain(source, subscriber, drained)
        if not self.hold.is_set():
            return more
        while not self.go.wait(0.005):
            if int(subscriber.get(zmq.EVENTS)) & zmq.POLLIN:
                self.arrived.set()
        return super()._drain(source, subscriber, drained)


async def test_batches_of_a_restarted_engine_never_come_before_the_end_of_the_old_one() -> None:
    """User case A3: the engine dies, comes back and publishes while the thread is held up in its reading. What it has
    read may be of either process, so none of it is handed over as the old one's; what comes later follows the notes."""
    heard: list[SubscriberEvent] = []
    async with ScriptedEngine() as engine:
        [endpoint] = engine.event_endpoints()
        subscriber = HeldUp([RankSource(0, endpoint)], lambda _, events: heard.extend(events), 1000)
        subscriber.start()
        try:
            await until(lambda: EngineConnected(0) in heard, "connected")
            await engine.publish(block(0))
            await until(lambda: EngineBatch(0, 0, block(0)) in heard, "the first batch")
            subscriber.hold.set()
            await engine.publish(block(1))
            await engine.restart()

            async def arrived() -> bool:
                await engine.publish(block(100))
                return subscriber.arrived.is_set()

            await until_async(arrived, "a batch of the new process waits to be read")
            subscriber.hold.clear()
            subscriber.go.set()
            await until(lambda: heard.count(EngineConnected(0)) == 2, "connected again")
            last = await engine.publish(block(101))
            await until(lambda: EngineBatch(0, last, block(101)) in heard, "a batch of the new process")
        finally:
            subscriber.go.set()
            await subscriber.stop()
    again = heard.index(EngineDisconnected(0))
    assert heard[:again] == [EngineConnected(0), EngineBatch(0, 0, block(0))]
    assert heard[again + 1] == EngineConnected(0)
    assert subscriber.counters.dropped >= 2

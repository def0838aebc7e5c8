"""What takes a bridge long, or kills its thread: it goes on meanwhile, or says that it cannot."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import zmq

from bus import subjects
from bus.interface import Bus
from bus.nats import connect
from bus.slices import in_slices
from bus.tasks import Tasks
from kvcore import dump as kvcore_dump
from kvcore.events import decode_batch
from kvcore.index import PrefixIndex
from schemas.base import from_json, to_json
from schemas.kv import SnapshotReply, SnapshotRequest
from services.bridge import core, own_index
from services.bridge.endpoints import RankSource
from services.bridge.events import SubscriberEvent
from services.bridge.shell import service as bridge_shell
from services.bridge.shell import snapshots
from services.bridge.shell.service import BridgeService
from services.bridge.shell.subscriber import EventSubscriber
from tests.integration.bridge.house import bridge_settings, running_bridge, until
from tests.integration.bridge.scripted_engine import ScriptedEngine, batch, stored
from tests.integration.bridge.test_bridge import Stream, block

BLOCKS = 10_000


async def test_live_batches_and_heartbeats_go_on_while_a_dump_is_made(
    url: str, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dump in thousands of slices (of the pure-Python twin, which can be made that slow): what the engine publishes
    meanwhile is forwarded at once, facts keep coming; the dump is the index at its marks, and the next one has the
    rest."""
    monkeypatch.setattr(own_index, "PrefixIndex", PrefixIndex)
    monkeypatch.setattr(core, "decode_batch", decode_batch)
    monkeypatch.setattr(kvcore_dump, "SLICE_BLOCKS", 1)
    monkeypatch.setattr(snapshots, "in_slices", partial(in_slices, slice_s=0.0))
    stream = await Stream.of(bus)
    many = batch(stored(list(range(1000, 1000 + BLOCKS)), list(range(100_000, 100_000 + 4 * BLOCKS))))
    async with (
        ScriptedEngine(block_size=4) as engine,
        running_bridge(engine, url, heartbeat_interval_s=0.02) as service,
    ):
        await stream.until_health("ready")
        await engine.publish(many)
        await stream.until_numbers(1)

        async def ask() -> SnapshotReply:
            question = to_json(SnapshotRequest(indexer="test"))
            answer = await bus.request(subjects.kv_snapshot("w"), question, timeout_s=30.0)
            return from_json(answer.payload, SnapshotReply)

        async def read(reply: SnapshotReply) -> PrefixIndex:
            restored = PrefixIndex()
            restored.load(await (await bus.objects(reply.bucket)).get(reply.key))
            return restored

        facts = len(stream.watcher.states())
        asked = asyncio.create_task(ask())
        await asyncio.sleep(0)
        sent = 1
        while not service.core.own.waiting:
            assert not asked.done(), "the dump was over before a batch came"
            await engine.publish(block(sent))
            await bus.flush()
            sent += 1
        await stream.until_numbers(2)
        assert service.core.own.waiting > 0
        assert not asked.done()
        reply = await asked
        assert len(stream.watcher.states()) > facts
        mark = reply.marks[0].seq
        expected = PrefixIndex()
        for payload in [many, *(block(number) for number in range(1, mark + 1))]:
            expected.apply("w", 0, decode_batch(payload))
        assert (await read(reply)).content() == expected.content()
        await stream.until_numbers(sent)
        await until(lambda: service.core.own.waiting == 0, "all applied")
        rest = await read(await ask())
        assert rest.resident("w", 0) == BLOCKS + sent - 1


async def test_death_of_the_polling_thread_ends_the_service(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its thread a bridge would look well and hear nothing: it fails, so that its supervisor restarts it."""

    class Broken(EventSubscriber):
        def _drain(self, source: RankSource, subscriber: zmq.Socket[bytes], drained: list[SubscriberEvent]) -> bool:
            raise MemoryError("no room for a batch")

    monkeypatch.setattr(bridge_shell, "EventSubscriber", Broken)
    bus = await connect(url, name="bridge-w")
    tasks = Tasks()
    async with ScriptedEngine() as engine:
        service = BridgeService(bridge_settings(engine, url))
        await service.start(bus, tasks)
        await until(lambda: bool(service.core.feeds) and service.core.feeds[0].connected, "connected")
        await engine.publish(block(0))
        async with asyncio.timeout(30):
            assert isinstance(await tasks.failed, MemoryError)
        await service.stop(2.0)
    await tasks.stop()
    await bus.close()

"""A bridge that comes back begins with the index that the one before it left in the object store."""

from __future__ import annotations

from pathlib import Path

from bus import subjects
from bus.errors import KeyMissingError
from bus.interface import Bus
from bus.nats import connect
from kvcore import PrefixIndex
from schemas.base import from_json, to_json
from schemas.kv import SnapshotReply, SnapshotRequest
from services.bridge.checkpoint import Checkpoint
from tests.integration.bridge.house import running_bridge, running_indexer, source_of, until, until_applied, until_async
from tests.integration.bridge.scripted_engine import ScriptedEngine, batch, removed
from tests.integration.bridge.test_bridge import FIRST, Stream, block
from tests.support.nats_cluster import client, made, running_cluster, settled

POINTER = "w.checkpoint"


async def snapshot(bus: Bus) -> tuple[SnapshotReply, PrefixIndex]:
    """The bridge's own index, by way of the store."""
    answer = await bus.request(subjects.kv_snapshot("w"), to_json(SnapshotRequest(indexer="test")), timeout_s=30)
    reply = from_json(answer.payload, SnapshotReply)
    index = PrefixIndex()
    index.load(await (await bus.objects(reply.bucket)).get(reply.key))
    return reply, index


async def checkpointed(bus: Bus, seq: int) -> None:
    """Until the store has a checkpoint of batch ``seq``."""
    objects = await bus.objects(subjects.OBJECTS_SNAPSHOTS)

    async def there() -> bool:
        try:
            checkpoint = from_json(await objects.get(POINTER), Checkpoint)
        except KeyMissingError:
            return False
        return [rank.seq for rank in checkpoint.ranks] == [seq]

    await until_async(there, f"a checkpoint of batch {seq}")


async def test_bridge_and_indexer_come_back_with_more_than_the_engine_remembers(url: str, bus: Bus) -> None:
    """The replay buffer has lost the beginning long ago; bridge and indexer both restart: nothing is missing, nothing
    was cleared, and the stream has kept its name."""
    stream = await Stream.of(bus)
    async with ScriptedEngine(block_size=4) as engine:
        async with running_indexer(url) as indexer, running_bridge(engine, url, checkpoint_interval_s=0.05):
            for number in range(6):
                await engine.publish(block(number))
            await engine.publish(batch(removed([101])))
            await until_applied(indexer, 6)
            await checkpointed(bus, 6)
            before = indexer.core.replica.index.content()
            assert len(before["w", 0]) == 5
        await engine.publish(block(7))
        engine.forget_before(6)
        async with running_bridge(engine, url), running_indexer(url) as indexer:
            await until_applied(indexer, 7)
            await until(lambda: source_of(indexer).health == "synced", "synced")
            content = indexer.core.replica.index.content()
            assert len(content["w", 0]) == 6
            assert before["w", 0].items() <= content["w", 0].items()
            reply, own = await snapshot(bus)
            assert [(mark.incarnation, mark.seq) for mark in reply.marks] == [(FIRST, 7)]
            assert own.content() == content
    assert stream.numbers()[-2:] == [(FIRST, 6), (FIRST, 7)]


async def test_a_small_snapshot_comes_without_the_store(tmp_path: Path) -> None:
    """Two of three servers die: the bus goes on, and its stores take nothing (as for 5 to 10 s at each election). Who
    lacks a batch has the index all the same, with the answer."""
    with running_cluster(tmp_path) as servers:
        async with client(servers, "watch") as watch:
            await made(watch)
            await settled(lambda: watch.objects(subjects.OBJECTS_SNAPSHOTS, ttl_s=subjects.SNAPSHOTS_TTL_S))
            registry = await settled(lambda: watch.key_value(subjects.BUCKET_WORKERS))
            await settled(lambda: registry.get("w"))  # a bridge looks there first
        last = servers["nats-2"].url
        async with ScriptedEngine(block_size=4) as engine, running_bridge(engine, last) as bridge:
            bus = await connect(last, name="asker", timeout_s=30)
            for number in range(3):
                await engine.publish(block(number))
            await until(lambda: bridge.core.blocks == 3, "all blocks")
            for name in ("nats-0", "nats-1"):
                servers[name].kill()
            answer = await bus.request(
                subjects.kv_snapshot("w"), to_json(SnapshotRequest(indexer="test")), timeout_s=30
            )
            reply = from_json(answer.payload, SnapshotReply)
            index = PrefixIndex()
            index.load(reply.dump)
            assert (reply.bucket, reply.key, reply.error) == ("", "", None)
            assert [(mark.incarnation, mark.seq) for mark in reply.marks] == [(FIRST, 2)]
            assert len(index.content()["w", 0]) == 3
            await bus.close()


async def test_a_question_before_the_engine_is_known_leaves_the_checkpoint_alone(url: str, bus: Bus) -> None:
    """An indexer that asks again and again finds a bridge that has just begun, and cannot say yet whose index it has:
    it gets a reason, and what the bridge before left behind stays."""
    stream = await Stream.of(bus)
    objects = await bus.objects(subjects.OBJECTS_SNAPSHOTS)
    async with ScriptedEngine(block_size=4) as engine:
        async with running_bridge(engine, url):
            for number in range(3):
                await engine.publish(block(number))
            await stream.until_numbers(3)
            await snapshot(bus)
        kept = await objects.get(POINTER)
        async with running_bridge(engine, url, engine_url="http://127.0.0.1:1"):
            question = to_json(SnapshotRequest(indexer="test"))
            answer = await bus.request(subjects.kv_snapshot("w"), question, timeout_s=30)
            assert from_json(answer.payload, SnapshotReply).error == "engine_unknown"
        assert await objects.get(POINTER) == kept


async def test_checkpoint_that_cannot_be_used(url: str, bus: Bus) -> None:
    """Damaged, of another engine process, or too old for the replay buffer: the engine is read as far back as it goes,
    and what is missing is said."""
    objects = await bus.objects(subjects.OBJECTS_SNAPSHOTS)
    stream = await Stream.of(bus)
    async with ScriptedEngine(block_size=4) as engine:
        async with running_bridge(engine, url):
            for number in range(3):
                await engine.publish(block(number))
            await stream.until_numbers(3)
            reply, _ = await snapshot(bus)
        good = await objects.get(reply.key)
        await objects.put(reply.key, good[:-1] + b"\x00")
        async with running_bridge(engine, url):
            await stream.until_numbers(6)
            assert (await stream.until_stream("synced")).incarnation == FIRST
        await objects.put(POINTER, b"junk")
        async with running_bridge(engine, url):
            await stream.until_numbers(9)
            reply, _ = await snapshot(bus)
        for number in range(3, 6):
            await engine.publish(block(number))
        engine.forget_before(5)
        async with running_bridge(engine, url):
            gone = await stream.until_stream("catching_up", "history_gone")
            assert gone.incarnation != FIRST
            _, own = await snapshot(bus)
            assert own.resident("w", 0) == 1
        await engine.restart()
        await engine.publish(block(9))
        async with running_bridge(engine, url):
            await stream.until_stream("synced")
            reply, own = await snapshot(bus)
            assert [mark.incarnation for mark in reply.marks] == ["1795973280250.0"]
            assert own.resident("w", 0) == 1

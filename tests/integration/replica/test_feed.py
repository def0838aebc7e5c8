"""A replica's feed on a real bus: what is wrong with the replica itself, and floods."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from xxhash import xxh3_64_hexdigest

from bus import subjects
from bus.interface import Bus
from bus.nats import NatsBus, connect
from bus.tasks import Tasks
from kvcore import PrefixIndex
from kvcore.events import decode_batch
from replica.config import ReplicaSettings
from replica.core import Replica
from replica.effects import ReplicaEffect
from replica.events import BatchReceived, ReplicaEvent, Tick
from replica.shell import RETRY_S, ReplicaFeed
from schemas.base import from_json, to_json
from schemas.index import MatchRequest
from schemas.kv import KvHeaders, RankMark, SnapshotReply, SnapshotRequest
from tests.support.processes import eventually
from tests.unit.replica.bridge import BLOCK, Bridge, bridge, chain, stored

POISON = b"poison"


class FragileReplica(Replica):
    """One with a mistake that nobody has found yet."""

    def handle(self, event: ReplicaEvent, now: float) -> list[ReplicaEffect]:
        if isinstance(event, BatchReceived) and event.payload == POISON:
            raise ZeroDivisionError("a mistake")
        return super().handle(event, now)

    def anew(self) -> Replica:
        return FragileReplica(self._settings, self.name)


class CountedReplica(Replica):
    """``ticks``: how often it was told the time."""

    ticks = 0

    def handle(self, event: ReplicaEvent, now: float) -> list[ReplicaEffect]:
        self.ticks += isinstance(event, Tick)
        return super().handle(event, now)


class Publisher:
    """A bridge on the bus: heartbeats, batches, and snapshots on demand."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.at: Bridge = bridge()
        self.asked = 0
        self.early: tuple[bytes, int] | None = None
        self.damaged = self.silent = 0
        self.inline = False
        self.errors: list[str] = []

    async def start(self) -> None:
        self._objects = await self._bus.objects(subjects.OBJECTS_SNAPSHOTS, ttl_s=subjects.SNAPSHOTS_TTL_S)
        await self._bus.subscribe(
            subjects.kv_snapshot("w"), lambda message: self._asked(message.reply, message.payload)
        )
        self._tasks = Tasks()

    def _asked(self, reply: str, payload: bytes) -> None:
        from_json(payload, SnapshotRequest)
        self.asked += 1
        if self.silent:
            return
        self._tasks.start("snapshot", self._answer(reply))

    async def _answer(self, reply: str) -> None:
        dump, seq = self.early or (self.at.index.dump(), self.at.seq)
        marks = (RankMark(rank=0, incarnation=self.at.incarnation, seq=seq),)
        if self.errors:
            self._bus.publish(reply, to_json(SnapshotReply(worker="w", error=self.errors.pop())))
            return
        stored_as = dump
        if self.damaged:
            self.damaged -= 1
            stored_as = dump[:-1] + bytes([dump[-1] ^ 1])
        if not self.inline:
            await self._objects.put("w.0", stored_as)
        answer = SnapshotReply(
            worker="w",
            bucket="" if self.inline else subjects.OBJECTS_SNAPSHOTS,
            key="" if self.inline else "w.0",
            dump=stored_as if self.inline else b"",
            size_bytes=len(dump),
            digest=xxh3_64_hexdigest(dump),
            marks=marks,
        )
        self._bus.publish(reply, to_json(answer))

    def beat(self) -> None:
        self._bus.publish(subjects.worker_state("w"), to_json(self.at.state()))

    def publish(self, payload: bytes, *, heard: bool = True) -> None:
        self.at.seq += 1
        if payload != POISON:
            self.at.index.apply("w", 0, decode_batch(payload))
        headers = KvHeaders(
            worker="w", rank=0, incarnation=self.at.incarnation, seq=self.at.seq, first=self.at.seq == 0
        )
        if heard:
            self._bus.publish(subjects.kv("w", 0), payload, headers.to_headers())


@pytest.fixture
async def publisher(url: str) -> AsyncIterator[Publisher]:
    bus = await connect(url, name="bridge-w", timeout_s=30)
    publisher = Publisher(bus)
    await publisher.start()
    yield publisher
    await bus.close()


@asynccontextmanager
async def running(bus: Bus, replica: Replica, **more: object) -> AsyncIterator[ReplicaFeed]:
    """A feed of ``replica``; ``clock`` may be given."""
    feed = ReplicaFeed(replica, ReplicaSettings(snapshot_retry_s=0.05), **more)  # type: ignore[arg-type]
    tasks = Tasks()
    await feed.start(bus, tasks)
    yield feed
    feed.stop()
    await tasks.stop()
    assert not tasks.failed.done()


def reach(feed: ReplicaFeed, number: int) -> tuple[int, str]:
    """Blocks of one chain, and the health of the only source."""
    reply = feed.replica.match(MatchRequest(model="tiny", block_size=BLOCK, chain=chain(number)), time.time())
    return (reply.matches[0].blocks.reach, reply.matches[0].health) if reply.matches else (0, "unknown")


async def test_an_isolated_replica_that_fails_begins_anew(bus: Bus, publisher: Publisher) -> None:
    """A mistake in the replica is counted and does not end the process; it is not asked meanwhile, and after a while a
    new one has everything again, from the bridge."""
    now = [time.time()]
    async with running(bus, FragileReplica(ReplicaSettings(), "own"), clock=lambda: now[0], isolated=True) as feed:
        publisher.beat()
        publisher.publish(stored(0))
        await eventually(lambda: reach(feed, 0) == (1, "synced"), what="the first block")
        publisher.publish(POISON)
        await eventually(lambda: feed.broken, what="it fails")
        assert feed.failures == 1
        publisher.publish(stored(1))
        now[0] += RETRY_S + 1

        def healed() -> bool:
            publisher.beat()
            return not feed.broken and reach(feed, 0) == (1, "synced") and reach(feed, 1) == (1, "synced")

        await eventually(healed, what="a new one has all")
        assert (feed.failures, publisher.asked > 0) == (1, True)


@pytest.mark.parametrize("step", [3600.0, -3600.0])
async def test_a_clock_that_is_set_makes_nobody_silent(bus: Bus, publisher: Publisher, step: float) -> None:
    """As after a block of the loop, nobody is lost by it, nor is what is known of him: silence counts from then."""
    now = [time.time()]
    replica = CountedReplica(ReplicaSettings(), "own")
    async with running(bus, replica, clock=lambda: now[0]):
        publisher.beat()
        publisher.publish(stored(0))
        request = MatchRequest(model="tiny", block_size=BLOCK, chain=chain(0))

        def reach() -> int:
            return sum(match.blocks.reach for match in replica.match(request, now[0]).matches)

        await eventually(lambda: reach() == 1)
        now[0] += step
        before = replica.ticks
        await eventually(lambda: replica.ticks >= before + 3)
        assert reach() == 1
        await eventually(lambda: replica.workers["w"].heard_at == now[0])


async def test_a_flood_does_not_keep_the_loop(bus: Bus, publisher: Publisher) -> None:
    """Thousands of batches held behind a hole are applied in slices: whoever shares the loop has his turn between
    them, many times over, and in the end all are in."""
    batches = 10_000
    # It beats once: on a busy machine it would be taken for lost.
    async with running(bus, Replica(ReplicaSettings(worker_lost_s=300.0), "own")) as feed:
        publisher.publish(stored(0), heard=False)
        publisher.early = publisher.at.index.dump(), 0  # it is on its way while the others are published
        for number in range(1, batches):
            publisher.publish(stored(number))
        publisher.beat()
        seen: set[int] = set()
        async with asyncio.timeout(60):
            while feed.replica.counters.batches < batches - 1 or reach(feed, batches - 1)[1] != "synced":
                seen.add(feed.replica.counters.batches)
                await asyncio.sleep(0)
        assert len(seen - {0}) >= 3, "whoever shares the loop sees it in between"
        assert feed.replica.index.content() == {("w", 0): publisher.at.index.content()["w", 0]}
        assert (feed.dropped, feed.waiting) == (0, 0)


async def test_batches_are_one_index_whoever_reads_them(bus: Bus, publisher: Publisher) -> None:
    """Two feeds on one bus, one of them late: the same answers."""
    async with running(bus, Replica(ReplicaSettings(), "one")) as one:
        publisher.beat()
        for number in range(20):
            publisher.publish(stored(number))
        async with running(bus, Replica(ReplicaSettings(), "two")) as two:
            publisher.beat()
            await eventually(lambda: reach(two, 19) == reach(one, 19) == (1, "synced"), what="both have all")
            assert one.replica.index.content() == two.replica.index.content()
            assert isinstance(one.replica.index, PrefixIndex)


async def test_batches_come_over_another_connection_when_theirs_is_lost(bus: Bus, publisher: Publisher) -> None:
    """The connection for batches ends for good: its owner's lives on, the source says that it lacks something, and what
    was missed comes from the bridge over a new one."""
    async with running(bus, Replica(ReplicaSettings(snapshot_retry_s=0.05), "own")) as feed:
        publisher.beat()
        publisher.publish(stored(0))
        await eventually(lambda: reach(feed, 0) == (1, "synced"), what="the first block")
        lost = feed._kv
        assert isinstance(lost, NatsBus)
        await lost.client.close()
        assert bus.connected
        publisher.publish(stored(1))

        def healed() -> bool:
            publisher.beat()
            return feed._kv is not lost and reach(feed, 0) == (1, "synced") and reach(feed, 1) == (1, "synced")

        await eventually(healed, what="all is there again")
        assert lost.closed
        assert publisher.asked > 0
        assert feed.dropped == 0


async def test_without_its_connection_a_source_says_that_it_lacks_something(bus: Bus, publisher: Publisher) -> None:
    """Heartbeats come over the owner's connection, and name a batch that nobody heard: no answer claims to be whole."""
    async with running(bus, Replica(ReplicaSettings(snapshot_retry_s=0.05), "own")) as feed:
        publisher.beat()
        publisher.publish(stored(0))
        await eventually(lambda: reach(feed, 0) == (1, "synced"), what="the first block")
        await feed._kv.close()
        publisher.publish(stored(1))

        def told() -> bool:
            publisher.beat()
            return reach(feed, 1)[1] != "synced"

        await eventually(told, what="the source says so")
        assert bus.connected


@pytest.mark.parametrize("inline", [False, True])
async def test_what_a_bridge_answers_is_checked(bus: Bus, publisher: Publisher, inline: bool) -> None:
    """Bytes that are not those it wrote are not loaded, wherever they are, its words are not made labels, and it is
    asked again."""
    publisher.inline = inline
    async with running(bus, Replica(ReplicaSettings(snapshot_retry_s=0.05), "own")) as feed:
        publisher.publish(stored(0), heard=False)
        publisher.publish(stored(1))
        publisher.damaged = 1
        publisher.errors = ["index_busy", "x" * 10_000]
        publisher.beat()
        await eventually(lambda: reach(feed, 0) == (1, "synced"), what="the snapshot")
        told = {reason: count for (_, reason), count in feed.replica.gaps.items() if reason != "asked"}
        # The third failure also cleared the rank.
        assert told == {"other": 1, "index_busy": 1, "snapshot_damaged": 2, "restored": 1}


async def test_a_question_to_a_dead_bridge_is_not_waited_for(bus: Bus, publisher: Publisher) -> None:
    """A bridge was killed while it was answering: the next one is asked as soon as it is heard."""
    async with running(bus, Replica(ReplicaSettings(snapshot_timeout_s=600.0), "own")) as feed:
        publisher.publish(stored(0), heard=False)
        publisher.publish(stored(1))
        publisher.silent = 1
        publisher.beat()
        await eventually(lambda: publisher.asked > 0, what="the question")
        publisher.silent = 0
        publisher.at.epoch += 1
        publisher.beat()
        await eventually(lambda: reach(feed, 0) == (1, "synced"), what="the snapshot of the new bridge")
        assert publisher.asked == 2

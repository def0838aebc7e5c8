"""A replica's feed on a real bus, and a shared pool: a master and its bridge as processes have them, late readers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bus.interface import Bus
from bus.nats import NatsBus
from bus.tasks import Tasks
from kvcore import page_hashes
from replica.config import ReplicaSettings
from replica.core import Replica
from replica.shell import ReplicaFeed
from schemas.index import MatchRequest, PoolMatch
from schemas.pool import SharedLayout
from schemas.worker import WorkerProfile, WorkerState
from tests.integration.bridge.house import until
from tests.integration.bridge.pools import running_pool, running_pool_bridge
from tests.unit.replica.bridge import BLOCK
from tests.unit.replica.pool_bridge import MODEL, keys, layout, prompt

NOT_SOON = 3600.0
"""Of the slow timer: what is noticed here, is noticed by something else."""


@asynccontextmanager
async def following(bus: Bus, shared: SharedLayout) -> AsyncIterator[ReplicaFeed]:
    """A replica that knows one reader of the pool."""
    feed, tasks = ReplicaFeed(Replica(ReplicaSettings(snapshot_retry_s=0.05), "own"), ReplicaSettings()), Tasks()
    await feed.start(bus, tasks)
    seen(feed, shared)
    yield feed
    feed.stop()
    await tasks.stop()
    assert not tasks.failed.done()


def seen(feed: ReplicaFeed, shared: SharedLayout) -> None:
    """The worker's heartbeat."""
    profile = WorkerProfile(url="http://e", model=MODEL, block_size=BLOCK, shared=shared)
    number = time.time_ns() // 1000
    state = WorkerState(
        source="b", epoch=1, seq=number, at_ms=0, worker="w", incarnation="1", health="ready", profile=profile
    )
    feed.worker_seen(state)


def found(feed: ReplicaFeed, tokens: bytes, shared: SharedLayout) -> PoolMatch:
    """What the pool holds of it."""
    seen(feed, shared)
    request = MatchRequest(
        model=MODEL, block_size=BLOCK, chain=b"\1" * 8, pages=page_hashes(tokens, BLOCK), page_size=BLOCK
    )
    (pool,) = feed.replica.match(request, time.time()).pools
    return pool


async def test_a_late_reader_has_all_of_a_pool_and_what_comes(url: str, bus: NatsBus, tmp_path: Path) -> None:
    """The pool was full before anybody read it: the bridge's snapshot brings it, its stream what comes and goes, and a
    reconcile what went without an event; a master that restarts has nothing any more."""
    shared, tokens = layout(pool="pool-a"), prompt(8)
    objects = keys(tokens, shared)
    async with running_pool(tmp_path) as pool:
        await pool.client.put(objects[:16])
        async with running_pool_bridge(pool, url, pool_reconcile_s=NOT_SOON) as bridge:
            await until(lambda: bridge.core.stats.objects == 16, "the bridge has read the list")
            async with following(bus, shared) as feed:
                await until(lambda: found(feed, tokens, shared).ranges == ((0, 4),), "the snapshot")
                assert feed.replica.pools.gaps["pool-a", "restored"] == 1
                assert found(feed, tokens, shared).health == "synced"
                await pool.client.put(objects[16:])
                await until(lambda: found(feed, tokens, shared).ranges == ((0, 8),), "what comes")
                await pool.client.post("evict", {"keys": objects[4:5]})
                await until(lambda: found(feed, tokens, shared).ranges == ((0, 1), (2, 8)), "what went silently")
                await pool.client.post("misbehave", {"restart": True})
                await until(lambda: found(feed, tokens, shared).ranges == (), "nothing is left")
                await pool.client.put(objects)
                await until(lambda: found(feed, tokens, shared).ranges == ((0, 8),), "it is stored again")
                assert feed.replica.pools.gaps["pool-a", "restored"] == 1


async def test_two_readers_side_by_side_say_the_same(url: str, bus: NatsBus, tmp_path: Path) -> None:
    """An indexer's replica and admission's follow one bridge; one that joins in the middle of the stream as well."""
    shared, tokens = layout(pool="pool-a"), prompt(40)
    objects = keys(tokens, shared)
    async with (
        running_pool(tmp_path) as pool,
        running_pool_bridge(pool, url, pool_reconcile_s=NOT_SOON) as bridge,
        following(bus, shared) as first,
    ):
        for start in range(0, len(objects), 8):
            await pool.client.put(objects[start : start + 8])
            if start == 80:
                break
        async with following(bus, shared) as second:
            for start in range(88, len(objects), 8):
                await pool.client.put(objects[start : start + 8])
            await until(
                lambda: [found(feed, tokens, shared).ranges for feed in (first, second)] == [((0, 40),)] * 2,
                "all of it",
            )
            assert bridge.core.stats.objects == len(objects)

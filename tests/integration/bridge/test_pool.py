"""A pool's bridge against a master as a process, real ZeroMQ, real HTTP and a real bus."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from xxhash import xxh3_64_hexdigest

from bus import subjects
from bus.interface import Bus
from bus.slices import in_slices
from kvcore import PoolIndex
from schemas.base import from_json, to_json
from schemas.pool import PoolSnapshotReply, PoolSnapshotRequest
from services.bridge.shell import pool_service
from services.bridge.shell.pool_service import PoolBridgeService
from tests.integration.bridge.house import until
from tests.integration.bridge.pools import running_pool, running_pool_bridge
from tests.support.pool_follower import PoolFollower
from tests.support.processes import python_process, settings_arguments

KEYS = [f"m_{page:032x}{0:032x}_0_{side}" for page in range(100) for side in "kv"]
NOT_SOON = 3600.0
"""Of the slow timer, in tests where something else has to be the reason."""


async def synced(follower: PoolFollower, *keys: str) -> None:
    """The follower knows these objects, and the bridge vouches for it."""
    await until(lambda: follower.is_synced() and follower.has(*keys), "synced with the keys")


async def test_what_was_stored_before_and_after_is_known(url: str, bus: Bus, tmp_path: Path) -> None:
    """The list tells what was there, events what comes; an answer to the snapshot question stands for a number."""
    follower = await PoolFollower.of(bus)
    async with running_pool(tmp_path) as pool:
        await pool.client.put(KEYS[:100])
        async with running_pool_bridge(pool, url, pool_reconcile_s=NOT_SOON) as bridge:
            await synced(follower, *KEYS[:100])
            await pool.client.put([*KEYS[100:], "sglang_mooncake_store_warmup_key0123456789abcdef"])
            await until(lambda: follower.has(*KEYS), "the events")
            assert set(follower.origins) == {"reconcile", "master"}
            await until(lambda: follower.states[-1].objects == len(KEYS), "counted")
            assert (follower.states[-1].pages, follower.states[-1].unparsed) == (len(KEYS) // 2, 1)
            assert follower.states[-1].backend_id == "pool-a"
            index, seq = await snapshot(bus)
            assert seq == follower.seq
            assert all(index.present(key) == {"cpu"} for key in KEYS)
            assert bridge.not_ready() is None
            assert REGISTRY.get_sample_value("tidegate_pool_bridge_objects") == len(KEYS)
            assert REGISTRY.get_sample_value("tidegate_bridge_zmq_received_total") == bridge.core.counters.batches
    assert (follower.states[-1].health, follower.states[-1].reason) == ("blind", "stopped")


async def snapshot(bus: Bus) -> tuple[PoolIndex, int]:
    """What the bridge answers."""
    question = to_json(PoolSnapshotRequest(indexer="test"))
    answer = await bus.request(subjects.pool_snapshot("pool-a"), question, timeout_s=30)
    reply = from_json(answer.payload, PoolSnapshotReply)
    assert reply.error is None
    dump = await (await bus.objects(reply.bucket)).get(reply.key)
    assert (len(dump), xxh3_64_hexdigest(dump)) == (reply.size_bytes, reply.digest)
    index = PoolIndex()
    await in_slices(index.load(dump))
    return index, reply.pool_seq


async def test_silent_removals_are_noticed(url: str, bus: Bus, tmp_path: Path) -> None:
    """Eviction, and a client that closes its segment: no event tells of them (spec: pool-events §3), the master's
    counters do. Mooncake #2187: nothing that the bridge asks keeps an object alive, or it could not be evicted."""
    follower = await PoolFollower.of(bus)
    async with running_pool(tmp_path, key_lease_s=3600.0) as pool:
        await pool.client.mount("c1", 1 << 30)
        await pool.client.put(KEYS[:10], client="c1")
        await pool.client.put(KEYS[10:20])
        async with running_pool_bridge(pool, url, pool_reconcile_s=NOT_SOON) as bridge:
            await synced(follower, *KEYS[:20])
            assert await pool.client.evict(KEYS[10:15]) == 5
            await until(lambda: not any(follower.has(key) for key in KEYS[10:15]), "the eviction")
            assert follower.has(*KEYS[:10], *KEYS[15:20])
            await pool.client.unmount("c1")
            await until(lambda: not any(follower.has(key) for key in KEYS[:10]), "the segment")
            await synced(follower, *KEYS[15:20])
            assert bridge.core.outcomes.finished["eviction"] >= 1
            assert bridge.core.outcomes.finished["segment"] >= 1


async def test_lost_batches_are_made_up_for(url: str, bus: Bus, tmp_path: Path) -> None:
    """In the middle of the stream, where a number is missing, and at its end, where the master's status tells."""
    follower = await PoolFollower.of(bus)
    async with running_pool(tmp_path) as pool, running_pool_bridge(pool, url, pool_reconcile_s=NOT_SOON) as bridge:
        await synced(follower)
        await pool.client.misbehave(drop_batches=1)
        await pool.client.put(KEYS[:1])
        await pool.client.put(KEYS[1:2])
        await synced(follower, *KEYS[:2])
        await pool.client.misbehave(drop_batches=1)
        await pool.client.put(KEYS[2:3])
        await synced(follower, *KEYS[:3])
        assert bridge.core.outcomes.finished["gap"] + bridge.core.outcomes.finished["tail_lost"] == 2


async def test_a_killed_master_comes_back_empty(url: str, bus: Bus, tmp_path: Path) -> None:
    """Its numbers begin again, its metadata is gone: blind while it is away, forgotten when it is back, then followed
    as before; no batch of the new process is lost, because the socket is polled all the time (spec: pool-events §4.7).
    """
    follower = await PoolFollower.of(bus)
    async with running_pool(tmp_path) as pool, running_pool_bridge(pool, url, pool_reconcile_s=NOT_SOON) as bridge:
        await synced(follower)
        for key in KEYS[:20]:
            await pool.client.put([key])
        await until(lambda: bridge.core.counters.batches == 20, "the events")
        await pool.process.kill()
        await until(lambda: follower.states[-1].health == "blind", "blind")
        async with running_pool(tmp_path, "again", **pool.same_place) as again:
            await again.client.put(KEYS[20:30])
            await synced(follower, *KEYS[20:30])
        assert not any(follower.has(key) for key in KEYS[:20])
        assert [reset.reason for reset in follower.resets] == ["bridge_started", "master_restarted"]
        assert bridge.core.master.restarts == 1


async def test_a_master_without_events_is_listed(url: str, bus: Bus, tmp_path: Path) -> None:
    """Mooncake #4039: published wheels of 0.3.13 accept the flags and publish nothing. Lists do, and it is said."""
    follower = await PoolFollower.of(bus)
    async with running_pool(tmp_path, kv_events=False) as pool:
        await pool.client.put(KEYS[:4])
        async with running_pool_bridge(pool, url, pool_reconcile_s=0.2):
            await until(lambda: follower.has(*KEYS[:4]), "the first list")
            await pool.client.put(KEYS[4:8])
            await pool.client.remove(KEYS[:4])
            await until(lambda: follower.has(*KEYS[4:8]) and not follower.has(KEYS[0]), "a later list")
            await until(lambda: follower.states[-1].reason == "events_disabled", "its reason")
            assert follower.states[-1].health == "approximate"


@pytest.mark.parametrize("how", ["hang", "error"])
async def test_a_list_that_fails_is_tried_again(url: str, bus: Bus, tmp_path: Path, how: str) -> None:
    """Every question has a deadline; events go on meanwhile, and health says what is wrong."""
    follower = await PoolFollower.of(bus)
    async with running_pool(tmp_path) as pool:
        await pool.client.put(KEYS[:4])
        misbehaviour = {"hang_requests": 1, "hang_s": 30.0} if how == "hang" else {"error_requests": 1}
        await pool.client.misbehave(only_path="/get_all_keys", **misbehaviour)
        async with running_pool_bridge(pool, url, pool_list_timeout_s=0.3) as bridge:
            await pool.client.put(KEYS[4:8])
            await synced(follower, *KEYS[:8])
            reasons = {state.reason for state in follower.states if state.health == "catching_up"}
            assert reasons & {"first_byte_timeout", "total_timeout", "http_503"} != set()
            assert sum(bridge.core.outcomes.given_up.values()) == 1


async def test_a_large_pool_is_told_in_pieces_while_the_loop_lives(url: str, bus: Bus, tmp_path: Path) -> None:
    """30,000 objects: facts go on coming once per interval, and no delta is larger than what a receiver can apply in
    a moment."""
    many = [f"m_{page:032x}{0:032x}_0_k" for page in range(30_000)]
    follower = await PoolFollower.of(bus)
    async with running_pool(tmp_path) as pool:
        for start in range(0, len(many), 10_000):
            await pool.client.put(many[start : start + 10_000])
        async with running_pool_bridge(pool, url) as bridge:
            await until(lambda: follower.is_synced() and follower.index.stats().objects == len(many), "synced", 30)
            assert follower.origins.count("reconcile") >= 3
            assert bridge.core.outcomes.last_listed == len(many)
            catching_up = sum(state.health == "catching_up" for state in follower.states)
            assert catching_up >= 2


async def test_a_large_difference_waits_for_the_bus(
    url: str, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of millions of objects has hundreds of megabytes of differences; what does not fit into the connection's
    buffer would be lost. Every so many bytes the bus must have taken them, however little one slice tells."""
    monkeypatch.setattr(pool_service, "FLUSH_BYTES", 100_000)
    monkeypatch.setattr(pool_service, "DELTA_BYTES", 10_000)
    monkeypatch.setattr(pool_service, "SLICE_S", 0.0005)
    settle, settled = PoolBridgeService._settle, 0

    async def counted(service: PoolBridgeService) -> None:
        nonlocal settled
        settled += 1
        await settle(service)

    monkeypatch.setattr(PoolBridgeService, "_settle", counted)
    many = [f"m_{page:032x}{0:032x}_0_k" for page in range(20_000)]
    follower = await PoolFollower.of(bus)
    async with running_pool(tmp_path) as pool:
        await pool.client.put(many)
        async with running_pool_bridge(pool, url):
            await until(lambda: follower.is_synced() and follower.index.stats().objects == len(many), "synced", 30)
    assert follower.origins.count("reconcile") >= 30
    assert settled >= 3


async def test_the_process_follows_a_pool(url: str, bus: Bus, tmp_path: Path) -> None:
    """``python -m services.bridge --set pool=...``; stopped as asked it ends with code 0."""
    follower = await PoolFollower.of(bus)
    async with running_pool(tmp_path) as pool:
        await pool.client.put(KEYS[:4])
        settings = {"nats_url": url, "pool": "pool-a", "pool_url": pool.url, "pool_events": pool.events}
        arguments = settings_arguments(settings)
        async with python_process("services.bridge", *arguments, directory=tmp_path, name="bridge") as process:
            await synced(follower, *KEYS[:4])
            assert await process.stop() == 0, process.output
    assert follower.states[-1].reason == "stopped"

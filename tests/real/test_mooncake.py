"""The bridge of a pool against a real Mooncake store: what its master tells, and what it keeps to itself.

Where a test does not say otherwise the slow timer is an hour, so that only what the bridge notices can be its reason.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bus.interface import Bus
from bus.nats import connect
from services.bridge.config import BridgeSettings
from services.bridge.shell.pool_service import PoolBridgeService
from tests.integration.bridge.house import running, until, until_async
from tests.support.mooncake import MooncakeClient, MooncakeMaster, mooncake_client, mooncake_master
from tests.support.nats import NatsServer
from tests.support.pool_follower import PoolFollower

pytestmark = [pytest.mark.real, pytest.mark.mooncake, pytest.mark.timeout(120)]

POLL_S = 0.2
MEGABYTE = 1_000_000


def pages(first: int, count: int) -> list[str]:
    """Keys of HiCache pages, K and V of one rank."""
    return [f"Qwen-Qwen3-8B_{page:032x}{0:032x}_0_{side}" for page in range(first, first + count) for side in "kv"]


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    bus = await connect(nats_server.url, name="test", timeout_s=10)
    yield bus
    await bus.close()


def bridge_of(nats_server: NatsServer, master: MooncakeMaster, **changes: float) -> PoolBridgeService:
    """A bridge of ``master`` that looks often."""
    values: dict[str, float] = {"pool_reconcile_s": 3600.0, "pool_reconcile_min_s": POLL_S, **changes}
    settings = BridgeSettings(
        nats_url=nats_server.url,
        instance="bridge-pool-a",
        pool="pool-a",
        pool_url=master.url,
        pool_events=master.events,
        pool_poll_s=POLL_S,
        heartbeat_interval_s=POLL_S,
        **values,  # type: ignore[arg-type]  # numbers all
    )
    return PoolBridgeService(settings)


@asynccontextmanager
async def following(
    nats_server: NatsServer, bus: Bus, master: MooncakeMaster, **changes: float
) -> AsyncIterator[tuple[PoolBridgeService, PoolFollower]]:
    """A bridge of ``master``, and a follower of what it says, both agreed with it."""
    follower = await PoolFollower.of(bus)
    service = bridge_of(nats_server, master, **changes)
    async with running(nats_server.url, service, "bridge-pool-a"):
        await until(follower.is_synced, "the first list", 30)
        yield service, follower


async def agreed(master: MooncakeMaster, follower: PoolFollower) -> None:
    """The follower knows just what the master lists, and the bridge vouches for it."""

    async def same() -> bool:
        keys = await master.keys()
        return follower.is_synced() and follower.has(*keys) and follower.index.stats().objects == len(keys)

    await until_async(same, "the master's keys", 60)


async def test_its_events_are_read(nats_server: NatsServer, bus: Bus, tmp_path: Path) -> None:
    """Puts, removals and a clear, as the real 0.3.14 frames them; warm-up keys are counted."""
    async with mooncake_master(tmp_path) as master, mooncake_client(master, tmp_path) as store:
        assert set(await store.put(pages(0, 5))) == {0}
        async with following(nats_server, bus, master) as (bridge, follower):
            await agreed(master, follower)
            assert set(await store.put(pages(5, 100))) == {0}
            await until(lambda: follower.has(*pages(0, 105)), "the events")
            assert await store.remove(pages(0, 1)) == [0, 0]
            await until(lambda: not follower.has(pages(0, 1)[0]), "the removal")
            await store.put([f"sglang_mooncake_store_warmup_key{1:032x}"])
            await until(lambda: bridge.core.stats.unparsed == 1, "the warm-up key")
            await store.remove_all()
            await until(lambda: follower.index.stats().objects == 0, "the clear")
            assert bridge.core.counters.cleared == 1
            assert bridge.core.stats.backend_id == "pool-a"
            assert (bridge.core.master.gaps, bridge.core.counters.bad_batches) == (0, 0)


async def test_nothing_is_leased_by_it(nats_server: NatsServer, bus: Bus, tmp_path: Path) -> None:
    """Mooncake #2187: polling kept renewing leases, and nothing could be evicted or removed any more. Many lists later
    every object can be removed, but for one that was read."""
    async with mooncake_master(tmp_path) as master, mooncake_client(master, tmp_path) as store:
        await store.put(pages(0, 5))
        async with following(nats_server, bus, master, pool_reconcile_s=POLL_S) as (bridge, follower):
            await until(lambda: bridge.core.outcomes.finished["timer"] >= 3, "three lists", 30)
            await store.read(pages(0, 1)[0])
            assert await store.remove(pages(0, 5)) == [-706, *[0] * 9]
            await agreed(master, follower)


async def test_a_master_without_events_is_listed(nats_server: NatsServer, bus: Bus, tmp_path: Path) -> None:
    """Mooncake #4039: its status alone says that it publishes nothing. Lists are used, and health says so."""
    follower = await PoolFollower.of(bus)
    async with (
        mooncake_master(tmp_path, enable_kv_events="false") as master,
        mooncake_client(master, tmp_path) as store,
        running(nats_server.url, bridge_of(nats_server, master, pool_reconcile_s=POLL_S), "bridge-pool-a"),
    ):
        await store.put(pages(0, 5))
        await until(lambda: follower.has(*pages(0, 5)), "a list", 30)
        await store.remove(pages(0, 1))
        await until(lambda: not follower.has(pages(0, 1)[0]), "a later list", 30)
        assert (follower.states[-1].health, follower.states[-1].reason) == ("approximate", "events_disabled")


async def test_tenants_cannot_be_agreed_with(nats_server: NatsServer, bus: Bus, tmp_path: Path) -> None:
    """The list names the default tenant only; the quota metrics say that there is another one. What is listed is
    agreed with all the same."""
    quotas = tmp_path / "quotas.yaml"
    quotas.write_text("version: 1\ntenants: [{name: default, quota: 8MB}, {name: team-b, quota: 8MB}]\n")
    flags = {
        "enable_multi_tenants": "true",
        "tenant_quota_connector_type": "file",
        "tenant_quota_connector_uri": quotas,
    }
    follower = await PoolFollower.of(bus)
    async with (
        mooncake_master(tmp_path, **flags) as master,
        mooncake_client(master, tmp_path) as store,
        mooncake_client(master, tmp_path, tenant="team-b") as other,
        running(nats_server.url, bridge_of(nats_server, master), "bridge-pool-a"),
    ):
        assert set(await store.put(pages(0, 5))) == {0}
        await until(lambda: follower.is_synced() and follower.has(*pages(0, 5)), "the default tenant", 30)
        assert set(await other.put(pages(0, 5))) == {0}
        await until(lambda: follower.states[-1].reason == "tenants_not_listed", "the other tenant", 30)
        await until(lambda: follower.index.stats().tenants == ("default", "team-b"), "its events", 30)


async def test_what_lies_on_disk_is_told_apart(nats_server: NatsServer, bus: Bus, tmp_path: Path) -> None:
    """Mooncake #3818: an object in two tiers is told of in each. Lists, which know of no tier, change nothing of it."""
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    async with (
        mooncake_master(tmp_path, enable_offload="true", default_kv_lease_ttl=200) as master,
        mooncake_client(master, tmp_path, ssd=ssd) as store,
        following(nats_server, bus, master, pool_reconcile_s=POLL_S) as (bridge, follower),
    ):
        keys = pages(0, 5)
        assert set(await store.put(keys)) == {0}
        both = frozenset({"cpu", "disk"})
        await until(lambda: all(follower.index.present(key) == both for key in keys), "on disk too", 60)
        lists = bridge.core.outcomes.finished["timer"]
        await until(lambda: bridge.core.outcomes.finished["timer"] >= lists + 2, "two lists", 30)
        assert all(follower.index.present(key) == both for key in keys)

        async def removed() -> bool:
            return await store.remove(keys[:1]) == [0]

        await until_async(removed, "the lease of the copy to disk ends", 30)
        await until(lambda: not follower.has(keys[0]), "removed from both", 30)


async def test_silent_eviction_is_noticed(nats_server: NatsServer, bus: Bus, tmp_path: Path) -> None:
    """A full segment: the master evicts without an event, and only its counter says so."""
    async with (
        mooncake_master(tmp_path) as master,
        mooncake_client(master, tmp_path) as store,
        following(nats_server, bus, master) as (bridge, follower),
    ):
        for page in range(30):
            await store.put(pages(page, 1), MEGABYTE)  # the one or the other finds no room; the next does
        await until(lambda: bridge.core.outcomes.finished["eviction"] >= 1, "an eviction", 30)
        await agreed(master, follower)
        assert bridge.core.counters.removed == 0
        assert bridge.core.outcomes.removed >= 1
        assert 0 < follower.index.stats().objects < 60


@pytest.mark.parametrize("how", ["killed", "closed"])
async def test_a_client_that_goes_is_noticed(nats_server: NatsServer, bus: Bus, tmp_path: Path, how: str) -> None:
    """Its segment's objects are gone without an event: at once when it closes; when it is killed they are hidden as
    soon as it is suspected, while its segment still stands."""
    async with mooncake_master(tmp_path) as master, mooncake_client(master, tmp_path) as stays:
        goes = await MooncakeClient.start(master, tmp_path)
        try:
            await stays.put(pages(0, 20))
            await goes.put(pages(20, 20))
            async with following(nats_server, bus, master) as (bridge, follower):
                await agreed(master, follower)
                before = len(await master.keys())
                if how == "killed":
                    await goes.kill()
                else:
                    await goes.leave()
                await until(lambda: follower.index.stats().objects < before, "objects gone", 30)
                await agreed(master, follower)
                wanted = bridge.core.outcomes.finished
                assert wanted["client"] + wanted["segment"] >= 1
                assert bridge.core.counters.removed == 0
        finally:
            await goes.kill()


async def test_a_restarted_master_is_noticed(nats_server: NatsServer, bus: Bus, tmp_path: Path) -> None:
    """All its metadata is gone, its numbers begin again, and clients mount their segments by themselves: blind while it
    is away, forgotten when it is back, and followed as before."""
    async with (
        mooncake_master(tmp_path) as master,
        mooncake_client(master, tmp_path) as store,
        following(nats_server, bus, master) as (bridge, follower),
    ):
        for page in range(10):
            await store.put(pages(page, 1))
        await until(lambda: follower.has(*pages(0, 10)), "the events")
        await master.kill()
        await until(lambda: follower.states[-1].health == "blind", "blind", 30)
        await master.start()

        async def stored_again() -> bool:
            return set(await store.put(pages(50, 1))) == {0}

        await until_async(stored_again, "the client's segment", 60)
        await until(lambda: follower.has(*pages(50, 1)), "the new process", 30)
        await agreed(master, follower)
        assert [reset.reason for reset in follower.resets] == ["bridge_started", "master_restarted"]
        assert bridge.core.master.restarts == 1
        assert not follower.has(pages(0, 1)[0])

"""Leaders that are killed or cut off, one after the other, under load: the next one decides within two seconds, and
nothing of the budget is lost or booked twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from bus.errors import BusError
from bus.subjects import BUCKET_LEADERS
from load.soak.relay import Relay
from schemas.admit import Granted
from tests.integration.admission.processes import Start, is_ready, metric
from tests.integration.admission.world import World
from tests.support.nats import NatsServer
from tests.support.nats_cluster import bucket_leader, client, led_by, made, running_cluster, settled
from tests.support.pace import Stopwatch
from tests.support.processes import HelperProcess, eventually

TAKEOVERS = 3
AGENTS = 12
LONG_LEASE_S = 4.0
"""Three servers that are short of time acknowledge slowly; still less than they take to elect."""
SETTINGS = {"policy": "kv", "worker_lost_s": 30.0, "ingress_lost_s": 30.0, "grant_ttl_s": 60.0}
"""The world is silent while the machine has no time for it, and not lost."""


class Load:
    """Agents that ask for turn after turn; each asks again, by the same id, when nobody answers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = random.Random(3)
        self._tasks: list[asyncio.Task[None]] = []
        self._goes = asyncio.Event()
        self._goes.set()
        self._still = 0
        self.granted = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._tasks = [asyncio.create_task(self._agent(number)) for number in range(AGENTS)]
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def pause(self) -> None:
        """Until every agent stands still: some with a turn that runs, some without."""
        self._goes.clear()
        await eventually(lambda: self._still == AGENTS or any(task.done() for task in self._tasks))

    def go_on(self) -> None:
        self._goes.set()

    def running_turns(self) -> int:
        return sum(item.worker is not None for item in self._world.in_flight.values())

    async def end(self) -> None:
        """End what runs, and begin nothing any more."""
        await self.pause()
        for task in self._tasks:
            task.cancel()
        for request_id, item in list(self._world.in_flight.items()):
            self._world.end(self._world.request(request_id, item.identity.session_id), item.worker or "w1")

    async def _agent(self, number: int) -> None:
        turn = 0
        while True:
            turn += 1
            request = self._world.request(f"r{number}-{turn}", f"s{number}")
            granted = await self._granted(request.request_id, f"s{number}")
            self.granted += 1
            await self._stand()
            await asyncio.sleep(self._random.uniform(0.0, 0.05))
            self._world.end(request, granted.grant.worker)
            await self._stand()

    async def _granted(self, request_id: str, session: str) -> Granted:
        while True:
            with contextlib.suppress(BusError):
                return await self._world.grant(self._world.request(request_id, session), idle_s=0.3)

    async def _stand(self) -> None:
        self._still += 1
        await self._goes.wait()
        self._still -= 1


async def leads(process: HelperProcess) -> bool:
    return await asyncio.to_thread(metric, process, "tidegate_leader") == 1.0


async def open_grants(process: HelperProcess, expected: int) -> None:
    """Until its table has as many; every look is one of the page."""
    found = -1.0
    async with asyncio.timeout(60):
        while found != expected:
            found = await asyncio.to_thread(metric, process, "tidegate_open_grants")
            await asyncio.sleep(0.05)


@pytest.mark.timeout(300)
async def test_nothing_of_the_budget_is_lost_or_doubled_when_leaders_die(start: Start, world: World) -> None:
    """Three times kill -9 of the leader under load: each time the standby has decided within two seconds, by a higher
    epoch, and its table of open grants is what the ingress says is in flight, no more and no less. At the end it is
    empty. No turn is placed twice."""
    load = Load(world)
    took: list[float] = []
    async with AsyncExitStack() as stack:
        leader = await stack.enter_async_context(start("admission-0", **SETTINGS))
        await world.grant(world.request("first", "first"))
        async with load.running():
            for number in range(1, TAKEOVERS + 1):
                name = f"admission-{number}"
                standby = await stack.enter_async_context(start(name, leads=False, **SETTINGS))
                await eventually(lambda process=standby: is_ready(process))  # type: ignore[misc]
                before, epochs = load.granted, {each.epoch for each in world.decisions}
                await eventually(lambda count=before: load.granted > count + AGENTS)  # type: ignore[misc]
                since = Stopwatch()
                await leader.kill()
                await eventually(lambda known=epochs: world.decisions[-1].epoch not in known)  # type: ignore[misc]
                took.append(since.took_s)
                await since.within(2.2)
                leader = standby
                await load.pause()
                await open_grants(leader, load.running_turns())
                load.go_on()
            await load.end()
            await open_grants(leader, 0)
    print(f"killed leader to the next decision, s: p50 {statistics.median(took):.2f}, max {max(took):.2f}; {took}")
    order = [each.epoch for each in world.decisions]
    assert order == sorted(order)
    assert len(set(order)) == TAKEOVERS + 1
    assert len({each.request_id for each in world.decisions}) == len(order)


@pytest.mark.timeout(200)
async def test_a_leader_that_is_cut_off_is_followed_and_decides_nothing_after_it(
    start: Start, world: World, nats_server: NatsServer
) -> None:
    """Its way to the bus is a black hole: nothing is refused, nothing comes through. It stops by its lease before the
    standby decides, and when the way is open again, with all that waited in it, it decides nothing more, stands by,
    and knows what runs as the new leader does."""
    relay = Relay(nats_server.port)
    await relay.start()
    load = Load(world)
    try:
        away = {**SETTINGS, "nats_url": f"nats://127.0.0.1:{relay.port}"}
        async with start("admission-1", **away) as first:
            await world.grant(world.request("first", "first"))
            async with start("admission-2", leads=False, **SETTINGS) as second, load.running():
                await eventually(lambda: load.granted > 2 * AGENTS)
                old = world.decisions[-1].epoch
                since = Stopwatch()
                relay.hold()
                await eventually(lambda: world.decisions[-1].epoch > old)
                print(f"cut off to the next decision: {since.took_s:.2f} s")
                await since.within(2.2)
                await eventually(lambda: metric(first, "tidegate_leader") == 0.0)
                before = load.granted
                await eventually(lambda: load.granted > before + AGENTS)
                relay.release()
                await eventually(lambda: load.granted > before + 10 * AGENTS)
                assert await leads(second)
                assert not await leads(first)
                await load.pause()
                await open_grants(second, load.running_turns())
                await open_grants(first, load.running_turns())
                ours = [each for each in world.decisions if each.epoch > old]
                assert max(each.at_ms for each in world.decisions if each.epoch == old) < ours[0].at_ms
    finally:
        await relay.stop()


@pytest.mark.timeout(200)
async def test_a_server_of_the_bus_dies_and_the_leader_decides_on(start: Start, tmp_path: Path) -> None:
    """Of three servers the one is killed that leads the leaders' bucket: for seconds nobody can write there. Decisions
    go on under the same epoch, and the leader's table is what runs; afterwards the leader is killed, and followed."""
    with running_cluster(tmp_path / "nats") as servers:
        async with AsyncExitStack() as stack:
            watch = await stack.enter_async_context(client(servers, "watch"))
            await made(watch)
            first_to_go = await bucket_leader(watch)
            others = {name: server for name, server in servers.items() if name != first_to_go}
            world = World(await stack.enter_async_context(client(others, "world")))
            await world.start()
            stack.push_async_callback(world.stop)
            load = Load(world)
            url = ",".join(server.url for server in servers.values())
            settings = {**SETTINGS, "nats_url": url, "nats_replicas": 3, "lease_s": LONG_LEASE_S, "renew_s": 1.0}
            leader = await stack.enter_async_context(start("admission-1", **settings))
            await world.grant(world.request("first", "first"))
            standby = await stack.enter_async_context(start("admission-2", leads=False, **settings))
            await eventually(lambda: is_ready(standby))
            await stack.enter_async_context(load.running())
            await eventually(lambda: load.granted > AGENTS)
            bucket = await settled(lambda: world.bus.key_value(BUCKET_LEADERS))
            await led_by(watch, first_to_go)
            epoch, decided = world.decisions[-1].epoch, len(world.decisions)
            servers.pop(first_to_go).kill()
            await leader.wait_said("leadership_in_doubt")
            before = load.granted
            await eventually(lambda: load.granted > before + 10 * AGENTS)
            await settled(lambda: bucket.check_writable("test"))
            since = Stopwatch()
            await eventually(lambda: since.took_s > 1.1 * LONG_LEASE_S)
            assert {each.epoch for each in world.decisions[decided:]} == {epoch}
            await load.pause()
            await open_grants(leader, load.running_turns())
            load.go_on()
            since = Stopwatch()
            await leader.kill()
            await eventually(lambda: world.decisions[-1].epoch > epoch)
            print(f"killed leader to the next decision, two servers of three: {since.took_s:.2f} s")
            await since.within(1.1 * LONG_LEASE_S)

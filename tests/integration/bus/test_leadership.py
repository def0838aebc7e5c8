"""The lease over a real nats-server: one leader, handed over, lost with the bus, won again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bus.leadership import Leadership
from bus.nats import connect
from bus.nats.buckets import NatsKeyValue
from bus.tasks import Tasks
from tests.support.nats import NatsServer
from tests.support.pace import Stopwatch
from tests.support.processes import eventually
from tests.support.slow_way import SlowWay, slow_way


@asynccontextmanager
async def candidate(
    server: NatsServer | SlowWay, name: str, lease_s: float = 1.0
) -> AsyncIterator[tuple[Leadership, list[int | None]]]:
    """One process's part: its own connection, and what it was told."""
    bus = await connect(f"nats://127.0.0.1:{server.port}", name=name, timeout_s=30)
    told: list[int | None] = []
    tasks = Tasks()
    leadership = Leadership(
        bus,
        "test",
        instance=name,
        incarnation=str(time.time_ns()),
        lease_s=lease_s,
        renew_s=lease_s / 4,
        changed=told.append,
    )
    tasks.start("leadership", leadership.run())
    try:
        yield leadership, told
    finally:
        await tasks.stop()
        assert not tasks.failed.done()
        await bus.close()


async def test_one_leads_and_a_clean_stop_hands_over_at_once(nats_server: NatsServer) -> None:
    """The second waits while the first renews, and follows with a higher epoch when it is given back."""
    async with candidate(nats_server, "a") as (first, told_first):
        await eventually(lambda: first.epoch is not None)
        async with candidate(nats_server, "b") as (second, told_second):
            await eventually(lambda: second.settled)
            await asyncio.sleep(1.2)  # longer than the lease: renewals hold it
            assert (second.epoch, told_second) == (None, [])
            epoch = first.epoch
            await first.give_back()
            since = Stopwatch()
            await eventually(lambda: second.epoch is not None)
            await since.within(0.5)
            assert told_first == [epoch, None]
            assert (second.epoch or 0) > (epoch or 0)


async def test_a_leader_whose_bus_hangs_stops_by_itself_and_leads_again_after_it(nats_server: NatsServer) -> None:
    """No renewal, no lead: it knows before anybody could take over; with the bus back somebody leads again."""
    async with candidate(nats_server, "a") as (first, told):
        await eventually(lambda: first.epoch is not None)
        nats_server.pause()
        since = Stopwatch()
        try:
            await eventually(lambda: first.epoch is None, timeout_s=30)
            assert since.took_s > 0.4
            await since.within(0.85)
            await eventually(lambda: told[-1] is None, timeout_s=30)
        finally:
            nats_server.resume()
        await eventually(lambda: first.epoch is not None, timeout_s=30)
        await eventually(lambda: told[-1] is not None, timeout_s=30)


async def test_a_server_that_is_slow_ends_no_leadership(nats_server: NatsServer) -> None:
    """Each answer comes after more than a renewal's time and less than half of what a holder trusts: one leads on under
    its epoch, and one that begins then leads too, once the other is gone."""
    async with slow_way(nats_server.port, 0.0) as way, candidate(way, "a", lease_s=4.0) as (first, told):
        await eventually(lambda: first.epoch is not None)
        way.delay_s = 0.55
        await asyncio.sleep(7.0)  # longer than a lease: the expected thing is that nothing happens
        assert len(told) == 1
        assert first.epoch == told[0]
        async with candidate(way, "b", lease_s=4.0) as (second, told_second):
            await eventually(lambda: second.settled, timeout_s=30)
            await asyncio.sleep(5.0)  # longer than a lease: it only watches
            assert (second.epoch, told_second, len(told)) == (None, [], 1)
            await first.give_back(timeout_s=10.0)
            await eventually(lambda: second.epoch is not None, timeout_s=30)


async def test_a_renewal_that_is_lost_is_sent_again(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What went to a server of the bus that died is never answered. Who asks others in time, and is answered, sends it
    anew: one of three servers dies, and its holder leads on."""
    taken = NatsKeyValue.update
    lost: list[int] = []

    async def update(bucket: NatsKeyValue, key: str, value: bytes, revision: int) -> int:
        if len(lost) == 3:
            lost.append(revision)
            await asyncio.Event().wait()
        lost.append(revision)
        return await taken(bucket, key, value, revision)

    monkeypatch.setattr(NatsKeyValue, "update", update)
    async with candidate(nats_server, "a", lease_s=6.0) as (leadership, told):
        await eventually(lambda: len(lost) > 6, timeout_s=60)
        assert len(told) == 1
        assert leadership.epoch == told[0]

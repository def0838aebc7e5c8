"""``deploy/nats-cluster/nats.conf`` on three real servers: one is killed, and nothing that was acknowledged is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bus.errors import BusError
from bus.leadership import Leadership
from bus.rows import RowPublisher
from bus.subjects import BUCKET_LEADERS, TRACE_STREAM, TRACE_SUBJECTS
from bus.tasks import Tasks
from tests.support.nats import NatsServer
from tests.support.nats_cluster import ELECTION_S, bucket_leader, client, led_by, made, running_cluster, settled
from tests.support.pace import Stopwatch
from tests.support.processes import eventually

pytestmark = pytest.mark.timeout(150)

ROWS = 600
LEASE_S = 4.0
"""Three servers that are short of time acknowledge slowly; still less than they take to elect."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, NatsServer]]:
    with running_cluster(tmp_path) as servers:
        yield servers


async def test_who_leads_goes_on_while_the_servers_elect(cluster: dict[str, NatsServer]) -> None:
    """The server that leads the leaders' bucket is killed, and for seconds nobody can write there: the leader, who
    lives, leads on under its epoch, and the standby does not take over, neither meanwhile nor afterwards. Then the
    leader dies, and is followed as ever."""
    async with client(cluster, "watch") as watch:
        await made(watch)
        first_to_go = await bucket_leader(watch)
        others = {name: server for name, server in cluster.items() if name != first_to_go}
        async with client(others, "a") as first, client(others, "b") as second:
            told: dict[str, list[int | None]] = {"a": [], "b": []}
            tasks = {name: Tasks() for name in told}
            candidates = {}
            for name, bus in (("a", first), ("b", second)):
                candidates[name] = Leadership(
                    bus,
                    "test",
                    instance=name,
                    incarnation=name,
                    lease_s=LEASE_S,
                    renew_s=1.0,
                    changed=told[name].append,
                )
                tasks[name].start("leadership", candidates[name].run())
                await eventually(lambda: candidates["a"].epoch is not None)
            await eventually(lambda: candidates["b"].settled)
            bucket = await settled(lambda: first.key_value(BUCKET_LEADERS))
            await led_by(watch, first_to_go)
            await eventually(lambda: candidates["a"].epoch is not None)
            before = await settled(lambda: bucket.get("test"))
            assert before is not None
            told["a"].clear()
            epoch = candidates["a"].epoch
            cluster.pop(first_to_go).kill()
            killed = Stopwatch()
            async with asyncio.timeout(60):
                while True:
                    entry = None
                    with contextlib.suppress(BusError, TimeoutError):
                        async with asyncio.timeout(5.0):
                            await bucket.check_writable("test")
                            entry = await bucket.get("test")
                    if entry is not None and entry.revision > before.revision + 4:
                        break
                    await asyncio.sleep(0.1)
            print(f"renewed again, several times, {killed.took_s:.1f} s after the server's death; told {told}")
            assert (told, candidates["a"].epoch) == ({"a": [], "b": []}, epoch)
            since = Stopwatch()
            await tasks["a"].stop()
            await eventually(lambda: candidates["b"].epoch is not None)
            print(f"leader's death to the standby's lead: {since.took_s:.2f} s")
            await since.within(1.1 * LEASE_S)
            await tasks["b"].stop()
            assert not any(each.failed.done() for each in tasks.values())


async def test_one_of_three_is_killed_while_rows_are_written_and_somebody_leads(
    cluster: dict[str, NatsServer],
) -> None:
    """The server that leads the trace stream: every row is stored once all the same, somebody leads admission again in
    time and nobody at the same time, and two servers are enough to read it all."""
    async with client(cluster, "a") as first, client(cluster, "b") as second:
        leader = await made(first)
        tasks = Tasks()
        epochs: list[tuple[str, int | None]] = []

        def told(name: str) -> Callable[[int | None], None]:
            return lambda epoch: epochs.append((name, epoch))

        candidates = [
            Leadership(bus, "test", instance=name, incarnation=name, lease_s=2.0, renew_s=0.5, changed=told(name))
            for name, bus in (("a", first), ("b", second))
        ]
        for candidate in candidates:
            tasks.start("leadership", candidate.run())
        rows = RowPublisher(first, tasks, timeout_s=2.0)
        await eventually(lambda: any(one.epoch is not None for one in candidates))
        for number in range(ROWS):
            assert rows.publish("tg.v1.trace.request_end.m.s", b'{"n": %d}' % number, f"row-{number}")
            if number == ROWS // 3:
                await eventually(lambda: rows.stats().acknowledged > 0)
                cluster.pop(leader).kill()
                killed = Stopwatch()
            await asyncio.sleep(0)
        await eventually(lambda: rows.depth == 0)
        await killed.within(ELECTION_S)
        await eventually(lambda: sum(one.epoch is not None for one in candidates) == 1)
        won = [epoch for _, epoch in epochs if epoch is not None]
        assert won == sorted(set(won))
        consumer = await settled(lambda: first.consume("recorder", TRACE_SUBJECTS))  # the two may elect once more
        seen: list[bytes] = []
        async with asyncio.timeout(40):
            while len(seen) < ROWS:
                batch = await consumer.fetch(1000, 2.0)
                await consumer.ack_rows(batch)
                seen += [row.payload for row in batch if row.delivered == 1]
        assert sorted(json.loads(row)["n"] for row in seen) == list(range(ROWS))
        info = await settled(lambda: first.js.call(TRACE_STREAM, first.js.manager.stream_info(TRACE_STREAM)))
        assert info.state.messages == ROWS
        await consumer.close()
        await tasks.stop()
        assert not tasks.failed.done()

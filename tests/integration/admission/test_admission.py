"""Admission as a process over a real nats-server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections import Counter

import pytest

from bus import subjects
from bus.errors import BusTimeoutError
from bus.interface import Endpoint
from bus.nats import connect
from schemas.admit import Granted, Held, Refused
from schemas.base import from_json
from schemas.trace import TraceRow
from tests.integration.admission.processes import Start, page
from tests.integration.admission.world import MODEL, World
from tests.support.nats import NatsServer
from tests.support.pace import Stopwatch
from tests.support.processes import HelperProcess, eventually


def cpu_s(process: HelperProcess) -> float:
    """CPU time that the process has had so far, in seconds, as it says itself."""
    lines = [line for line in page(process, "/metrics").splitlines() if line.startswith("process_cpu_seconds_total ")]
    return float(lines[0].split()[1])


async def test_an_ask_over_the_bus_is_granted_and_everybody_sees_the_decision(start: Start, world: World) -> None:
    """Grant, decision with candidates, session facts at begin, end and close; the index was asked with the chain."""
    async with start() as process:
        world.reach = {"w2": 3}
        request = world.request("r1", "s1")
        answer = await world.grant(request)
        assert (answer.grant.worker, answer.url, answer.predicted_cached_tokens) == ("w2", "http://w2", 48)
        await eventually(lambda: len(world.decisions) == 1)
        decision = world.decisions[0]
        assert decision.grant == answer.grant
        assert [each.worker for each in decision.candidates] == ["w1", "w2"]
        assert world.asked_of_index[0].chain == request.chain
        again = await world.ask(request)
        assert again == answer
        world.end(request, "w2")
        await eventually(lambda: [fact.state for fact in world.sessions if fact.lease is None] == ["opened", "acting"])
        final = world.request("r2", "s1", kind="final")
        second = await world.grant(final)
        world.end(final, second.grant.worker)
        await eventually(lambda: [fact.state for fact in world.sessions if fact.lease is None][-1] == "closed")
        assert len(world.decisions) == 2
        text = page(process, "/metrics")
        assert 'tidegate_grants_total{mode="policy"} 2.0' in text
        assert "tidegate_admission_wait_seconds_count 2.0" in text
        stats = await world.bus.request("$SRV.STATS.tidegate-admission", b"", timeout_s=30)
        endpoints = {each["name"]: each for each in json.loads(stats.payload)["endpoints"]}
        assert endpoints["admit"]["num_requests"] == 3


async def test_held_replies_keep_coming_until_a_place_is_free(start: Start, world: World) -> None:
    """D4: several replies to one question: held at least once a second with the place, then granted."""
    world.workers = ["w1"]
    async with start(max_grants_per_rank=1):
        first = world.request("r1", "s1")
        await world.grant(first)
        held: list[Held] = []
        second = world.request("r2", "s2")
        world.accept(second)
        asking = asyncio.create_task(world.ask(second, idle_s=10.0, held=held))
        await eventually(lambda: len(held) >= 3)
        assert {(each.reason, each.place) for each in held} == {("at_limit", 1)}
        world.end(first, "w1")
        answer = await asking
        assert isinstance(answer, Granted)
        assert answer.hold_reason == "at_limit"
        assert answer.hold_ms > 500
        gone = world.request("r3", "s3")
        world.accept(gone)
        waiting = asyncio.create_task(world.ask(gone, held=held))
        await eventually(lambda: any(each.request_id == "r3" for each in held))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        world.cancel(gone)
        fourth = world.request("r4", "s4")
        world.accept(fourth)
        places: list[Held] = []
        last = asyncio.create_task(world.ask(fourth, held=places))
        await eventually(lambda: len(places) >= 1)
        assert places[-1].place == 1
        world.end(second, "w1")
        assert isinstance(await last, Granted)


async def test_unknown_model_and_no_worker_are_refused_with_their_status(start: Start, world: World) -> None:
    """404 for a model nobody serves; 503 with Retry-After when its workers are gone."""
    async with start(worker_lost_s=1.0):
        await world.grant(world.request("r0", "s0"))
        reply = await world.ask(world.request("r1", "s1", model="no/such"))
        assert isinstance(reply, Refused)
        assert (reply.status, reply.reason) == (404, "unknown_model")
        world.workers.clear()

        async def refused() -> Refused | None:
            reply = await world.ask(world.request(f"r{time.monotonic_ns()}", "s2"))
            return reply if isinstance(reply, Refused) else None

        deadline = time.monotonic() + 60
        answer = await refused()
        while answer is None and time.monotonic() < deadline:
            answer = await refused()
        assert answer is not None
        assert (answer.status, answer.reason, answer.retry_after_s) == (503, "no_worker", 1)


async def test_a_burst_of_a_hundred_asks_spreads_over_the_workers(start: Start, world: World) -> None:
    """D1: 100 simultaneous asks over the bus, no scrape at all: each of four workers gets a quarter."""
    world.workers = ["w1", "w2", "w3", "w4"]
    async with start(policy="kv"):
        await world.grant(world.request("first", "first", tokens=0))
        world.end(world.request("first", "first"), "w1")
        answers = await asyncio.gather(
            *(world.grant(world.request(f"r{number}", f"s{number}", tokens=640)) for number in range(100))
        )
        counts = Counter(answer.grant.worker for answer in answers)
        assert all(24 <= counts[name] <= 26 for name in world.workers)
        await eventually(lambda: len(world.decisions) == 101)


async def test_decisions_are_quick(start: Start, world: World) -> None:
    """300 asks one after the other, index included, take admission a few milliseconds of CPU each, whatever else the
    machine does."""
    async with start() as process:
        await world.grant(world.request("first", "first"))
        before = await asyncio.to_thread(cpu_s, process)
        for number in range(300):
            request = world.request(f"r{number}", f"s{number % 10}", tokens=2048)
            reply = await world.ask(request)
            assert isinstance(reply, Granted)
            world.end(request, reply.grant.worker)
        await eventually(lambda: len(world.decisions) == 301)
        each_ms = (await asyncio.to_thread(cpu_s, process) - before) / 300 * 1e3
        print(f"CPU a turn, ms: {each_ms:.2f}")
        assert each_ms < 10


async def test_a_restarted_leader_is_back_within_two_seconds_with_the_same_books(start: Start, world: World) -> None:
    """kill -9 and restart under the same name: the open grant counts again before anything is granted, epoch grows."""
    world.workers = ["w1"]
    first, second = world.request("r1", "s1"), world.request("r2", "s2")
    async with start(label="before", max_grants_per_rank=1) as process:
        granted = await world.grant(first)
        await process.kill()
    async with start(label="after", max_grants_per_rank=1) as process:
        since = Stopwatch()
        world.accept(second)
        held: list[Held] = []
        asking = asyncio.create_task(world.ask(second, idle_s=2.0, held=held))
        await eventually(lambda: any(each.reason == "at_limit" for each in held), timeout_s=30)
        await since.within(2.0)
        again = await world.ask(first)
        assert isinstance(again, Granted)
        assert again.grant.grant_id == granted.grant.grant_id
        assert again.epoch > granted.epoch
        world.end(first, "w1")
        assert isinstance(await asking, Granted)


async def test_a_standby_takes_over_within_two_seconds_of_a_killed_leader(start: Start, world: World) -> None:
    """kill -9 of the leader: the standby answers in its place with the same grant and a higher epoch; never both."""
    async with start("admission-1", worker_lost_s=30.0) as leader:
        first = world.request("r1", "s1")
        granted = await world.grant(first)
        async with start("admission-2", leads=False, worker_lost_s=30.0):
            both = await world.ask(world.request("r2", "s2"))
            assert both.epoch == granted.epoch
            since = Stopwatch()
            await leader.kill()
            again: object = None
            while again is None:
                with contextlib.suppress(BusTimeoutError):
                    again = await world.ask(first, idle_s=0.1)
                assert since.took_s < 30
            print(f"killed leader to the standby's answer: {since.took_s:.2f} s")
            await since.within(2.2)
            assert isinstance(again, Granted)
            assert (again.grant.grant_id, again.grant.worker) == (granted.grant.grant_id, granted.grant.worker)
            assert again.epoch > granted.epoch


async def test_a_leader_that_slept_through_its_lease_says_nothing_more(start: Start, world: World) -> None:
    """SIGSTOP for longer than the lease: what wakes up does not know yet that another leads, and must not act as if.
    Who leads now has heard the question, too, and may answer it."""
    world.workers = ["w1"]
    async with start("admission-1", max_grants_per_rank=1) as leader:
        await world.grant(world.request("r1", "s1"))
        async with start("admission-2", leads=False, max_grants_per_rank=1) as standby:
            second = world.request("r2", "s2")
            world.accept(second)
            held: list[Held] = []
            asking = asyncio.create_task(world.ask(second, idle_s=20.0, held=held))
            await eventually(lambda: len(held) >= 2)
            leader.signal(signal.SIGSTOP)
            old = held[-1].epoch
            try:
                await standby.wait_said("leadership key=admission epoch=")
                await world.bus.flush()
                held.clear()
            finally:
                leader.signal(signal.SIGCONT)
            await leader.wait_said("leadership key=admission epoch=None")
            await eventually(lambda: "tidegate_leader 0.0" in page(leader, "/metrics"))
            await world.bus.flush()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert [each for each in held if each.epoch <= old] == []


async def test_a_clean_stop_hands_the_lead_over_at_once(start: Start, world: World) -> None:
    """SIGTERM gives the lease back: the standby does not wait for it to grow old, and the process ends with 0."""
    async with start("admission-1") as leader:
        await world.grant(world.request("r1", "s1"))
        async with start("admission-2", leads=False) as standby:
            since = Stopwatch()
            assert await leader.stop() == 0
            await standby.wait_said("leadership key=admission epoch=")
            await since.within(1.5)
            reply = await world.ask(world.request("r2", "s2"))
            assert isinstance(reply, Granted)


async def test_a_lost_ingress_leaves_exactly_one_end_and_one_row_per_request(start: Start, world: World) -> None:
    """The ingress falls silent: its requests end as ``ingress_lost``, on the bus and, durably, in the trace stream."""
    async with start(ingress_lost_s=1.0, grant_ttl_s=3.0):
        for number in range(3):
            await world.grant(world.request(f"r{number}", f"s{number}"))
        done = world.request("r0", "s0")
        world.end(done, "w1")
        world.ingress_speaks = False
        await eventually(lambda: len([each for each in world.ends if each.outcome == "ingress_lost"]) == 2)
        rows: list[TraceRow] = []
        consumer = await world.bus.consume("test", f"{subjects.ROOT}.trace.request_end.>")
        while len(rows) < 2:
            for stored in await consumer.fetch(10, 2.0):
                rows.append(from_json(stored.payload, TraceRow))
                await consumer.ack(stored)
        assert await consumer.fetch(10, 0.3) == []
        await consumer.close()
        requests = {row.request.request_id: row.request for row in rows if row.request is not None}
        assert sorted(requests) == ["r1", "r2"]
        assert {(each.outcome, each.reason, each.decision_mode) for each in requests.values()} == {
            ("ingress_lost", "silence", "policy")
        }


@pytest.mark.parametrize("index", ["absent", "late"])
async def test_without_an_index_turns_run_and_say_blind(start: Start, nats_server: NatsServer, index: str) -> None:
    """Failure mode: the indexer is down or hangs: granted within the deadline, marked blind with the reason."""
    bus = await connect(nats_server.url, name="test-blind", timeout_s=30)
    world = World(bus)
    await world.start(index=False)
    try:
        if index == "late":
            await bus.serve("deaf", "1.0.0", "", [Endpoint("match", subjects.INDEX_MATCH, lambda _: None)], {})
        async with start():
            await world.grant(world.request("first", "first", chain=b""))
            since = Stopwatch()
            granted = await world.grant(world.request("r1", "s1"))
            await since.within(0.5)
            assert (granted.index_health, granted.index_reason) == ("blind", f"index_{index}")
    finally:
        await world.stop()
        await bus.close()


async def test_unreadable_messages_are_counted_and_harm_nothing(start: Start, world: World) -> None:
    """Bad bytes on every subject: each counted by kind, the next ask is granted."""
    async with start() as process:
        await world.grant(world.request("r1", "s1"))
        world.bus.publish(subjects.worker_state("w9"), b"{")
        world.bus.publish(subjects.request("end", MODEL), b"\x00")
        world.bus.publish(subjects.admit_cancel(MODEL), b"\xc1")
        await world.bus.flush()
        await world.grant(world.request("r2", "s2"))
        text = page(process, "/metrics")
        for kind in ("WorkerState", "RequestEnd", "AdmitCancel"):
            assert f'tidegate_admission_bad_messages_total{{kind="{kind}"}} 1.0' in text

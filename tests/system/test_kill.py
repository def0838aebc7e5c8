"""kill -9 of every part in turn under load: it comes back, nothing hangs, every accepted request has one row, no grant
leaks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from bus.interface import BusMessage
from bus.nats import NatsBus, connect
from bus.subjects import ROOT
from bus.tasks import Tasks
from load.workload.client import WorkloadClient
from load.workload.results import RequestResult
from load.workload.sessions import WorkloadShape, plan
from schemas.base import from_json
from schemas.request import RequestAccepted
from tests.support.processes import eventually
from tests.support.system import RunningSystem, running_system
from tidegate.demo.observe import recorded_requests
from tidegate.rows import read_row
from web.client import HttpClient, Timeouts
from web.errors import WebError

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

REQUEST_TIMEOUT_S = 60.0
SHAPE = WorkloadShape(
    sessions=6,
    turns=5,
    sub_agents=2,
    sub_agent_turns=3,
    system_words=300,
    max_tokens=24,
    gap_s=(0.05, 0.2),
    spread_s=0.5,
)
UNSEEN = {
    "hints": ("services.hints",),
    "recorder": ("services.recorder",),
    "indexer": ("services.indexer",),
    "admission": ("services.admission",),
    "bridge-1": ("services.bridge", "instance=bridge-1"),
}
"""Parts whose death no client may notice, and words of their command line."""


@dataclass
class Ledger:
    """What the bus has said since the system came up."""

    accepted: set[str] = field(default_factory=set)
    rows: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, str] = field(default_factory=dict)

    def owed(self) -> set[str]:
        """Accepted requests without a row."""
        return self.accepted - set(self.rows)


@dataclass
class House:
    """The system under test, watched."""

    system: RunningSystem
    bus: NatsBus
    ledger: Ledger

    async def load(self, run_id: str, victim: tuple[str, ...], after: int = 6) -> list[RequestResult]:
        """Sessions during which ``victim`` is killed once ``after`` requests have ended; then it must be back."""
        client = WorkloadClient(
            self.system.url, self.system.addresses["model"], timeout_s=REQUEST_TIMEOUT_S, failure_pause_s=1.0
        )
        ended = 0
        killed: list[int] = []

        def on_end(_: RequestResult) -> None:
            nonlocal ended
            ended += 1
            if ended == after:
                pid = self.system.child_pid(*victim)
                assert pid is not None, victim
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

        try:
            results = await client.run(plan(SHAPE, run_id=run_id), on_end)
        finally:
            await client.close()
        assert len(killed) == 1
        await eventually(lambda: self.system.child_pid(*victim) not in (None, killed[0]), 60, f"{victim} restarted")
        await self.served()
        return results

    async def served(self) -> None:
        """Until a new request is."""
        body = {
            "model": self.system.addresses["model"],
            "max_tokens": 1,
            "messages": [{"role": "user", "content": "?"}],
        }
        headers = [(b"content-type", b"application/json")]
        client = HttpClient()
        try:
            async with asyncio.timeout(90):
                while True:
                    with suppress(WebError):
                        answer = await client.fetch(
                            "POST", f"{self.system.url}/v1/chat/completions", headers, json.dumps(body).encode()
                        )
                        if answer.status == 200:
                            return
                    await asyncio.sleep(0.1)
        finally:
            await client.close()

    @asynccontextmanager
    async def unread(self) -> AsyncIterator[None]:
        """A long answer that has begun and whose client does not read: in flight while its front door lives."""
        client = HttpClient()
        body = {"model": self.system.addresses["model"], "stream": True, "max_tokens": 20_000, "ignore_eos": True}
        body["messages"] = [{"role": "user", "content": "for ever"}]
        headers = [(b"content-type", b"application/json")]
        url = f"{self.system.url}/v1/chat/completions"
        stream = await client.open("POST", url, headers, json.dumps(body).encode(), Timeouts())
        assert await stream.read()
        try:
            yield
        finally:
            await client.close()

    async def settle(self) -> None:
        """Every accepted request has its row, every grant is back."""
        await eventually(lambda: not self.ledger.owed(), 60, "every accepted request has a row")
        await eventually(lambda: self.open_grants() == 0, 60, "every grant is released")

    def open_grants(self) -> float:
        try:
            return self.system.metric("admission", "tidegate_open_grants")
        except OSError:
            return -1.0  # admission is on its way back


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    async with running_system(tmp_path_factory.mktemp("kill")) as system:
        bus = await connect(system.nats_url, name="test", timeout_s=30)
        tasks = Tasks()
        ledger = Ledger()

        def on_accepted(message: BusMessage) -> None:
            ledger.accepted.add(from_json(message.payload, RequestAccepted).request_id)

        async def read_rows() -> None:
            async with aclosing(bus.tail(f"{ROOT}.trace.request_end.>", from_start=True)) as rows:
                async for stored in rows:
                    row = read_row(stored.payload)
                    assert row is not None
                    assert row.request is not None
                    ledger.rows[row.request.request_id] += 1
                    ledger.outcomes[row.request.request_id] = row.request.outcome or ""

        await bus.subscribe(f"{ROOT}.request.accepted.>", on_accepted)
        tasks.start("rows", read_rows())
        await bus.flush()
        yield House(system, bus, ledger)
        await tasks.stop()
        await bus.close()
        code = await system.process.stop(60)
        assert code == 0, system.process.output
        recorded = Counter(recorded_requests(Path(system.addresses["traces"])))
        assert recorded == ledger.rows, system.logs()
        assert set(recorded.values()) == {1}


def said(results: list[RequestResult]) -> list[str]:
    return [f"{result.session_id} turn {result.turn}: {result.error}" for result in results if result.failed]


@pytest.mark.parametrize("name", list(UNSEEN))
async def test_no_client_notices_the_death_of(name: str, house: House) -> None:
    """kill -9 of a part behind the front door: every request of the load succeeds, it is restarted, each accepted
    request has exactly one row, and no grant is left open."""
    results = await house.load(f"kill-{name}", UNSEEN[name])
    assert said(results) == [], house.system.logs()
    await house.settle()
    assert set(house.ledger.rows.values()) == {1}


async def test_a_killed_engine_fails_only_what_it_was_streaming(house: House) -> None:
    """kill -9 of an engine: streams that had begun end with an in-band error, everything else is served by the other
    worker; nothing hangs (report C2)."""
    results = await house.load("kill-engine", ("load.engine", "instance=engine-1"))
    assert not any(result.hung for result in results), said(results)
    failed = {result.request_id for result in results if result.failed}
    await house.settle()
    assert {house.ledger.outcomes[request] for request in failed if request} <= {"upstream_lost", "upstream_error"}
    assert len(failed) <= len(plan(SHAPE).sessions)
    assert set(house.ledger.rows.values()) == {1}


async def test_a_killed_front_door_owes_no_row_and_no_grant(house: House) -> None:
    """kill -9 of the ingress: its clients see a broken connection at once, not a hang; what it had accepted and not
    ended gets one row with outcome ingress_lost; its grants come back; new requests are served."""
    before = set(house.ledger.rows)
    async with house.unread():
        results = await house.load("kill-ingress", ("services.ingress",))
    assert not any(result.hung for result in results), said(results)
    await house.settle()
    lost = [
        request for request in house.ledger.rows.keys() - before if house.ledger.outcomes[request] == "ingress_lost"
    ]
    assert lost, "the request that nobody reads was in flight"
    assert set(house.ledger.rows.values()) == {1}


async def test_a_killed_bus_is_survived(house: House) -> None:
    """kill -9 of nats-server: the front door places by itself meanwhile, nothing hangs, rows come when it is back."""
    results = await house.load("kill-nats", ("-c", str(house.system.workdir / "nats.conf")))
    assert not any(result.hung for result in results), said(results)
    assert said(results) == [], house.system.logs()
    await house.settle()
    assert set(house.ledger.rows.values()) == {1}

"""A front door whose way to the bus is a black hole, and several that have nobody to ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from load.soak.relay import Relay
from schemas.admit import AdmitReply, AdmitRequest
from tests.integration.ingress.support import Door, Stage, chat, open_door, until
from tests.integration.ingress.test_asking import grant
from tests.support.pace import Stopwatch
from web.client import Answer

pytestmark = pytest.mark.asyncio(loop_scope="session")

SESSIONS = 12


def request_id(answer: Answer) -> str:
    return (answer.header("x-request-id") or b"").decode()


async def until_decided(stage: Stage, door: Door) -> None:
    """Until admission decides: it may be slow for an idle time as short as ours."""
    async with asyncio.timeout(60):
        mode: str | None = None
        while mode != "policy":
            answer = await door.post(chat(), x_tidegate_session_id="decided")
            assert answer.status == 200
            mode = (await stage.rows.one(request_id(answer))).decision_mode


@pytest_asyncio.fixture(loop_scope="session")
async def relay(stage: Stage) -> AsyncIterator[Relay]:
    relay = Relay(stage.nats.port)
    await relay.start()
    yield relay
    await relay.stop()


async def test_a_front_door_that_is_cut_off_serves_on(stage: Stage, relay: Relay) -> None:
    """C9, without a broken connection: what would be asked of admission is placed by the hash after the idle time, no
    request fails, and health says nothing wrong. When the way is open again admission decides again, and every request
    has the one row that says how it was placed."""

    def answer(question: AdmitRequest) -> list[AdmitReply]:
        return [grant(stage, question, "worker-1")]

    settings: dict[str, Any] = {"instance": "ingress-away", "admit_idle_s": 0.3, "worker_lost_s": 3.0}
    async with stage.leader(answer), open_door(f"nats://127.0.0.1:{relay.port}", **settings) as door:
        await until_decided(stage, door)
        relay.hold()
        since = Stopwatch()
        meanwhile: list[Answer] = []
        while since.took_s < 4.5:  # longer than a worker may be silent
            meanwhile.append(await door.post(chat(), x_tidegate_session_id=f"away-{len(meanwhile) % SESSIONS}"))
            assert (await door.get("/healthz")).status == 200
        assert {each.status for each in meanwhile} == {200}
        relay.release()
        await until_decided(stage, door)
        rows = [await stage.rows.one(request_id(each)) for each in meanwhile]
        assert {(row.outcome, row.decision_mode) for row in rows} == {("completed", "fallback")}
        await until(lambda: door.service.in_flight == 0)


async def test_front_doors_that_ask_nobody_place_a_session_alike(stage: Stage) -> None:
    """Rendezvous hashing needs no talk: whichever of three ingresses a turn comes to, its session has one worker, and
    many sessions use all."""
    async with AsyncExitStack() as stack:
        doors = [
            await stack.enter_async_context(stage.door(instance=f"ingress-{number}", admit_idle_s=0.05))
            for number in range(3)
        ]
        for door in doors:
            await until(lambda door=door: door.service.workers == len(stage.engines))  # type: ignore[misc]
        places: dict[int, set[str]] = {number: set() for number in range(SESSIONS)}
        for number, found in places.items():
            for door in doors:
                answer = await door.post(chat(), x_tidegate_session_id=f"alike-{number}")
                row = await stage.rows.one(request_id(answer))
                assert row.decision_mode == "fallback"
                assert row.worker is not None
                found.add(row.worker.worker)
    assert {len(found) for found in places.values()} == {1}
    assert set().union(*places.values()) == set(stage.engines)

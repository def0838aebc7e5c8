"""The breaker before real engines that fail, refuse and hang, with a real admission that is told of it."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from tests.integration.ingress.support import MODEL, Door, System, chat, running_system
from tests.support.pace import Stopwatch
from tests.support.processes import python_process, settings_arguments
from web.client import Answer

pytestmark = pytest.mark.asyncio(loop_scope="module")

RULES = {"breaker_failures": 3, "breaker_open_s": 1.0, "breaker_longest_s": 2.0}
MOST = 200
"""Requests after which it must be open: of two equal workers each is chosen every other time."""

_names = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """Its own: engines are stopped and killed here."""
    async with running_system(tmp_path_factory.mktemp("breaker")) as system:
        yield system


@pytest.fixture
def victim(house: System) -> str:
    return next(iter(house.engines))


async def post(door: Door) -> Answer:
    """One request of a session that nobody knows."""
    return await door.post(chat(f"hello {next(_names)}"), x_tidegate_session_id=f"s-{next(_names)}")


async def breaker(door: Door, worker: str) -> str | None:
    page = (await door.get("/metrics")).body.decode()
    for state in ("open", "half_open"):
        if f'tidegate_ingress_breakers{{state="{state}",worker="{worker}"}}' in page:
            return state
        if f'tidegate_ingress_breakers{{worker="{worker}",state="{state}"}}' in page:
            return state
    return None


async def posts_until(door: Door, worker: str, states: set[str | None]) -> list[int]:
    """Statuses of the requests that it took until the worker's breaker was in one of ``states``; it opens by their
    number, and closes by time."""
    statuses: list[int] = []
    async with asyncio.timeout(60):
        while await breaker(door, worker) not in states:
            assert len(statuses) < MOST or None in states
            statuses.append((await post(door)).status)
    return statuses


async def started(house: System, worker: str) -> int:
    return (await house.engines[worker].counts())["started"]


async def test_an_engine_that_answers_503_is_left_alone_tried_and_taken_back(house: System, victim: str) -> None:
    """Three failures in a row and it gets nothing, while every client is served by the other; after its time one
    request tries it; when that comes through it is as any other."""
    async with house.door(**RULES) as door:
        await house.engines[victim].misbehave(error_status=503, error_requests=100_000)
        assert set(await posts_until(door, victim, {"open"})) == {200}
        await house.engines[victim].behave()
        assert set(await posts_until(door, victim, {None})) <= {200}
        assert "tidegate_ingress_breaker_trips_total 0" not in (await door.get("/metrics")).body.decode()


async def test_while_it_is_open_no_request_goes_there(house: System, victim: str) -> None:
    """And admission decides among the others."""
    async with house.door(**{**RULES, "breaker_open_s": 60.0, "breaker_longest_s": 60.0}) as door:
        await house.engines[victim].misbehave(error_status=500, error_requests=100_000)
        assert set(await posts_until(door, victim, {"open"})) <= {200, 500}
        before = await started(house, victim)
        await house.engines[victim].behave()
        answers = [await post(door) for _ in range(20)]
        assert {answer.status for answer in answers} == {200}
        assert await started(house, victim) == before
        rows = [await house.rows.one((answer.header("x-request-id") or b"").decode()) for answer in answers]
        assert {(row.decision_mode, row.attempts) for row in rows} == {("policy", 1)}


async def test_clients_faults_open_nothing(house: System) -> None:
    """C8: 20 answers of 400 from each engine, and both are as before."""
    async with house.door(**RULES) as door:
        for engine in house.engines.values():
            await engine.misbehave(error_status=400, error_requests=100_000)
        assert {(await post(door)).status for _ in range(40)} == {400}
        for worker, engine in house.engines.items():
            assert await breaker(door, worker) is None
            await engine.behave()
        assert (await post(door)).status == 200


async def test_where_all_are_open_all_are_tried(house: System) -> None:
    """The engines' own answer is the client's, no refusal of ours; the first that works again is found at once."""
    async with house.door(**{**RULES, "breaker_open_s": 60.0, "breaker_longest_s": 60.0}) as door:
        for engine in house.engines.values():
            await engine.misbehave(error_status=503, error_requests=100_000)
        for worker in house.engines:
            assert set(await posts_until(door, worker, {"open"})) <= {503}
        answer = await post(door)
        assert answer.status == 503
        assert b"the engine was told to fail" in answer.body
        for engine in house.engines.values():
            await engine.behave()
        assert (await post(door)).status == 200


async def test_a_process_that_hangs_and_one_that_is_gone(tmp_path: Path) -> None:
    """Connections that nobody answers (SIGSTOP) and none at all (SIGKILL): each opens it, no client fails, and the
    process that comes back is found by a probe. Nobody waits for a hanging engine's ``/tokenize`` either (2 s each)."""
    async with running_system(tmp_path) as house:
        victim, engine = next(iter(house.engines.items()))
        async with house.door(**RULES, first_byte_timeout_s=1.0) as door:
            engine.process.signal(signal.SIGSTOP)
            try:
                assert set(await posts_until(door, victim, {"open"})) == {200}
                since = Stopwatch()
                for _ in range(10):
                    assert (await post(door)).status == 200
                await since.within(8.0)
            finally:
                engine.process.signal(signal.SIGCONT)
            assert set(await posts_until(door, victim, {None})) <= {200}
            await engine.process.kill()
            assert set(await posts_until(door, victim, {"open"})) == {200}
            known = {"model": MODEL, "profile": "instant", "instance": victim, "http_port": urlsplit(engine.url).port}
            arguments = settings_arguments(known)
            async with python_process("load.engine", *arguments, directory=tmp_path, name="again") as again:
                await again.wait_line()
                assert set(await posts_until(door, victim, {None})) <= {200}
            assert door.service.in_flight == 0

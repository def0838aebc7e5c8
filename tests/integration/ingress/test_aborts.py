"""Clients that leave, 500 of them, anywhere between the first byte of a request and the last one of its answer: nothing
stays in flight here, in admission or in an engine, and every request that was accepted has one row."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from bus import subjects
from bus.interface import BusMessage
from schemas.base import from_json
from schemas.decision import Decision
from schemas.request import RequestAccepted
from tests.integration.ingress.support import Door, System, chat, running_system, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

CLIENTS = 500
AT_ONCE = 100
GRANTS_PER_RANK = 20
"""Fewer than there are clients at a time, so that most of them are held for a while."""

CHUNKS = 60
"""After which a stream stands still: however slow the machine, its client leaves first."""

POINTS = ("head", "body", "sent", "accepted", "first", "stream", "end")
"""After the head, inside the body, after the body, once it is known that the request was accepted (held, or on its way
to an engine), after the first byte of the answer, inside the stream, when all of it was read."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def narrow(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """A system with room for few turns at a time."""
    directory = tmp_path_factory.mktemp("aborts")
    async with running_system(directory, max_grants_per_rank=GRANTS_PER_RANK) as system:
        yield system


class Heard:
    """What the bus said meanwhile."""

    def __init__(self) -> None:
        self.accepted: list[str] = []
        self.names: set[str | None] = set()
        self.decisions: list[Decision] = []

    def on_accepted(self, message: BusMessage) -> None:
        accepted = from_json(message.payload, RequestAccepted)
        self.accepted.append(accepted.request_id)
        self.names.add(accepted.x_request_id)

    def on_decision(self, message: BusMessage) -> None:
        self.decisions.append(from_json(message.payload, Decision))


class Leaver:
    """One client, which leaves at ``point``; ``resets``: with what it has not read thrown away."""

    def __init__(self, number: int, generator: random.Random) -> None:
        self.name = f"leaver-{number}"
        self.point = generator.choice(POINTS)
        self._resets = generator.random() < 0.5
        self._share = generator.random()

    async def run(self, door: Door, heard: Heard) -> None:
        url = urlsplit(door.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        try:
            with suppress(ConnectionError):
                await self._until_it_leaves(reader, writer, heard)
        except asyncio.IncompleteReadError as error:
            raise AssertionError(f"{self.name} ({self.point}) was left by the door: {error.partial!r}") from error
        finally:
            if self._resets:
                writer.transport.abort()
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _until_it_leaves(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: Heard) -> None:
        tokens = 4 if self.point == "end" else 1500
        body = json.dumps(chat("hello " * 50, stream=True, max_tokens=tokens, ignore_eos=True)).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: door\r\ncontent-type: application/json\r\n"
            f"x-request-id: {self.name}\r\nx-tidegate-session-id: {self.name}\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode()
        sent = {"head": 0, "body": int(self._share * len(body))}.get(self.point, len(body))
        writer.write(head + body[:sent])
        await writer.drain()
        if self.point == "accepted":
            await until(lambda: self.name in heard.names)
        elif self.point == "first":
            await reader.readexactly(1)
        if self.point in ("stream", "end") and b" 200 " not in (status := await reader.readline()):
            raise AssertionError(f"{self.name} was refused: {status + await reader.readuntil(b'}}')!r}")
        if self.point == "stream":
            await reader.readexactly(200 + int(self._share * 4_000))
        elif self.point == "end":
            await reader.readuntil(b"[DONE]")


async def free_of_grants(door: Door, heard: Heard) -> bool:
    """Whether the decision about one more request finds no turn open anywhere."""
    answer = await door.post(chat("is anybody there?"))
    assert answer.status == 200, answer.body
    request_id = (answer.header("x-request-id") or b"").decode()
    await until(lambda: any(decision.request_id == request_id for decision in heard.decisions))
    (decision,) = (decision for decision in heard.decisions if decision.request_id == request_id)
    return all(candidate.open_grants == 0 for candidate in decision.candidates)


async def test_500_clients_that_leave_anywhere(narrow: System) -> None:
    """B2: in-flight returns to 0, each connection to an engine is closed or kept idle, every accepted request has
    exactly one row, which says that its client left (or that it was complete), and admission has its grants back."""
    generator = random.Random(7)
    for engine in narrow.engines.values():
        await engine.misbehave(stall="stream", stall_s=0.0, stall_requests=-1, stall_after_chunks=CHUNKS)
    before = {engine.worker: await engine.counts() for engine in narrow.engines.values()}
    heard = Heard()
    subscriptions = [
        await narrow.bus.subscribe(f"{subjects.ROOT}.request.accepted.*", heard.on_accepted),
        await narrow.bus.subscribe(f"{subjects.ROOT}.decision.*", heard.on_decision),
    ]
    await narrow.bus.flush()
    leavers = [Leaver(number, generator) for number in range(CLIENTS)]
    assert set(Counter(leaver.point for leaver in leavers)) == set(POINTS)
    room = asyncio.Semaphore(AT_ONCE)
    async with narrow.door() as door:

        async def leave(leaver: Leaver) -> None:
            async with room:
                await leaver.run(door, heard)

        await asyncio.gather(*map(leave, leavers))
        await until(lambda: door.service.in_flight == 0)
        await until(lambda: door.service.open_connections == 0)
        names = {leaver.name for leaver in leavers}
        certain = sum(leaver.point in ("accepted", "first", "stream", "end") for leaver in leavers)
        await until(lambda: certain <= len(heard.accepted) == len(narrow.rows.named(names)))
        rows = narrow.rows.named(names)
        assert sorted(row.request_id for row in rows) == sorted(heard.accepted)
        ended = {leaver.name: leaver.point for leaver in leavers}
        points = Counter(ended[row.x_request_id or ""] for row in rows)
        assert points["head"] == points["body"] == 0
        for point in ("accepted", "first", "stream", "end"):
            assert points[point] == sum(leaver.point == point for leaver in leavers)
        outcomes = {(ended[row.x_request_id or ""] == "end", row.outcome) for row in rows}
        assert outcomes <= {(False, "client_disconnect"), (True, "completed"), (True, "client_disconnect")}
        for engine in narrow.engines.values():
            await engine.behave()
        async with asyncio.timeout(30):
            while not await free_of_grants(door, heard):  # noqa: ASYNC110 - it asks
                await asyncio.sleep(0.05)
        for engine in narrow.engines.values():
            was = before[engine.worker]
            async with asyncio.timeout(30):
                while True:
                    now = await engine.counts()
                    over = sum(now[what] - was[what] for what in ("served", "disconnected", "lost", "refused"))
                    if over == now["started"] - was["started"]:
                        break
                    await asyncio.sleep(0.02)
    for subscription in subscriptions:
        await subscription.unsubscribe()

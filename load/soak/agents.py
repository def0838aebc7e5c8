"""Agents that ask all the while: session after session, at a front door of their choice, again where it fails."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from bus.tasks import Tasks
from load.soak.attribution import Symptom
from load.soak.books import Exchange
from load.soak.conversations import KEPT_BYTES, PATHS, Ask, Conversation, error_code, stream_end
from load.soak.parts import MODEL
from services.ingress.replies import REASON_HEADER
from web.client import AnswerStream, HttpClient, Timeouts
from web.errors import ConnectError, ConnectionLostError, WebError
from web.headers import find

AGENTS = 6
TRIES = 4
"""Of one turn, before its session is given up: agents retry, at another front door if they know one."""

_PATIENCE = Timeouts(connect_s=5.0, first_byte_s=110.0, idle_s=60.0, total_s=120.0)
_AGAIN_S = (0.1, 0.5)
_STOP_S = 150.0


class Agents:
    """``doors``: front doors by name, with their addresses. Everything that was asked is in ``exchanges``."""

    def __init__(self, seed: int, doors: Sequence[tuple[str, str]]) -> None:
        self.exchanges: list[Exchange] = []
        self.failed = 0
        self.succeeded = 0
        self._seed = seed
        self._doors = list(doors)
        self._http = HttpClient()
        self._tasks = Tasks()
        self._running: list[asyncio.Task[None]] = []
        self._over = asyncio.Event()
        self._sent = 0
        self._served = asyncio.Condition()

    @property
    def broken(self) -> BaseException | None:
        """What ended an agent: a fault of the soak itself."""
        return self._tasks.failed.result() if self._tasks.failed.done() else None

    def start(self) -> None:
        for number in range(AGENTS):
            self._running.append(self._tasks.start(f"agent-{number}", self._live(number)))

    async def served(self, count: int, timeout_s: float) -> bool:
        """Until so many more requests have succeeded; ``False`` when they do not."""
        wanted = self.succeeded + count
        try:
            async with asyncio.timeout(timeout_s), self._served:
                await self._served.wait_for(lambda: self.succeeded >= wanted)
        except TimeoutError:
            return False
        return True

    async def finish(self) -> None:
        """No new turns; those that run come to their end."""
        self._over.set()
        if self._running:
            await asyncio.wait(self._running, timeout=_STOP_S)

    async def stop(self) -> None:
        await self._tasks.stop()
        await self._http.close()

    async def _live(self, number: int) -> None:
        randomness = random.Random(f"{self._seed}/agent-{number}")
        count = 0
        while not self._over.is_set():
            count += 1
            session = f"soak:{self._seed}:{number}:{count}"
            await self._session(Conversation(self._seed, session, MODEL), randomness)

    async def _session(self, talk: Conversation, randomness: random.Random) -> None:
        door = randomness.randrange(len(self._doors))
        while not talk.over and not self._over.is_set():
            await asyncio.sleep(talk.pause_s())
            beside = talk.beside()
            if beside is not None:
                await self._ask(beside, talk, door)
            for _ in range(TRIES):
                exchange = await self._ask(talk.ask(), talk, door)
                if exchange.symptom is None:
                    break
                door = (door + 1) % len(self._doors)
                await asyncio.sleep(randomness.uniform(*_AGAIN_S))
            else:
                return
            talk.answered()

    async def _ask(self, ask: Ask, talk: Conversation, door: int) -> Exchange:
        name, url = self._doors[door]
        self._sent += 1
        sent_id = f"soak-{self._seed}-{self._sent}"
        headers = [(b"content-type", b"application/json"), (b"x-request-id", sent_id.encode()), *talk.headers]
        began = Exchange(sent_id, name, ask.api, time.time(), 0.0)
        seen = await self._exchange(ask, f"{url}{PATHS[ask.api]}", headers, began)
        seen = replace(seen, ended_at=time.time())
        async with self._served:
            self.exchanges.append(seen)
            if seen.symptom is None:
                self.succeeded += 1
            else:
                self.failed += 1
            self._served.notify_all()
        return seen

    async def _exchange(self, ask: Ask, url: str, headers: list[tuple[bytes, bytes]], seen: Exchange) -> Exchange:
        try:
            stream = await self._http.open("POST", url, headers, msgspec.json.encode(ask.body), _PATIENCE)
        except WebError as error:
            return replace(seen, symptom=_symptom(error), reason=error.reason)
        said = find(stream.headers, b"x-request-id")
        seen = replace(seen, status=stream.status, request_id=said.decode("ascii") if said is not None else None)
        try:
            return await _read(ask, stream, seen)
        except WebError as error:
            return replace(seen, symptom=_symptom(error), reason=error.reason)
        finally:
            stream.close()


async def _read(ask: Ask, stream: AnswerStream, seen: Exchange) -> Exchange:
    """The answer to its end, or to where its client goes away. Raises `WebError`."""
    kept, pieces, lost = b"", 0, False
    try:
        while piece := await stream.read():
            kept = (kept + piece)[-KEPT_BYTES:]
            pieces += 1
            if stream.status == 200 and ask.aborts_after is not None and pieces >= ask.aborts_after:
                return replace(seen, aborted=True)
    except ConnectionLostError:
        lost = True
    if stream.status != 200:
        said = find(stream.headers, REASON_HEADER)
        return replace(seen, symptom="status", reason=said.decode("ascii") if said else error_code(kept) or "")
    if not ask.stream:
        return replace(seen, symptom="cut_answer") if lost else seen
    end = stream_end(ask.api, kept)
    if end not in (None, "done"):
        return replace(seen, symptom="in_band", reason=end)
    if lost:
        return replace(seen, symptom="connection_lost")
    return replace(seen, symptom="cut_stream") if end is None else seen


def _symptom(error: WebError) -> Symptom:
    if isinstance(error, ConnectError):
        return "no_connection"
    return "connection_lost" if isinstance(error, ConnectionLostError) else "timeout"

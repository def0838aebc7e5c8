"""The client of `load.bench.router`: connections in a closed loop, or streams that are held while CPU is read."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import cast

import httptools
import msgspec

from load.bench.router_engine import MODEL

_ANSWER_S = 30.0
_BEGIN_S = 30.0
_MESSAGE_BYTES = 2_000
_ids = itertools.count(1)


@cache
def _text() -> str:
    """What agents read: source code, of the standard library."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted(Path(asyncio.__file__).parent.glob("*.py")))


class LostError(Exception):
    """A request without a complete answer of status 200; the text says what came."""


@dataclass(slots=True)
class Load:
    """What became of the requests of one cell: ms from the request to its first byte and to its end, failures;
    ``unanswered`` of them by a time-out."""

    first_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    failed: int = 0
    unanswered: int = 0
    chunks: int = 0
    pieces: int = 0
    seconds: float = 0.0
    begun: int = 0
    wanted: int = 0
    all_begun: asyncio.Event = field(default_factory=asyncio.Event)

    def one_more_begun(self) -> None:
        self.begun += 1
        self._tell()

    def one_more_lost(self) -> None:
        self.failed += 1
        self._tell()

    def _tell(self) -> None:
        if self.begun + self.failed >= self.wanted:
            self.all_begun.set()


class Connection(asyncio.Protocol):
    """One kept connection, one request at a time."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[None] | None = None
        self._first = 0.0
        self._has_begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.load.pieces += 1
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self._first:
            self._first = time.perf_counter()
            if not self._has_begun:
                self._has_begun = True
                self.load.one_more_begun()
        self.load.chunks += body.count(b"\n\n")

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            status = self._parser.get_status_code()
            if status == 200:
                self._done.set_result(None)
            else:
                self._done.set_exception(LostError(f"status {status}"))

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(LostError("the connection was lost"))

    async def ask(self, request: bytes, within_s: float = _ANSWER_S) -> None:
        """One request to its end. Raises `LostError`, `TimeoutError`."""
        self._done = asyncio.get_running_loop().create_future()
        self._first = 0.0
        began = time.perf_counter()
        self._transport.write(request)
        async with asyncio.timeout(within_s):
            await self._done
        ended = time.perf_counter()
        self.load.first_ms.append(((self._first or ended) - began) * 1e3)
        self.load.total_ms.append((ended - began) * 1e3)

    def close(self) -> None:
        self._transport.abort()


async def connect(port: int, load: Load) -> Connection:
    """Raises `OSError`."""
    _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(load), "127.0.0.1", port)
    return connection


class Prompts:
    """Requests of one session, as bytes on the wire. ``size``: of a body, about; ``grows``: each is the one before
    with an answer and a message of 1 KB more, otherwise each has another text."""

    def __init__(self, size: int, *, grows: bool = False, stream: bool = False, chunks: int = 16, pace_ms: int = 0):
        self._size = size
        self._grows = grows
        self._head = {"model": MODEL, "stream": stream, "max_tokens": chunks, "seed": pace_ms}
        self._session = f"bench-{next(_ids)}"
        self._random = random.Random(self._session)
        self._new()

    def _new(self) -> None:
        count = max(1, self._size // _MESSAGE_BYTES)
        self._messages = [self._message("user" if at % 2 == 0 else "assistant", at) for at in range(count)]

    def _message(self, role: str, at: int) -> dict[str, str]:
        return {"role": role, "content": f"{self._session} {at} {self._cut(min(self._size, _MESSAGE_BYTES))}"}

    def _cut(self, size: int) -> str:
        start = self._random.randrange(len(_text()) - size)
        return _text()[start : start + size]

    def __iter__(self) -> Iterator[bytes]:
        while True:
            yield self._request()
            if self._grows:
                self._messages.append({"role": "assistant", "content": "done " * 16})
                self._messages.append({"role": "user", "content": self._cut(1_000)})
            else:
                self._new()

    def _request(self) -> bytes:
        body = msgspec.json.encode({**self._head, "messages": self._messages})
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"x-session-id: {self._session}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


async def closed_loop(
    ports: list[int], prompts: Callable[[], Prompts], concurrency: int, seconds: float, cpu_s: Callable[[], float]
) -> tuple[Load, float]:
    """So many connections, each asking again when it is answered; and the CPU meanwhile. The first request of each is
    not counted; where one of these has no answer, nothing is measured. Raises `OSError` where nobody listens."""
    load = Load()
    sources = [iter(prompts()) for _ in range(concurrency)]
    connections = [await connect(ports[number % len(ports)], Load()) for number in range(concurrency)]
    first = [one.ask(next(source)) for one, source in zip(connections, sources, strict=True)]
    ended = await asyncio.gather(*first, return_exceptions=True)
    for number, problem in enumerate(ended):
        if isinstance(problem, LostError | TimeoutError):
            load.failed += 1
            load.unanswered += isinstance(problem, TimeoutError)
            connections[number].close()
            connections[number] = await connect(ports[number % len(ports)], load)
        elif problem is not None:
            raise problem
    began, cpu = time.perf_counter(), cpu_s()
    if load.unanswered:
        seconds = 0.0

    async def one(number: int) -> None:
        connection = connections[number]
        connection.load = load
        while time.perf_counter() < began + seconds:
            try:
                await connection.ask(next(sources[number]))
            except (LostError, TimeoutError) as problem:
                load.failed += 1
                load.unanswered += isinstance(problem, TimeoutError)
                connection.close()
                connection = connections[number] = await connect(ports[number % len(ports)], load)

    async with asyncio.TaskGroup() as group:
        for number in range(concurrency):
            group.create_task(one(number))
    load.seconds = time.perf_counter() - began
    spent = cpu_s() - cpu
    for connection in connections:
        connection.close()
    return load, spent


@dataclass(frozen=True, slots=True)
class Held:
    """What was seen while all streams ran. ``begun`` of them had their first byte, after ``begin_s``; where that is not
    all of them, nothing was measured."""

    begun: int
    begin_s: float
    failed: int
    cpu_s: float = 0.0
    wall_s: float = 0.0
    chunks: int = 0
    pieces: int = 0


@asynccontextmanager
async def open_streams(
    ports: list[int], prompts: Callable[[], Prompts], streams: int, begin_s: float, within_s: float
) -> AsyncIterator[tuple[Load, float]]:
    """So many streams at once, cut at the end; entered when all have begun, with the seconds that took. One that ends
    is asked for again; one that has not begun after ``begin_s``, or lasts longer than ``within_s``, has failed."""
    load = Load(wanted=streams)

    async def one(number: int) -> None:
        requests = iter(prompts())
        connection = None
        try:
            connection = await connect(ports[number % len(ports)], load)
            while True:
                await connection.ask(next(requests), within_s)
        except (LostError, TimeoutError, OSError):
            load.one_more_lost()
        finally:
            if connection is not None:
                connection.close()

    asked = time.perf_counter()
    tasks = [asyncio.create_task(one(number)) for number in range(streams)]
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(begin_s):
                await load.all_begun.wait()
        yield load, time.perf_counter() - asked
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def held_streams(
    ports: list[int],
    prompts: Callable[[], Prompts],
    streams: int,
    settle_s: float,
    seconds: float,
    cpu_s: Callable[[], float],
    begin_s: float = _BEGIN_S,
) -> Held:
    """So many streams at once; CPU and chunks of ``seconds``, from ``settle_s`` after the last one has begun. Where
    some have not begun after ``begin_s``, nothing is measured."""
    async with open_streams(ports, prompts, streams, begin_s, 2 * begin_s + seconds) as (load, took):
        begun = load.begun
        if begun < streams:
            return Held(begun, took, streams - begun)
        await asyncio.sleep(settle_s)
        cpu, wall, chunks, pieces = cpu_s(), time.perf_counter(), load.chunks, load.pieces
        await asyncio.sleep(seconds)
        spent, passed = cpu_s() - cpu, time.perf_counter() - wall
        return Held(begun, took, load.failed, spent, passed, load.chunks - chunks, load.pieces - pieces)

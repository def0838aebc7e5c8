"""Raw sockets to speak to the server with, and a scripted server to put the client before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from web.server import Handler, HttpServer, ServerLimits


@asynccontextmanager
async def serving(handler: Handler, limits: ServerLimits | None = None) -> AsyncIterator[HttpServer]:
    """A server on a free port, closed at the end."""
    server = HttpServer(handler, limits)
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.close(drain_s=0.0)


class RawClient:
    """A plain socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int) -> RawClient:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> tuple[int, dict[bytes, bytes]]:
        """Status and headers (lower case) of the next answer."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 30)
        first, *rest = head[:-4].split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in rest)
        return int(first.split(b" ")[1]), {name.lower(): value for name, value in headers.items()}

    async def answer(self) -> tuple[int, dict[bytes, bytes], bytes]:
        """The next answer, whose length must be given."""
        status, headers = await self.head()
        return status, headers, await asyncio.wait_for(self.reader.readexactly(int(headers[b"content-length"])), 30)

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        return await asyncio.wait_for(self.reader.read(), 30)

    def close(self) -> None:
        self.writer.close()


@asynccontextmanager
async def raw_client(port: int) -> AsyncIterator[RawClient]:
    client = await RawClient.connect(port)
    try:
        yield client
    finally:
        client.writer.transport.abort()


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[str]:
    """A server that does exactly what ``script`` says with each connection; yields its base URL."""
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def run() -> None:
            try:
                await script(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                return
            finally:
                writer.transport.abort()

        tasks.add(asyncio.get_running_loop().create_task(run()))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """One request's head and its body by content length."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return head + await reader.readexactly(int(line.split(b":")[1]))
    return head


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for a state that no event announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the state is another object's, without an event
            await asyncio.sleep(0.002)

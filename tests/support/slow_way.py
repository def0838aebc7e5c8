"""A TCP relay that delays: each byte arrives ``delay_s`` later, each way, whatever is under way besides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_PIECE_BYTES = 65_536


class SlowWay:
    """Listens on a port of its own and passes on to ``upstream``, both on loopback. ``delay_s`` may change."""

    def __init__(self, upstream: int, delay_s: float) -> None:
        self.delay_s = delay_s
        self.port = 0
        self._upstream = upstream
        self._pumps: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, upstream = await asyncio.open_connection("127.0.0.1", self._upstream)
        for source, sink in ((reader, upstream), (answers, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def stop(self) -> None:
        pumps = tuple(self._pumps)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        arrives = 0.0
        try:
            while piece := await reader.read(_PIECE_BYTES):
                arrives = max(arrives, loop.time() + self.delay_s)  # never before what was sent earlier
                loop.call_at(arrives, writer.write, piece)
        finally:
            writer.transport.abort()


@asynccontextmanager
async def slow_way(upstream: int, delay_s: float) -> AsyncIterator[SlowWay]:
    """A `SlowWay` that listens; every connection over it is cut at the end."""
    way = SlowWay(upstream, delay_s)
    server = await asyncio.start_server(way.accept, "127.0.0.1", 0)
    way.port = server.sockets[0].getsockname()[1]
    try:
        yield way
    finally:
        server.close()
        await way.stop()

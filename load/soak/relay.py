"""A TCP relay between one part and the bus that can stop forwarding without closing anything: a black hole."""

from __future__ import annotations

import asyncio
import contextlib

from bus.tasks import Tasks

_PIECE_BYTES = 65_536


class Relay:
    """Listens on a port of its own and passes on to ``port``, both on loopback. While it holds, bytes wait, and so do
    new connections and ends of old ones; nothing is lost, as TCP has it."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._tasks = Tasks()
        self._flows = asyncio.Event()
        self._flows.set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Raises `OSError`."""
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def hold(self) -> None:
        self._flows.clear()

    def release(self) -> None:
        self._flows.set()

    async def stop(self) -> None:
        """Every connection is cut."""
        if self._server is not None:
            self._server.close()
        await self._tasks.stop()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.start("relay", self._carry(reader, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection to its end; when one side goes, the other is cut."""
        upstream: asyncio.StreamWriter | None = None
        try:
            await self._flows.wait()
            answers, upstream = await asyncio.open_connection("127.0.0.1", self._upstream)
            ways = [
                asyncio.ensure_future(self._pump(reader, upstream)),
                asyncio.ensure_future(self._pump(answers, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass  # nobody listens there now: the part is cut off as it would be by the bus itself
        finally:
            for side in (writer, upstream):
                if side is not None:
                    side.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE_BYTES):
                await self._flows.wait()
                writer.write(piece)
                await writer.drain()
            await self._flows.wait()

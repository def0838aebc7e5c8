"""What terminates TLS before a server that speaks plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


@asynccontextmanager
async def tls_before(url: str, context: ssl.SSLContext) -> AsyncIterator[str]:
    """The ``https://`` address, of localhost, of what listens at ``url``."""
    parts = urlsplit(url)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(65_536):
                writer.write(piece)
                await writer.drain()
        finally:
            writer.close()

    async def terminate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, before = await asyncio.open_connection(parts.hostname, parts.port)
        with contextlib.suppress(OSError):
            await asyncio.gather(carry(reader, before), carry(behind, writer))

    server = await asyncio.start_server(terminate, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://localhost:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()

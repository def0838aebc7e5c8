"""The relay between a part and the bus, with real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from load.soak.relay import Relay
from tests.support.ports import free_ports

DEADLINE_S = 30.0


@asynccontextmanager
async def echo() -> AsyncIterator[tuple[Relay, asyncio.Server]]:
    """A server that says what it hears, behind a relay."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(65_536):
                writer.write(piece)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    relay = Relay(server.sockets[0].getsockname()[1])
    await relay.start()
    try:
        yield relay, server
    finally:
        await relay.stop()
        server.close()


async def test_what_is_held_comes_later_and_whole() -> None:
    """A black hole: nothing comes, nothing is closed, and once it is let go everything comes in order."""
    async with asyncio.timeout(DEADLINE_S), echo() as (relay, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        relay.hold()
        sent = bytes(range(256)) * 64
        writer.write(sent)
        late, other = await asyncio.open_connection("127.0.0.1", relay.port)
        other.write(b"a new one")
        coming = asyncio.ensure_future(reader.readexactly(len(sent)))
        done, _ = await asyncio.wait({coming}, timeout=0.2)
        assert not done
        relay.release()
        assert await coming == sent
        assert await late.readexactly(9) == b"a new one"
        writer.close()
        other.close()


async def test_the_end_of_either_side_is_the_others() -> None:
    """A part that goes takes its connection to the bus along, and the bus its clients', through the relay as without
    it; where nobody listens behind it, a new connection ends at once."""
    async with asyncio.timeout(DEADLINE_S), echo() as (relay, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        writer.write_eof()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
    nobody = Relay(free_ports(1)[0])
    await nobody.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", nobody.port)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            writer.close()
    finally:
        await nobody.stop()

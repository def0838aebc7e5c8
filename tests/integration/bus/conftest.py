"""Both kinds of bus behind one handle: a real nats-server, and the in-memory broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
import uvloop

from bus.interface import Bus
from bus.memory import MemoryBroker
from bus.nats import NatsOptions, connect
from tests.integration.bus.support import Server
from tests.support.nats import NatsServer


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """As in production: uvloop."""
    return {"uvloop": uvloop.new_event_loop}


class RealServer(Server):
    """nats-server."""

    kind = "nats"

    def __init__(self, directory: Path, max_payload: int) -> None:
        super().__init__()
        self._server = NatsServer(directory, max_payload=max_payload).start()
        self._fresh = 0

    async def _open(self, name: str) -> Bus:
        return await connect(self._server.url, name=name, timeout_s=30, options=NatsOptions(retry_most_s=0.05))

    def stop(self) -> None:
        self._server.stop()

    def start(self, *, fresh: bool = False) -> None:
        self._fresh += fresh
        self._server.restart(store=f"store-{self._fresh}" if fresh else None)


class InMemoryServer(Server):
    """`MemoryBroker`."""

    kind = "memory"

    def __init__(self, max_payload: int) -> None:
        super().__init__()
        self._broker = MemoryBroker(max_payload=max_payload)

    async def _open(self, name: str) -> Bus:
        return await self._broker.connect(name=name)

    def stop(self) -> None:
        self._broker.stop()

    def start(self, *, fresh: bool = False) -> None:
        self._broker.start(fresh=fresh)


MAX_PAYLOAD = 64 * 1024


@pytest.fixture(params=["nats", "memory"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    """A server of either kind that takes messages up to 64 KB; connections are closed at the end."""
    made: Server = (
        RealServer(tmp_path / "nats", MAX_PAYLOAD) if request.param == "nats" else InMemoryServer(MAX_PAYLOAD)
    )
    try:
        yield made
        await made.close()
    finally:
        made.stop()


@pytest.fixture
async def bus(server: Server) -> Bus:
    """One connection."""
    return await server.connect()

"""Fixtures for the rooms that speak over a real bus; the server is `tests.conftest.nats_server`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from bus.nats import NatsBus, connect
from tests.support.nats import NatsServer


@pytest.fixture
def url(nats_server: NatsServer) -> str:
    """Where this test's bus is."""
    return nats_server.url


@pytest.fixture
async def bus(url: str) -> AsyncIterator[NatsBus]:
    """The test's own connection to it."""
    bus = await connect(url, name="test", timeout_s=30)
    yield bus
    await bus.close()

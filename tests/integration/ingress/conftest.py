"""One system for all tests of the ingress: its parts take seconds to start."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.integration.ingress.support import System, running_system


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """nats-server, two engines, admission."""
    async with running_system(tmp_path_factory.mktemp("ingress")) as system:
        yield system
        for engine in system.engines.values():
            await engine.behave()

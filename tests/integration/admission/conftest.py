"""A world that speaks for workers and an ingress, and admission processes before it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bus.nats import NatsBus
from tests.integration.admission.processes import Start
from tests.integration.admission.world import World
from tests.support.nats import NatsServer
from tests.support.processes import HelperProcess, python_process, settings_arguments


@pytest.fixture
async def world(bus: NatsBus) -> AsyncIterator[World]:
    world = World(bus)
    await world.start()
    yield world
    await world.stop()


@pytest.fixture
def start(nats_server: NatsServer, tmp_path: Path) -> Start:
    """Start an admission process; it leads (or, told so, stands by) when this returns."""

    @asynccontextmanager
    async def start(
        name: str = "admission-1", *, label: str = "", leads: bool = True, **settings: object
    ) -> AsyncIterator[HelperProcess]:
        known: dict[str, object] = {
            "nats_url": nats_server.url,
            "instance": name,
            "warmup_s": 0.4,
            "index": "ask",  # the world has the index; an own one is tested in test_own_index.py
        }
        arguments = settings_arguments({**known, **settings})
        async with python_process("services.admission", *arguments, directory=tmp_path, name=label or name) as process:
            await process.wait_said("leadership key=admission epoch=" if leads else "service_started")
            yield process

    return start

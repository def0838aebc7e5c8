"""One system for all tests of the ingress: its parts take seconds to start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import pytest_asyncio
import uvloop

from tests.integration.ingress.support import (
    ASSETS,
    MODEL,
    Door,
    Stage,
    System,
    answer_ok,
    running_stage,
    running_system,
)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """On the loop that the services use."""
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """nats-server, two engines, admission."""
    async with running_system(tmp_path_factory.mktemp("ingress")) as system:
        yield system
        for engine in system.engines.values():
            await engine.behave()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def one_stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """nats-server and two scripted engines, no admission."""
    async with running_stage(tmp_path_factory.mktemp("stage")) as stage:
        yield stage


@pytest.fixture
def stage(one_stage: Stage) -> Stage:
    """The stage, with engines that behave and have seen nothing."""
    for engine in one_stage.engines.values():
        engine.script = answer_ok
        engine.seen.clear()
        engine.gone = 0
    one_stage.heartbeats.silent.clear()
    return one_stage


@pytest_asyncio.fixture(loop_scope="session")
async def door_with_tokenizer(stage: Stage) -> AsyncIterator[Door]:
    """An ingress with the simulated engine's tokenizer; silence of admission costs it 50 ms."""
    tokenizers = {MODEL: str(ASSETS)}
    async with stage.door(tokenizers=tokenizers, tokenize="local", admit_idle_s=0.05) as door:
        yield door

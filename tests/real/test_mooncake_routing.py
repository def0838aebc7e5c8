"""Real objects in a real Mooncake store change where a turn goes, and it goes back when they are gone."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from bus.errors import BusTimeoutError
from bus.nats import NatsBus, connect
from kvcore import page_digests, page_hashes
from kvcore.hashing import pack_tokens
from kvcore.pool_layout import hicache_prefix, mha_components
from schemas.admit import AdmitReply, Granted
from schemas.pool import ComponentSet, SharedLayout
from services.bridge.config import BridgeSettings
from services.bridge.shell.pool_service import PoolBridgeService
from services.bridge.shell.service import BridgeService
from tests.integration.admission.world import World
from tests.integration.bridge.house import chain_of_prompt, running, until, until_async
from tests.integration.engine.engines import RunningEngine, running_engine
from tests.integration.indexer.test_processes import BLOCK, MODEL
from tests.support.mooncake import MooncakeClient, MooncakeMaster, mooncake_client, mooncake_master
from tests.support.nats import NatsServer
from tests.support.processes import python_process, settings_arguments

pytestmark = [pytest.mark.real, pytest.mark.mooncake, pytest.mark.timeout(120)]

PAGES = 40
PROMPT = [7 + number % 500 for number in range(PAGES * BLOCK)]
LAYOUT = SharedLayout(
    pool="pool-a",
    scheme="sglang_hicache",
    page_size=BLOCK,
    key_prefix=hicache_prefix(model=MODEL),
    sets=(ComponentSet(components=mha_components(2)),),
)
WARM = 4 * BLOCK
"""Tokens of the prompt that the engine without a pool has on its device: without the pool it is the better place."""


def objects() -> list[str]:
    """Every object of every page of the prompt, as two tensor-parallel ranks of SGLang name them."""
    digests = page_digests(pack_tokens(PROMPT), BLOCK)
    pages = [digests[at : at + 32].hex() for at in range(0, len(digests), 32)]
    return [f"{LAYOUT.key_prefix}{page}{component}" for page in pages for component in LAYOUT.sets[0].components]


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await connect(nats_server.url, name="test", timeout_s=10)
    yield bus
    await bus.close()


class House:
    """Two engines, of which ``reader`` reads the pool and ``warm`` has a little of the prompt; admission over both."""

    def __init__(self, world: World, pool: PoolBridgeService) -> None:
        self._world = world
        self._pool = pool
        self._asked = 0

    async def turns_go_to(self, worker: str, shared_pages: int, objects: int) -> None:
        """Once the pool's bridge knows of so many objects. Not asked before: an engine that is granted turns and does
        nothing about them is not believed for long."""
        await until(lambda: self._pool.core.stats.objects == objects, f"{objects} objects", 60)
        await until_async(lambda: self.goes_to(worker, shared_pages), f"to {worker}", 30)

    async def goes_to(self, worker: str, shared_pages: int) -> bool:
        """Whether a turn with the prompt goes there now, and is promised so many pages of the pool."""
        self._asked += 1
        request = self._world.request(
            f"ask-{self._asked}",
            f"session-{self._asked}",
            tokens=len(PROMPT) + 1,
            chain=chain_of_prompt(PROMPT, BLOCK),
            pages=page_hashes(pack_tokens(PROMPT), BLOCK),
            page_size=BLOCK,
        )
        self._world.accept(request)
        answer: AdmitReply | None = None
        with contextlib.suppress(BusTimeoutError):
            answer = await self._world.ask(request)
        if not isinstance(answer, Granted):  # nobody leads yet, or no bridge has spoken
            self._world.in_flight.pop(request.request_id)
            return False
        self._world.end(request, answer.grant.worker)
        return (answer.grant.worker, answer.predicted_shared_tokens) == (worker, shared_pages * BLOCK)


async def enter(
    stack: AsyncExitStack, url: str, master: MooncakeMaster, directory: Path, bus: NatsBus
) -> tuple[House, RunningEngine]:
    """Everything that a decision needs, on ``stack``; and the engine with the warm beginning."""
    engines = {}
    for name in ("reader", "warm"):
        (directory / name).mkdir()
        engines[name] = await stack.enter_async_context(running_engine(directory / name))
        settings = BridgeSettings(
            nats_url=url,
            worker=name,
            instance=f"bridge-{name}",
            engine_url=engines[name].url,
            scrape_interval_s=0.2,
            heartbeat_interval_s=0.2,
            shared_pool="pool-a" if name == "reader" else "",
            shared_layout=LAYOUT if name == "reader" else None,
        )
        await stack.enter_async_context(running(url, BridgeService(settings), f"bridge-{name}"))
    pool = BridgeSettings(
        nats_url=url,
        instance="bridge-pool-a",
        pool="pool-a",
        pool_url=master.url,
        pool_events=master.events,
        pool_poll_s=0.2,
        pool_reconcile_s=3600.0,
        pool_reconcile_min_s=0.2,
        heartbeat_interval_s=0.2,
    )
    pool_bridge = PoolBridgeService(pool)
    await stack.enter_async_context(running(url, pool_bridge, "bridge-pool-a"))
    arguments = settings_arguments({"nats_url": url, "policy": "kv", "warmup_s": 0.4})
    admission = await stack.enter_async_context(python_process("services.admission", *arguments, directory=directory))
    await admission.wait_said("service_started")
    world = World(bus, workers=(), model=MODEL)
    await world.start(index=False)
    stack.push_async_callback(world.stop)
    return House(world, pool_bridge), engines["warm"]


async def test_real_objects_change_a_decision(nats_server: NatsServer, bus: NatsBus, tmp_path: Path) -> None:
    """The prompt's pages come into the real store: its reader becomes the better place, for exactly the pages of which
    every object is there (Mooncake #1887: one object of a page is missing, so the run ends before it). The client
    with the objects is killed: no event tells of it, and turns go where they went before."""
    keys = objects()
    per_page = len(keys) // PAGES
    async with AsyncExitStack() as stack:
        master = await stack.enter_async_context(mooncake_master(tmp_path))
        house, warm = await enter(stack, nats_server.url, master, tmp_path, bus)
        await warm.complete(PROMPT[:WARM])
        await house.turns_go_to("warm", 0, 0)

        store: MooncakeClient = await stack.enter_async_context(mooncake_client(master, tmp_path))
        missing = keys[30 * per_page + 1]
        assert set(await store.put([key for key in keys if key != missing])) == {0}
        await house.turns_go_to("reader", 30, len(keys) - 1)
        assert await store.put([missing]) == [0]
        await house.turns_go_to("reader", PAGES, len(keys))
        assert await store.remove([missing]) == [0]
        await house.turns_go_to("reader", 30, len(keys) - 1)

        await store.kill()
        await house.turns_go_to("warm", 0, 0)

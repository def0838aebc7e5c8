"""Admission with a replica of the index of its own: real bridges, simulated engines, and no indexer anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bus import subjects
from bus.errors import BusTimeoutError
from bus.nats import NatsBus
from schemas.admit import AdmitReply, AdmitRequest, Granted
from schemas.kv import KvHeaders
from tests.integration.admission.processes import is_ready, metric
from tests.integration.admission.world import World
from tests.integration.bridge.house import chain_of_prompt, until_async
from tests.integration.engine.engines import RunningEngine, running_engine
from tests.integration.indexer.test_processes import BLOCK, MODEL, Load, bridge_process, resident
from tests.support.pace import Stopwatch
from tests.support.processes import HelperProcess, python_process, settings_arguments

QUIET = [3] * (40 * BLOCK)
"""A prompt that the load leaves alone."""


@pytest.fixture
async def world(bus: NatsBus) -> AsyncIterator[World]:
    world = World(bus, workers=(), model=MODEL)
    await world.start(index=False)
    yield world
    await world.stop()


@asynccontextmanager
async def admission(
    url: str, directory: Path, name: str = "admission-1", label: str = ""
) -> AsyncIterator[HelperProcess]:
    """``python -m services.admission`` as it is by default."""
    arguments = settings_arguments({"nats_url": url, "instance": name, "warmup_s": 0.4})
    async with python_process("services.admission", *arguments, directory=directory, name=label or name) as process:
        await process.wait_said("service_started")
        yield process


class Asker:
    """Asks about one prompt after the other; ends what it was granted."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = 0

    def request(self, prompt: list[int], name: str = "") -> AdmitRequest:
        self._count += 1
        return self._world.request(
            name or f"ask-{self._count}",
            f"session-{self._count}",
            tokens=len(prompt) + 1,
            chain=chain_of_prompt(prompt, BLOCK),
        )

    async def knows(self, prompt: list[int], blocks: int) -> bool:
        """Whether a decision says that exactly so many blocks are there, and is sure of it."""
        request = self.request(prompt)
        self._world.accept(request)
        answer: AdmitReply | None = None
        with contextlib.suppress(BusTimeoutError):
            answer = await self._world.ask(request)
        if not isinstance(answer, Granted):  # nobody leads yet, or no bridge has spoken
            self._world.in_flight.pop(request.request_id)
            return False
        self._world.end(request, answer.grant.worker)
        return (answer.index_health, answer.predicted_cached_tokens) == ("synced", blocks * BLOCK)


async def reach(engine: RunningEngine, prompt: list[int]) -> int:
    """How many blocks of the prompt the engine says it holds."""
    truth, _ = await resident(engine)
    chain = chain_of_prompt(prompt, BLOCK)
    own = [int.from_bytes(chain[at : at + 8], "little") for at in range(0, len(chain), 8)]
    return next((number for number, value in enumerate(own) if value not in truth), len(own))


async def test_decisions_are_exact_without_any_indexer(url: str, world: World, tmp_path: Path) -> None:
    """Nobody answers `index.match`; decisions say `synced` and predict what the engine holds. What its index knows and
    does stands on admission's own page."""
    async with (
        running_engine(tmp_path) as engine,
        bridge_process(engine, url, tmp_path, "bridge"),
        admission(url, tmp_path) as process,
    ):
        await engine.complete(QUIET)
        asker = Asker(world)
        await until_async(lambda: asker.knows(QUIET, 40), "the prompt is known")
        await Load(engine).run(3)
        truth, _ = await resident(engine)
        blocks = "tidegate_admission_index_blocks"
        await until_async(lambda: asyncio.to_thread(lambda: metric(process, blocks) == len(truth)), "all are indexed")
        assert metric(process, "tidegate_admission_index_batches_total") > 0
        assert metric(process, "tidegate_admission_index_failures_total") == 0
        assert is_ready(process)


async def test_what_is_unreadable_is_counted_and_takes_nothing_with_it(url: str, world: World, tmp_path: Path) -> None:
    """Junk in place of batches, and batches of workers that nobody knows: admission stays, its index stays exact."""
    async with (
        running_engine(tmp_path) as engine,
        bridge_process(engine, url, tmp_path, "bridge"),
        admission(url, tmp_path) as process,
    ):
        await engine.complete(QUIET)
        asker = Asker(world)
        await until_async(lambda: asker.knows(QUIET, 40), "the prompt is known")
        for number, payload in enumerate((b"junk", b"\xc1", b"", b"\x93\x01\x02\x03")):
            headers = KvHeaders(worker="ghost", rank=0, incarnation="1", seq=number, first=number == 0)
            world.bus.publish(subjects.kv("ghost", 0), payload, headers.to_headers())
            world.bus.publish(subjects.kv("ghost", 0), payload, {"Tg-Worker": "ghost"})
        assert await asker.knows(QUIET, 40)
        assert metric(process, "tidegate_admission_index_events_rejected_total") >= 8
        assert process.returncode is None


async def test_a_standbys_index_is_as_warm_as_its_leaders(url: str, world: World, tmp_path: Path) -> None:
    """kill -9 of the leader while requests run: the first answer of the standby is exact."""
    async with (
        running_engine(tmp_path, "--num-blocks", "512", "--max-model-len", "2048") as engine,
        bridge_process(engine, url, tmp_path, "bridge"),
        admission(url, tmp_path) as leader,
    ):
        await engine.complete(QUIET)
        asker = Asker(world)
        await until_async(lambda: asker.knows(QUIET, 40), "the prompt is known")
        async with admission(url, tmp_path, "admission-2"):
            load, enough = Load(engine), asyncio.Event()
            loading = asyncio.create_task(load.until(enough))
            await leader.kill()
            request = asker.request(QUIET, "after")
            answer: Granted | None = None
            while answer is None:
                with contextlib.suppress(BusTimeoutError):
                    answer = await world.grant(request, idle_s=0.2, deadline_s=0.5)
            enough.set()
            await loading
            assert (answer.index_health, answer.epoch > 0) == ("synced", True)
            assert answer.predicted_cached_tokens == await reach(engine, QUIET) * BLOCK


async def test_a_restarted_admission_is_ready_when_its_index_is(url: str, world: World, tmp_path: Path) -> None:
    """User case A16 for the index in admission: kill -9 and restart under load. The new one asks the bridge for
    everything, is ready when it has it, and decides by it; nothing of it waits for an indexer."""
    async with (
        running_engine(tmp_path, "--num-blocks", "512", "--max-model-len", "2048") as engine,
        bridge_process(engine, url, tmp_path, "bridge"),
    ):
        asker = Asker(world)
        async with admission(url, tmp_path, label="before") as process:
            await engine.complete(QUIET)
            await until_async(lambda: asker.knows(QUIET, 40), "the prompt is known")
            await process.kill()
        load, enough = Load(engine), asyncio.Event()
        loading = asyncio.create_task(load.until(enough))
        async with admission(url, tmp_path, label="after") as process:
            since = Stopwatch()
            await until_async(lambda: asyncio.to_thread(is_ready, process), "ready")
            await since.within(5.0)
            enough.set()
            await loading
            blocks = await reach(engine, QUIET)
            await until_async(lambda: asker.knows(QUIET, blocks), "exact again")
            assert metric(process, "tidegate_admission_index_kv_gaps_total") > 0


async def test_a_bridge_that_begins_again_is_followed(url: str, world: World, tmp_path: Path) -> None:
    """kill -9 of the bridge: the new one goes on, and in the end decisions are exact again."""
    async with running_engine(tmp_path, "--num-blocks", "512", "--max-model-len", "2048") as engine:
        asker = Asker(world)
        async with admission(url, tmp_path) as process:
            async with bridge_process(engine, url, tmp_path, "bridge-a") as bridge:
                await engine.complete(QUIET)
                await until_async(lambda: asker.knows(QUIET, 40), "the prompt is known")
                await bridge.kill()
            load = Load(engine)
            await load.run(2)
            async with bridge_process(engine, url, tmp_path, "bridge-b"):
                await load.run(2)
                blocks = await reach(engine, QUIET)
                await until_async(lambda: asker.knows(QUIET, blocks), "exact again")
                for prompt in load.prompts.values():
                    blocks = await reach(engine, prompt)
                    await until_async(lambda p=prompt, b=blocks: asker.knows(p, b), "every session's prompt")  # type: ignore[misc]
            process.signal(signal.SIGTERM)
            assert await process.wait() == 0

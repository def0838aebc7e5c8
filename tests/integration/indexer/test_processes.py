"""Bridge and indexer as processes of their own, killed under load, against the simulated engine's own account."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bus import subjects
from bus.interface import Bus
from schemas.base import from_json, from_msgpack, to_msgpack
from schemas.index import IndexSource, MatchReply, MatchRequest, WorkerMatch
from tests.integration.bridge.house import (
    Watcher,
    chain_of_prompt,
    running_indexer,
    until,
    until_async,
)
from tests.integration.engine.engines import RunningEngine, running_engine
from tests.support.pace import Stopwatch
from tests.support.processes import HelperProcess, python_process, settings_arguments

BLOCK = 16
MODEL = "sim-8b"
SYNC_WITHIN_S = 5.0


@asynccontextmanager
async def bridge_process(engine: RunningEngine, url: str, directory: Path, name: str) -> AsyncIterator[HelperProcess]:
    """``python -m services.bridge``, told its endpoints."""
    settings = {
        "nats_url": url,
        "worker": "w",
        "engine_url": engine.url,
        "kv_events": f'["{engine.kv_events[0]}"]',
        "kv_replay": f'["{engine.replay[0]}"]',
        "scrape_interval_s": 0.2,
        "heartbeat_interval_s": 0.2,
    }
    arguments = settings_arguments(settings)
    async with python_process("services.bridge", *arguments, directory=directory, name=name) as process:
        yield process


@asynccontextmanager
async def indexer_process(url: str, directory: Path, name: str) -> AsyncIterator[HelperProcess]:
    """``python -m services.indexer``."""
    arguments = settings_arguments({"nats_url": url})
    async with python_process("services.indexer", *arguments, directory=directory, name=name) as process:
        yield process


class Load:
    """Sessions that grow turn by turn, with a shared beginning, in a pool small enough that blocks are evicted."""

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine
        self.requests = 0
        self.prompts: dict[int, list[int]] = {}

    async def until(self, enough: asyncio.Event) -> None:
        while not enough.is_set():
            await self.run(1)

    async def run(self, turns: int) -> None:
        for _ in range(turns):
            for session in range(6):
                prompt = self.prompts.setdefault(session, [7] * 64 + [1000 + session] * 32)
                prompt += [2000 + self.requests % 500] * 40
                if len(prompt) > 1200:
                    del self.prompts[session]
                await self._engine.complete(prompt)
                self.requests += 1


async def resident(engine: RunningEngine) -> tuple[set[int], int]:
    """Chain hashes that the engine holds, and the number of its last batch."""
    page = (await engine.get("/sim/resident"))["ranks"]["0"]
    return {int(value, 16) for value in page["chain_hashes"]}, page["seq"] - 1


async def match(bus: Bus, prompt: list[int]) -> WorkerMatch | None:
    """The one worker's answer, if it is known."""
    request = MatchRequest(model=MODEL, block_size=BLOCK, chain=chain_of_prompt(prompt, BLOCK))
    answer = await bus.request(subjects.INDEX_MATCH, to_msgpack(request), timeout_s=30.0)
    matches = from_msgpack(answer.payload, MatchReply).matches
    return matches[0] if matches else None


async def test_indexer_killed_under_load(url: str, bus: Bus, tmp_path: Path) -> None:
    """User case A16: kill -9 of the indexer while requests run. The new one is synced within seconds, and holds exactly
    what the engine says it holds: in number, and along every session's prompt."""
    facts = await Watcher.of(bus, subjects.index_source("w", 0))

    def synced(since: int) -> bool:
        said = [from_json(message.payload, IndexSource) for message in facts.messages[since:]]
        return any(fact.health == "synced" for fact in said)

    async with (
        running_engine(tmp_path, "--num-blocks", "256", "--max-model-len", "2048") as engine,
        bridge_process(engine, url, tmp_path, "bridge"),
    ):
        load = Load(engine)
        async with indexer_process(url, tmp_path, "indexer-a") as first:
            await load.run(8)
            await until(lambda: synced(0), "synced for the first time")
            await first.kill()
        seen, before = len(facts.messages), load.requests
        enough = asyncio.Event()
        loading = asyncio.create_task(load.until(enough))
        async with indexer_process(url, tmp_path, "indexer-b") as second:
            await second.wait_said("service_started")
            since = Stopwatch()
            await until(lambda: synced(seen), "synced again")
            await since.within(SYNC_WITHIN_S)
            assert load.requests > before
            enough.set()
            await loading
            truth, _ = await resident(engine)
            assert len(truth) > 100

            async def complete() -> bool:
                """The count alone may be right before the last batches are there: the engine is full."""
                answer = await match(bus, [7] * 64)
                if answer is None or (answer.resident_blocks, answer.health) != (len(truth), "synced"):
                    return False
                for prompt in load.prompts.values():
                    chain = chain_of_prompt(prompt, BLOCK)
                    own = [int.from_bytes(chain[at : at + 8], "little") for at in range(0, len(chain), 8)]
                    reach = next((number for number, value in enumerate(own) if value not in truth), len(own))
                    answer = await match(bus, prompt)
                    if answer is None or answer.blocks.reach != reach:
                        return False
                return True

            await until_async(complete, f"{len(truth)} blocks, those of the engine")


async def test_bridge_killed_under_load(url: str, tmp_path: Path) -> None:
    """kill -9 of the bridge while requests run: the new one reads the engine's history and speaks of the same
    incarnation, so that the indexer clears nothing; in the end it holds what the engine holds, block by block."""
    async with (
        running_engine(tmp_path, "--num-blocks", "256", "--max-model-len", "2048") as engine,
        running_indexer(url, worker_lost_s=20.0) as indexer,
    ):
        load = Load(engine)
        async with bridge_process(engine, url, tmp_path, "bridge-a") as first:
            await load.run(8)
            await until(lambda: indexer.core.replica.index.resident("w", 0) > 0, "something is indexed")
            await first.kill()
        await load.run(8)
        async with bridge_process(engine, url, tmp_path, "bridge-b") as second:
            await load.run(8)
            truth, last = await resident(engine)
            await until(lambda: indexer.core.replica.sources["w"][0].machine.last == last, f"batch {last}")
            source = indexer.core.replica.sources["w"][0]
            await until(lambda: source.health == "synced", "the bridge says that its stream is whole")
            assert set(indexer.core.replica.index.content()["w", 0]) == truth
            assert source.machine.counters.cleared == 0
            assert (await second.stop()) == 0
        await until(lambda: "w" not in indexer.core.replica.workers, "left is said on a clean stop")


async def test_engine_address_is_enough(url: str, tmp_path: Path) -> None:
    """Only ``engine_url`` is set: event and replay endpoints are discovered. The engine names a concrete host although
    it binds (vLLM would connect to it), so the bridge finds that it cannot bind there and connects."""
    settings = {"nats_url": url, "worker": "w", "heartbeat_interval_s": 0.2, "scrape_interval_s": 0.2}
    async with (
        running_engine(tmp_path, "--num-blocks", "256", "--max-model-len", "2048") as engine,
        running_indexer(url) as indexer,
        python_process(
            "services.bridge",
            *settings_arguments({**settings, "engine_url": engine.url}),
            directory=tmp_path,
            name="bridge",
        ),
    ):
        await Load(engine).run(2)
        truth, last = await resident(engine)
        await until(lambda: "w" in indexer.core.replica.sources, "the worker is known")
        await until(lambda: indexer.core.replica.sources["w"][0].machine.last == last, f"batch {last}")
        assert set(indexer.core.replica.index.content()["w", 0]) == truth


async def test_wrong_setting_ends_with_a_sentence(tmp_path: Path) -> None:
    """Exit code 2 and one sentence naming the key."""
    async with python_process("services.bridge", "--set", "engine_url=ftp://x", directory=tmp_path) as process:
        assert await process.wait() == 2
        assert "engine_url: must be the http or https URL of an engine" in process.stderr
        assert "Traceback" not in process.stderr
    async with python_process("services.indexer", "--set", "max_blocks=0", directory=tmp_path) as process:
        assert await process.wait() == 2
        assert "max_blocks: must be positive" in process.stderr

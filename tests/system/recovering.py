"""Engine, bridge and indexer as processes that are killed and come back, under load, beside the engine's own truth."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bus import subjects
from bus.errors import BusError
from bus.interface import Bus
from bus.tasks import Tasks
from kvcore import PrefixIndex, chain_hashes, pack_tokens, unpack_chain
from schemas.base import from_json, from_msgpack, to_json, to_msgpack
from schemas.index import MatchReply, MatchRequest, WorkerMatch
from schemas.kv import SnapshotReply, SnapshotRequest
from tests.integration.bridge.house import until_async
from tests.support.processes import HelperProcess, settings_arguments, start_process
from web.client import HttpClient
from web.errors import WebError

MODEL = "sim-8b"
WORKER = "w"
BLOCK = 16
RANKS = 2
SESSIONS = 4
LONGEST_TOKENS = 1200
SETTLED_WITHIN_S = 60.0
Truth = dict[int, set[int]]


class Part:
    """One process under its settings: started, killed, started again."""

    def __init__(self, name: str, module: str, directory: Path, settings: dict[str, object], ready: str) -> None:
        self.name = name
        self._command = [sys.executable, "-m", module, *settings_arguments(settings)]
        self._directory = directory
        self._ready = ready
        self._starts = 0
        self.process: HelperProcess | None = None

    async def start(self) -> None:
        """Returns when it says that it runs."""
        self._starts += 1
        self.process = await start_process(self._command, self._directory, name=f"{self.name}-{self._starts}")
        await self.process.wait_said(self._ready)

    async def kill(self) -> None:
        """``kill -9``."""
        assert self.process is not None
        await self.process.kill()

    async def close(self) -> None:
        if self.process is not None:
            await self.process.close()


class Load:
    """Sessions that grow turn by turn from a shared beginning, in a pool so small that blocks are evicted all the time.
    A request that fails is asked again: the engine dies now and then."""

    def __init__(self, url: str) -> None:
        self.requests = 0
        self.failed = 0
        self.chains: set[bytes] = set()
        self._url = url
        self._http = HttpClient()
        self._go = asyncio.Event()
        self._busy = 0

    async def session(self, number: int) -> None:
        """One session after another, for ever."""
        randomness = random.Random(number)
        while True:
            prompt = [7] * 64 + [1000 + randomness.randrange(500)] * 32
            before = b""
            while len(prompt) < LONGEST_TOKENS:
                prompt += [2000 + randomness.randrange(5000)] * randomness.randrange(16, 64)
                chain = chain_hashes(pack_tokens(prompt), BLOCK)
                self.chains.discard(before)  # the longer one has its blocks as well
                self.chains.add(chain)
                before = chain
                await self._ask(prompt)
                await asyncio.sleep(0.02)

    async def _ask(self, prompt: list[int]) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
        while True:
            await self._go.wait()
            self._busy += 1
            try:
                answer = await self._http.fetch("POST", f"{self._url}/v1/completions", [], json.dumps(body).encode())
            except WebError:
                self.failed += 1
            else:
                assert answer.status == 200, answer.body
                self.requests += 1
                return
            finally:
                self._busy -= 1
            await asyncio.sleep(0.05)

    async def until_requests(self, count: int) -> None:
        """So many more were answered."""
        wanted = self.requests + count

        async def answered() -> bool:
            return self.requests >= wanted

        await until_async(answered, f"{count} requests", 30.0)

    def resume(self) -> None:
        self._go.set()

    async def pause(self) -> None:
        """Nothing is on its way any more."""
        self._go.clear()

        async def quiet() -> bool:
            return self._busy == 0

        await until_async(quiet, "the load is quiet", 30.0)

    async def resident(self) -> Truth:
        """What the engine says that it holds, rank by rank, in our chain hashes."""
        answer = await self._http.fetch("GET", f"{self._url}/sim/resident", [], b"")
        pages: dict[str, Any] = json.loads(answer.body)["ranks"]
        return {int(rank): {int(value, 16) for value in page["chain_hashes"]} for rank, page in pages.items()}

    async def close(self) -> None:
        await self._http.close()


class House:
    """The parts, the load, and the questions that a stranger on the bus can ask."""

    def __init__(self, bus: Bus, parts: dict[str, Part], load: Load) -> None:
        self.bus = bus
        self.parts = parts
        self.load = load

    async def kill_and_restart(self, *names: str) -> None:
        """All of ``names`` at the same moment."""
        await asyncio.gather(*(self.parts[name].kill() for name in names))
        await asyncio.gather(*(self.parts[name].start() for name in names))

    async def match(self, chain: bytes) -> dict[int, WorkerMatch]:
        """The indexer's answer for one chain, by rank."""
        request = MatchRequest(model=MODEL, block_size=BLOCK, chain=chain)
        answer = await self.bus.request(subjects.INDEX_MATCH, to_msgpack(request), timeout_s=30.0)
        return {match.rank: match for match in from_msgpack(answer.payload, MatchReply).matches}

    async def bridge_blocks(self) -> Truth:
        """The bridge's own index, by way of its snapshot. Asked again when it does not answer, as an indexer does: one
        that was writing when the bus died waits for that first."""
        question = to_json(SnapshotRequest(indexer="test"))
        replies: list[SnapshotReply] = []

        async def answered() -> bool:
            with contextlib.suppress(BusError):
                answer = await self.bus.request(subjects.kv_snapshot(WORKER), question, timeout_s=2.0)
                replies.append(from_json(answer.payload, SnapshotReply))
            return bool(replies) and replies[-1].error is None

        await until_async(answered, f"a snapshot: {replies}", SETTLED_WITHIN_S)
        reply = replies[-1]
        index = PrefixIndex()
        index.load(await (await self.bus.objects(reply.bucket)).get(reply.key))
        content = index.content()
        return {rank: set(content.get((WORKER, rank), {})) for rank in range(RANKS)}

    async def settled(self) -> Truth:
        """The load pauses, and within seconds every source is `synced` and counts as many blocks as its engine."""
        await self.load.pause()
        truth = await self.load.resident()
        expected = {rank: ("synced", None, len(blocks)) for rank, blocks in truth.items()}
        told: dict[int, tuple[str, str | None, int]] = {}

        async def synced() -> bool:
            try:
                told.update({r: (m.health, m.reason, m.resident_blocks) for r, m in (await self.match(b"")).items()})
            except BusError:
                return False
            return told == expected

        try:
            await until_async(synced, "synced and complete", SETTLED_WITHIN_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {told}, the engine says {expected}\n{self.logs()}") from None
        return truth

    async def check(self) -> None:
        """Bridge and indexer hold exactly what the engine holds, block by block, as soon as its last batch has come."""
        truth = await self.settled()
        found: dict[str, Truth] = {}

        async def bridge_agrees() -> bool:
            found["bridge"] = await self.bridge_blocks()
            return found["bridge"] == truth

        async def indexer_agrees() -> bool:
            found["indexer"] = await self.confirmed(truth)
            return found["indexer"] == truth

        for agrees, name in ((bridge_agrees, "bridge"), (indexer_agrees, "indexer")):
            try:
                await until_async(agrees, f"the {name} agrees with the engine", SETTLED_WITHIN_S)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self.differing(found[name], truth)}") from None

    async def confirmed(self, truth: Truth) -> Truth:
        """The blocks that the indexer finds along every chain ever asked for; it must find none that is not there.
        It counts as many as the engine has, so when all are found there are no others."""
        found: Truth = {rank: set() for rank in truth}
        for chain in list(self.load.chains):
            own = unpack_chain(chain)
            for rank, match in (await self.match(chain)).items():
                found[rank].update(own[: match.blocks.reach])
        return found

    def differing(self, found: Truth, truth: Truth) -> str:
        """How many blocks are too many, and how many are missing; and what everybody logged."""
        words = [f"rank {r}: {len(found[r] - own)} too many, {len(own - found[r])} missing" for r, own in truth.items()]
        return "\n".join([*words, self.logs()])

    def logs(self) -> str:
        return "\n".join(part.process.output for part in self.parts.values() if part.process is not None)


@asynccontextmanager
async def recovering_house(url: str, bus: Bus, directory: Path) -> AsyncIterator[House]:
    """Everything runs, and the load with it."""
    port, events, replay = _ports()
    engine_url = f"http://127.0.0.1:{port}"
    engine: dict[str, object] = {
        "http_port": port,
        "profile": "instant",
        "ranks": RANKS,
        "num_blocks": 160,
        "max_model_len": 2048,
        "kv_events_endpoint": f"tcp://127.0.0.1:{events}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
        "buffer_steps": 500,
    }
    bridge: dict[str, object] = {
        "nats_url": url,
        "worker": WORKER,
        "engine_url": engine_url,
        "kv_events": json.dumps([f"tcp://127.0.0.1:{events + rank}" for rank in range(RANKS)]),
        "kv_replay": json.dumps([f"tcp://127.0.0.1:{replay + rank}" for rank in range(RANKS)]),
        "scrape_interval_s": 0.2,
        "heartbeat_interval_s": 0.2,
        "checkpoint_interval_s": 0.3,
    }
    parts = {
        "engine": Part("engine", "load.engine", directory, engine, '"ready"'),
        "bridge": Part("bridge", "services.bridge", directory, bridge, "service_started"),
        "indexer": Part("indexer", "services.indexer", directory, {"nats_url": url}, "service_started"),
    }
    load = Load(engine_url)
    tasks = Tasks()
    try:
        await asyncio.gather(*(part.start() for part in parts.values()))
        for number in range(SESSIONS):
            tasks.start(f"session-{number}", load.session(number))
        load.resume()
        yield House(bus, parts, load)
        assert not tasks.failed.done(), tasks.failed.result()
    finally:
        await tasks.stop()
        await load.close()
        for part in parts.values():
            await part.close()


def _ports() -> tuple[int, int, int]:
    """One for HTTP and two bases with a port for each rank: below those that the system gives to whoever connects, so
    that nobody takes them while the engine is dead."""
    randomness = random.SystemRandom()
    while True:
        base = randomness.randrange(20_000, 32_000)
        ports = range(base, base + 1 + 2 * RANKS)
        if all(map(_is_free, ports)):
            return base, base + 1, base + 1 + RANKS


def _is_free(port: int) -> bool:
    with socket.socket() as each:
        try:
            each.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

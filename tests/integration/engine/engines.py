"""Starts real engine processes and listens to them: HTTP, PUB and ROUTER sockets."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import zmq
import zmq.asyncio

from kvcore.events import Batch, Cleared, Removed, Stored, decode_batch
from tests.support.processes import HelperProcess, python_process
from web.client import HttpClient
from web.server import Headers

END_SEQ = b"\xff" * 8
WAIT_S = 30.0
MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class RunningEngine:
    """One engine process that listens."""

    process: HelperProcess
    http: HttpClient
    url: str
    kv_events: list[str]
    replay: list[str]

    async def get(self, path: str) -> Any:
        answer = await self.http.fetch("GET", self.url + path, [], b"")
        assert answer.status == 200, answer.body
        return json.loads(answer.body)

    async def post(self, path: str, body: Any, headers: Headers | None = None) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self.http.fetch("POST", self.url + path, headers or [], raw)
        return answer.status, json.loads(answer.body)

    async def complete(self, prompt: list[int], headers: Headers | None = None, **fields: Any) -> Any:
        """One text completion over token ids."""
        body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True, **fields}
        status, answer = await self.post("/v1/completions", body, headers)
        assert status == 200, answer
        return answer

    async def misbehave(self, **flags: Any) -> None:
        status, answer = await self.post("/sim/misbehave", flags)
        assert status == 200, answer

    async def counts(self) -> dict[str, int]:
        return dict((await self.get("/sim/served"))["counts"])

    async def wait_count(self, what: str, number: int) -> None:
        """Until so many requests are ``what`` (a count of ``/sim/served``)."""

        async def reached() -> bool:
            return (await self.counts())[what] >= number

        await until(reached)

    async def metric(self, name: str) -> dict[str, float]:
        """Samples of one metric, by the text of their labels."""
        page = (await self.http.fetch("GET", self.url + "/metrics", [], b"")).body.decode()
        samples = {}
        for line in page.splitlines():
            if line.startswith(name) and line[len(name)] in " {":
                labels, _, value = line[len(name) :].rpartition(" ")
                samples[labels] = float(value)
        return samples

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


@asynccontextmanager
async def running_engine(directory: Path, *options: str) -> AsyncIterator[RunningEngine]:
    """An engine with ``options``; without any time model unless they name one."""
    arguments = options if "--profile" in options else ("--profile", "instant", *options)
    http = HttpClient()
    async with python_process("load.engine", *arguments, directory=directory, name="engine") as process:
        ready = json.loads(await process.wait_line())
        assert ready["ready"] is True
        try:
            yield RunningEngine(process, http, ready["url"], ready["kv_events"], ready["replay"])
        finally:
            await http.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask again until ``condition`` holds. Raises `AssertionError` after `WAIT_S`."""
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


class Listener:
    """A SUB socket on one rank's stream."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint)
        self.messages: list[tuple[int, bytes]] = []

    async def subscribed(self, engine: RunningEngine, headers: Headers | None = None) -> None:
        """Until something of the engine arrives: prompts are sent for it."""
        for attempt in range(100):
            await engine.complete([9000 + attempt] * 64, headers)
            if await self.poll(0.1):
                return
        raise AssertionError("the subscription never took hold")

    async def poll(self, timeout_s: float) -> bool:
        """Take one message, if one comes in time."""
        if not await self._socket.poll(int(timeout_s * 1000)):
            return False
        topic, seq, payload = await self._socket.recv_multipart()
        assert isinstance(topic, bytes)
        self.messages.append((int.from_bytes(seq, "big"), payload))
        return True

    async def take(self, count: int) -> list[int]:
        """The sequence numbers of the next ``count`` messages."""
        before = len(self.messages)
        while len(self.messages) < before + count:
            assert await self.poll(WAIT_S), f"{len(self.messages) - before} of {count} messages came"
        return [seq for seq, _ in self.messages[before:]]

    async def take_until(self, seq: int) -> None:
        """Everything up to and with ``seq``."""
        while not self.messages or self.messages[-1][0] < seq:
            assert await self.poll(WAIT_S), f"no message {seq}"

    def close(self) -> None:
        self._socket.close()
        self._context.term()


async def replay(endpoint: str, start: int, *, frames: int = 4, timeout_s: float = WAIT_S) -> list[tuple[int, bytes]]:
    """Ask for everything from ``start`` on; ``frames``: of each answer (4 with topic, 3 without)."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    answers: list[tuple[int, bytes]] = []
    try:
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            if not await socket.poll(int(timeout_s * 1000)):
                raise TimeoutError("no end mark")
            parts = await socket.recv_multipart()
            assert len(parts) == frames
            if parts[-2] == END_SEQ:
                assert parts == [b""] * (frames - 2) + [END_SEQ, b""]
                return answers
            answers.append((int.from_bytes(parts[-2], "big"), parts[-1]))
    finally:
        socket.close()
        context.term()


def decoded(messages: list[tuple[int, bytes]]) -> list[Batch]:
    return [decode_batch(payload) for _, payload in messages]


def resident_after(batches: list[Batch]) -> set[str]:
    """The resident set by the rules of a ref-counting consumer, as hex of the engine's hashes."""
    copies: Counter[int] = Counter()
    for batch in batches:
        for event in batch.events:
            if isinstance(event, Stored):
                copies.update(event.hashes)
            elif isinstance(event, Removed):
                copies.subtract(event.hashes)
            else:
                assert isinstance(event, Cleared)
                copies.clear()
    return {f"{value & MASK64:016x}" for value, count in copies.items() if count > 0}

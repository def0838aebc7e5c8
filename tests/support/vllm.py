"""A real vLLM as a test's part, on CPU: found through ``VLLM_PYTHON``, started, killed, started again.

`history` reads everything that it has published, from its replay socket, and `EngineCache` is what that amounts to,
by a few lines that share nothing with our own decoder and index.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import msgspec
import pytest
import zmq
import zmq.asyncio

from tests.support.ports import free_ports
from tests.support.processes import HelperProcess, start_process

INTERPRETER = "VLLM_PYTHON"
MODEL = "tiny"
BLOCK_SIZE = 32
"""vLLM's attention on CPU takes multiples of 32 only."""

START_TIMEOUT_S = 600.0
_END = b"\xff" * 8
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def interpreter() -> str:
    """The Python that has vLLM. Skips the test with a reason when there is none."""
    found = os.environ.get(INTERPRETER)
    if not found:
        pytest.skip(
            f"no vLLM here: set {INTERPRETER} to a Python that has it (vllm, or vllm-cpu on a machine without GPU)"
        )
    if not Path(found).is_file():
        pytest.skip(f"{INTERPRETER}={found} does not exist")
    return found


class Vllm:
    """One vLLM server, its ports the same over restarts. ``blocks``: size of its KV cache, ``ranks``: data parallel."""

    def __init__(self, python: str, model: Path, directory: Path, *, blocks: int, ranks: int = 1) -> None:
        self._python = python
        self.model = model
        self._directory = directory
        self._blocks = blocks
        self._ranks = ranks
        self._starts = 0
        self._process: HelperProcess | None = None
        (self.port,) = free_ports(1)
        self.events_port, self.replay_port = _consecutive_ports(ranks)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        """As ``tidegate up --engine`` takes it."""
        events = ",".join(f"tcp://127.0.0.1:{self.events_port + rank}" for rank in range(self._ranks))
        replay = ",".join(f"replay=tcp://127.0.0.1:{self.replay_port + rank}" for rank in range(self._ranks))
        return f"{self.url}={events},{replay}"

    @property
    def output(self) -> str:
        return self._process.output if self._process else ""

    def command(self) -> list[str]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay_port}",
            "topic": "kv",
            "buffer_steps": 100_000,
        }
        options = {
            "--model": str(self.model),
            "--served-model-name": MODEL,
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--dtype": "bfloat16",
            "--max-model-len": "2048",
            "--max-num-seqs": "8",
            "--block-size": str(BLOCK_SIZE),
            "--num-gpu-blocks-override": str(self._blocks),
            "--scheduling-policy": "priority",
            "--kv-events-config": json.dumps(events),
        }
        flags = ["--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
        if self._ranks > 1:
            options["--data-parallel-size"] = str(self._ranks)
        # `vllm serve` asks for a distribution called vllm, which the CPU build is not.
        module = ["-m", "vllm.entrypoints.openai.api_server"]
        return [self._python, *module, *(part for pair in options.items() for part in pair), *flags]

    async def start(self) -> None:
        """Returns when it serves. Raises `AssertionError` with its log when it does not."""
        assert self._process is None, "already running"
        self._starts += 1
        name = f"vllm-{self._starts}"
        self._process = await start_process(self.command(), self._directory, name=name, environment=_ENVIRONMENT)
        await self._process.wait_for(self._serves, START_TIMEOUT_S)

    def _serves(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    async def kill(self) -> None:
        """``kill -9`` of everything that belongs to it."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.close()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Ask vLLM itself."""
        request = Request(f"{self.url}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
        with urlopen(request, timeout=20) as answer:
            return json.loads(answer.read() or b"null")

    def running(self) -> float:
        """Requests that it works on, in all ranks."""
        with urlopen(f"{self.url}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running{"))

    def tokens(self, **body: Any) -> list[int]:
        """Token ids of a prompt or of messages, by vLLM's own tokenizer."""
        return list(self.post("/tokenize", {"model": MODEL, **body})["tokens"])

    async def history(self, rank: int = 0, timeout_s: float = 10.0) -> list[bytes]:
        """Every payload since its start. Raises `AssertionError` when some are missing."""
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        try:
            dealer.connect(f"tcp://127.0.0.1:{self.replay_port + rank}")
            await dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            payloads: list[bytes] = []
            async with asyncio.timeout(timeout_s):
                while True:
                    *_, seq, payload = await dealer.recv_multipart()
                    if seq == _END:
                        return payloads
                    assert int.from_bytes(seq, "big") == len(payloads), "the replay buffer has lost its beginning"
                    payloads.append(payload)
        finally:
            dealer.close()
            context.term()

    async def cache(self, rank: int = 0) -> EngineCache:
        """What it holds now, by its own account."""
        return EngineCache(await self.history(rank))


class EngineCache:
    """The blocks that a history of vLLM's events (map layout, full attention) leaves resident."""

    def __init__(self, history: list[bytes]) -> None:
        self.copies: Counter[int] = Counter()
        self.evicted = 0
        self.batches = len(history)
        self._children: dict[tuple[int | None, tuple[int, ...], str], int] = {}
        for payload in history:
            for event in msgspec.msgpack.decode(payload)[1]:
                self._apply(event)

    @property
    def resident(self) -> int:
        """Distinct blocks."""
        return len(self.copies)

    def prefix(self, tokens: list[int], salt: str | None = None) -> int:
        """How many blocks of ``tokens`` are resident from the start."""
        parent: int | None = None
        for count, start in enumerate(range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE)):
            keys = str([salt]) if salt and not start else "None"
            parent = self._children.get((parent, tuple(tokens[start : start + BLOCK_SIZE]), keys))
            if parent is None or parent not in self.copies:
                return count
        return len(tokens) // BLOCK_SIZE

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.copies.clear()
        elif event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                self.evicted += 1
                self.copies[block] -= 1
                if not self.copies[block]:
                    del self.copies[block]
        else:
            parent, tokens = event["parent_block_hash"], event["token_ids"]
            keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
            for at, block in enumerate(event["block_hashes"]):
                self.copies[block] += 1
                own = tuple(tokens[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE])
                self._children[parent, own, str(keys[at])] = parent = block


def _consecutive_ports(ranks: int) -> tuple[int, int]:
    """Two bases; rank r uses base + r of each."""
    while True:
        first, second = free_ports(2)
        free = all(_is_free(base + rank) for base in (first, second) for rank in range(ranks))
        if free and abs(first - second) >= ranks:
            return first, second


def _is_free(port: int) -> bool:
    with socket.socket() as each:
        try:
            each.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

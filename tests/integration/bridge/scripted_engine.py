"""An engine whose events the test writes: real HTTP, real PUB and ROUTER sockets, and every way to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq
import zmq.asyncio

from tests.support.ports import free_ports
from web.server import HttpServer, Request, Responder

FIXTURES = Path(__file__).parents[2] / "fixtures" / "engine_streams"
END = b"\xff" * 8


def read_frames(name: str) -> list[tuple[bytes, int, bytes]]:
    """(topic, seq, payload) of every message of a captured stream (per message: count, then length and bytes)."""
    data = (FIXTURES / f"{name}.frames").read_bytes()
    messages = []
    at = 0
    while at < len(data):
        count, at = data[at], at + 1
        frames = []
        for _ in range(count):
            size = int.from_bytes(data[at : at + 4], "big")
            frames.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        messages.append((frames[0], int.from_bytes(frames[1], "big"), frames[2]))
    return messages


def batch(*events: Any, rank: int | None = 0, ts: float = 1.0) -> bytes:
    """One payload as an engine encodes it."""
    return msgspec.msgpack.encode([ts, list(events), rank])


def stored(
    hashes: list[int],
    tokens: list[int],
    parent: int | None = None,
    block_size: int = 4,
    shape: Literal["map", "array"] = "map",
) -> Any:
    """One BlockStored event of a device block group."""
    if shape == "array":
        return ["BlockStored", hashes, parent, tokens, block_size, None, "GPU", None, None, 0, "full_attention", None]
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def removed(hashes: list[int], shape: Literal["map", "array"] = "map") -> Any:
    """One BlockRemoved event."""
    if shape == "array":
        return ["BlockRemoved", hashes, "GPU", 0]
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}


@dataclass
class Rank:
    """One rank's sockets and history. ``replay``: how the ROUTER behaves."""

    events: zmq.asyncio.Socket
    router: zmq.asyncio.Socket
    events_port: int
    replay_port: int
    history: list[tuple[int, bytes]] = field(default_factory=list)
    next_seq: int = 0
    replay: Literal["normal", "only_end", "silent"] = "normal"
    replay_requests: list[int] = field(default_factory=list)


class ScriptedEngine:
    """``async with ScriptedEngine(ranks=2) as engine``; the test calls `publish` and friends."""

    def __init__(
        self,
        *,
        ranks: int = 1,
        block_size: int | None = 32,
        model: str = "tiny",
        topic: bytes = b"kv@test-pod@tiny",
        with_topic: bool = True,
        discovery: Literal["kv_event_sources", "server_info"] | bool = False,
        owner: str = "vllm",
        metrics: bool = True,
        connect: bool = False,
    ) -> None:
        self.block_size = block_size
        self.model = model
        self.started_at = 1_795_973_180.25
        self.scrapes = 0
        self.failing: int | None = None
        self._topic = topic
        self._with_topic = with_topic
        self._discovery = discovery
        self._owner = owner
        self._metrics = metrics
        self._connect = connect
        self._count = ranks
        self._ports = _consecutive_ports(ranks) if discovery == "server_info" else [(0, 0)] * ranks
        self._context = zmq.asyncio.Context()
        self._server = HttpServer(self._answer)
        self._tasks: list[asyncio.Task[None]] = []
        self.ranks: list[Rank] = []

    async def __aenter__(self) -> ScriptedEngine:
        await self._server.start("127.0.0.1", 0)
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._shut()
        self._context.destroy(linger=0)
        await self._server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"

    def event_endpoints(self) -> tuple[str, ...]:
        return tuple(f"tcp://127.0.0.1:{rank.events_port}" for rank in self.ranks)

    def replay_endpoints(self) -> tuple[str, ...]:
        return tuple(f"tcp://127.0.0.1:{rank.replay_port}" for rank in self.ranks)

    async def publish(self, payload: bytes, *, rank: int = 0, seq: int | None = None, lost: bool = False) -> int:
        """Send one batch; ``lost``: it takes its number and stands in the history, but nobody hears it."""
        at = self.ranks[rank]
        number = at.next_seq if seq is None else seq
        at.next_seq = number + 1
        at.history.append((number, payload))
        if not lost:
            await at.events.send_multipart([self._topic, number.to_bytes(8, "big"), payload])
        return number

    async def resend(self, number: int, *, rank: int = 0) -> None:
        """Publish an old batch once more."""
        payload = dict(self.ranks[rank].history)[number]
        await self.ranks[rank].events.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    def forget_before(self, seq: int, rank: int = 0) -> None:
        """The replay buffer no longer reaches back beyond ``seq``."""
        at = self.ranks[rank]
        at.history = [entry for entry in at.history if entry[0] >= seq]

    async def restart(self) -> None:
        """The process dies and comes back on the same ports: sequence 0, empty history, another start time."""
        self._ports = [(rank.events_port, rank.replay_port) for rank in self.ranks]
        await self._shut()
        self.started_at += 100.0
        await self._open()

    # Sockets

    async def _open(self) -> None:
        ranks: list[Rank] = []
        for events_port, replay_port in self._ports:
            events = self._context.socket(zmq.PUB)
            events.set(zmq.LINGER, 0)
            router = self._context.socket(zmq.ROUTER)
            router.set(zmq.LINGER, 0)
            if self._connect:
                events_port = events_port or free_ports(1)[0]
                events.connect(f"tcp://127.0.0.1:{events_port}")
            else:
                events_port = await _bind(events, events_port)
            rank = Rank(events, router, events_port, await _bind(router, replay_port))
            ranks.append(rank)
            self._tasks.append(asyncio.get_running_loop().create_task(self._replay(rank)))
        self.ranks = ranks  # at once: its pages never show an engine without sources

    async def _shut(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for rank in self.ranks:
            rank.events.close()
            rank.router.close()

    async def _replay(self, rank: Rank) -> None:
        while True:
            frames = await rank.router.recv_multipart()
            if len(frames) != 3 or frames[1] != b"":
                continue
            start = int.from_bytes(frames[2], "big")
            rank.replay_requests.append(start)
            if rank.replay == "silent":
                continue
            topic = [self._topic] if self._with_topic else []
            if rank.replay == "normal":
                for number, payload in rank.history:
                    if number >= start:
                        await rank.router.send_multipart([frames[0], b"", *topic, number.to_bytes(8, "big"), payload])
            last = [b""] if self._with_topic else []
            await rank.router.send_multipart([frames[0], b"", *last, END, b""])

    # Pages

    async def _answer(self, request: Request, responder: Responder) -> None:
        if self.failing is not None:
            responder.send(self.failing, [], b"")
        elif request.path == "/v1/models":
            model = {"id": self.model, "object": "model", "owned_by": self._owner, "max_model_len": 640}
            responder.send(200, [(b"content-type", b"application/json")], json.dumps({"data": [model]}).encode())
        elif request.path == "/metrics" and self._metrics:
            self.scrapes += 1
            responder.send(200, [(b"content-type", b"text/plain")], self._metrics_page().encode())
        elif request.path == "/version":
            responder.send(200, [], b'{"version": "0.32.0"}')
        elif request.path == "/server_info" and self._discovery == "server_info":
            responder.send(200, [], json.dumps(self._server_info()).encode())
        elif request.path == "/kv_event_sources" and self._discovery in (True, "kv_event_sources"):
            host = "127.0.0.1" if self._connect else "*"
            told = {
                str(number): {
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": f"tcp://{host}:{rank.events_port}",
                    "replay_endpoint": f"tcp://*:{rank.replay_port}",
                    "topic": self._topic.decode(),
                }
                for number, rank in enumerate(self.ranks)
            }
            responder.send(200, [], json.dumps(told).encode())
        else:
            responder.send(404, [], b"")

    def _server_info(self) -> dict[str, Any]:
        """As SGLang says it: one base port for all ranks, and the worker's own host."""
        first = self.ranks[0]
        return {
            "version": "0.5.23",
            "page_size": self.block_size,
            "kv_events": {
                "publisher": "zmq",
                "endpoint_host": "*",
                "endpoint_port_base": first.events_port,
                "topic": self._topic.decode(),
                "block_size": self.block_size,
                "dp_size": self._count,
                "replay_endpoint_port_base": first.replay_port,
            },
        }

    def _metrics_page(self) -> str:
        size = "None" if self.block_size is None else str(self.block_size)
        lines = [
            "# TYPE vllm:num_requests_running gauge",
            *(
                f'vllm:num_requests_running{{engine="{rank}",model_name="tiny"}} {rank + 1}.0'
                for rank in range(self._count)
            ),
            "# TYPE vllm:cache_config_info gauge",
            f'vllm:cache_config_info{{block_size="{size}",engine="0",num_gpu_blocks="64"}} 1.0',
            f"process_start_time_seconds {self.started_at}",
        ]
        return "\n".join(lines) + "\n"


async def _bind(bound: zmq.asyncio.Socket, port: int) -> int:
    if port == 0:
        return int(bound.bind_to_random_port("tcp://127.0.0.1"))
    async with asyncio.timeout(30):
        while True:
            try:
                bound.bind(f"tcp://127.0.0.1:{port}")
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
                await asyncio.sleep(0.01)  # ZeroMQ closes the old socket in a thread of its own
            else:
                return port


def _consecutive_ports(ranks: int) -> list[tuple[int, int]]:
    """(events, replay) of each rank, both counted up from a base."""
    while True:
        base = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(base, base + 2 * ranks):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return [(base + rank, base + ranks + rank) for rank in range(ranks)]

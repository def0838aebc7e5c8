"""The simulated pool as a process: real ZeroMQ, real HTTP, and what a bridge has to notice."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from load.pool.client import PoolClient, PoolUnreachableError
from tests.support.processes import python_process

WAIT_MS = 10_000


@dataclass
class RunningPool:
    """A pool process, a client of it, and a SUB socket on its stream."""

    client: PoolClient
    socket: zmq.asyncio.Socket

    async def messages(self, events: int) -> list[tuple[int, list[dict[str, Any]]]]:
        """(number, events) of the next messages, until ``events`` events came."""
        taken: list[tuple[int, list[dict[str, Any]]]] = []
        while sum(len(maps) for _, maps in taken) < events:
            assert await self.socket.poll(WAIT_MS), f"no message; {taken}"
            topic, seq, payload = await self.socket.recv_multipart()
            assert topic == b""
            taken.append((int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)[1]))
        return taken

    async def subscribed(self) -> None:
        """Until messages arrive: a late subscriber misses the first ones."""
        for attempt in range(200):
            await self.client.put([f"hello-{attempt}"])
            if await self.socket.poll(50):
                while await self.socket.poll(50):
                    await self.socket.recv_multipart()
                return
        raise AssertionError("the subscription never took hold")


@asynccontextmanager
async def running_pool(directory: Path, *options: str) -> AsyncIterator[RunningPool]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    async with python_process("load.pool", *options, directory=directory, name="pool") as process:
        ready = json.loads(await process.wait_line())
        if ready["kv_events"]:
            socket.connect(ready["kv_events"])
        client = PoolClient(ready["url"])
        try:
            yield RunningPool(client, socket)
        finally:
            await client.close()
            socket.close()
            context.term()


async def test_events_lists_and_reports_agree(tmp_path: Path) -> None:
    """What is told, listed and reported of puts, removals, offload and silent eviction."""
    async with running_pool(tmp_path, "--capacity-bytes", "500") as pool:
        await pool.subscribed()
        await pool.client.remove(all=True)
        start = (await pool.messages(1))[-1][0]
        while await pool.socket.poll(50):
            start = int.from_bytes((await pool.socket.recv_multipart())[1], "big")
        keys = [f"k{number}" for number in range(100)]
        assert set(await pool.client.put(keys, 5, group_ids=["g"] * 100)) == {0}
        messages = await pool.messages(100)
        assert [number for number, _ in messages] == [start + 1, start + 2]
        assert [fields["object_key"] for _, maps in messages for fields in maps] == keys
        assert await pool.client.keys() == set(keys)
        assert await pool.client.put(["late"], 50) == [0], "ten objects leave for it, silently"
        assert [fields["object_key"] for _, maps in await pool.messages(1) for fields in maps] == ["late"]
        page = (await pool.client.fetch("GET", "/metrics")).decode()
        assert "\nmaster_evicted_key_count_mem 10\n" in page
        assert await pool.client.probe(["k0", "k50"]) == [False, True]
        assert await pool.client.offload(["k50"]) == 1
        answer = await pool.client.get_json("/batch_query_keys?keys=k50,k0,la%74e")
        assert answer["data"]["k0"]["ok"] is False
        assert len(answer["data"]["k50"]["values"]) == len(answer["data"]["k50"]["local_disk_values"]) == 1
        assert answer["data"]["late"]["values"][0]["size_"] == 50
        status = await pool.client.get_json("/kv_events/status")
        assert status["enabled"] is True
        assert status["published_batches"] == start + 4
        segments = await pool.client.get_json("/get_segments_detail")
        assert [row["allocator_used_bytes"] for row in segments["segments"]] == [500]


async def test_what_only_a_reconcile_notices(tmp_path: Path) -> None:
    """A client's death and a restart: segments and keys vanish without an event; numbers begin again at 1."""
    options = ("--client-ttl-s", "0.2", "--client-suspicion-s", "0.2")
    async with running_pool(tmp_path, *options) as pool:
        await pool.subscribed()
        await pool.client.mount("engine-1", 100, "10.0.0.1:1")
        await pool.client.put(["mine"], client="engine-1")
        await pool.messages(1)
        assert b"10.0.0.1:1\n" in await pool.client.fetch("GET", "/get_all_segments")
        await pool.client.misbehave(kill_client="engine-1")
        for _ in range(200):
            if await pool.socket.poll(20) or not await pool.client.ping("engine-1"):
                break
        assert not await pool.client.ping("engine-1")
        assert await pool.client.probe(["mine"]) == [False]
        assert b"10.0.0.1:1" not in await pool.client.fetch("GET", "/get_all_segments")
        await pool.client.misbehave(drop_batches=1)
        await pool.client.put(["lost"])
        await pool.client.put(["kept"])
        [(number, maps)] = await pool.messages(1)
        assert maps[0]["object_key"] == "kept"
        assert (await pool.client.get_json("/kv_events/status"))["published_batches"] == number
        await pool.client.misbehave(restart=True)
        assert await pool.client.keys() == set()
        for attempt in range(200):
            await pool.client.put([f"again-{attempt}"])
            if await pool.socket.poll(50):
                break
        [(number, maps)] = await pool.messages(1)
        assert maps[0]["event_id"] == number == int(maps[0]["object_key"].removeprefix("again-")) + 1


async def test_flags_of_the_admin_endpoints(tmp_path: Path) -> None:
    """Errors, a hang, and a master without events, each only where it was asked for."""
    async with running_pool(tmp_path, "--kv-events", "false") as pool:
        assert (await pool.client.get_json("/kv_events/status"))["enabled"] is False
        await pool.client.misbehave(error_requests=1, only_path="/get_all")
        assert (await pool.client.fetch("GET", "/metrics")).startswith(b"# TYPE")
        with pytest.raises(PoolUnreachableError, match="503"):
            await pool.client.keys()
        assert await pool.client.keys() == set()
        impatient = PoolClient(pool.client.url, timeout_s=0.1)
        await pool.client.misbehave(hang_requests=1)
        with pytest.raises(PoolUnreachableError):
            await impatient.keys()
        await impatient.close()
        assert await pool.client.keys() == set()
        for path, body in (("put", {"keys": [""]}), ("evict", {"what": 1}), ("remove", {"regex": "("})):
            with pytest.raises(PoolUnreachableError, match="400"):
                await pool.client.post(path, body)

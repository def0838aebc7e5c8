"""The bridge between real sockets: a scripted engine's HTTP, PUB and ROUTER, and a real nats-server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bus import subjects
from bus.interface import Bus
from bus.nats import connect
from schemas.base import from_json
from schemas.kv import KvHeaders
from schemas.worker import WorkerState
from tests.integration.bridge.house import Watcher, nats_server, running_bridge, until
from tests.integration.bridge.scripted_engine import ScriptedEngine, batch, stored


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    async with nats_server(tmp_path) as address:
        yield address


@pytest.fixture
async def bus(url: str) -> AsyncIterator[Bus]:
    connection = await connect(url, name="test")
    yield connection
    await connection.close()


def kv_messages(watcher: Watcher) -> list[tuple[KvHeaders, bytes]]:
    return [
        (KvHeaders.from_headers(dict(message.headers)), message.payload)
        for message in watcher.messages
        if message.subject.startswith("tg.v1.kv.")
    ]


def block(number: int) -> bytes:
    return batch(stored([100 + number], [number * 4 + i for i in range(4)]), ts=float(number))


async def test_engine_becomes_a_worker(url: str, bus: Bus) -> None:
    """Profile, load and health are learned over HTTP, told each heartbeat, and kept in the registry bucket."""
    watcher = await Watcher.of(bus, subjects.worker_state("w"))
    async with ScriptedEngine(block_size=4) as engine, running_bridge(engine, url) as service:
        await until(lambda: bool(watcher.states()) and watcher.states()[-1].health == "ready", "ready")
        await until(
            lambda: bool(watcher.states()[-1].streams) and watcher.states()[-1].streams[0].state == "synced", "synced"
        )
        state = watcher.states()[-1]
        assert (state.profile.model, state.profile.engine, state.profile.engine_version) == ("tiny", "vllm", "0.32.0")
        assert (state.profile.block_size, state.profile.block_size_from, state.profile.kv_tokens) == (4, "metrics", 256)
        assert state.profile.features == ("kv_events", "kv_replay")
        assert [(load.rank, load.running) for load in state.loads] == [(0, 1)]
        assert (state.streams[0].incarnation, state.streams[0].seq) == ("1795973180250.0", -1)
        assert service.not_ready() is None
        registry = await bus.key_value(subjects.BUCKET_WORKERS)
        entry = await registry.get("w")
        assert entry is not None
        assert entry.value is not None
        assert from_json(entry.value, WorkerState).profile == state.profile
    await until(lambda: watcher.states()[-1].health == "left", "left")
    assert watcher.states()[-1].reason == "stopped"
    numbers = [state.seq for state in watcher.states()]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


async def test_batches_are_forwarded_untouched(url: str, bus: Bus) -> None:
    """The engine's own bytes, in order, with rank, incarnation, seq and dialect in the headers; `first` marked once."""
    watcher = await Watcher.of(bus, "tg.v1.kv.*.*")
    async with ScriptedEngine() as engine, running_bridge(engine, url):
        sent = [block(number) for number in range(3)]
        for payload in sent:
            await engine.publish(payload)
        await until(lambda: len(kv_messages(watcher)) == 3, "three batches")
    assert [payload for _, payload in kv_messages(watcher)] == sent
    assert [(h.worker, h.rank, h.incarnation, h.seq, h.first) for h, _ in kv_messages(watcher)] == [
        ("w", 0, "1795973180250.0", 0, True),
        ("w", 0, "1795973180250.0", 1, False),
        ("w", 0, "1795973180250.0", 2, False),
    ]

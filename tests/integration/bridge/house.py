"""Runs bridges and indexers in the test's own loop, against a real nats-server and real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from bus.interface import Bus, BusMessage
from bus.nats import connect
from bus.tasks import Tasks
from kvcore.hashing import chain_hashes, pack_tokens
from replica.source import Source
from schemas.base import from_json
from schemas.worker import WorkerState
from services.bridge.config import BridgeSettings
from services.bridge.shell.service import BridgeService
from services.indexer.config import IndexerSettings
from services.indexer.shell.service import IndexerService
from tests.integration.bridge.scripted_engine import ScriptedEngine

WAIT_S = 30.0


class Runnable(Protocol):
    async def start(self, bus: Bus, tasks: Tasks) -> None: ...
    async def stop(self, timeout_s: float) -> None: ...


@asynccontextmanager
async def running(url: str, service: Runnable, name: str) -> AsyncIterator[Bus]:
    """A service with a connection of its own; what failed in it fails the test."""
    bus = await connect(url, name=name)
    tasks = Tasks()
    await service.start(bus, tasks)
    try:
        yield bus
    finally:
        await service.stop(2.0)
        await tasks.stop()
        await bus.close()
        assert not tasks.failed.done(), tasks.failed.result()


def bridge_settings(engine: ScriptedEngine, url: str, **changes: object) -> BridgeSettings:
    """Settings for tests: quick scrapes and heartbeats, the engine's endpoints as configured ones."""
    values: dict[str, object] = {
        "engine_url": engine.url,
        "nats_url": url,
        "worker": "w",
        "instance": "bridge-w",
        "kv_events": engine.event_endpoints(),
        "kv_replay": engine.replay_endpoints(),
        "scrape_interval_s": 0.05,
        "heartbeat_interval_s": 0.1,
        "replay_timeout_s": 1.0,
        "replay_retry_s": 0.1,
        "identify_timeout_s": 2.0,
        **changes,
    }
    return BridgeSettings(**values)  # type: ignore[arg-type]  # values are checked by the test's own eyes


@asynccontextmanager
async def running_bridge(engine: ScriptedEngine, url: str, **changes: object) -> AsyncIterator[BridgeService]:
    """A bridge of ``engine``."""
    service = BridgeService(bridge_settings(engine, url, **changes))
    async with running(url, service, "bridge-w"):
        yield service


async def until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait for something that this process can see; polls, because it has no event of its own."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {what}") from None


async def until_async(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = WAIT_S) -> None:
    """As `until`, for a condition that asks somebody."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await condition():  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {what}") from None


def chain_of_prompt(prompt: list[int], block_size: int) -> bytes:
    """The packed chain of a prompt's full blocks."""
    return chain_hashes(pack_tokens(prompt), block_size)


class Watcher:
    """Everything that was said on some subjects, as it comes."""

    def __init__(self) -> None:
        self.messages: list[BusMessage] = []

    @classmethod
    async def of(cls, bus: Bus, *wanted: str) -> Watcher:
        watcher = cls()
        for subject in wanted:
            await bus.subscribe(subject, watcher.messages.append)
        await bus.flush()
        return watcher

    def states(self) -> list[WorkerState]:
        """The worker facts among them."""
        return [from_json(m.payload, WorkerState) for m in self.messages if ".worker.state." in m.subject]

    def newest(self) -> WorkerState | None:
        states = self.states()
        return states[-1] if states else None


@asynccontextmanager
async def running_indexer(url: str, **changes: object) -> AsyncIterator[IndexerService]:
    """An indexer."""
    values: dict[str, object] = {"nats_url": url, "instance": "indexer-1", "worker_lost_s": 2.0, **changes}
    service = IndexerService(IndexerSettings(**values))  # type: ignore[arg-type]  # as in `bridge_settings`
    async with running(url, service, "indexer-1"):
        yield service


def source_of(indexer: IndexerService, rank: int = 0, worker: str = "w") -> Source:
    """A source that must be known by now."""
    return indexer.core.replica.sources[worker][rank]


async def until_applied(indexer: IndexerService, seq: int, rank: int = 0) -> None:
    """The indexer is synced (or as synced as it will be) with batch ``seq`` of worker ``w``."""

    def applied() -> bool:
        source = indexer.core.replica.sources.get("w", {}).get(rank)
        return source is not None and source.machine.last == seq and source.health in ("synced", "approximate")

    await until(applied, f"batch {seq} of rank {rank} applied")

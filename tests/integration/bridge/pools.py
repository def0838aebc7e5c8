"""Runs the simulated master as a process, and bridges of it in the test's own loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load.pool.client import PoolClient
from services.bridge.config import BridgeSettings
from services.bridge.shell.pool_service import PoolBridgeService
from tests.integration.bridge.house import running
from tests.support.processes import HelperProcess, python_process


@dataclass(frozen=True)
class RunningPool:
    """Where it is, and a client of its store."""

    process: HelperProcess
    url: str
    events: str
    client: PoolClient

    @property
    def same_place(self) -> dict[str, object]:
        """Settings with which another one takes this one's ports."""
        return {"http_port": int(self.url.rpartition(":")[2]), "kv_events_endpoint": self.events}


@asynccontextmanager
async def running_pool(directory: Path, name: str = "pool", **settings: object) -> AsyncIterator[RunningPool]:
    """``python -m load.pool``."""
    arguments = [f"--{key.replace('_', '-')}={_text(value)}" for key, value in settings.items()]
    async with python_process("load.pool", *arguments, directory=directory, name=name) as process:
        ready: Mapping[str, Any] = json.loads(await process.wait_line())
        client = PoolClient(ready["url"])
        try:
            yield RunningPool(process, ready["url"], ready["kv_events"], client)
        finally:
            await client.close()


def pool_bridge_settings(pool: RunningPool, url: str, **changes: object) -> BridgeSettings:
    """Settings for tests: quick looks, heartbeats and lists."""
    values: dict[str, object] = {
        "nats_url": url,
        "instance": "bridge-pool-a",
        "pool": "pool-a",
        "pool_url": pool.url,
        "pool_events": pool.events or "tcp://127.0.0.1:9",  # a master without events listens nowhere
        "pool_poll_s": 0.1,
        "pool_reconcile_min_s": 0.1,
        "heartbeat_interval_s": 0.1,
        **changes,
    }
    return BridgeSettings(**values)  # type: ignore[arg-type]  # values are checked by the test's own eyes


@asynccontextmanager
async def running_pool_bridge(pool: RunningPool, url: str, **changes: object) -> AsyncIterator[PoolBridgeService]:
    """A bridge of ``pool``."""
    service = PoolBridgeService(pool_bridge_settings(pool, url, **changes))
    async with running(url, service, "bridge-pool-a"):
        yield service


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""``deploy/nats-cluster/nats.conf`` on three real servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from bus.errors import BusError
from bus.nats import NatsBus, NatsOptions, connect
from bus.subjects import BUCKET_LEADERS
from tests.support.nats import NatsServer
from tests.support.ports import free_ports

T = TypeVar("T")

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "nats-cluster" / "nats.conf"
ELECTION_S = 20.0
"""A stream's servers notice after 4 to 9 s that the one that led it is gone; twice that, for a slow machine."""


@contextmanager
def running_cluster(directory: Path) -> Iterator[dict[str, NatsServer]]:
    """By name. Addresses, names and stores are replaced in our file, nothing else."""
    routes = free_ports(3)
    text = CONFIGURATION.read_text()
    for number, port in enumerate(routes):
        old = f"nats://nats-{number}.nats:6222"
        assert old in text
        text = text.replace(old, f"nats://127.0.0.1:{port}")
    servers = {}
    try:
        for number, port in enumerate(routes):
            own = text
            for line, replacement in (
                ("server_name: $NATS_SERVER_NAME", f"server_name: nats-{number}"),
                ("listen: 0.0.0.0:4222", "listen: 127.0.0.1:-1"),
                ("http: 0.0.0.0:8222", "http: 127.0.0.1:-1"),
                ("listen: 0.0.0.0:6222", f"listen: 127.0.0.1:{port}"),
                ("store_dir: /data", f"store_dir: {json.dumps(str(directory / f'data-{number}'))}"),
            ):
                assert line in own
                own = own.replace(line, replacement)
            servers[f"nats-{number}"] = NatsServer(directory / f"nats-{number}", config=own, whole_config=True).start()
        yield servers
    finally:
        for server in servers.values():
            server.kill()


@asynccontextmanager
async def client(servers: dict[str, NatsServer], name: str) -> AsyncIterator[NatsBus]:
    """A connection that knows all three and makes streams on all three."""
    url = ",".join(server.url for server in servers.values())
    bus = await connect(url, name=name, timeout_s=20, options=NatsOptions(replicas=3))
    try:
        yield bus
    finally:
        await bus.close()


async def made(bus: NatsBus) -> str:
    """The trace stream and the leaders' bucket, once the servers have found each other; who leads the stream."""
    async with asyncio.timeout(40):
        while True:
            try:
                await bus.key_value(BUCKET_LEADERS)
                info = await bus.js.ensure_trace_stream()
            except BusError:
                await asyncio.sleep(0.2)
                continue
            if info.cluster is not None and info.cluster.leader:
                assert info.config.num_replicas == 3
                return info.cluster.leader
            await asyncio.sleep(0.1)


async def bucket_leader(bus: NatsBus) -> str:
    """Which server leads the leaders' bucket."""
    name = f"KV_{BUCKET_LEADERS}"
    async with asyncio.timeout(40):
        while True:
            info = await settled(lambda: bus.js.call(name, bus.js.manager.stream_info(name)))
            if info.cluster is not None and info.cluster.leader:
                return info.cluster.leader
            await asyncio.sleep(0.1)


async def led_by(bus: NatsBus, server: str) -> None:
    """Until this server leads the leaders' bucket (again): on a busy machine servers elect whenever they miss a
    heartbeat."""
    subject = f"$JS.API.STREAM.LEADER.STEPDOWN.KV_{BUCKET_LEADERS}"
    asked = json.dumps({"placement": {"preferred": server}}).encode()
    async with asyncio.timeout(60):
        while await bucket_leader(bus) != server:
            with suppress(BusError):
                await bus.request(subject, asked, timeout_s=5)
            await asyncio.sleep(0.1)


async def settled(ask: Callable[[], Awaitable[T]]) -> T:
    """What servers answer once they have elected, or have time."""
    async with asyncio.timeout(40):
        while True:
            with suppress(BusError):
                return await ask()
            await asyncio.sleep(0.1)

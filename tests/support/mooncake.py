"""A real Mooncake store as a test's part, on CPU over loopback TCP (spec: pool-events §5): its master, and clients.

Found through ``MOONCAKE_MASTER`` (the binary of ``mooncake-transfer-engine-cuda13``, the wheel that publishes events)
and ``MOONCAKE_PYTHON`` (a Python with ``mooncake-transfer-engine-non-cuda``); ``make mooncake`` installs both.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_ports
from tests.support.processes import REPOSITORY, HelperProcess, start_process
from web.client import HttpClient, Timeouts
from web.errors import WebError

MASTER = "MOONCAKE_MASTER"
INTERPRETER = "MOONCAKE_PYTHON"
START_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 60.0
SEGMENT_BYTES = 16 << 20
"""The smallest segment that was seen to work."""

_ANSWER = b"answer: "
_OFFLOAD = {
    "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "file_per_key_storage_backend",
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(64 << 20),
}
"""Without these nothing of a test's size reaches the disk (spec: pool-events §5)."""


def installed(variable: str) -> str:
    """What the variable names. Skips the test with a reason when it is not there."""
    found = os.environ.get(variable)
    if not found:
        pytest.skip(f"no Mooncake here: `make mooncake` installs it, and `make test-pool` sets {variable}")
    if not Path(found).is_file():
        pytest.skip(f"{variable}={found} does not exist")
    return found


class MooncakeMaster:
    """One master, its ports the same over restarts. A client that is silent for ``client_ttl_s`` is suspected, and lost
    as long after that."""

    def __init__(self, directory: Path, *, client_ttl_s: int = 2, **flags: object) -> None:
        self._binary = installed(MASTER)
        self._directory = directory
        self._flags = {"client_active_ttl_sec": client_ttl_s, "client_suspicion_ttl_sec": client_ttl_s, **flags}
        self._starts = 0
        self._process: HelperProcess | None = None
        rpc, http, events = free_ports(3)
        self.address = f"127.0.0.1:{rpc}"
        self.url = f"http://127.0.0.1:{http}"
        self.events = f"tcp://127.0.0.1:{events}"
        self._http = HttpClient()

    async def start(self) -> None:
        """Until it answers."""
        host, _, port = self.address.rpartition(":")
        flags = {
            "rpc_address": host,
            "rpc_port": port,
            "metrics_host": host,
            "metrics_port": self.url.rpartition(":")[2],
            "enable_metric_reporting": "false",
            "default_kv_lease_ttl": 60_000,
            "enable_kv_events": "true",
            "kv_events_bind_endpoint": self.events,
            "kv_events_backend_id": "pool-a",
            "logtostderr": 1,
            **self._flags,
        }
        self._starts += 1
        command = [self._binary, *(f"--{name}={value}" for name, value in flags.items())]
        self._process = await start_process(command, self._directory, name=f"master-{self._starts}")
        async with asyncio.timeout(START_TIMEOUT_S):
            while await self._answers() is None:
                assert self._process.returncode is None, self._process.output
                await asyncio.sleep(0.05)

    async def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            await self._process.kill()

    async def keys(self) -> set[str]:
        """What it lists now."""
        body = await self._answers("/get_all_keys")
        assert body is not None
        return set(body.decode().split("\n")) - {""}

    async def close(self) -> None:
        """Gone, in whatever state it is."""
        await self._http.close()
        if self._process is not None:
            await self._process.close()

    async def _answers(self, path: str = "/kv_events/status") -> bytes | None:
        try:
            answer = await self._http.fetch("GET", self.url + path, [], b"", Timeouts(total_s=5))
        except WebError:
            return None
        return answer.body if answer.status == 200 else None


class MooncakeClient:
    """A client that lends a segment to the store, in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, err: Path) -> None:
        self._process = process
        self._err = err

    @classmethod
    async def start(
        cls, master: MooncakeMaster, directory: Path, tenant: str = "", ssd: Path | None = None
    ) -> MooncakeClient:
        """Until the store has taken its segment. ``ssd``: where objects are copied to, by a master that offloads."""
        script = str(REPOSITORY / "tests" / "support" / "mooncake_store.py")
        [port] = free_ports(1)
        path = directory / f"store-{port}.err"
        with path.open("wb") as err:
            process = await asyncio.create_subprocess_exec(
                installed(INTERPRETER),
                "-P",  # our module of the same name shall not be the store's package
                script,
                f"127.0.0.1:{port}",
                master.address,
                str(SEGMENT_BYTES),
                tenant,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=err,
                env=os.environ if ssd is None else {**os.environ, **_OFFLOAD, "SSD_PATH": str(ssd)},
            )
        client = cls(process, path)
        assert await client._read() == ["ready", 0]
        return client

    async def put(self, keys: list[str], size_bytes: int = 100) -> list[int]:
        """Result codes: 0, or -200 for no room."""
        return list(await self._ask("put", keys, size_bytes))

    async def remove(self, keys: list[str]) -> list[int]:
        """Result codes: 0, or -706 where a lease protects the object."""
        return list(await self._ask("remove", keys))

    async def remove_all(self) -> None:
        await self._ask("remove_all")

    async def read(self, key: str) -> int:
        """Bytes got; it is leased from then on."""
        return int(await self._ask("get", key))

    async def leave(self) -> None:
        """Close the store: its segment is unmounted, and all objects in it are gone."""
        await self._ask("close")
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL; nothing when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def _ask(self, *question: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        await self._process.stdin.drain()
        return await self._read()

    async def _read(self) -> Any:
        assert self._process.stdout is not None
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while line := await self._process.stdout.readline():
                if line.startswith(_ANSWER):
                    return json.loads(line.removeprefix(_ANSWER))
        raise AssertionError(f"the store's client ended\n{self._err.read_text(errors='replace')[-4000:]}")


@asynccontextmanager
async def mooncake_master(directory: Path, **flags: Any) -> AsyncIterator[MooncakeMaster]:
    """A master that answers."""
    master = MooncakeMaster(directory, **flags)
    try:
        await master.start()
        yield master
    finally:
        await master.close()


@asynccontextmanager
async def mooncake_client(
    master: MooncakeMaster, directory: Path, tenant: str = "", ssd: Path | None = None
) -> AsyncIterator[MooncakeClient]:
    """A client whose segment is mounted."""
    client = await MooncakeClient.start(master, directory, tenant, ssd)
    try:
        yield client
    finally:
        await client.kill()

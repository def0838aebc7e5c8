"""A whole system under ``tidegate up``, and what a test wants to know of it."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.support.processes import HelperProcess, start_process


class RunningSystem:
    """``addresses``: what ``up --json`` printed."""

    def __init__(self, process: HelperProcess, addresses: Mapping[str, Any], workdir: Path) -> None:
        self.process = process
        self.addresses = addresses
        self.workdir = workdir

    @property
    def url(self) -> str:
        return str(self.addresses["url"])

    @property
    def nats_url(self) -> str:
        return str(self.addresses["nats_url"])

    def child_pid(self, *words: str) -> int | None:
        """The child whose command line holds all of ``words``; ``None`` while there is none."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
                command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except (FileNotFoundError, ProcessLookupError, IndexError):
                continue
            if int(parent) == self.process.pid and all(word in command for word in words):
                return int(entry.name)
        return None

    def metric(self, child: str, name: str) -> float:
        """The sum of a metric's samples on a service's page."""
        page = self.addresses["health"][child].replace("/readyz", "/metrics")
        with urlopen(page, timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        values = [line.rsplit(" ", 1)[1] for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(float(value) for value in values)

    def logs(self) -> str:
        """The end of every child's log, for a failing test."""
        paths = sorted((self.workdir / "logs").glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)


@asynccontextmanager
async def running_system(directory: Path, *options: str) -> AsyncIterator[RunningSystem]:
    """``tidegate up --json`` on a free port in ``directory``, ready; killed at the end if it still runs."""
    workdir = directory / "system"
    command = [sys.executable, "-m", "tidegate", "up", "--json", "--port", "0", "--workdir", str(workdir), *options]
    process = await start_process(command, directory, name="up")
    try:
        addresses = json.loads(await process.wait_line(90))
        yield RunningSystem(process, addresses, workdir)
    finally:
        await process.close()

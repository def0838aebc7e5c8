"""One child process: started so that it dies with us, its output in a bounded log, ended by signals with deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import site
import sys
from pathlib import Path

import services
from tidegate.supervisor import launch

_TAIL_BYTES = 4_096
_KILL_WAIT_S = 5.0


class ChildLog:
    """``<folder>/<name>.log`` and one older file; the child appends, `turn_over` keeps it under ``limit_bytes``."""

    def __init__(self, folder: Path, name: str, limit_bytes: int) -> None:
        self.path = folder / f"{name}.log"
        self._older = folder / f"{name}.log.1"
        self._limit_bytes = limit_bytes

    def open(self) -> int:
        """A descriptor to hand to the child; appending, so that cutting the file under it is safe."""
        self.turn_over()
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def turn_over(self) -> None:
        """Copy and cut when the file is too large (the child holds it open and goes on writing)."""
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_size > self._limit_bytes:
                with contextlib.suppress(OSError):  # on a full disk the cut matters more than the copy
                    shutil.copyfile(self.path, self._older)
                os.truncate(self.path, 0)

    def last_lines(self, count: int) -> list[str]:
        """The newest lines, for an error message."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self.path.stat().st_size - _TAIL_BYTES))
                return file.read().decode(errors="replace").splitlines()[-count:]
        except FileNotFoundError:
            return []


class ChildProcess:
    """A running child in a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: tuple[str, ...], log: ChildLog, cwd: Path) -> ChildProcess:
        """Raises `OSError` when the system cannot do it now (no disk, no memory). A program that does not exist
        ends with code 1, its log says why."""
        wrapper = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid())]
        output = log.open()
        try:
            process = await asyncio.create_subprocess_exec(
                *wrapper,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=cwd,
                env=child_environment(),
                start_new_session=True,
            )
        finally:
            os.close(output)
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        """The exit code; negative: the signal that killed it."""
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """To its whole group; nothing when it has ended."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def stop(self, timeout_s: float) -> bool:
        """SIGTERM, and SIGKILL after ``timeout_s``; ``False`` when it had to be killed."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
            return True
        except TimeoutError:
            self.signal(signal.SIGKILL)
        async with asyncio.timeout(_KILL_WAIT_S):
            await self.wait()
        return False


def child_environment() -> dict[str, str]:
    """Ours, with this installation's packages in reach also when they run from a source tree."""
    environment = dict(os.environ)
    root = str(Path(services.__file__).resolve().parent.parent)
    if root not in site.getsitepackages():
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{known}" if known else root
    environment["PYTHONUNBUFFERED"] = "1"
    return environment

"""Helper processes of a test: started with captured output, waited for, signalled, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
READY_TIMEOUT_S = 60.0
_POLL_S = 0.02


class HelperProcess:
    """A child in its own process group; standard output and error go to files that can be read at any time."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path, name: str) -> None:
        self._process = process
        self._out = directory / f"{name}.out"
        self._err = directory / f"{name}.err"
        self.name = name

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    async def wait(self, timeout_s: float = READY_TIMEOUT_S) -> int:
        """The exit code. Raises `AssertionError` with the output when it does not end in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._process.wait()
        except TimeoutError:
            raise AssertionError(f"{self.name} did not end within {timeout_s:g} s\n{self.output}") from None

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until ``condition`` holds. Raises `AssertionError` with the output when it ends or takes too long."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.returncode is not None:
                raise AssertionError(f"{self.name} ended with code {self.returncode}\n{self.output}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.name} took longer than {timeout_s:g} s\n{self.output}")
            await asyncio.sleep(_POLL_S)

    async def wait_line(self, timeout_s: float = READY_TIMEOUT_S) -> str:
        """The first whole line of standard output."""
        await self.wait_for(lambda: "\n" in self.stdout, timeout_s)
        return self.stdout.split("\n", 1)[0]

    async def wait_said(self, text: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until ``text`` stands in its output or log."""
        await self.wait_for(lambda: text in self.output, timeout_s)

    @property
    def output(self) -> str:
        return f"--- {self.name} stdout\n{self.stdout[-8000:]}\n--- {self.name} stderr\n{self.stderr[-8000:]}"

    def signal(self, number: signal.Signals) -> None:
        """To the process itself; nothing when it has ended."""
        if self.returncode is None:
            self._process.send_signal(number)

    async def stop(self, timeout_s: float = READY_TIMEOUT_S) -> int:
        """SIGTERM; the exit code."""
        self.signal(signal.SIGTERM)
        return await self.wait(timeout_s)

    async def kill(self) -> None:
        """SIGKILL."""
        self.signal(signal.SIGKILL)
        await self._process.wait()

    async def close(self) -> None:
        """Whatever state it is in: its whole group is gone after this."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()


async def start_process(
    command: list[str], directory: Path, *, name: str = "process", environment: Mapping[str, str] | None = None
) -> HelperProcess:
    """Any program, run in the repository's root, its output in ``directory``."""
    with (directory / f"{name}.out").open("wb") as out, (directory / f"{name}.err").open("wb") as err:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            start_new_session=True,
        )
    return HelperProcess(process, directory, name)


@asynccontextmanager
async def python_process(
    module: str, *arguments: str, directory: Path, name: str = "", environment: Mapping[str, str] | None = None
) -> AsyncIterator[HelperProcess]:
    """``python -m module arguments``; killed at the end when it still runs."""
    command = [sys.executable, "-m", module, *arguments]
    process = await start_process(command, directory, name=name or module, environment=environment)
    try:
        yield process
    finally:
        await process.close()


def settings_arguments(settings: Mapping[str, object]) -> list[str]:
    """``--set key=value`` for each of ``settings``."""
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


async def eventually(condition: Callable[[], bool], timeout_s: float = READY_TIMEOUT_S, what: str = "") -> None:
    """Until ``condition`` holds. Raises `AssertionError` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or condition}")
        await asyncio.sleep(_POLL_S)

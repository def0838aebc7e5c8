"""Starts the children, waits until each is ready, starts again what ends, stops all in order."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bus import restarts
from bus.tasks import Tasks
from tidegate.errors import ChildFailedError
from tidegate.supervisor.layout import ChildSpec, Stage
from tidegate.supervisor.process import ChildLog, ChildProcess
from web.client import HttpClient, Timeouts
from web.errors import WebError

_POLL_S = 0.1
_LOG_CHECK_S = 5.0
_LAST_LINES = 4
_ALIVE_S = 3.0
_PATIENCE = Timeouts(connect_s=1.0, first_byte_s=2.0, total_s=2.0)

ChildState = Literal["starting", "ready", "restarting", "given_up", "stopped"]


@dataclass(frozen=True, slots=True)
class ChildEvent:
    """Something a person would want to read: ``what`` happened to ``child``, as half a sentence."""

    child: str
    state: ChildState
    what: str


@dataclass(frozen=True, slots=True)
class ChildStatus:
    """``why``: the reason while it is not ready."""

    name: str
    state: ChildState
    pid: int | None
    restarts: int
    why: str | None
    log: Path


class Supervisor:
    """Owner of the children. ``on_event`` is told of every change after the start. ``hung_s``: a child that answers
    nothing for so long, once it was ready, is killed and started again; 0: never."""

    def __init__(
        self,
        specs: list[ChildSpec],
        workdir: Path,
        *,
        log_bytes: int = 16_777_216,
        rules: restarts.RestartRules | None = None,
        hung_s: float = 0.0,
        on_event: Callable[[ChildEvent], None] = lambda _: None,
    ) -> None:
        logs = workdir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._on_event = on_event
        self._rules = rules or restarts.RestartRules()
        self.hung_s = hung_s
        self._http = HttpClient()
        self._tasks = Tasks()
        self._children = [_Child(spec, ChildLog(logs, spec.name, log_bytes), workdir, self) for spec in specs]

    @property
    def rules(self) -> restarts.RestartRules:
        return self._rules

    async def start(self, timeout_s: float) -> None:
        """All children ready. Raises `ChildFailedError` for the first one that gives up or is late."""
        deadline = time.monotonic() + timeout_s
        for stages in ((Stage.BUS,), tuple(stage for stage in Stage if stage is not Stage.BUS)):
            members = [child for child in self._children if child.spec.stage in stages]
            for child in members:
                self._tasks.start(f"keep-{child.spec.name}", child.keep())
            await self._wait_ready(members, deadline)
        self._tasks.start("logs", self._watch_logs())

    def status(self) -> list[ChildStatus]:
        return [child.status() for child in self._children]

    async def wait_given_up(self, stages: tuple[Stage, ...]) -> None:
        """Ends only by raising `ChildFailedError`, when a child of these stages is given up."""
        while True:
            for child in self._children:
                if child.spec.stage in stages and child.state == "given_up":
                    raise ChildFailedError(child.spec.name, child.problem())
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> list[str]:
        """Stage by stage; returns the names of those that had to be killed."""
        for child in self._children:
            child.stopping.set()
        killed: list[str] = []
        for stage in Stage:
            members = [child for child in self._children if child.spec.stage is stage]
            clean = await asyncio.gather(*(child.stop() for child in members))
            killed += [child.spec.name for child, was_clean in zip(members, clean, strict=True) if not was_clean]
        await self._tasks.stop()
        await self._http.close()
        return killed

    async def ask_ready(self, url: str) -> str | None:
        """``None`` when it is ready, else why not."""
        try:
            answer = await self._http.fetch("GET", url, [], b"", _PATIENCE)
        except WebError as error:
            return f"{url}: {error}"
        if 200 <= answer.status < 300:
            return None
        return answer.body.decode(errors="replace").strip()[:200] or f"status {answer.status}"

    async def ask_alive(self, url: str) -> bool:
        """Whether anything is answered."""
        try:
            await self._http.fetch("GET", url, [], b"", _PATIENCE)
        except WebError:
            return False
        return True

    def tell(self, child: str, state: ChildState, what: str) -> None:
        self._on_event(ChildEvent(child, state, what))

    async def _wait_ready(self, members: list[_Child], deadline: float) -> None:
        while True:
            waiting = [child for child in members if child.state != "ready"]
            for child in waiting:
                if child.state == "given_up":
                    raise ChildFailedError(child.spec.name, child.problem())
            if not waiting:
                return
            if time.monotonic() >= deadline:
                child = waiting[0]
                raise ChildFailedError(child.spec.name, f"is not ready in time: {child.problem()}")
            await asyncio.sleep(_POLL_S / 2)

    async def _watch_logs(self) -> None:
        while True:
            await asyncio.sleep(_LOG_CHECK_S)
            for child in self._children:
                await asyncio.to_thread(child.log.turn_over)


class _Child:
    """One child over all its processes."""

    def __init__(self, spec: ChildSpec, log: ChildLog, workdir: Path, owner: Supervisor) -> None:
        self.spec = spec
        self.log = log
        self.state: ChildState = "starting"
        self.stopping = asyncio.Event()
        self._starting = asyncio.Lock()
        self._workdir = workdir
        self._owner = owner
        self._history = restarts.History()
        self._process: ChildProcess | None = None
        self._why: str | None = "not started"

    def status(self) -> ChildStatus:
        pid = self._process.pid if self._process is not None and self._process.running else None
        return ChildStatus(self.spec.name, self.state, pid, self._history.restarts, self._why, self.log.path)

    def problem(self) -> str:
        """Why it is not well, with what it said last."""
        lines = "\n".join(f"    {line}" for line in self.log.last_lines(_LAST_LINES))
        return f"{self._why}\n  last lines of {self.log.path}:\n{lines}" if lines else str(self._why)

    async def keep(self) -> None:
        """Start, watch, start again; ends when it is given up or the system stops."""
        while True:
            try:
                running = await self._start()
            except OSError as error:
                if not await self._ended(1, f"cannot be started: {error}"):
                    return
                continue
            if not running:
                return
            assert self._process is not None
            watching = asyncio.ensure_future(self._watch())
            try:
                code = await self._process.wait()
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            if self.stopping.is_set():
                self.state = "stopped"
                return
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            if not await self._ended(code, how):
                return

    async def stop(self) -> bool:
        """``False`` when it had to be killed."""
        self.stopping.set()
        async with self._starting:
            if self._process is None or not self._process.running:
                return True
            return await self._process.stop(self.spec.stop_s)

    async def _start(self) -> bool:
        """A new process; ``False`` when the system stops. Raises `OSError` when it cannot be started now."""
        async with self._starting:
            if self.stopping.is_set():
                self.state = "stopped"
                return False
            self._history = restarts.started(self._history, time.monotonic())
            self._process = await ChildProcess.start(self.spec.command, self.log, self._workdir)
            self.state = "starting"
            return True

    async def _watch(self) -> None:
        """Until it is ready, then whether it lives: what answers nothing for too long is killed."""
        await self._watch_ready()
        silence = restarts.Silence(self._owner.hung_s)
        while self._owner.hung_s:
            await asyncio.sleep(min(_ALIVE_S, self._owner.hung_s / restarts.LEAST_LOOKS))
            answered = await self._owner.ask_alive(self.spec.ready_url)
            if silence.looked(answered, time.monotonic()) and self._process is not None:
                self._owner.tell(self.spec.name, "restarting", f"answers nothing for {self._owner.hung_s:g} s: killed")
                self._process.signal(signal.SIGKILL)
                return

    async def _watch_ready(self) -> None:
        while (why := await self._owner.ask_ready(self.spec.ready_url)) is not None:
            self._why = why
            await asyncio.sleep(_POLL_S)
        self._why = None
        self.state = "ready"
        if self._history.restarts:
            self._owner.tell(self.spec.name, "ready", "is ready again")
        self._history = restarts.became_ready(self._history)

    async def _ended(self, code: int, how: str) -> bool:
        """After an exit that nobody asked for; ``False`` when it is given up."""
        self._history, verdict = restarts.exited(self._history, code, time.monotonic(), self._owner.rules)
        if isinstance(verdict, restarts.GiveUp):
            self._why = f"{how}; {verdict.message}"
            self.state = "given_up"
            self._owner.tell(self.spec.name, "given_up", f"{how} and is left alone: {verdict.message}")
            return False
        self._why = how
        self.state = "restarting"
        self._owner.tell(self.spec.name, "restarting", f"{how}, starts again in {verdict.delay_s:g} s")
        await asyncio.sleep(verdict.delay_s)
        return True

"""Several processes of one service behind one port: started, watched, started again, and stopped together.

The parent does no work of the service. It holds the port (`bus.held_address`), starts ``count`` processes anew (never a
fork of a running loop), each under the instance name ``<instance>-<number>``, and answers for all of them on
``http_host:http_port``: alive, ready when at least one is, and their metrics on one page (`bus.merged_metrics`).

One that ends is started again with back-off while the others go on; so is one whose pages do not answer for
`HUNG_S`, and one that has not come to its pages `START_S` after its start. One that refuses its settings before it was
ever ready, or never comes to start, ends all of them; when settings become wrong later, who is started again refuses
them, and all end when none is left that took them. Children notice the parent's death and stop at once.

Exit codes: as of `bus.service`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client import ProcessCollector as OwnProcessCollector

from bus import restarts
from bus.errors import cannot_listen
from bus.health import TEXT, metrics_answer
from bus.held_address import HeldAddress
from bus.log import EventLog
from bus.membership import Membership, Told
from bus.merged_metrics import MergedCollector
from bus.settings import CommonSettings
from bus.tasks import Tasks
from web.client import Answer, HttpClient, Timeouts
from web.errors import WebError
from web.server import HttpServer, Request, Responder, ServerLimits

log = EventLog(__name__)

PARENT = "parent"
"""The parent's own samples, under the label ``process``."""
ASK_S = 2.0
HUNG_S = 30.0
"""A process whose pages do not answer for so long hangs, and is killed."""
START_S = 120.0
"""A process that has no pages so long after its start hangs in its imports, and is killed."""
REFUSALS = 5
"""In a row, by every process: no restart heals that."""
STOP_GRACE_S = 1.0
"""Beyond ``stop_timeout_s``, for a child to end by itself."""
RULES = restarts.RestartRules(max_exits=2**31)
"""One that has started once is never given up: the others serve meanwhile."""

_TIMEOUTS = Timeouts(connect_s=1.0, first_byte_s=ASK_S, total_s=ASK_S)
_LIVENESS_S = 1.0

Command = Callable[[Membership], list[str]]


class _Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.up = Gauge("tidegate_process_up", "1 while this process answers.", ["process"], registry=registry)
        self.restarts = Counter(
            "tidegate_process_restarts_total", "Times that it was started again.", ["process"], registry=registry
        )
        self.hung = Counter(
            "tidegate_process_hung_total", "Times that it was killed for its silence.", ["process"], registry=registry
        )
        OwnProcessCollector(registry=registry)


class ProcessGroup:
    """``command``: how a member is started. ``held``: the address that they share. ``memory``: see `Membership`."""

    def __init__(
        self,
        section: str,
        settings: CommonSettings,
        count: int,
        command: Command,
        held: HeldAddress,
        memory: int = -1,
        hung_s: float = HUNG_S,
        start_s: float = START_S,
    ) -> None:
        self._section = section
        self._settings = settings
        self._held = held
        self._registry = CollectorRegistry()
        self._metrics = _Metrics(self._registry)
        self._http = HttpClient()
        self._server = HttpServer(self._answer, ServerLimits(body_bytes=65_536, connections=256))
        self._signals = 0
        self._stop = asyncio.Event()
        self._hopeless: int | None = None
        self._members = [
            _Member(Membership(number, count, memory), command, self._http, self._metrics, self, hung_s, start_s)
            for number in range(1, count + 1)
        ]

    async def run(self) -> int:
        """Until a signal, or until it cannot work; the exit code. Raises `SettingsError`."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        tasks = Tasks()
        try:
            await self._listen()
            for member in self._members:
                tasks.start(f"keep-{member.number}", member.keep())
                tasks.start(f"watch-{member.number}", member.watch())
            log.info("processes_started", section=self._section, processes=len(self._members), port=self._held.port)
            stopping = tasks.start("stop", self._stop.wait())
            await asyncio.wait({stopping, tasks.failed}, return_when=asyncio.FIRST_COMPLETED)
            failed = tasks.failed.done()
        finally:
            clean = await self._shut_down(tasks)
        if self._hopeless is not None:
            return self._hopeless
        return 0 if clean and not failed else 1

    async def _shut_down(self, tasks: Tasks) -> bool:
        """Stop every member, the held address last: until then nobody else takes it."""
        timeout_s = self._settings.stop_timeout_s + STOP_GRACE_S
        clean = await asyncio.gather(*(member.stop(timeout_s) for member in self._members))
        await tasks.stop()
        await self._server.close(drain_s=0.5)
        await self._http.close()
        self._held.close()
        log.info("service_stopped", section=self._section)
        return all(clean)

    async def _listen(self) -> None:
        settings = self._settings
        if settings.http_port < 0:
            return
        try:
            await self._server.start(settings.http_host, settings.http_port)
        except OSError as error:
            raise cannot_listen("http_port", settings.http_host, settings.http_port, error) from error
        log.info("http_listening", url=f"http://{settings.http_host}:{self._server.port}")

    def _on_signal(self, number: int) -> None:
        log.info("stop_asked", signal=signal.Signals(number).name)
        self._signals += 1
        if self._signals > 1:  # the children hurry as a single process does
            for member in self._members:
                member.signal(signal.SIGTERM)
        self._stop.set()

    def give_up(self, code: int) -> None:
        """One member will never work, and the others would not either."""
        self._hopeless = code
        self._stop.set()

    def refused(self) -> None:
        """A member that had worked refuses its settings now; the others may work on with what they have read."""
        if all(member.refusals >= REFUSALS for member in self._members):
            log.error("settings_refused", section=self._section, times=REFUSALS)
            self.give_up(restarts.WRONG_SETTING_EXIT)

    # Pages

    async def _answer(self, request: Request, responder: Responder) -> None:
        if request.method not in ("GET", "HEAD"):
            responder.send(405, [*TEXT, (b"allow", b"GET, HEAD")], b"only GET\n")
        elif request.path == "/healthz":
            responder.send(200, TEXT, b"ok\n")
        elif request.path == "/readyz":
            await self._readyz(responder)
        elif request.path == "/metrics":
            await self._metrics_page(responder)
        else:
            responder.send(404, TEXT, b"there are /healthz, /readyz and /metrics\n")

    async def _readyz(self, responder: Responder) -> None:
        if self._stop.is_set():
            responder.send(503, TEXT, b"stopping\n")
            return
        reasons = await asyncio.gather(*(member.not_ready() for member in self._members))
        ready = reasons.count(None)
        text = f"ready ({ready} of {len(reasons)})" if ready else str(reasons[0])
        responder.send(200 if ready else 503, TEXT, f"{text}\n".encode())

    async def _metrics_page(self, responder: Responder) -> None:
        found = await asyncio.gather(*(member.ask("/metrics") for member in self._members))
        for member, answer in zip(self._members, found, strict=True):
            self._metrics.up.labels(str(member.number)).set(answer is not None)
        pages = {PARENT: generate_latest(self._registry).decode()}
        for member, answer in zip(self._members, found, strict=True):
            if answer is not None and answer.status == 200:
                pages[str(member.number)] = answer.body.decode()
        registry = CollectorRegistry()
        registry.register(MergedCollector(pages))
        responder.send(*metrics_answer(registry))


class _Member:
    """One place of the group over all its processes."""

    def __init__(
        self,
        membership: Membership,
        command: Command,
        http: HttpClient,
        metrics: _Metrics,
        group: ProcessGroup,
        hung_s: float,
        start_s: float,
    ) -> None:
        self.number = membership.number
        self.refusals = 0
        self._membership = membership
        self._command = command
        self._http = http
        self._metrics = metrics
        self._group = group
        self._hung_s = hung_s
        self._start_s = start_s
        self._history = restarts.History()
        self._process: asyncio.subprocess.Process | None = None
        self._pages: str | None = None
        self._stopping = asyncio.Event()
        self._starting = asyncio.Lock()
        metrics.up.labels(str(self.number)).set(0)
        metrics.restarts.labels(str(self.number))
        metrics.hung.labels(str(self.number))

    async def keep(self) -> None:
        """Start, wait, start again; ends at the stop, or when it is given up."""
        while not self._stopping.is_set():
            self._history = restarts.started(self._history, time.monotonic())
            try:
                code = await self._run()
            except OSError as error:
                log.error("process_not_started", process=self.number, error=error)  # noqa: TRY400 - the system's
                code = 1
            if self._stopping.is_set():
                return
            self._history, verdict = restarts.exited(self._history, code, time.monotonic(), RULES)
            if isinstance(verdict, restarts.GiveUp):
                log.error("process_given_up", process=self.number, code=code, detail=verdict.message)
                self._group.give_up(restarts.WRONG_SETTING_EXIT if verdict.reason == "wrong_setting" else 1)
                return
            self._metrics.restarts.labels(str(self.number)).inc()
            log.warning("process_restarting", process=self.number, code=code, delay_s=verdict.delay_s)
            self.refusals = self.refusals + 1 if code == restarts.WRONG_SETTING_EXIT else 0
            if self.refusals:
                self._group.refused()
            await asyncio.sleep(verdict.delay_s)

    async def _run(self) -> int:
        """One process from start to end; its exit code, negative: the signal that killed it. Raises `OSError`."""
        async with self._starting:  # who stops it knows then what there is to be stopped
            if self._stopping.is_set():
                return 0
            self._process, ours = await self._start()
        listening = asyncio.ensure_future(self._listen(ours))
        try:
            return await self._process.wait()
        finally:
            self._pages = None
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _start(self) -> tuple[asyncio.subprocess.Process, socket.socket]:
        """A new process, and our end of the line to it. Raises `OSError`."""
        ours, its = socket.socketpair()
        inherited = () if self._membership.memory < 0 else (self._membership.memory,)
        try:
            # A session of its own: Ctrl-C in a terminal is for the parent, which then stops it once and not twice.
            process = await asyncio.create_subprocess_exec(
                *self._command(self._membership), stdin=its.fileno(), pass_fds=inherited, start_new_session=True
            )
        except BaseException:
            ours.close()
            raise
        finally:
            its.close()
        return process, ours

    async def _listen(self, line: socket.socket) -> None:
        """What the process tells of itself."""
        reader, writer = await asyncio.open_connection(sock=line)
        try:
            while told := await reader.readline():
                said = msgspec.json.decode(told, type=Told)
                self._pages = said.pages
                if said.started:
                    self._history = restarts.became_ready(self._history)
                    self.refusals = 0
            # Its end of the line is closed and it may live on; ours stays open until it has ended.
            await asyncio.Event().wait()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def watch(self) -> None:
        """Look whether it comes to its pages, then whether it answers; kill what has been silent for too long."""
        watched, silence = None, restarts.Silence(self._start_s)
        while True:
            await asyncio.sleep(_LIVENESS_S)
            process, starting = self._process, self._pages is None
            if process is None or process.returncode is not None:
                continue
            if watched != (process, starting):
                watched, silence = (process, starting), restarts.Silence(self._start_s if starting else self._hung_s)
            answered = await self.ask("/healthz") is not None
            if (process, starting) != (self._process, self._pages is None):
                continue
            if silence.looked(answered, time.monotonic()) and not self._stopping.is_set():
                silent_s = self._start_s if starting else self._hung_s
                log.error("process_hung", process=self.number, silent_s=silent_s, starting=starting)
                self._metrics.hung.labels(str(self.number)).inc()
                watched = None
                self.signal(signal.SIGKILL)

    async def ask(self, path: str) -> Answer | None:
        """One of its pages; ``None`` when it does not answer."""
        if self._pages is None:
            return None
        try:
            return await self._http.fetch("GET", self._pages + path, [], b"", _TIMEOUTS)
        except WebError:
            return None

    async def not_ready(self) -> str | None:
        """``None`` when it is ready, else why not."""
        if self._pages is None:
            return "starting"
        answer = await self.ask("/readyz")
        if answer is None:
            return "silent"
        return None if answer.status == 200 else answer.body.decode(errors="replace").strip()[:200]

    def signal(self, number: signal.Signals) -> None:
        """To the process; nothing when there is none."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def stop(self, timeout_s: float) -> bool:
        """SIGTERM, and SIGKILL after ``timeout_s``; whether it ended well."""
        self._stopping.set()
        async with self._starting:
            process = self._process
        if process is None or process.returncode is not None:
            return True
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                # One that was still being imported has no handler yet.
                return await process.wait() in (0, -signal.SIGTERM)
        except TimeoutError:
            log.error("process_killed", process=self.number, after_s=timeout_s)  # noqa: TRY400 - no traceback to show
            self.signal(signal.SIGKILL)
        await process.wait()
        return False

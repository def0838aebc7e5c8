"""Captured requests on their way to the process that writes them: gathered while they run, queued within bounds.

Nothing here ever waits for the writer in a request's way: what does not fit is counted, and gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from bus.errors import SettingsError
from bus.log import EventLog
from bus.tasks import Tasks
from schemas.base import UNDECODABLE
from schemas.trace import TraceRow
from services.ingress import capture
from services.ingress.capture import DropReason, HeaderList, Selection
from services.ingress.config import IngressSettings
from services.ingress.errors import WriterLostError
from services.ingress.events import RequestReceived
from services.ingress.shell.capture_writer import Report, WriterSettings
from web.headers import Headers
from web.limits import HeldBytes

log = EventLog(__name__)

START_S = 15.0
"""For the writer to say that it is ready, the time included in which it waits for its predecessor's end."""
STUCK_S = 30.0
"""A writer that takes nothing for so long is ended, and started anew: what it was given is lost."""
RESTART_S = 1.0
_STEP_BYTES = 16_384
_ROOT = Path(__file__).resolve().parents[3]


class CaptureMetrics:
    """Of what is captured; they exist only where something is."""

    def __init__(self, registry: CollectorRegistry, waiting: Callable[[], float], held: Callable[[], float]) -> None:
        self._registry = registry
        self.rows = Counter("tidegate_ingress_capture_rows_total", "Captured requests written.", registry=registry)
        self.bytes = Counter(
            "tidegate_ingress_capture_bytes_total", "Bytes of them on the disk, compressed.", registry=registry
        )
        self.dropped = Counter(
            "tidegate_ingress_capture_dropped_total",
            "Captured requests that were not written.",
            ["reason"],
            registry=registry,
        )
        self.incomplete = Counter(
            "tidegate_ingress_capture_incomplete_total",
            "Captured requests without their prompt or their answer.",
            ["reason"],
            registry=registry,
        )
        self.waiting = Gauge(
            "tidegate_ingress_capture_waiting", "Captured requests that wait for their writer.", registry=registry
        )
        self.held = Gauge("tidegate_ingress_capture_held_bytes", "Bytes held for capture in memory.", registry=registry)
        self.waiting.set_function(waiting)
        self.held.set_function(held)

    def unregister(self) -> None:
        for metric in (self.rows, self.bytes, self.dropped, self.incomplete, self.waiting, self.held):
            self._registry.unregister(metric)


class Answer:
    """An answer as it goes to the client: the pieces themselves, nothing is copied. ``held``: bytes of the bound that
    are taken for it, in steps, so that a piece costs one comparison."""

    def __init__(self, most_bytes: int, bound: HeldBytes) -> None:
        self.pieces: list[bytes] = []
        self.size = 0
        self.held = 0
        self.is_stream = False
        self.dropped: DropReason | None = None
        self._most_bytes = most_bytes
        self._bound = bound

    def beside(self, write: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """``write``, with a look over its shoulder."""

        def both(data: bytes) -> None:
            write(data)
            self.size += len(data)
            if self.size <= self.held or self._has_room():
                self.pieces.append(data)

        return both

    def add(self, data: bytes) -> None:
        """A piece that went to the client another way."""
        self.size += len(data)
        if self.size <= self.held or self._has_room():
            self.pieces.append(data)

    def _has_room(self) -> bool:
        if self.dropped is not None:
            return False
        if self.size > self._most_bytes:
            self.drop("too_large")
            return False
        more = min(self._most_bytes, max(self.size, self.held + _STEP_BYTES)) - self.held
        if not self._bound.take(more):
            self.drop("over_bound")
            return False
        self.held += more
        return True

    def drop(self, reason: DropReason) -> None:
        """Let go of it."""
        self.fit(0)
        self.pieces, self.dropped = [], reason

    def fit(self, size: int) -> None:
        """It holds no more than ``size`` bytes from here on."""
        self._bound.give(self.held - size)
        self.held = size


@dataclass(slots=True)
class Kept:
    """One request that is captured, while it runs. ``answer``: where answers are."""

    request: bytes
    headers: dict[str, str]
    answer: Answer | None


@dataclass(frozen=True, slots=True)
class _Frame:
    pieces: list[bytes]
    size: int


class Capture:
    """See the module. The requests that it keeps are those between `begin` and `end` (or `forget`)."""

    def __init__(self, settings: IngressSettings, registry: CollectorRegistry) -> None:
        self._settings = settings
        self._headers = HeaderList(settings.capture_headers)
        self._selection = Selection(settings.capture_models, settings.capture_sessions)
        self._held = HeldBytes(settings.capture_held_bytes)
        self._directory = os.path.abspath(settings.capture_directory)
        self._open: dict[str, Kept] = {}
        self._waiting: deque[_Frame] = deque()
        self._changed = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._sending: asyncio.Task[None] | None = None
        self._unreported = 0
        self._closing = False
        self._metrics = CaptureMetrics(registry, lambda: len(self._waiting), lambda: self._held.size)

    @property
    def waiting(self) -> int:
        """Requests that wait for the writer."""
        return len(self._waiting)

    @property
    def writer_pid(self) -> int | None:
        """The process that writes, or wrote last."""
        return self._process.pid if self._process is not None else None

    # A request

    def begin(self, received: RequestReceived, headers: Headers) -> Kept | None:
        """Keep this request, if it is one of those that are captured (of one without identity `end` knows)."""
        request, identity = received.request, received.resolved.identity
        is_known = identity.key.family != "request"
        if is_known and not self._selection.takes(request.model, identity.session_id, identity.parent_session_id):
            return None
        settings = self._settings
        answer = Answer(settings.capture_bytes, self._held) if settings.capture == "answers" else None
        kept = self._open[received.request_id] = Kept(request.body, self._headers.of(headers), answer)
        return kept

    def end(self, row: TraceRow) -> None:
        """The request's row ``request_end`` is made: make ours."""
        kept = self._open.pop(row.request.request_id, None) if row.request is not None else None
        if kept is None:
            return
        request, answer = kept.request, kept.answer
        if not self._is_chosen(row):
            if answer is not None:
                answer.fit(0)
            return
        dropped: DropReason | None = None
        if len(request) > self._settings.capture_bytes:
            request, dropped = b"", "too_large"
        response: capture.ResponseKind = "none"
        if answer is not None:
            if answer.dropped is None and not capture.has_whole_answer(row):
                answer.drop("no_whole_answer")
            if answer.dropped is None:
                response = "stream" if answer.is_stream else "document"
            dropped = dropped or answer.dropped
        head = capture.captured(row, kept.headers, response, dropped)
        if dropped is not None:
            self._metrics.incomplete.labels(dropped).inc()
        if len(self._waiting) >= self._settings.capture_rows or not self._held.take(len(request)):
            if answer is not None:
                answer.fit(0)
            self._drop(1, "queue_full")
            return
        pieces, size = [], len(request)
        if answer is not None and answer.dropped is None:
            answer.fit(answer.size)
            pieces, size = answer.pieces, size + answer.size
        self._waiting.append(_Frame(capture.frame(head, request, pieces), size))
        self._changed.set()

    def _is_chosen(self, row: TraceRow) -> bool:
        model, context = (row.request.model or "") if row.request is not None else "", row.agent_context
        if context is None:
            return self._selection.takes(model)
        return self._selection.takes(model, context.session_id, context.parent_session_id)

    def forget(self, request_id: str) -> None:
        """The request is over; without a row it was never accepted."""
        kept = self._open.pop(request_id, None)
        if kept is not None and kept.answer is not None:
            kept.answer.fit(0)

    def _drop(self, rows: int, reason: str) -> None:
        if rows:
            self._metrics.dropped.labels(reason).inc(rows)
            log.warning("captured_requests_lost", rows=rows, reason=reason)

    # The writer

    async def start(self, tasks: Tasks) -> None:
        """Raises `SettingsError` for a directory that cannot be written."""
        process = await self._spawn()
        self._sending = tasks.start("capture", self._run(process))
        settings = self._settings
        log.warning(
            "prompts_are_written",
            capture=settings.capture,
            directory=self._directory,
            secrets="hidden where they look like some" if settings.capture_redact_secrets else "written",
            keep_bytes=settings.capture_keep_bytes,
            advice='whoever reads these files reads what users say; [ingress] capture = "off" ends it',
        )

    async def stop(self, timeout_s: float) -> None:
        """Have all written that is here, within ``timeout_s``; what is not is counted."""
        self._closing = True
        self._changed.set()
        if self._sending is not None and not self._sending.done():
            await asyncio.wait({self._sending}, timeout=timeout_s)
            if not self._sending.done():
                self._sending.cancel()
                await asyncio.wait({self._sending}, timeout=1.0)
        self._drop(len(self._waiting), "stopped")
        self._waiting.clear()
        self._metrics.unregister()

    async def _spawn(self) -> asyncio.subprocess.Process:
        """A writer that is ready. Raises `SettingsError`."""
        settings = self._settings
        told = WriterSettings(
            directory=self._directory,
            prefix=f"capture.{re.sub(r'[^A-Za-z0-9._-]', '_', settings.instance)}",
            roll_bytes=settings.capture_roll_bytes,
            roll_age_s=settings.capture_roll_age_s,
            keep_segments=settings.capture_keep_segments,
            keep_bytes=settings.capture_keep_bytes,
            keep_age_s=settings.capture_keep_age_s,
            redact_secrets=settings.capture_redact_secrets,
            redact=settings.capture_redact,
        )
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", ""))))
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "services.ingress.shell.capture_writer", msgspec.json.encode(told).decode()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                line = await process.stdout.readline()
        except TimeoutError:
            await self._end(process)
            raise SettingsError("capture_directory", f"its writer did not start within {START_S:g} s") from None
        report = msgspec.json.decode(line, type=Report) if line else Report(error="its writer ended at once")
        if not report.ready:
            await self._end(process)
            raise SettingsError("capture_directory", report.error)
        return process

    async def _run(self, process: asyncio.subprocess.Process) -> None:
        """Keep a writer running and feed it, until `stop` and until all is written."""
        while True:
            self._unreported = 0
            reports = asyncio.get_running_loop().create_task(self._hear(process))
            try:
                await self._feed(process, reports)
                await self._finish(process, reports)
                return
            except WriterLostError as error:
                log.error("capture_writer_lost", reason=error.reason, detail=str(error))  # noqa: TRY400 - said whole
            finally:
                reports.cancel()
                await self._end(process)
                self._drop(self._unreported, "writer_lost")
                self._unreported = 0
            process = await self._respawn()

    async def _respawn(self) -> asyncio.subprocess.Process:
        while True:
            await asyncio.sleep(RESTART_S)
            try:
                return await self._spawn()
            except (SettingsError, OSError) as error:
                log.error("capture_writer_not_started", detail=str(error))  # noqa: TRY400 - tried again

    async def _feed(self, process: asyncio.subprocess.Process, reports: asyncio.Task[None]) -> None:
        """Frames to the writer, one after the other; returns when the ingress stops and none is left. Raises
        `WriterLostError`."""
        stdin = process.stdin
        assert stdin is not None
        while True:
            if reports.done():
                raise WriterLostError("it ended by itself")
            if not self._waiting:
                if self._closing:
                    return
                self._changed.clear()
                await self._changed.wait()
                continue
            sent = self._waiting.popleft()
            self._unreported += 1
            try:
                stdin.writelines(sent.pieces)
                async with asyncio.timeout(STUCK_S):
                    await stdin.drain()
            except TimeoutError:
                raise WriterLostError(f"it has taken nothing for {STUCK_S:g} s") from None
            except (OSError, RuntimeError) as error:
                raise WriterLostError(f"it took no more: {error}") from error
            finally:
                self._held.give(sent.size)

    async def _finish(self, process: asyncio.subprocess.Process, reports: asyncio.Task[None]) -> None:
        """Nothing more comes: let it write the rest. The caller's deadline is ours."""
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait({reports})
        await process.wait()

    async def _hear(self, process: asyncio.subprocess.Process) -> None:
        """The writer's reports, to its end."""
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                report = msgspec.json.decode(line, type=Report)
                self._unreported -= report.written + report.failed
                self._metrics.rows.inc(report.written)
                self._metrics.bytes.inc(report.bytes)
                if report.failed:
                    self._metrics.dropped.labels(report.failure).inc(report.failed)
                    log.error("capture_failed", rows=report.failed, reason=report.failure, detail=report.error)
        except UNDECODABLE as error:
            log.error("capture_report_unreadable", detail=str(error))  # noqa: TRY400 - the writer is started anew
        finally:
            self._changed.set()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """It is gone when this returns."""
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()

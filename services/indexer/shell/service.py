"""The indexer as `bus.service.run_service` runs it: subscriptions and clocks around the core, and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from prometheus_client import REGISTRY

from bus import subjects
from bus.errors import BusError
from bus.interface import Bus, BusMessage, Endpoint, ObjectStore, ServedEndpoints
from bus.log import EventLog
from bus.service import package_version
from bus.slices import in_slices
from bus.tasks import Tasks
from kvcore.errors import BadDumpError
from schemas.base import BadMessageError, from_json, to_json
from schemas.decision import Decision
from schemas.kv import KvHeaders, RankMark, SnapshotReply, SnapshotRequest
from schemas.request import RequestEnd
from schemas.worker import WorkerState
from services.indexer.config import IndexerSettings
from services.indexer.core import IndexerCore
from services.indexer.effects import AskSnapshot, IndexerEffect, Publish, Say
from services.indexer.errors import SnapshotError
from services.indexer.events import (
    BatchReceived,
    DecisionSeen,
    IndexerEvent,
    RequestEnded,
    SnapshotFailed,
    SnapshotReceived,
    Tick,
    WorkerSeen,
)
from services.indexer.shell.metrics import MATCH_SECONDS, IndexerCollector

log = EventLog(__name__)

TICK_S = 0.1
WARM_UP_S = 10.0
"""How long after the start sources that are still on their way keep the process from being ready."""

_KV_SUBJECTS = f"{subjects.ROOT}.kv.*.*"
_SNAPSHOT_PREFIX = f"{subjects.ROOT}.kv.snapshot."
_KV_PENDING = 262_144
M = TypeVar("M")


class IndexerService:
    """One complete index."""

    def __init__(self, settings: IndexerSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._started_at = clock()
        self._stopped = False
        self.core = IndexerCore(settings, round(self._started_at * 1000))

    async def start(self, bus: Bus, tasks: Tasks) -> None:
        """Subscribe and serve. Workers make themselves known within a heartbeat."""
        self._bus = bus
        self._tasks = tasks
        self._objects: ObjectStore = await bus.objects(subjects.OBJECTS_SNAPSHOTS, ttl_s=subjects.SNAPSHOTS_TTL_S)
        self._collector = IndexerCollector(self.core)
        REGISTRY.register(self._collector)
        root = subjects.ROOT
        await bus.subscribe(_KV_SUBJECTS, self._on_batch, pending_limit=_KV_PENDING)
        await bus.subscribe(f"{root}.worker.state.*", self._on_worker)
        await bus.subscribe(f"{root}.decision.*", self._on_decision)
        await bus.subscribe(f"{root}.request.end.*", self._on_end)
        self._served: ServedEndpoints = await bus.serve(
            "tidegate-indexer",
            package_version(),
            "Who holds which prefix, where, and which session it belongs to",
            [
                Endpoint("match", subjects.INDEX_MATCH, self._on_match),
                Endpoint("session", subjects.INDEX_SESSION, self._on_session),
            ],
            {"instance": self._settings.instance},
        )
        tasks.start("tick", self._tick())

    def not_ready(self) -> str | None:
        """While warming up: the sources that are not there yet. Later they are answered for as they are."""
        if self._clock() - self._started_at > WARM_UP_S:
            return None
        waiting = self.core.catching_up()
        return f"catching up with {', '.join(waiting[:5])}" if waiting else None

    async def stop(self, timeout_s: float) -> None:
        """Stop answering. There is nothing to drain: the index is rebuilt from the bridges."""
        self._stopped = True
        await self._served.stop()
        REGISTRY.unregister(self._collector)

    # In and out of the core

    def _handle(self, event: IndexerEvent) -> None:
        if not self._stopped:
            self._perform(self.core.handle(event, self._clock()))

    def _perform(self, effects: list[IndexerEffect]) -> None:
        for effect in effects:
            match effect:
                case Publish():
                    self._bus.publish(effect.subject, effect.payload)
                case AskSnapshot():
                    self._tasks.start(f"snapshot-{effect.worker}", self._fetch_snapshot(effect))
                case Say():
                    (log.warning if effect.warning else log.info)(effect.event, **effect.fields)

    # Questions

    def _on_match(self, message: BusMessage) -> None:
        started = time.perf_counter()
        answer = self.core.match(message.payload)
        MATCH_SECONDS.observe(time.perf_counter() - started)
        if message.reply:
            self._bus.publish(message.reply, answer)

    def _on_session(self, message: BusMessage) -> None:
        if message.reply:
            self._bus.publish(message.reply, self.core.session(message.payload))

    # Facts

    def _on_batch(self, message: BusMessage) -> None:
        if message.subject.startswith(_SNAPSHOT_PREFIX):
            return  # a question to a bridge, which this wildcard also matches
        try:
            headers = KvHeaders.from_headers(dict(message.headers))
        except BadMessageError as error:
            self._reject(message, error)
            return
        self._handle(BatchReceived(headers, message.payload))

    def _on_worker(self, message: BusMessage) -> None:
        if (state := self._read(message, WorkerState)) is not None:
            self._handle(WorkerSeen(state))

    def _on_decision(self, message: BusMessage) -> None:
        if (decision := self._read(message, Decision)) is not None:
            self._handle(DecisionSeen(decision))

    def _on_end(self, message: BusMessage) -> None:
        if (end := self._read(message, RequestEnd)) is not None:
            self._handle(RequestEnded(end))

    def _read(self, message: BusMessage, kind: type[M]) -> M | None:
        try:
            return from_json(message.payload, kind)
        except BadMessageError as error:
            self._reject(message, error)
            return None

    def _reject(self, message: BusMessage, error: BadMessageError) -> None:
        self.core.rejected[error.reason] += 1
        log.warning("message_rejected", subject=message.subject, reason=error.reason, detail=str(error))

    # Snapshots and time

    async def _fetch_snapshot(self, effect: AskSnapshot) -> None:
        try:
            async with asyncio.timeout(self._settings.snapshot_timeout_s * 2):
                reply, dump = await self._snapshot(effect.worker)
        except TimeoutError:
            self._handle(SnapshotFailed(effect.worker, effect.ticket, "snapshot_timeout"))
        except (BusError, SnapshotError) as error:
            self._handle(SnapshotFailed(effect.worker, effect.ticket, error.reason))
        else:
            await self._load(effect, reply.marks, dump)

    async def _load(self, effect: AskSnapshot, marks: tuple[RankMark, ...], dump: bytes) -> None:
        """Millions of blocks take seconds: in slices, between which questions are answered and batches taken."""
        try:
            prepared = await in_slices(self.core.prepare(effect.worker, marks, dump))
        except BadDumpError as error:
            self._handle(SnapshotFailed(effect.worker, effect.ticket, error.reason))
            return
        self._handle(SnapshotReceived(effect.worker, effect.ticket, marks, prepared))
        await in_slices(self.core.index.discard(prepared))

    async def _snapshot(self, worker: str) -> tuple[SnapshotReply, bytes]:
        """Ask the bridge, fetch the object. Raises `SnapshotError`, `BusError`."""
        question = to_json(SnapshotRequest(indexer=self.core.name))
        answer = await self._bus.request(
            subjects.kv_snapshot(worker), question, timeout_s=self._settings.snapshot_timeout_s
        )
        try:
            reply = from_json(answer.payload, SnapshotReply)
        except BadMessageError as error:
            raise SnapshotError(worker, error.reason, str(error)) from error
        if reply.error is not None:
            raise SnapshotError(worker, reply.error, f"the bridge answered {reply.error}")
        if reply.bucket != subjects.OBJECTS_SNAPSHOTS:
            raise SnapshotError(worker, "unknown_bucket", f"it is in {reply.bucket!r}")
        dump = await self._objects.get(reply.key)
        if len(dump) != reply.size_bytes:
            raise SnapshotError(worker, "snapshot_overwritten", "the object is not the one the bridge spoke of")
        return reply, dump

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            # After a long block of the loop heartbeats are still unread: nobody may be taken for silent yet.
            listened = loop.time() - due < self._settings.worker_lost_s / 2
            self._handle(Tick(self._bus.connected and listened))
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)

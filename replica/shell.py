"""The feed of a replica: what it listens to on the bus, the snapshots it fetches, and its clock. Nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from bus import subjects
from bus.errors import BusError
from bus.interface import Bus, BusMessage, ObjectStore, Subscription
from bus.log import EventLog
from bus.slices import in_slices
from bus.tasks import Tasks
from kvcore.errors import BadDumpError
from replica.config import ReplicaSettings
from replica.core import Replica
from replica.effects import AskSnapshot, ReplicaEffect, Say, SourceChanged
from replica.errors import SnapshotError
from replica.events import (
    BatchReceived,
    PromptPlaced,
    ReplicaEvent,
    RequestEnded,
    SnapshotFailed,
    SnapshotReceived,
    Tick,
    Work,
    WorkerSeen,
)
from schemas.base import BadMessageError, from_json, from_msgpack, to_json
from schemas.kv import KvHeaders, RankMark, SnapshotReply, SnapshotRequest
from schemas.placed import Placed
from schemas.request import RequestEnd
from schemas.worker import WorkerState

log = EventLog(__name__)

TICK_S = 0.1
WARM_UP_S = 10.0
"""How long after the start sources that are still on their way keep the process from being ready."""

SLICE_S = 0.002
"""How long the loop is kept for work that can wait."""

RETRY_S = 10.0
"""How long a replica that failed is left alone."""

KV_PENDING = 262_144
"""Batches that may wait for their turn; more are dropped by the bus, counted, and fetched again as a gap."""

_KV_SUBJECTS = f"{subjects.ROOT}.kv.*.*"
_SNAPSHOT_PREFIX = f"{subjects.ROOT}.kv.snapshot."
M = TypeVar("M", WorkerState, RequestEnd)


class ReplicaFeed:
    """Keeps its replica as new as the bus allows. ``changed`` hears of every change of a source's health, ``placed`` of
    every prompt that was sent somewhere.

    ``isolated``: what goes wrong in the replica itself is not the process's end: it is counted and logged (`failures`),
    `broken` for `RETRY_S`, and then a new one begins.
    """

    def __init__(
        self,
        replica: Replica,
        settings: ReplicaSettings,
        clock: Callable[[], float] = time.time,
        changed: Callable[[SourceChanged], None] | None = None,
        placed: Callable[[PromptPlaced], None] | None = None,
        *,
        isolated: bool = False,
    ) -> None:
        self.replica = replica
        self._settings = settings
        self._clock = clock
        self._changed = changed
        self._placed = placed
        self._started_at = clock()
        self._isolated = isolated
        self._broken_until: float | None = None
        self.failures = 0
        self._working = False
        self._stopped = False
        self._bus: Bus
        self._tasks: Tasks
        self._objects: ObjectStore
        self._batches: Subscription | None = None

    async def start(self, bus: Bus, tasks: Tasks, *, facts: bool = True) -> None:
        """Subscribe. Workers make themselves known within a heartbeat. Without ``facts`` the owner hears the facts
        itself, and hands them over: `worker_seen`, `request_ended`, `prompt_placed`."""
        self._bus = bus
        self._tasks = tasks
        self._objects = await bus.objects(subjects.OBJECTS_SNAPSHOTS, ttl_s=subjects.SNAPSHOTS_TTL_S)
        self._batches = await bus.subscribe(_KV_SUBJECTS, self._on_batch, pending_limit=KV_PENDING)
        if facts:
            await bus.subscribe(f"{subjects.ROOT}.worker.state.*", self._on_worker)
            await bus.subscribe(f"{subjects.ROOT}.request.end.*", self._on_end)
            await bus.subscribe(f"{subjects.ROOT}.placed.*", self._on_placed)
        tasks.start("replica-tick", self._tick())

    def not_ready(self) -> str | None:
        """While warming up: the sources that are not there yet. Later they are answered for as they are."""
        if self._clock() - self._started_at > WARM_UP_S:
            return None
        waiting = self.replica.catching_up()
        return f"catching up with {', '.join(waiting[:5])}" if waiting else None

    def stop(self) -> None:
        """Take nothing in any more. There is nothing to drain: a replica is rebuilt from the bridges."""
        self._stopped = True

    @property
    def waiting(self) -> int:
        """Batches that have arrived and wait for their turn."""
        return self._batches.stats().pending if self._batches is not None else 0

    @property
    def dropped(self) -> int:
        """Batches that did not fit into the line since the start."""
        return self._batches.stats().dropped if self._batches is not None else 0

    # What happens

    def worker_seen(self, state: WorkerState) -> None:
        """A bridge's heartbeat."""
        self._handle(WorkerSeen(state))

    def request_ended(self, end: RequestEnd) -> None:
        """A request is over."""
        self._handle(RequestEnded(end))

    def prompt_placed(self, fact: Placed) -> None:
        """A prompt was sent somewhere."""
        self._handle(PromptPlaced(fact))

    def _handle(self, event: ReplicaEvent) -> None:
        if self._stopped or (self._broken_until is not None and not self._begin_again()):
            return
        try:
            effects = self.replica.handle(event, self._clock())
        except Exception as error:
            if not self._isolated:
                raise
            self.broke(error)
            return
        self._perform(effects)
        if self.replica.behind and not self._working:
            self._working = True
            self._tasks.start("replica-work", self._work())

    @property
    def broken(self) -> bool:
        """Whether the replica failed a short while ago, so that it cannot be asked."""
        return self._broken_until is not None

    def broke(self, error: Exception) -> None:
        """The replica failed in a way that nobody foresaw: it is not trusted any more. A new one begins after a while
        (bridges are asked for everything again)."""
        self.failures += 1
        self._broken_until = self._clock() + RETRY_S
        log.error("replica_failed", failures=self.failures, error=error)

    def _begin_again(self) -> bool:
        assert self._broken_until is not None
        if self._clock() < self._broken_until:
            return False
        self._broken_until = None
        self.replica = self.replica.anew()
        return True

    async def _work(self) -> None:
        """Apply what waits, a few batches at a time; everybody else has a turn in between."""
        loop = asyncio.get_running_loop()
        try:
            due = loop.time() + SLICE_S
            while self.replica.behind and not self.broken and not self._stopped:
                self._handle(Work())
                if loop.time() >= due:
                    await asyncio.sleep(0)
                    due = loop.time() + SLICE_S
        finally:
            self._working = False

    def _perform(self, effects: list[ReplicaEffect]) -> None:
        for effect in effects:
            match effect:
                case AskSnapshot():
                    self._tasks.start(f"snapshot-{effect.worker}", self._fetch_snapshot(effect))
                case SourceChanged():
                    if self._changed is not None:
                        self._changed(effect)
                case Say():
                    (log.warning if effect.warning else log.info)(effect.event, **effect.fields)

    # Facts

    def _on_batch(self, message: BusMessage) -> None:
        if message.subject.startswith(_SNAPSHOT_PREFIX):
            return  # a question to a bridge, which this wildcard also matches
        try:
            headers = KvHeaders.from_headers(message.headers)
        except BadMessageError as error:
            self._reject(message, error)
            return
        self._handle(BatchReceived(headers, message.payload))

    def _on_worker(self, message: BusMessage) -> None:
        if (state := self._read(message, WorkerState)) is not None:
            self.worker_seen(state)

    def _on_end(self, message: BusMessage) -> None:
        if (end := self._read(message, RequestEnd)) is not None:
            self.request_ended(end)

    def _on_placed(self, message: BusMessage) -> None:
        try:
            fact = from_msgpack(message.payload, Placed)
        except BadMessageError as error:
            self._reject(message, error)
            return
        self.prompt_placed(fact)
        if self._placed is not None:
            self._placed(PromptPlaced(fact))

    def _read(self, message: BusMessage, kind: type[M]) -> M | None:
        try:
            return from_json(message.payload, kind)
        except BadMessageError as error:
            self._reject(message, error)
            return None

    def _reject(self, message: BusMessage, error: BadMessageError) -> None:
        self.replica.rejected[error.reason] += 1
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
        replica = self.replica
        try:
            prepared = await in_slices(replica.prepare(effect.worker, marks, dump), SLICE_S)
        except BadDumpError as error:
            self._handle(SnapshotFailed(effect.worker, effect.ticket, error.reason))
            return
        except Exception as error:
            if not self._isolated:
                raise
            self.broke(error)
            return
        if self.replica is replica:  # else it began anew meanwhile, and asks for itself
            self._handle(SnapshotReceived(effect.worker, effect.ticket, marks, prepared))
        await in_slices(replica.index.discard(prepared), SLICE_S)

    async def _snapshot(self, worker: str) -> tuple[SnapshotReply, bytes]:
        """Ask the bridge, fetch the object. Raises `SnapshotError`, `BusError`."""
        question = to_json(SnapshotRequest(indexer=self.replica.name))
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

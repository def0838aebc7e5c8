"""The feed of a replica: what it listens to on the bus, the snapshots it fetches, and its clock. Nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from xxhash import xxh3_64

from bus import subjects
from bus.errors import BusError
from bus.interface import Bus, BusMessage, ObjectStore, Subscription
from bus.log import EventLog
from bus.slices import in_slices
from bus.tasks import Tasks
from kvcore.dump import Steps
from kvcore.errors import BadDumpError
from replica.config import ReplicaSettings
from replica.core import Replica
from replica.effects import AskPoolSnapshot, AskSnapshot, ReplicaEffect, Say, SourceChanged
from replica.errors import BRIDGE_REASONS, SnapshotError
from replica.events import (
    BatchReceived,
    PoolBatchReceived,
    PoolResetReceived,
    PoolSnapshotFailed,
    PoolSnapshotReceived,
    PoolStated,
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
from schemas.pool import PoolHeaders, PoolReset, PoolSnapshotReply, PoolSnapshotRequest, PoolState
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

LISTEN_AGAIN_S = 1.0
"""Pause before the next try, when the connection for batches was lost for good."""

KV_PENDING = 262_144
"""Batches that may wait for their turn; more are dropped by the bus, counted, and fetched again as a gap."""

_KV_SUBJECTS = f"{subjects.ROOT}.kv.*.*"
_SNAPSHOT_PREFIX = f"{subjects.ROOT}.kv.snapshot."
_POOL_PREFIX = f"{subjects.ROOT}.pool."
M = TypeVar("M", WorkerState, RequestEnd, PoolReset, PoolState)
R = TypeVar("R", SnapshotReply, PoolSnapshotReply)


DIGEST_BYTES = 1 << 20
"""Bytes digested in one step: 0.1 ms."""


def digest(dump: bytes) -> Steps[str]:
    """XXH3-64 of ``dump`` in hex, in steps."""
    state = xxh3_64()
    for start in range(0, len(dump), DIGEST_BYTES):
        state.update(memoryview(dump)[start : start + DIGEST_BYTES])
        yield
    return state.hexdigest()


class ReplicaFeed:
    """Keeps its replica as new as the bus allows. ``changed`` hears of every change of a source's health, ``placed`` of
    every prompt that was sent somewhere, ``ended`` of every request that is over.

    Batches and snapshots come over a connection of their own: a flood of them neither delays nor ends what its owner
    says and hears. While it is away the sources say so; when it is lost for good, another one is opened.

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
        ended: Callable[[RequestEnd], None] | None = None,
        *,
        isolated: bool = False,
    ) -> None:
        self.replica = replica
        self._settings = settings
        self._clock = clock
        self._changed = changed
        self._placed = placed
        self._ended = ended
        self._started_at = clock()
        self._isolated = isolated
        self._broken_until: float | None = None
        self.failures = 0
        self._working = False
        self._stopped = False
        self._bus: Bus
        self._tasks: Tasks
        self._kv: Bus
        self._objects: ObjectStore
        self._batches: Subscription | None = None
        self._dropped_before = 0
        self._pools: Subscription | None = None
        self._questions: dict[str, asyncio.Task[None]] = {}
        self._pool_questions: dict[str, asyncio.Task[None]] = {}

    async def start(self, bus: Bus, tasks: Tasks, *, facts: bool = True) -> None:
        """Subscribe. Workers make themselves known within a heartbeat. Without ``facts`` the owner hears the facts
        itself, and hands them over: `worker_seen`, `request_ended`, `prompt_placed`."""
        self._bus = bus
        self._tasks = tasks
        await self._listen()
        if facts:
            await bus.subscribe(f"{subjects.ROOT}.worker.state.*", self._on_worker)
            await bus.subscribe(f"{subjects.ROOT}.request.end.*", self._on_end)
            await bus.subscribe(f"{subjects.ROOT}.placed.*", self._on_placed)
        tasks.start("replica-tick", self._tick())
        tasks.start("replica-bus", self._keep_listening())

    async def _listen(self) -> None:
        """Raises `BusError`."""
        kv = await self._bus.another("kv")
        try:
            objects = await kv.objects(subjects.OBJECTS_SNAPSHOTS, ttl_s=subjects.SNAPSHOTS_TTL_S)
            batches = await kv.subscribe(_KV_SUBJECTS, self._on_batch, pending_limit=KV_PENDING)
            # One subscription for all that pools say: what is numbered together stays in order.
            pools = await kv.subscribe(f"{_POOL_PREFIX}>", self._on_pool, pending_limit=KV_PENDING)
        except BaseException:
            await kv.close()
            raise
        self._dropped_before = self.dropped
        self._kv, self._objects, self._batches, self._pools = kv, objects, batches, pools

    async def _keep_listening(self) -> None:
        """What was missed between two connections shows as a gap, or by the heartbeats."""
        while True:
            log.warning("replica_bus_lost", reason=await self._kv.wait_lost())
            await self._kv.close()
            while self._kv.closed:
                try:
                    await self._listen()
                except BusError as error:
                    log.warning("replica_bus_absent", reason=error.reason)
                    await asyncio.sleep(LISTEN_AGAIN_S)

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
        return sum(each.stats().pending for each in (self._batches, self._pools) if each is not None)

    @property
    def dropped(self) -> int:
        """Batches that did not fit into the line since the start."""
        now = sum(each.stats().dropped for each in (self._batches, self._pools) if each is not None)
        return self._dropped_before + now

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
                    before = self._questions.pop(effect.worker, None)
                    if before is not None:
                        before.cancel()  # to a bridge that is gone, or over a connection that it has no more
                    task = self._tasks.start(f"snapshot-{effect.worker}", self._fetch_snapshot(effect))
                    self._questions[effect.worker] = task
                case AskPoolSnapshot():
                    before = self._pool_questions.pop(effect.pool, None)
                    if before is not None:
                        before.cancel()
                    task = self._tasks.start(f"pool-snapshot-{effect.pool}", self._fetch_pool(effect))
                    self._pool_questions[effect.pool] = task
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

    def _on_pool(self, message: BusMessage) -> None:
        kind, _, pool = message.subject.removeprefix(_POOL_PREFIX).partition(".")
        if not pool:
            try:
                headers = PoolHeaders.from_headers(message.headers)
            except BadMessageError as error:
                self._reject(message, error)
                return
            self._handle(PoolBatchReceived(headers, message.payload))
        elif kind == "reset":
            if (reset := self._read(message, PoolReset)) is not None:
                self._handle(PoolResetReceived(reset))
        elif kind == "state" and (state := self._read(message, PoolState)) is not None:
            self._handle(PoolStated(state))

    def _on_worker(self, message: BusMessage) -> None:
        if (state := self._read(message, WorkerState)) is not None:
            self.worker_seen(state)

    def _on_end(self, message: BusMessage) -> None:
        if (end := self._read(message, RequestEnd)) is not None:
            self.request_ended(end)
            if self._ended is not None:
                self._ended(end)

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
            self._failed(effect, "snapshot_timeout")
        except SnapshotError as error:
            self._failed(effect, error.reason)
        except BusError as error:
            self._failed(effect, error.reason)
        else:
            self._questions.pop(effect.worker, None)
            await self._load(effect, reply.marks, dump)

    def _failed(self, effect: AskSnapshot, reason: str) -> None:
        self._questions.pop(effect.worker, None)
        self._handle(SnapshotFailed(effect.worker, effect.ticket, reason))

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
        """Ask the bridge, fetch the object where it is not in the answer. Raises `SnapshotError`, `BusError`."""
        question = to_json(SnapshotRequest(indexer=self.replica.name))
        reply = await self._ask(worker, subjects.kv_snapshot(worker), question, SnapshotReply)
        dump = reply.dump or await self._stored(worker, reply.bucket, reply.key)
        await self._check(worker, dump, reply.size_bytes, reply.digest)
        return reply, dump

    async def _pool_snapshot(self, pool: str) -> tuple[PoolSnapshotReply, bytes]:
        """Ask the pool's bridge, fetch the object. Raises `SnapshotError`, `BusError`."""
        question = to_json(PoolSnapshotRequest(indexer=self.replica.name))
        reply = await self._ask(pool, subjects.pool_snapshot(pool), question, PoolSnapshotReply)
        dump = await self._stored(pool, reply.bucket, reply.key)
        await self._check(pool, dump, reply.size_bytes, reply.digest)
        return reply, dump

    async def _ask(self, name: str, subject: str, question: bytes, kind: type[R]) -> R:
        answer = await self._kv.request(subject, question, timeout_s=self._settings.snapshot_timeout_s)
        try:
            reply = from_json(answer.payload, kind)
        except BadMessageError as error:
            raise SnapshotError(name, error.reason, str(error)) from error
        if reply.error is not None:
            reason = reply.error if reply.error in BRIDGE_REASONS else "other"
            raise SnapshotError(name, reason, f"the bridge answered {reply.error}")
        return reply

    async def _stored(self, name: str, bucket: str, key: str) -> bytes:
        if bucket != subjects.OBJECTS_SNAPSHOTS:
            raise SnapshotError(name, "unknown_bucket", f"it is in {bucket!r}")
        return await self._objects.get(key)

    async def _check(self, name: str, dump: bytes, size_bytes: int, written: str) -> None:
        if len(dump) != size_bytes:
            raise SnapshotError(name, "snapshot_overwritten", "the object is not the one the bridge spoke of")
        if written and await in_slices(digest(dump), SLICE_S) != written:
            raise SnapshotError(name, "snapshot_damaged", "the bytes are not those that the bridge wrote")

    async def _fetch_pool(self, effect: AskPoolSnapshot) -> None:
        """A pool's picture, loaded aside and taken over at once."""
        replica, pool = self.replica, effect.pool
        try:
            async with asyncio.timeout(self._settings.snapshot_timeout_s * 2):
                reply, dump = await self._pool_snapshot(pool)
            index = await in_slices(replica.prepare_pool(dump), SLICE_S)
        except TimeoutError:
            failed: str | None = "snapshot_timeout"
        except (SnapshotError, BusError, BadDumpError) as error:
            failed = error.reason
        except Exception as error:
            if not self._isolated:
                raise
            self.broke(error)
            return
        else:
            failed = None
        self._pool_questions.pop(pool, None)
        if self.replica is not replica:
            return  # it began anew meanwhile, and asks for itself
        if failed is not None:
            self._handle(PoolSnapshotFailed(pool, effect.ticket, failed))
        else:
            self._handle(PoolSnapshotReceived(pool, effect.ticket, reply.epoch, reply.pool_seq, index))

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        due, ahead, most = loop.time(), self._clock() - loop.time(), self._settings.worker_lost_s / 2
        while True:
            # After a long block of the loop heartbeats are still unread, and by a clock that was set (or a machine that
            # slept) they are of another time: nobody may be taken for silent yet.
            before, ahead = ahead, self._clock() - loop.time()
            listened = loop.time() - due < most and abs(ahead - before) < most
            self._handle(Tick(self._bus.connected and listened))
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)

"""The bridge of a shared pool as `bus.service.run_service` runs it: sockets and clocks around the core."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from prometheus_client import REGISTRY

from bus import subjects
from bus.errors import BusError, PayloadTooLargeError
from bus.interface import Bus, Endpoint, ServedEndpoints
from bus.log import EventLog
from bus.service import package_version
from bus.tasks import Tasks
from services.bridge.config import BridgeSettings
from services.bridge.effects import Publish, Say
from services.bridge.errors import BadEndpointError, ScrapeError
from services.bridge.events import Beat, EngineBatch, Stopping, SubscriberEvent
from services.bridge.pool.core import PoolCore
from services.bridge.pool.effects import Compare, ListKeys, PoolEffect
from services.bridge.pool.events import Compared, GoOn, KeysListed, ListEnded, Polled, PollFailed, PoolEvent
from services.bridge.shell.pool_client import PoolClient
from services.bridge.shell.pool_metrics import PoolCollector
from services.bridge.shell.pool_snapshots import PoolSnapshotDesk
from services.bridge.shell.subscriber import EventSubscriber

log = EventLog(__name__)

SOCKET_RETRY_S = 2.0
FLUSH_BYTES = 4 * 1024 * 1024
"""Deltas published before the bus has to have taken them: a pool of millions of objects has hundreds of megabytes."""

DELTA_BYTES = 250_000
"""Of one delta, about: what a receiver applies in one go, some milliseconds."""

SLICE_S = 0.005
FLUSH_TIMEOUT_S = 5.0


class PoolBridgeService:
    """One pool's bridge."""

    def __init__(self, settings: BridgeSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._client = PoolClient(settings.pool_url, settings.scrape_timeout_s, settings.pool_list_timeout_s)
        self._subscriber: EventSubscriber | None = None
        self._poll_now = asyncio.Event()
        self._poll_failures: dict[str, int] = {}
        self._work: asyncio.Queue[ListKeys] = asyncio.Queue(maxsize=1)
        self._comparison: Compare | None = None
        self._published_bytes = 0
        self._stopped = False

    async def start(self, bus: Bus, tasks: Tasks) -> None:
        """Serve, subscribe, and start asking the master. The master need not be there yet."""
        settings = self._settings
        self._bus = bus
        self._tasks = tasks
        self.core = PoolCore(settings, round(self._clock() * 1000), bus.max_payload)
        objects = await bus.objects(subjects.OBJECTS_SNAPSHOTS, ttl_s=subjects.SNAPSHOTS_TTL_S)
        self._desk = PoolSnapshotDesk(bus, objects, self.core)
        self._collector = PoolCollector(self.core, lambda: self._subscriber, self._poll_failures)
        REGISTRY.register(self._collector)
        self._served: ServedEndpoints = await bus.serve(
            "tidegate-bridge",
            package_version(),
            "Makes a shared pool a citizen of the bus: its key events, agreed with its key list, and snapshots",
            [Endpoint("pool-snapshot", subjects.pool_snapshot(self.core.pool), self._desk.asked, queue="")],
            {"instance": settings.instance, "pool": self.core.pool, "master": settings.pool_url},
        )
        self._handle(Beat())
        for name, coroutine in (
            ("socket", self._keep_socket()),
            ("poll", self._poll()),
            ("beat", self._beat()),
            ("reconcile", self._reconcile()),
            ("snapshots", self._desk.serve()),
        ):
            tasks.start(name, coroutine)

    def not_ready(self) -> str | None:
        """Ready as long as something can be said of the pool; a doubted picture says so itself."""
        health, reason = self.core.health()
        return None if health in ("synced", "approximate") else f"{health}: {reason}"

    @property
    def snapshots_written(self) -> int:
        """Dumps put into the object store."""
        return self._desk.written

    async def stop(self, timeout_s: float) -> None:
        """Say that nothing more comes, as the last fact; then close the socket."""
        self._handle(Stopping("stopped"))
        self._stopped = True
        await self._served.stop()
        if self._subscriber is not None:
            await self._subscriber.stop()
            self._subscriber = None
        await self._client.close()
        REGISTRY.unregister(self._collector)
        try:
            await self._bus.flush(min(2.0, timeout_s))
            async with asyncio.timeout(min(2.0, timeout_s)):
                await self._desk.clear()
        except TimeoutError:
            log.warning("pool_snapshots_left_behind", pool=self.core.pool)
        except BusError as error:
            log.warning("pool_leave_unsaid", pool=self.core.pool, reason=error.reason)

    # In and out of the core

    def _handle(self, event: PoolEvent) -> None:
        if not self._stopped:
            self._perform(self.core.handle(event, self._clock()))

    def _received(self, subscriber: EventSubscriber, events: Sequence[SubscriberEvent]) -> None:
        if subscriber is self._subscriber:
            for event in events:
                self._handle(event)
                if not isinstance(event, EngineBatch):
                    self._poll_now.set()  # which process is it?

    def _perform(self, effects: Sequence[PoolEffect]) -> None:
        for effect in effects:
            match effect:
                case Publish():
                    self._publish(effect)
                case ListKeys():
                    self._work.put_nowait(effect)  # the core has one reconcile at a time
                case Compare():
                    self._comparison = effect
                case Say():
                    (log.warning if effect.warning else log.info)(effect.event, **effect.fields)

    def _publish(self, effect: Publish) -> None:
        try:
            self._bus.publish(effect.subject, effect.payload, effect.headers or None)
            self._published_bytes += len(effect.payload)
        except PayloadTooLargeError as error:
            # Batches are cut into parts before; a state or a reset is small.
            log.warning("publish_refused", subject=effect.subject, reason=error.reason, size=error.size_bytes)

    # Loops

    async def _keep_socket(self) -> None:
        """Subscribe; where ZeroMQ refuses the endpoint, try again later."""
        source = self._settings.pool_source()
        while True:
            subscriber = EventSubscriber([source], self._received, self._settings.handover_limit)
            try:
                subscriber.start()
            except BadEndpointError as error:
                await subscriber.stop()
                log.warning("pool_events_unusable", pool=self.core.pool, reason=error.reason, detail=str(error))
                await asyncio.sleep(SOCKET_RETRY_S)
                continue
            self._subscriber = subscriber
            await subscriber.watch()
            return

    async def _poll(self) -> None:
        while True:
            self._poll_now.clear()
            try:
                self._handle(Polled(await self._client.look()))
            except ScrapeError as error:
                self._poll_failures[error.reason] = self._poll_failures.get(error.reason, 0) + 1
                log.debug("pool_poll_failed", pool=self.core.pool, reason=error.reason, detail=str(error))
                self._handle(PollFailed(error.reason))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.pool_poll_s):
                    await self._poll_now.wait()

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._handle(Beat(self._bus.stats().reconnects))
            due = max(due + self._settings.heartbeat_interval_s, loop.time())
            await asyncio.sleep(due - loop.time())

    async def _reconcile(self) -> None:
        """Carry out one reconcile after the other, for ever, in pieces between which everything else goes on."""
        while True:
            ticket = (await self._work.get()).ticket
            self._handle(ListEnded(ticket, await self._list(ticket)))
            while self._runs(ticket):
                await self._go_on(ticket)

    def _runs(self, ticket: int) -> bool:
        running = self.core.reconciling
        return running is not None and running.ticket == ticket

    async def _list(self, ticket: int) -> str | None:
        """The key list into the core, piece by piece; what went wrong."""
        try:
            async for lines in self._client.keys():
                self._handle(KeysListed(ticket, lines))
                running = self.core.reconciling
                if running is None or running.void is not None:
                    return None  # nothing will come of it
                await asyncio.sleep(0)
        except ScrapeError as error:
            log.debug("pool_list_failed", pool=self.core.pool, reason=error.reason, detail=str(error))
            return error.reason
        return None

    async def _go_on(self, ticket: int) -> None:
        """A slice of the work; where the core wants a comparison, that instead, in a thread."""
        comparison, self._comparison = self._comparison, None
        if comparison is not None:
            deltas = await asyncio.to_thread(comparison.here.difference, comparison.there, part_bytes=DELTA_BYTES)
            self._handle(Compared(comparison.ticket, tuple(deltas)))
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + SLICE_S
        while loop.time() < due and self._runs(ticket) and self._comparison is None:
            self._handle(GoOn(ticket))
            if self._published_bytes > FLUSH_BYTES:
                break
        if self._published_bytes > FLUSH_BYTES:
            await self._settle()
        await asyncio.sleep(0)

    async def _settle(self) -> None:
        """Until the bus has taken what was published. One that is away is waited for once; what it cannot buffer is
        counted by it, and seen as missing by every receiver."""
        self._published_bytes = 0
        try:
            await self._bus.flush(FLUSH_TIMEOUT_S)
        except BusError as error:
            log.warning("pool_deltas_unconfirmed", pool=self.core.pool, reason=error.reason)

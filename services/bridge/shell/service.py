"""The bridge as `bus.service.run_service` runs it: sockets and clocks around the core, and nothing else."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Coroutine, Generator, Sequence

import zmq.asyncio
from prometheus_client import REGISTRY

from bus import subjects
from bus.errors import BusError, PayloadTooLargeError, SettingsError
from bus.interface import Bus, BusMessage, Endpoint, KeyValue, ServedEndpoints
from bus.log import EventLog
from bus.service import package_version
from bus.slices import in_slices
from bus.tasks import Tasks
from kvcore import BadDumpError
from schemas.base import BadMessageError, from_json
from schemas.worker import WorkerState
from services.bridge.checkpoint import Restorable
from services.bridge.config import BridgeSettings
from services.bridge.core import BridgeCore
from services.bridge.effects import (
    BridgeEffect,
    CallEngine,
    Discard,
    Discover,
    FetchReplay,
    Publish,
    PutWorker,
    Say,
    ScrapeNow,
    Subscribe,
)
from services.bridge.endpoints import RankSource, host_of
from services.bridge.engine import Sight
from services.bridge.errors import BadEndpointError, CheckpointError, ScrapeError
from services.bridge.events import (
    Beat,
    BridgeEvent,
    CheckpointRead,
    HintReceived,
    ReplayAnswered,
    Scraped,
    ScrapeFailed,
    SessionHeard,
    SocketsOpened,
    SourcesFound,
    Stopping,
    SubscriberEvent,
)
from services.bridge.layout import LayoutPage
from services.bridge.shell.hinting import HintCaller
from services.bridge.shell.metrics import BridgeCollector
from services.bridge.shell.replay import Replayed, fetch_replay
from services.bridge.shell.scraper import EngineScraper
from services.bridge.shell.snapshots import SnapshotDesk
from services.bridge.shell.subscriber import EventSubscriber
from web.errors import BadTlsFileError
from web.tls import client_tls

log = EventLog(__name__)

SIGHT_EVERY_S = 30.0
"""How often models and version are asked again while the engine's process stays the same (adapters come and go)."""

SOCKET_RETRY_S = 2.0
RESTORE_TIMEOUT_S = 10.0

REPLAY_BATCHES = 32
"""Batches of a replay that the core gets at once."""


def _engine_tls(settings: BridgeSettings) -> ssl.SSLContext | None:
    """Raises `SettingsError`."""
    if not settings.engine_url.lower().startswith("https:"):
        return None
    try:
        return client_tls(settings.engine_tls_ca)
    except BadTlsFileError as error:
        raise SettingsError("engine_tls_ca", str(error)) from error


class BridgeService:
    """One engine's bridge."""

    def __init__(self, settings: BridgeSettings, clock: Callable[[], float] = time.time) -> None:
        """Raises `SettingsError` for an ``engine_tls_ca`` that cannot be used."""
        self._settings = settings
        self._clock = clock
        tls = _engine_tls(settings)
        self._scraper = EngineScraper(settings.engine_url, settings.scrape_timeout_s, settings.engine_api_key, tls=tls)
        self._caller = HintCaller(settings, self._handle, tls)
        self._context = zmq.asyncio.Context()
        self._subscriber: EventSubscriber | None = None
        self._sources: tuple[RankSource, ...] = ()
        self._sources_changed = asyncio.Event()
        self._replays: dict[int, asyncio.Task[None]] = {}
        self._scrape_now = asyncio.Event()
        self._discover = False
        self._entry: bytes | None = None
        self._entry_changed = asyncio.Event()
        self._sight_at = float("-inf")
        self._started_at: float | None = None
        self._stopped = False

    async def start(self, bus: Bus, tasks: Tasks) -> None:
        """Serve, subscribe, and start asking the engine. The engine need not be there yet."""
        settings = self._settings
        self._bus = bus
        self._tasks = tasks
        self._registry = await bus.key_value(subjects.BUCKET_WORKERS)
        previous = await _previous_incarnations(self._registry, settings.worker_id)
        epoch = round(self._clock() * 1000)
        self.core = BridgeCore(settings, epoch, bus.max_payload, previous, restores=True)
        self._collector = BridgeCollector(self.core, lambda: self._subscriber)
        REGISTRY.register(self._collector)
        objects = await bus.objects(subjects.OBJECTS_SNAPSHOTS, ttl_s=subjects.SNAPSHOTS_TTL_S)
        self._desk = SnapshotDesk(bus, objects, self.core.worker, self.core.snapshot, self.core.marks)
        self._served: ServedEndpoints = await bus.serve(
            "tidegate-bridge",
            package_version(),
            "Makes an engine a citizen of the bus: its facts, its KV event stream, snapshots of its index",
            [
                Endpoint("snapshot", subjects.kv_snapshot(self.core.worker), self._desk.asked, queue=""),
                Endpoint("hint", subjects.hint(self.core.worker), self._hint, queue=""),
            ],
            {"instance": settings.instance, "worker": self.core.worker, "engine": settings.engine_url},
        )
        for state in ("closed", "opened"):
            await bus.subscribe(f"{subjects.ROOT}.session.{state}.*", self._session)
        for name, coroutine in self._loops():
            tasks.start(name, coroutine)
        if configured := settings.sources():
            self._handle(SourcesFound(configured))

    def _loops(self) -> list[tuple[str, Coroutine[None, None, None]]]:
        return [
            ("sockets", self._keep_sockets()),
            ("scrape", self._scrape()),
            ("beat", self._beat()),
            ("registry", self._register()),
            ("restore", self._restore()),
            ("snapshots", self._desk.serve()),
            *self._caller.loops(),
            ("keep", self._desk.keep(self._settings.checkpoint_interval_s, self._settings.checkpoint_batches)),
        ]

    def not_ready(self) -> str | None:
        """The engine's health, unless it is ready."""
        health, reason = self.core.health()
        return None if health == "ready" else f"{health}: {reason}"

    @property
    def snapshots_written(self) -> int:
        """Dumps put into the object store."""
        return self._desk.written

    async def stop(self, timeout_s: float) -> None:
        """Say `left`, once, as the last fact; then close the sockets."""
        self._handle(Stopping("stopped"))
        self._stopped = True
        await self._served.stop()
        if self._subscriber is not None:
            await self._subscriber.stop()
            self._subscriber = None
        for task in self._replays.values():
            task.cancel()
        await asyncio.gather(*self._replays.values(), return_exceptions=True)
        self._context.destroy(linger=0)
        await self._scraper.close()
        await self._caller.close()
        REGISTRY.unregister(self._collector)
        try:
            await self._bus.flush(min(2.0, timeout_s))
            async with asyncio.timeout(min(2.0, timeout_s)):
                if self._entry is not None:
                    await self._registry.put(subjects.encode_id(self.core.worker), self._entry)
                await self._desk.clear()
        except TimeoutError:
            log.warning("stores_left_as_they_are", worker=self.core.worker)
        except BusError as error:
            log.warning("leave_unsaid", worker=self.core.worker, reason=error.reason)

    # In and out of the core

    def _handle(self, event: BridgeEvent) -> None:
        if not self._stopped:
            self._perform(self.core.handle(event, self._clock()))

    def _received(self, subscriber: EventSubscriber, events: Sequence[SubscriberEvent]) -> None:
        if subscriber is not self._subscriber or self._sources_changed.is_set():
            return  # of sockets that are being closed: their ranks may be others by now
        for event in events:
            self._handle(event)

    def _hint(self, message: BusMessage) -> None:
        self._handle(HintReceived(message.payload))

    def _session(self, message: BusMessage) -> None:
        self._handle(SessionHeard(message.payload))

    def _perform(self, effects: list[BridgeEffect]) -> None:
        for effect in effects:
            match effect:
                case Publish():
                    self._publish(effect)
                case FetchReplay():
                    self._fetch(effect)
                case PutWorker():
                    self._entry = effect.payload
                    self._entry_changed.set()
                case ScrapeNow():
                    self._scrape_now.set()
                case Discover():
                    self._discover = True
                    self._scrape_now.set()
                case Subscribe():
                    self._sources = effect.sources
                    self._sources_changed.set()
                case Discard():
                    self._tasks.start("discard", in_slices(self.core.own.index.discard(effect.prepared)))
                case CallEngine():
                    self._caller.call(effect)
                case Say():
                    (log.warning if effect.warning else log.info)(effect.event, **effect.fields)

    def _publish(self, effect: Publish) -> None:
        try:
            self._bus.publish(effect.subject, effect.payload, effect.headers or None)
        except PayloadTooLargeError as error:
            # Only the state of a worker with thousands of ranks could reach this; batches are cut into parts before.
            log.warning("publish_refused", subject=effect.subject, reason=error.reason, size=error.size_bytes)

    def _fetch(self, effect: FetchReplay) -> None:
        running = self._replays.get(effect.rank)
        if running is not None:
            running.cancel()
        self._replays[effect.rank] = self._tasks.start(f"replay-{effect.rank}", self._replay(effect))

    async def _replay(self, effect: FetchReplay) -> None:
        answer = await fetch_replay(self._context, effect.endpoint, effect.start, self._settings.replay_timeout_s)
        await in_slices(self._answered(effect, answer))

    def _answered(self, effect: FetchReplay, answer: Replayed) -> Generator[None, None, None]:
        """A few batches at a time: the engine's whole past at once would keep everybody waiting for seconds."""
        batches = answer.batches
        for start in range(0, len(batches), REPLAY_BATCHES):
            part = batches[start : start + REPLAY_BATCHES]
            self._handle(ReplayAnswered(effect.rank, effect.ticket, part, more=True))
            yield
        self._handle(ReplayAnswered(effect.rank, effect.ticket, (), answer.problem))

    # Loops

    async def _restore(self) -> None:
        """Begin with what the bridge before left behind. Whatever is wrong with it, the engine is asked instead."""
        restorable: Restorable | None = None
        worker = self.core.worker
        try:
            async with asyncio.timeout(RESTORE_TIMEOUT_S):
                found = await self._desk.read()
                if found is not None:
                    checkpoint, dump = found
                    prepared = await in_slices(self.core.prepare(checkpoint, dump))
                    restorable = Restorable({rank.rank: rank for rank in checkpoint.ranks}, prepared)
        except TimeoutError:
            log.warning("checkpoint_unusable", worker=worker, reason="timeout")
        except (BusError, BadMessageError, BadDumpError, CheckpointError) as error:
            log.warning("checkpoint_unusable", worker=worker, reason=error.reason, detail=str(error))
        self._handle(CheckpointRead(restorable))

    async def _keep_sockets(self) -> None:
        """Open the sockets that the core wants now; where ZeroMQ refuses (a port is taken), try again later."""
        while True:
            await self._sources_changed.wait()
            self._sources_changed.clear()
            if self._subscriber is not None:
                await self._subscriber.stop()
                self._subscriber = None
            if not self._sources:
                continue
            subscriber = EventSubscriber(self._sources, self._received, self._settings.handover_limit)
            try:
                subscriber.start()
            except BadEndpointError as error:
                await subscriber.stop()
                self._handle(SocketsOpened(str(error)))
                await asyncio.sleep(SOCKET_RETRY_S)
                self._sources_changed.set()
                continue
            self._subscriber = subscriber
            self._tasks.start("kv-subscriber", subscriber.watch())
            self._handle(SocketsOpened())
            if subscriber.fell_back:
                await self._see_whether_connected()

    async def _see_whether_connected(self) -> None:
        """We connected to where we should have bound. If nobody is there, it was a leftover of ourselves: once more."""
        try:
            async with asyncio.timeout(SOCKET_RETRY_S):
                await self._sources_changed.wait()
        except TimeoutError:
            if not all(feed.connected for feed in self.core.feeds.values()):
                self._sources_changed.set()

    async def _scrape(self) -> None:
        while True:
            self._scrape_now.clear()
            asked_at = self._clock()
            try:
                self._handle(await self._look(asked_at))
                if self._discover:
                    self._discover = False
                    self._handle(await self._find_sources())
            except ScrapeError as error:
                log.debug("scrape_failed", worker=self.core.worker, reason=error.reason, detail=str(error))
                self._handle(ScrapeFailed(asked_at, error.reason))
            try:
                async with asyncio.timeout(self._settings.scrape_interval_s):
                    await self._scrape_now.wait()
            except TimeoutError:
                continue

    async def _look(self, asked_at: float) -> Scraped:
        """Metrics every time; models and version for a new process, and now and then. Raises `ScrapeError`."""
        metrics = await self._scraper.metrics()
        started_at = metrics.started_at if metrics is not None else None
        sight: Sight | None = None
        if started_at != self._started_at or asked_at - self._sight_at >= SIGHT_EVERY_S or not self._seen:
            models = await self._scraper.models()
            sight = Sight(
                models,
                await self._scraper.version(),
                await self._scraper.server_info(),
                await self._layout(),
                await self._scraper.hints(),
                await self._has_pin_prefix(),
            )
            self._sight_at = asked_at
            self._started_at = started_at
        elif metrics is None:
            await self._scraper.models()
        return Scraped(asked_at, metrics, sight)

    async def _layout(self) -> LayoutPage | None:
        """How pages lie in the shared pool, where there is one and the settings do not say. A page that cannot
        be read costs credit for the pool, not the worker."""
        if not self._settings.shared_pool or self._settings.shared_layout is not None:
            return None
        try:
            return await self._scraper.layout()
        except ScrapeError as error:
            return LayoutPage(enabled=True, problem=str(error)[:200])

    async def _has_pin_prefix(self) -> bool:
        """Asked of SGLang only: others would log a path that they never had. Raises `ScrapeError`."""
        return self.core.engine.kind == "sglang" and await self._scraper.has_pin_prefix()

    @property
    def _seen(self) -> bool:
        return self.core.engine.sight is not None

    async def _find_sources(self) -> SourcesFound:
        try:
            return SourcesFound(await self._scraper.sources(host_of(self._settings.engine_url)))
        except ScrapeError:
            self._discover = True
            raise

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._handle(Beat(self._bus.stats().reconnects))
            due = max(due + self._settings.heartbeat_interval_s, loop.time())
            await asyncio.sleep(due - loop.time())

    async def _register(self) -> None:
        """Keep the worker's entry in the registry bucket; a bus that is away gets the newest one later."""
        key = subjects.encode_id(self.core.worker)
        while True:
            await self._entry_changed.wait()
            self._entry_changed.clear()
            if self._entry is None:
                continue
            try:
                await self._registry.put(key, self._entry)
            except BusError as error:
                log.warning("registry_unreachable", worker=self.core.worker, reason=error.reason)
                await asyncio.sleep(self._settings.heartbeat_interval_s)
                self._entry_changed.set()


async def _previous_incarnations(registry: KeyValue, worker: str) -> dict[int, str]:
    """What an earlier bridge of this worker called each rank's stream last."""
    entry = await registry.get(subjects.encode_id(worker))
    if entry is None or entry.value is None:
        return {}
    try:
        state = from_json(entry.value, WorkerState)
    except BadMessageError as error:
        log.warning("registry_entry_unreadable", worker=worker, reason=error.reason)
        return {}
    return {stream.rank: stream.incarnation for stream in state.streams}

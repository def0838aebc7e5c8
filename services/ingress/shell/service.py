"""The ingress as a process: starts the front door on the bus, ticks, and drains on the way out."""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry

from bus import subjects
from bus.errors import BusError, SettingsError, cannot_listen
from bus.interface import Bus, BusMessage
from bus.log import EventLog
from bus.membership import Membership
from bus.rows import RowCollector, RowPublisher
from bus.tasks import Tasks
from schemas.base import BadMessageError, from_json
from schemas.worker import WorkerState
from services.ingress.breaker import BreakerRules
from services.ingress.config import IngressSettings
from services.ingress.core import IngressCore, IngressRules
from services.ingress.events import HintHeard, StopAsked, Stopped, Tick, WorkerHeard
from services.ingress.recognising import RecognitionRules
from services.ingress.shell.attempt import Splices
from services.ingress.shell.capture import Capture
from services.ingress.shell.counting import PromptCounter
from services.ingress.shell.dispatcher import Dispatcher
from services.ingress.shell.forwarding import ForwardList
from services.ingress.shell.front import FrontDoor
from services.ingress.shell.keys import Access, salt_secret
from services.ingress.shell.metrics import IngressMetrics, Levels, LevelsCollector
from services.ingress.shell.serving import Tools
from services.ingress.shell.shared_limits import common_secret, shared_buckets
from services.ingress.shell.tls import DoorTls
from services.ingress.turn_state import TurnStates
from web.client import HttpClient, Timeouts
from web.errors import BadTlsFileError
from web.server import HttpServer, ServerLimits
from web.tls import client_tls

log = EventLog(__name__)

TICK_S = 1.0
PROGRESS_PARTS, PROGRESS_REQUESTS = 20, 50
"""Into how many parts of a second the requests' progress is spread at most, and how many requests are one part."""
FIRST_WORKER_S = 1.5
"""How long a front door that starts listens to the bus before it listens to clients: bridges speak every second, and
who knows no worker yet refuses."""
BUS_ANSWERS_S = 0.75
"""A bus that needs longer for a round trip is taken for away: together with a tick well below `worker_lost_s`."""


async def _turn_secret(settings: IngressSettings, membership: Membership | None) -> bytes:
    """What turn states are signed with: the front doors' common secret, or one of the processes at this port. Raises
    `SettingsError`."""
    if settings.cache_salt_secret or settings.cache_salt_secret_file:
        return await asyncio.to_thread(salt_secret, settings)
    return secrets.token_bytes(32) if membership is None else common_secret(membership)


def _engine_tls(settings: IngressSettings) -> ssl.SSLContext:
    """Raises `SettingsError`."""
    try:
        return client_tls(settings.engine_tls_ca)
    except BadTlsFileError as error:
        raise SettingsError("engine_tls_ca", str(error)) from error


class _Epoch(msgspec.Struct, frozen=True):
    """All that is read of an `IngressState` of our own name."""

    epoch: int


class IngressService:
    """See `bus.service.Service`. ``membership``: which process of several at one port. ``_levels`` is there once the
    rest is."""

    def __init__(
        self,
        settings: IngressSettings,
        registry: CollectorRegistry = REGISTRY,
        membership: Membership | None = None,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._metrics = IngressMetrics(registry)
        self._epoch = int(time.time() * 1000)
        self._core = IngressCore(
            settings.instance,
            self._epoch,
            IngressRules(
                admit_deadline_s=settings.admit_deadline_s,
                worker_lost_s=settings.worker_lost_s,
                max_in_flight=settings.max_in_flight,
                fallback=settings.fallback,
                retry=settings.retry,
                hedge=settings.hedge_after_ms > 0,
                held_comment_s=settings.held_comment_s,
                recognition=RecognitionRules(on=settings.recognise_sessions, least=settings.recognise_confidence),
                session_id=settings.splice_session_id is None,
                continuum=settings.splice_continuum,
                kv_hints=settings.splice_kv_hints,
                trace_fine_tokens=settings.trace_fine_tokens,
                breaker=BreakerRules(
                    failures=settings.breaker_failures,
                    open_s=settings.breaker_open_s,
                    longest_s=settings.breaker_longest_s,
                ),
            ),
        )
        self._client = HttpClient()
        self._counter = PromptCounter(settings, self._client, self._worker_urls)
        self._membership = membership
        shared = shared_buckets(membership) if membership is not None and settings.keys_file else None
        self._access = Access(settings, self._metrics, shared)
        self._capture = Capture(settings, registry) if settings.capture != "off" else None
        self._tls = DoorTls(settings) if settings.tls_cert else None
        self._name_taken = asyncio.Event()
        self._worker_heard = asyncio.Event()
        self._levels: LevelsCollector | None = None
        self._server: HttpServer
        self._dispatcher: Dispatcher
        self._rows: RowPublisher
        self._row_levels: RowCollector
        self._bus: Bus

    @property
    def url(self) -> str:
        """Where clients connect."""
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{host}:{self._server.port}"

    @property
    def in_flight(self) -> int:
        """Accepted requests that have not ended."""
        return len(self._core)

    @property
    def workers(self) -> int:
        """Workers that are heard."""
        return len(self._core.workers)

    @property
    def hints_waiting(self) -> int:
        """Sessions, each at a worker, whose hints wait for a turn."""
        return len(self._core.fields.waiting)

    @property
    def open_connections(self) -> int:
        """Of clients."""
        return self._server.open_connections

    def cached_tokens(self) -> tuple[int, int]:
        """Tokens found in the prompt caches, and encoded, since the start."""
        return self._counter.cache_tokens()

    async def start(self, bus: Bus, tasks: Tasks) -> None:
        """Raises `SettingsError` for a tokenizer, a secret or a certificate that cannot be read, a directory that
        cannot be written and an address that is taken."""
        settings = self._settings
        tls = None if self._tls is None else await self._tls.load()
        self._client.tls = await asyncio.to_thread(_engine_tls, settings)
        await self._access.start(tasks)
        await self._counter.load(self._access.engine_api_key)
        if self._capture is not None:
            await self._capture.start(tasks)
        self._bus = bus
        self._rows = RowPublisher(bus, tasks, window=settings.row_window)
        self._dispatcher = Dispatcher(self._core, bus, self._rows, self._metrics, self._capture)
        self._server = self._make_server(
            bus, TurnStates(await _turn_secret(settings, self._membership), settings.turn_state_s)
        )
        self._register()
        await bus.subscribe(f"{subjects.ROOT}.worker.state.*", self._on_worker_state)
        await bus.subscribe(subjects.ingress_state(settings.instance), self._on_own_state)
        if settings.splice_kv_hints:
            await bus.subscribe(f"{subjects.ROOT}.hint.*", self._on_hint)
        await self._hear_first_worker()
        try:
            await self._server.start(settings.host, settings.port, reuse_port=self._membership is not None, tls=tls)
        except OSError as error:
            raise cannot_listen("port", settings.host, settings.port, error) from error
        if self._tls is not None:
            tasks.start("tls", self._tls.watch(self._server.use_tls))
        tasks.start("name", self._keep_name())
        tasks.start("tick", self._tick())
        tasks.start("progress", self._progress())
        log.info("front_door_open", url=self.url, models="/v1/models")
        if settings.exposed:
            log.warning(
                "exposed_without_credentials",
                host=settings.host,
                advice="whoever reaches this address can use the engines; set keys_file (`tidegate keys add`), bind to "
                "127.0.0.1 or put a proxy before it",
            )
        if settings.keys_in_clear:
            log.warning("keys_in_clear", host=settings.host, advice="set tls_cert, or put a proxy with TLS before it")

    async def _hear_first_worker(self) -> None:
        try:
            async with asyncio.timeout(FIRST_WORKER_S):
                await self._worker_heard.wait()
        except TimeoutError:
            log.info("no_worker_heard", after_s=FIRST_WORKER_S)

    def _make_server(self, bus: Bus, turn_states: TurnStates) -> HttpServer:
        settings = self._settings
        tools = Tools(
            settings=settings,
            bus=bus,
            client=self._client,
            counter=self._counter,
            dispatcher=self._dispatcher,
            metrics=self._metrics,
            forward_list=ForwardList(
                settings.forward_headers,
                keep_credentials=self._access.on,
                engine_api_key=self._access.engine_api_key,
            ),
            turn_states=turn_states,
            capture=self._capture,
            splices=Splices(
                usage=settings.splice_usage,
                priority=settings.splice_priority,
                session_id=bool(settings.splice_session_id),
                stripped=settings.strip_hints,
            ),
            timeouts=Timeouts(
                connect_s=settings.connect_timeout_s,
                first_byte_s=settings.first_byte_timeout_s,
                idle_s=settings.idle_timeout_s,
                total_s=settings.total_timeout_s,
            ),
        )
        front = FrontDoor(settings, tools, self._core, self._access, self._metrics, self._registry, self.not_ready)
        limits = ServerLimits(
            header_bytes=settings.header_bytes,
            body_bytes=settings.body_bytes,
            held_body_bytes=settings.held_body_bytes,
            body_timeout_s=settings.body_timeout_s,
            stall_timeout_s=settings.stall_timeout_s,
        )
        handshakes = None if self._tls is None else self._tls.handshakes
        return HttpServer(front.handle, limits, front.refusal, front.screen, handshakes)

    def _register(self) -> None:
        self._levels = LevelsCollector(
            Levels(
                in_flight=lambda: len(self._core),
                workers=lambda: len(self._core.workers),
                client_connections=lambda: self._server.open_connections,
                engine_connections=lambda: self._client.open_connections,
                tokenize_depth=lambda: self._counter.depth,
                held_body_bytes=lambda: self._server.held_body_bytes,
                cache_tokens=self._counter.cache_tokens,
                late_events=lambda: self._core.late_events,
                http_refusals=lambda: self._server.refusals,
                hints=lambda: self._core.fields.waiting.counts,
                hints_waiting=lambda: self.hints_waiting,
                breakers=lambda: self._core.breaker.states(time.time()),
                breaker_trips=lambda: self._core.breaker.trips,
            )
        )
        self._row_levels = RowCollector(self._rows)
        self._registry.register(self._levels)
        self._registry.register(self._row_levels)
        if self._tls is not None:
            self._registry.register(self._tls)

    def not_ready(self) -> str | None:
        """Ready once some worker can take requests (spec: user-cases B7), and somebody can be let in."""
        if self._core.stopping:
            return "stopping"
        if (closed := self._access.not_ready()) is not None:
            return closed
        return None if self._core.workers.models(time.time()) else "no_worker"

    async def stop(self, timeout_s: float) -> None:
        """Stop accepting, let streams finish, end what is left, wait until every row is acknowledged."""
        if self._levels is None:
            await self._abandon()
            return
        deadline = time.monotonic() + timeout_s
        reserve_s = min(3.0, timeout_s / 3)
        self._dispatcher.deliver(StopAsked())
        await self._server.drain(timeout_s - reserve_s)
        self._dispatcher.deliver(Stopped())
        await self._server.close(drain_s=min(0.5, reserve_s / 3))
        await self._client.close()
        self._counter.close()
        if self._capture is not None:
            await self._capture.stop(max(0.5, min(reserve_s / 3, deadline - time.monotonic() - 0.5)))
        self._dispatcher.say()
        await self._rows.drain(max(0.1, deadline - time.monotonic() - 0.2))
        try:
            await self._bus.flush(timeout_s=1.0)
        except BusError as error:
            log.warning("last_facts_not_flushed", reason=error.reason)
        self._registry.unregister(self._levels)
        self._registry.unregister(self._row_levels)
        if self._tls is not None:
            self._registry.unregister(self._tls)
        self._metrics.unregister()

    async def _abandon(self) -> None:
        """Stop what never started (a tokenizer could not be read)."""
        if self._capture is not None:
            await self._capture.stop(1.0)
        await self._client.close()
        self._counter.close()
        self._metrics.unregister()

    async def _tick(self) -> None:
        """Once a second: who is in flight."""
        while True:
            self._dispatcher.deliver(Tick(connected=await self._hears()))
            await asyncio.sleep(TICK_S)

    async def _progress(self) -> None:
        """Over each second: how far the streams are. A thousand at once are 15 ms of work, for which everybody else
        would wait, and on a busy machine ten times as long."""
        while True:
            parts = min(PROGRESS_PARTS, 1 + self.in_flight // PROGRESS_REQUESTS)
            for _ in self._dispatcher.progress(parts):
                await asyncio.sleep(TICK_S / parts)

    async def _hears(self) -> bool:
        """Whether the bus answers now: on one that hangs, the workers' silence is not theirs."""
        if not self._bus.connected:
            return False
        try:
            await self._bus.flush(timeout_s=BUS_ANSWERS_S)
        except BusError:
            return False
        return True

    def _on_worker_state(self, message: BusMessage) -> None:
        try:
            state = from_json(message.payload, WorkerState)
        except BadMessageError as error:
            self._metrics.bad_messages.inc()
            log.warning("bad_message", subject=message.subject, reason=error.reason, detail=str(error))
            return
        self._worker_heard.set()
        self._dispatcher.deliver(WorkerHeard(state=state))

    def _on_own_state(self, message: BusMessage) -> None:
        """What is said under our name. Who is older keeps it."""
        try:
            said = from_json(message.payload, _Epoch)
        except BadMessageError:
            return  # counted by those who read it
        if said.epoch < self._epoch:
            self._name_taken.set()

    async def _keep_name(self) -> None:
        """Two front doors of one name would undo each other's grants. Raises `SettingsError`."""
        await self._name_taken.wait()
        raise SettingsError(
            "instance",
            f"another front door named {self._settings.instance} is on this bus; give each its own name "
            "(its own requests would be taken for lost)",
        )

    def _on_hint(self, message: BusMessage) -> None:
        self._dispatcher.deliver(HintHeard(payload=message.payload))

    def _worker_urls(self, model: str) -> list[str]:
        """Engines of this model, for their ``/tokenize``; without those that fail, if there are others."""
        now = time.time()
        placeable = self._core.workers.placeable(model, now)
        avoided = self._core.breaker.avoided((state.worker for state in placeable), now)
        return [state.profile.url for state in placeable if state.worker not in avoided]

"""The indexer as `bus.service.run_service` runs it: a replica's feed, and the questions around the core."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import REGISTRY

from bus import subjects
from bus.interface import Bus, BusMessage, Endpoint, ServedEndpoints
from bus.log import EventLog
from bus.service import package_version
from bus.tasks import Tasks
from replica.shell import ReplicaFeed
from schemas.base import BadMessageError, from_json
from schemas.request import RequestAccepted, RequestEnd
from services.indexer.config import IndexerSettings
from services.indexer.core import IndexerCore
from services.indexer.events import EndHeard, IndexerEvent, RequestHeard
from services.indexer.shell.metrics import MATCH_SECONDS, IndexerCollector

log = EventLog(__name__)


class IndexerService:
    """One complete index."""

    def __init__(self, settings: IndexerSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._stopped = False
        self.core = IndexerCore(settings, round(clock() * 1000))
        self.feed = ReplicaFeed(self.core.replica, settings.replica(), clock, self._handle, self._handle, self._ended)

    async def start(self, bus: Bus, tasks: Tasks) -> None:
        """Subscribe and serve. Workers make themselves known within a heartbeat."""
        self._bus = bus
        self._collector = IndexerCollector(self.core)
        REGISTRY.register(self._collector)
        await self.feed.start(bus, tasks)
        await bus.subscribe(f"{subjects.ROOT}.request.accepted.*", self._on_accepted)
        self._served: ServedEndpoints = await bus.serve(
            "tidegate-indexer",
            package_version(),
            "Who holds which prefix, where, and which session it belongs to",
            [
                Endpoint("match", subjects.INDEX_MATCH, self._on_match),
                Endpoint("session", subjects.INDEX_SESSION, self._on_session),
                Endpoint("recognise", subjects.INDEX_RECOGNISE, self._on_recognise),
            ],
            {"instance": self._settings.instance},
        )

    def not_ready(self) -> str | None:
        """See `ReplicaFeed.not_ready`."""
        return self.feed.not_ready()

    async def stop(self, timeout_s: float) -> None:
        """Stop answering. There is nothing to drain: the index is rebuilt from the bridges."""
        self._stopped = True
        self.feed.stop()
        await self._served.stop()
        REGISTRY.unregister(self._collector)

    def _handle(self, event: IndexerEvent) -> None:
        if not self._stopped:
            for effect in self.core.handle(event, self._clock()):
                self._bus.publish(effect.subject, effect.payload)

    def _on_match(self, message: BusMessage) -> None:
        started = time.perf_counter()
        answer = self.core.match(message.payload, self._clock())
        MATCH_SECONDS.observe(time.perf_counter() - started)
        if message.reply:
            self._bus.publish(message.reply, answer)

    def _on_session(self, message: BusMessage) -> None:
        if message.reply:
            self._bus.publish(message.reply, self.core.session(message.payload, self._clock()))

    def _on_recognise(self, message: BusMessage) -> None:
        answer = self.core.recognise(message.payload, self._clock())
        if message.reply:
            self._bus.publish(message.reply, answer)

    def _on_accepted(self, message: BusMessage) -> None:
        try:
            fact = from_json(message.payload, RequestAccepted)
        except BadMessageError as error:
            self.core.bad_facts += 1
            log.warning("message_rejected", subject=message.subject, reason=error.reason, detail=str(error))
            return
        self._handle(RequestHeard(fact))

    def _ended(self, end: RequestEnd) -> None:
        self._handle(EndHeard(end))

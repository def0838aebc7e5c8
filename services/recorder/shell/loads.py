"""Samples of workers' load: facts of bridges in, rows out."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry

from bus import subjects
from bus.interface import Bus, BusMessage, Subscription
from bus.log import EventLog
from bus.metric_families import gauge, total
from bus.rows import RowPublisher
from schemas.base import BadMessageError, from_json
from schemas.worker import WorkerState
from services.recorder.loads import LoadSampler

log = EventLog(__name__)


class LoadSamples(Collector):
    """Takes a sample of every worker that is heard, each ``every_s`` seconds."""

    def __init__(self, every_s: float, registry: CollectorRegistry = REGISTRY) -> None:
        self._sampler = LoadSampler(every_s)
        self._registry = registry
        self._taken = 0
        self._unreadable = 0
        self._heard: Subscription | None = None
        self._rows: RowPublisher

    async def start(self, bus: Bus, rows: RowPublisher) -> None:
        self._rows = rows
        self._registry.register(self)
        self._heard = await bus.subscribe(f"{subjects.ROOT}.worker.state.*", self._on_state)

    async def stop(self) -> None:
        """Hear no more; what was taken is the publisher's."""
        if self._heard is not None:
            await self._heard.unsubscribe()
            self._registry.unregister(self)
            self._heard = None

    def _on_state(self, message: BusMessage) -> None:
        try:
            fact = from_json(message.payload, WorkerState)
        except BadMessageError as error:
            self._unreadable += 1
            log.warning("bad_message", subject=message.subject, reason=error.reason, detail=str(error))
            return
        row = self._sampler.handle(fact, time.time())
        if row is not None:
            self._taken += self._rows.publish(row.subject, row.payload, row.message_id)

    def collect(self) -> Iterable[Metric]:
        """See `docs/operations.md`, "Load samples"."""
        yield total("load_samples", "Rows made of workers' load.", self._taken)
        yield gauge("load_sampled_workers", "Workers whose load is sampled.", len(self._sampler))
        yield total("load_bad_facts", "Facts about workers that cannot be read.", self._unreadable)

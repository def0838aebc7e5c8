"""The counters of a pool's bridge, read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bus.metric_families import gauge, total, totals
from services.bridge.pool.core import PoolCore
from services.bridge.shell.metrics import socket_metrics
from services.bridge.shell.subscriber import EventSubscriber

HEALTHS = ("synced", "catching_up", "approximate", "blind")


class PoolCollector(Collector):
    """``subscriber``: the one there is now. ``poll_failures``: looks at the master that failed, by reason."""

    def __init__(
        self,
        core: PoolCore,
        subscriber: Callable[[], EventSubscriber | None],
        poll_failures: Mapping[str, int],
    ) -> None:
        self._core = core
        self._subscriber = subscriber
        self._poll_failures = poll_failures

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        core = self._core
        health = GaugeMetricFamily(
            "tidegate_pool_bridge_health", "1 for how far the picture can be trusted now.", labels=["pool", "health"]
        )
        now, _ = core.health()
        for name in HEALTHS:
            health.add_metric([core.pool, name], float(name == now))
        yield health
        yield from self._picture()
        yield from self._stream()
        yield from self._reconciles()
        subscriber = self._subscriber()
        if subscriber is not None:
            yield from socket_metrics(subscriber)

    def _picture(self) -> Iterable[Metric]:
        stats = self._core.stats
        for name, text, value in (
            ("objects", "Objects known to be in the pool.", stats.objects),
            ("pages", "Pages of which at least one object is there.", stats.pages),
            ("prefixes", "Key prefixes, each of one way to lay pages out.", stats.prefixes),
            ("memory_bytes", "Memory of the bridge's own index, estimated.", stats.memory_bytes),
        ):
            yield gauge(f"pool_bridge_{name}", text, value)
        text = "Pages forgotten because the index was full (pool_max_pages)."
        yield total("pool_bridge_pages_evicted", text, self._core.counters.evicted)

    def _stream(self) -> Iterable[Metric]:
        core, counters = self._core, self._core.counters
        for name, text, value in (
            ("batches", "Batches of the master forwarded.", counters.batches),
            ("deltas", "Differences to the key list published.", counters.deltas),
            ("payload_bytes", "Bytes of both.", counters.payload_bytes),
            ("batches_unreadable", "Batches that could not be read as such.", counters.bad_batches),
            ("batches_dropped", "Batches dropped because too many waited for a comparison.", counters.held_dropped),
            ("gaps", "Holes in the master's numbers, lost tails included.", core.master.gaps),
            ("restarts", "Other processes of the master than before.", core.master.restarts),
        ):
            yield total(f"pool_bridge_{name}", text, value)
        text = "Events of the master that could not be taken in, by reason."
        yield totals("pool_bridge_events_rejected", text, "reason", core.unusable)
        yield totals("pool_bridge_polls_failed", "Looks at the master that failed.", "reason", self._poll_failures)
        yield gauge("pool_bridge_batches_held", "Batches that wait for a comparison to be told.", core.held)

    def _reconciles(self) -> Iterable[Metric]:
        outcomes = self._core.outcomes
        yield totals("pool_bridge_reconciles", "Key lists agreed with, by trigger.", "reason", outcomes.finished)
        text = "Key lists that came to nothing, by reason."
        yield totals("pool_bridge_reconciles_given_up", text, "reason", outcomes.given_up)
        yield total("pool_bridge_reconcile_added", "Objects that the picture had lacked.", outcomes.added)
        yield total("pool_bridge_reconcile_removed", "Objects that were gone without an event.", outcomes.removed)
        text = "From the last list's question to the end of telling what it differed in."
        yield gauge("pool_bridge_reconcile_seconds", text, outcomes.last_took_s)
        yield gauge("pool_bridge_listed_objects", "Objects in the last key list.", outcomes.last_listed)
        text = "Keys in the last list that are no pages of a known scheme."
        yield gauge("pool_bridge_listed_unparsed", text, outcomes.last_unparsed)

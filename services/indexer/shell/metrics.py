"""The indexer's counters, read when scraped, and the histogram of match times."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replica.metrics import replica_families
from services.indexer.core import IndexerCore

_BUCKETS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2)

MATCH_SECONDS = Histogram(
    "tidegate_index_match_seconds", "One match question: decode, look up, encode.", buckets=_BUCKETS
)


class IndexerCollector(Collector):
    """One indexer's counters."""

    def __init__(self, core: IndexerCore) -> None:
        self._core = core

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        core = self._core
        yield from replica_families(core.replica)
        for name, text, value in (
            ("index_bad_questions", "Questions that could not be read.", core.bad_questions),
            ("index_sessions_evicted", "Sessions forgotten because of the bound.", core.sessions.evicted),
        ):
            yield CounterMetricFamily(f"tidegate_{name}", text, value=value)
        yield GaugeMetricFamily("tidegate_index_sessions", "Sessions remembered.", value=len(core.sessions))

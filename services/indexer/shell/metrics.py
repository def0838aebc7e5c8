"""The indexer's counters, read when scraped, and the histogram of match times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.indexer.core import IndexerCore

HEALTHS = ("synced", "catching_up", "approximate", "blind")
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
        core, counters = self._core, self._core.counters
        state = GaugeMetricFamily(
            "tidegate_index_state", "1 for the health of a source.", labels=["worker", "rank", "state"]
        )
        blocks = GaugeMetricFamily("tidegate_index_blocks", "Blocks a source holds.", labels=["worker", "rank"])
        held = GaugeMetricFamily(
            "tidegate_index_held_batches", "Batches waiting for what is missing before them.", labels=["worker", "rank"]
        )
        for source in core.all_sources():
            labels = [source.worker, str(source.rank)]
            for name in HEALTHS:
                state.add_metric([*labels, name], float(name == source.health))
            blocks.add_metric(labels, core.index.resident(source.worker, source.rank))
            held.add_metric(labels, source.machine.held)
        yield from (state, blocks, held)
        yield from self._by_label("tidegate_events_rejected", "Events left out.", "reason", core.rejected)
        yield from self._by_label(
            "tidegate_predicted_cached_tokens",
            "Cached tokens as predicted, where both are known.",
            "worker",
            core.predicted,
        )
        yield from self._by_label(
            "tidegate_reported_cached_tokens", "Cached tokens as the engine reported them.", "worker", core.reported
        )
        gaps = CounterMetricFamily(
            "tidegate_kv_gaps",
            "Snapshots asked for, restored, failed; ranks cleared, by reason.",
            labels=["worker", "result"],
        )
        for labels_of, count in core.gaps.items():
            gaps.add_metric(list(labels_of), count)
        yield gaps
        stats = core.index.stats()
        for name, text, value in (
            ("index_batches", "Batches applied.", counters.batches),
            ("index_blocks_stored", "Blocks stored.", counters.blocks_stored),
            ("index_blocks_removed", "Blocks removed.", counters.blocks_removed),
            ("index_blocks_evicted", "Blocks forgotten because of the bound.", stats.evicted),
            ("index_batches_discarded", "Batches in parts of which one was missing.", core.parts.discarded),
            ("index_bad_questions", "Questions that could not be read.", counters.bad_questions),
            ("index_refused", "Messages of workers beyond the bound.", counters.refused),
            ("index_sessions_evicted", "Sessions forgotten because of the bound.", core.sessions.evicted),
            ("parity_alarms", "Sources found to disagree with their engine, or silent.", counters.parity_alarms),
        ):
            yield CounterMetricFamily(f"tidegate_{name}", text, value=value)
        yield GaugeMetricFamily("tidegate_index_unique_blocks", "Distinct chain hashes.", value=stats.unique)
        yield GaugeMetricFamily("tidegate_index_waiting_blocks", "Blocks waiting for their parent.", value=stats.held)
        yield GaugeMetricFamily("tidegate_index_sessions", "Sessions remembered.", value=len(core.sessions))

    def _by_label(self, name: str, text: str, label: str, counts: Mapping[str, int]) -> Iterable[Metric]:
        family = CounterMetricFamily(name, text, labels=[label])
        for value, count in counts.items():
            family.add_metric([value], count)
        yield family

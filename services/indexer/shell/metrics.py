"""The indexer's counters, read when scraped, and the histogram of match times."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from bus.metric_families import gauge, total, totals
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
        stats, recogniser = core.sessions.index.stats(), core.recogniser
        yield total("index_bad_questions", "Questions that could not be read.", core.bad_questions)
        yield total("index_bad_facts", "Facts about requests that could not be read.", core.bad_facts)
        yield total("index_sessions_evicted", "Sessions forgotten because of the bound.", core.sessions.evicted)
        yield total(
            "index_session_contradictions", "Chains of sessions that no hash function makes.", stats.contradictions
        )
        yield totals(
            "index_session_events",
            "Runs of blocks that an engine stored for a session, by what became of them.",
            "outcome",
            core.engine_sessions.outcomes,
        )
        yield gauge("index_sessions", "Sessions remembered.", stats.sessions)
        yield gauge("index_session_blocks", "Distinct blocks of their prefixes.", stats.blocks)
        yield gauge("index_recognised_sessions", "Sessions known by their content.", len(recogniser.index))
        yield totals(
            "index_recognised", "Prompts that named nobody, by what they are.", "relation", recogniser.relations
        )
        yield totals(
            "index_recognition_doubts", "Why nobody, or not surely somebody, was named.", "reason", recogniser.reasons
        )

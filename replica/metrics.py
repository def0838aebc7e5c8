"""A replica's counters as Prometheus families, read when scraped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from replica.core import Replica

HEALTHS = ("synced", "catching_up", "approximate", "blind")


def replica_families(replica: Replica, prefix: str = "tidegate_", index: str = "index_") -> Iterable[Metric]:
    """Every family, its name beginning with ``prefix``, those about the index itself with ``prefix`` + ``index``."""
    yield from _sources(replica, prefix + index)
    yield from _labelled(replica, prefix)
    stats, counters = replica.index.stats(), replica.counters
    for name, text, value in (
        (f"{index}batches", "Batches applied.", counters.batches),
        (f"{index}blocks_stored", "Blocks stored.", counters.blocks_stored),
        (f"{index}blocks_removed", "Blocks removed.", counters.blocks_removed),
        (f"{index}blocks_evicted", "Blocks forgotten because of the bound.", stats.evicted),
        (f"{index}batches_discarded", "Batches in parts of which one was missing.", replica.parts.discarded),
        (f"{index}refused", "Messages of workers beyond the bound.", counters.refused),
        ("parity_alarms", "Sources found to disagree with their engine, or silent.", counters.parity_alarms),
    ):
        yield CounterMetricFamily(f"{prefix}{name}", text, value=value)
    yield from _sent(replica, f"{prefix}{index}")
    yield GaugeMetricFamily(f"{prefix}{index}unique_blocks", "Distinct chain hashes.", value=stats.unique)
    yield GaugeMetricFamily(f"{prefix}{index}waiting_blocks", "Blocks waiting for their parent.", value=stats.held)


def _sources(replica: Replica, prefix: str) -> Iterable[Metric]:
    labels = ["worker", "rank"]
    state = GaugeMetricFamily(f"{prefix}state", "1 for the health of a source.", labels=[*labels, "state"])
    blocks = GaugeMetricFamily(f"{prefix}blocks", "Blocks a source holds.", labels=labels)
    held = GaugeMetricFamily(f"{prefix}held_batches", "Batches waiting for what is missing before them.", labels=labels)
    for source in replica.all_sources():
        values = [source.worker, str(source.rank)]
        for name in HEALTHS:
            state.add_metric([*values, name], float(name == source.health))
        blocks.add_metric(values, replica.index.resident(source.worker, source.rank))
        held.add_metric(values, source.machine.held)
    yield from (state, blocks, held)


def _sent(replica: Replica, prefix: str) -> Iterable[Metric]:
    """What was sent where, by unit of the chain."""
    blocks = GaugeMetricFamily(f"{prefix}sent_blocks", "Blocks known from what was sent where.", labels=["unit"])
    evicted = CounterMetricFamily(
        f"{prefix}sent_blocks_evicted", "Sent blocks forgotten before their time because of a bound.", labels=["unit"]
    )
    for unit, sent in (("tokens", replica.approximate.tokens), ("text", replica.approximate.text)):
        blocks.add_metric([unit], len(sent))
        evicted.add_metric([unit], sent.evicted)
    yield from (blocks, evicted)


def _labelled(replica: Replica, prefix: str) -> Iterable[Metric]:
    yield _by_label(f"{prefix}events_rejected", "Events left out.", "reason", replica.rejected)
    yield _by_label(
        f"{prefix}predicted_cached_tokens",
        "Cached tokens as predicted, where both are known.",
        "worker",
        replica.predicted,
    )
    yield _by_label(
        f"{prefix}reported_cached_tokens", "Cached tokens as the engine reported them.", "worker", replica.reported
    )
    gaps = CounterMetricFamily(
        f"{prefix}kv_gaps",
        "Snapshots asked for, restored, failed; ranks cleared, by reason.",
        labels=["worker", "result"],
    )
    for labels, count in replica.gaps.items():
        gaps.add_metric(list(labels), count)
    yield gaps


def _by_label(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family

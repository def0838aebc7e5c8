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
    yield from _pools(replica, f"{prefix}{index}")
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


def _pools(replica: Replica, prefix: str) -> Iterable[Metric]:
    """Shared pools: what is known of each, who can be answered, and what came and could not be taken in."""
    pools = replica.pools
    state = GaugeMetricFamily(f"{prefix}pool_state", "1 for the health of a shared pool.", labels=["pool", "state"])
    pages = GaugeMetricFamily(
        f"{prefix}pool_pages", "Pages of a shared pool of which any object is known.", labels=["pool"]
    )
    objects = GaugeMetricFamily(f"{prefix}pool_objects", "Objects of a shared pool.", labels=["pool"])
    memory = GaugeMetricFamily(
        f"{prefix}pool_memory_bytes", "About what the index of a shared pool takes.", labels=["pool"]
    )
    held = GaugeMetricFamily(f"{prefix}pool_held_batches", "Batches that wait for those before them.", labels=["pool"])
    for source in pools.sources.values():
        for name in HEALTHS:
            state.add_metric([source.name, name], float(name == source.health))
        stats = source.index.stats()
        pages.add_metric([source.name], stats.pages)
        objects.add_metric([source.name], stats.objects)
        memory.add_metric([source.name], stats.memory_bytes)
        held.add_metric([source.name], source.machine.held + len(source.backlog))
    usable = GaugeMetricFamily(
        f"{prefix}pool_layout_usable",
        "1: the workers of this model that read the pool agree how its pages lie; 0: no credit is given.",
        labels=["pool", "model"],
    )
    alarm = GaugeMetricFamily(
        f"{prefix}pool_alarm", "1: keys arrive, and workers of this model find none.", labels=["pool", "model"]
    )
    for readers in pools.layouts.readers():
        usable.add_metric([readers.pool, readers.model], float(readers.usable))
        alarm.add_metric([readers.pool, readers.model], float(readers.alarmed))
    yield from (state, pages, objects, memory, held, usable, alarm)
    counters = pools.counters
    for name, text, value in (
        ("pool_batches", "Batches of pools applied.", counters.batches),
        ("pool_objects_stored", "Objects that came into pools.", counters.objects_stored),
        ("pool_objects_removed", "Objects that left pools.", counters.objects_removed),
        ("pool_unparsed_keys", "Keys of pools that name no page.", counters.unparsed),
        ("pool_pages_evicted", "Pages of pools forgotten because of the bound.", counters.evicted),
        ("pool_matches", "Prompts looked for in a pool.", counters.matches),
        ("pool_matched_pages", "Pages of prompts found in a pool.", counters.matched_pages),
        ("pool_unread_messages", "Messages of pools that no worker reads.", counters.unread),
        ("pool_refused_messages", "Messages of pools beyond the bound.", counters.refused),
        ("pool_alarms", "Pools whose keys arrive and nobody finds.", counters.alarms),
        ("pool_layout_disagreements", "Times that workers came to disagree about a pool.", counters.disagreements),
    ):
        yield CounterMetricFamily(f"{prefix}{name}", text, value=value)
    yield _by_label(f"{prefix}pool_events_rejected", "Events of pools left out.", "reason", pools.rejected)
    gaps = CounterMetricFamily(
        f"{prefix}pool_gaps",
        "Snapshots of pools asked for, restored, failed; pools cleared.",
        labels=["pool", "result"],
    )
    for labels, count in pools.gaps.items():
        gaps.add_metric(list(labels), count)
    yield gaps


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

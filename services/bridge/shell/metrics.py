"""The bridge's counters, read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.bridge.core import BridgeCore
from services.bridge.shell.subscriber import EventSubscriber

HEALTHS = ("starting", "ready", "unhealthy", "mismatch", "left")
STATES = ("synced", "catching_up", "blind")


class BridgeCollector(Collector):
    """``subscriber``: the one there is now; its counters begin anew with each set of sockets."""

    def __init__(self, core: BridgeCore, subscriber: Callable[[], EventSubscriber | None]) -> None:
        self._core = core
        self._subscriber = subscriber

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        core = self._core
        worker = core.worker
        health = GaugeMetricFamily(
            "tidegate_worker_health", "1 for the engine's health now.", labels=["worker", "health"]
        )
        now, _ = core.health()
        for name in HEALTHS:
            health.add_metric([worker, name], float(name == now))
        yield health
        yield from self._streams(worker)
        for name, text, value in (
            ("kv_batches", "Batches forwarded.", core.counters.batches),
            ("kv_messages", "Messages that carried them.", core.counters.messages),
            ("kv_payload_bytes", "Bytes of engine payload forwarded.", core.counters.payload_bytes),
            ("hints_answered", "Hint commands answered.", core.hints.hints),
            ("dumps_given_up", "Dumps of the index given up, because too many batches came.", core.own.given_up),
            (
                "hints_unreadable",
                "Hint commands that could not be read, or not wholly.",
                core.hints.unreadable,
            ),
        ):
            family = CounterMetricFamily(f"tidegate_bridge_{name}", text, labels=["worker"])
            family.add_metric([worker], value)
            yield family
        yield from self._hints(worker)
        rejected = CounterMetricFamily(
            "tidegate_events_rejected", "Engine events left out, by reason.", labels=["reason"]
        )
        for reason, count in core.rejected.items():
            rejected.add_metric([reason], count)
        yield rejected
        yield GaugeMetricFamily("tidegate_bridge_index_blocks", "Blocks in the bridge's own index.", value=core.blocks)
        yield GaugeMetricFamily(
            "tidegate_bridge_index_waiting", "Batches that wait for a dump of the index to end.", value=core.own.waiting
        )
        subscriber = self._subscriber()
        if subscriber is not None:
            yield from socket_metrics(subscriber)

    def _hints(self, worker: str) -> Iterable[Metric]:
        hints = self._core.hints
        engine = self._core.engine.kind
        actions = CounterMetricFamily(
            "tidegate_bridge_hint_actions", "Actions answered.", labels=["worker", "engine", "action", "outcome"]
        )
        for (action, outcome), count in hints.counts.items():
            actions.add_metric([worker, engine, action, outcome], count)
        calls = CounterMetricFamily(
            "tidegate_bridge_hint_calls",
            "Calls to the engine for hints, by how they ended.",
            labels=["worker", "result"],
        )
        for result, count in hints.calls.items():
            calls.add_metric([worker, result], count)
        yield from (actions, calls)
        for name, text, value in (
            ("hint_calls_waiting", "Calls for hints that run or wait.", hints.waiting),
            ("hint_closed_sessions", "Closed sessions that are remembered.", len(hints.closed)),
        ):
            family = GaugeMetricFamily(f"tidegate_bridge_{name}", text, labels=["worker"])
            family.add_metric([worker], value)
            yield family

    def _streams(self, worker: str) -> Iterable[Metric]:
        core = self._core
        gaps = CounterMetricFamily(
            "tidegate_kv_gaps",
            "Holes in an engine's stream: found, and those that lost its history or failed to be replayed, by reason.",
            labels=["worker", "result"],
        )
        state = GaugeMetricFamily(
            "tidegate_kv_stream_state", "1 for the state of a rank's stream.", labels=["worker", "rank", "state"]
        )
        dropped = CounterMetricFamily(
            "tidegate_kv_batches_dropped",
            "Batches given up before they were forwarded.",
            labels=["worker", "rank", "reason"],
        )
        for rank, feed in core.feeds.items():
            label = str(rank)
            now, _ = feed.state()
            for name in STATES:
                state.add_metric([worker, label, name], float(name == now))
            dropped.add_metric([worker, label, "unidentified"], feed.counters.overflowed)
            dropped.add_metric([worker, label, "history_gone"], feed.machine.counters.dropped)
        gaps.add_metric([worker, "found"], sum(feed.machine.counters.gaps for feed in core.feeds.values()))
        for reason, count in core.gaps.items():
            gaps.add_metric([worker, reason], count)
        yield from (gaps, state, dropped)


def socket_metrics(subscriber: EventSubscriber) -> Iterable[Metric]:
    """Of the thread that polls the PUB sockets."""
    counters = subscriber.counters
    yield CounterMetricFamily("tidegate_bridge_zmq_received", "Messages of the PUB sockets.", value=counters.received)
    yield CounterMetricFamily(
        "tidegate_bridge_zmq_malformed", "Messages without topic, sequence and payload.", value=counters.malformed
    )
    yield CounterMetricFamily(
        "tidegate_bridge_handover_dropped", "Batches that the hand-over queue could not take.", value=counters.dropped
    )
    yield GaugeMetricFamily(
        "tidegate_bridge_handover_depth", "Events handed over and not yet taken.", value=subscriber.depth
    )

"""What the hints service measures, read from the core when somebody asks for the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bus.facts import GapCounter
from services.hints.core import Core


class HintMetrics(Collector):
    """Counters and tables of one core. Never labelled by session."""

    def __init__(self, core: Core, gaps: GapCounter) -> None:
        self._core = core
        self._gaps = gaps
        self.bad_messages: Counter[str] = Counter()
        self.publish_failed: Counter[str] = Counter()

    def collect(self) -> Iterable[Metric]:
        core = self._core
        yield GaugeMetricFamily("tidegate_leader", "1 while this process leads.", value=float(core.leading))
        depth = GaugeMetricFamily("tidegate_queue_depth", "Entries that wait, by queue.", labels=["queue"])
        depth.add_metric(["hints_under_way"], core.outcomes.under_way)
        yield depth
        retained = GaugeMetricFamily("tidegate_retained_sessions", "Sessions retained.", labels=["worker"])
        for worker, count in core.retained.workers().items():
            retained.add_metric([worker], count)
        yield retained
        sent = CounterMetricFamily("tidegate_hint_actions", "Hint actions sent.", labels=["action"])
        for action, count in core.outcomes.sent.items():
            sent.add_metric([action], count)
        yield sent
        results = CounterMetricFamily("tidegate_hint_results", "What became of actions.", labels=["action", "outcome"])
        for (action, outcome), count in core.outcomes.outcomes.items():
            results.add_metric([action, outcome], count)
        yield results
        unknown = core.outcomes.unknown_results
        yield CounterMetricFamily("tidegate_hint_results_unknown", "Results of no envelope of ours.", value=unknown)
        yield _totals("hints_not_sent", "Hints not sent.", "reason", core.not_sent)
        yield _totals("facts_missed", "Facts lost on the way, by family.", "family", self._gaps.missed)
        yield _totals("hints_bad_messages", "Messages that could not be read.", "kind", self.bad_messages)
        yield _totals("hints_publish_failed", "Messages that could not be sent.", "reason", self.publish_failed)


def _totals(name: str, text: str, label: str, values: Counter[str]) -> Metric:
    family = CounterMetricFamily(f"tidegate_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family

"""What admission measures, as Prometheus families read from the core when somebody asks for the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bus.facts import GapCounter
from schemas.decision import Decision
from services.admission.core import Core

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class AdmissionMetrics(Collector):
    """Counters and tables of one core. Never labelled by session or request."""

    def __init__(self, core: Core, gaps: GapCounter) -> None:
        self._core = core
        self._gaps = gaps
        self.bad_messages: Counter[str] = Counter()
        self.publish_failed: Counter[str] = Counter()
        self._wait = Histogram(
            "tidegate_admission_wait_seconds",
            "From a turn's ask to its grant, holds included.",
            buckets=SECONDS,
            registry=None,
        )
        self._decision = Histogram(
            "tidegate_decision_seconds",
            "From the beginning of a decision to its grant: index, route policy, placement.",
            buckets=SECONDS,
            registry=None,
        )

    def granted(self, decision: Decision) -> None:
        """One grant was given."""
        decide_s = decision.decide_us / 1e6
        self._decision.observe(decide_s)
        self._wait.observe(decision.hold_ms / 1000 + decide_s)

    def collect(self) -> Iterable[Metric]:
        yield from self._wait.collect()
        yield from self._decision.collect()
        yield from self._tables()
        yield from self._totals()

    def _tables(self) -> Iterable[Metric]:
        state, deciding = self._core.state, self._core.deciding
        yield _gauge("leader", "1 while this process is the admission leader.", float(self._core.leading))
        depth = GaugeMetricFamily("tidegate_queue_depth", "Entries that wait, by queue.", labels=["queue"])
        depth.add_metric(["admission_hold"], deciding.held)
        depth.add_metric(["admission_questions"], deciding.open_questions)
        yield depth
        grants = GaugeMetricFamily("tidegate_open_grants", "Turns admitted and not ended.", labels=["worker", "rank"])
        for (worker, rank), account in state.ledger.accounts():
            grants.add_metric([worker, str(rank)], account.requests)
        yield grants
        sessions = GaugeMetricFamily("tidegate_sessions", "Sessions known, by state.", labels=["state"])
        for name, count in state.sessions.states().items():
            sessions.add_metric([name], count)
        yield sessions
        yield _gauge("workers", "Workers heard of.", len(state.fleet))
        yield _gauge("ingresses", "Ingresses heard of.", state.requests.ingresses)
        yield _gauge("requests_open", "Requests accepted and not ended.", len(state.requests))

    def _totals(self) -> Iterable[Metric]:
        counters = self._core.state.counters
        yield _total("admission_asks", "Asks, without repeated ones.", counters.asks)
        yield _total("admission_asks_again", "Repeated asks.", counters.asks_again)
        yield _total(
            "predicted_cached_tokens", "Prompt tokens predicted to be cached.", counters.predicted_cached_tokens
        )
        yield _total("admitted_input_tokens", "Prompt tokens of granted turns.", counters.input_tokens)
        yield _total("admission_workers_refused", "Facts of workers beyond the bound.", self._core.state.fleet.refused)
        yield _total(
            "admission_requests_refused", "Requests beyond the bound on known ones.", self._core.state.requests.refused
        )
        yield _total("requests_vanished", "Requests that no fact named any more.", counters.vanished)
        yield _totals("grants", "Grants.", "mode", counters.grants)
        yield _totals("sticky_placements", "Turns by what became of the previous worker.", "outcome", counters.sticky)
        yield _totals("grants_released", "Grants released.", "reason", counters.released)
        yield _totals("admission_refused", "Asks refused.", "reason", counters.refused)
        yield _totals("admission_cancelled", "Asks cancelled.", "reason", counters.cancels)
        yield _totals("held_replies", "Held replies sent.", "reason", counters.held)
        yield _totals("index_questions", "Questions to the index.", "outcome", counters.index)
        yield _totals("route_policy_questions", "Questions to the route policy.", "outcome", counters.policy)
        yield _totals("requests_lost", "Requests ended for their lost ingress.", "reason", counters.lost)
        yield _totals("workers_lost", "Workers lost.", "reason", counters.workers_lost)
        yield _totals("session_transitions", "Transitions of sessions.", "state", counters.sessions)
        if self._core.state.scheduled is not None:
            ignored = self._core.state.scheduled.ignored
            yield _totals("policy_ignored", "What a scheduling policy wanted and cannot have.", "what", ignored)
        yield _totals("facts_missed", "Facts lost on the way, by family.", "family", self._gaps.missed)
        yield _totals("admission_bad_messages", "Messages that could not be read.", "kind", self.bad_messages)
        yield _totals("admission_publish_failed", "Messages that could not be sent.", "reason", self.publish_failed)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tidegate_{name}", text, value=value)


def _total(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"tidegate_{name}", text, value=value)


def _totals(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"tidegate_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family

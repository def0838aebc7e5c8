"""The ingress's metrics. Never a label by session or request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schemas.trace import TraceRow

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_FAST_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)


class IngressMetrics:
    """Counters and histograms that events move."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.requests = Counter(
            "tidegate_ingress_requests_total",
            "Accepted requests that have ended.",
            ["endpoint", "outcome"],
            registry=registry,
        )
        self.not_accepted = Counter(
            "tidegate_ingress_not_accepted_total",
            "Requests answered before they were accepted (they have no row).",
            ["reason"],
            registry=registry,
        )
        self.unreadable_identity = Counter(
            "tidegate_ingress_unreadable_identity_total",
            "Session headers that are not printable ASCII: treated as absent.",
            registry=registry,
        )
        self.keys = Gauge("tidegate_ingress_keys", "API keys of the keys file.", registry=registry)
        self.keys_reload_failures = Counter(
            "tidegate_ingress_keys_reload_failures_total",
            "Times that a changed keys file could not be read: the keys from before it are kept.",
            registry=registry,
        )
        self.retries = Counter(
            "tidegate_ingress_retries_total", "Requests that went to a second worker.", registry=registry
        )
        self.hedges = Counter(
            "tidegate_ingress_hedges_total",
            "Requests that were sent twice to be fast, by what became of the second sending.",
            ["outcome"],
            registry=registry,
        )
        self.tokens = Counter(
            "tidegate_ingress_prompts_total",
            "Prompts, by how their tokens were counted or why not.",
            ["how"],
            registry=registry,
        )
        self.text_chains = Counter(
            "tidegate_ingress_text_chains_total",
            "Prompts without tokens that are placed by their text.",
            registry=registry,
        )
        self.recognised = Counter(
            "tidegate_ingress_recognised_total",
            "Requests that name nobody, by what they were said to be, or why nobody said so.",
            ["relation"],
            registry=registry,
        )
        self.facts_dropped = Counter(
            "tidegate_ingress_facts_dropped_total", "Facts that could not be published.", ["reason"], registry=registry
        )
        self.bad_messages = Counter(
            "tidegate_ingress_bad_messages_total", "Messages of the bus that could not be read.", registry=registry
        )
        self.deposed = Counter(
            "tidegate_ingress_deposed_answers_total",
            "Answers of an admission leader that were not taken because a newer one had been heard.",
            registry=registry,
        )
        self.held_comments = Counter(
            "tidegate_ingress_held_comments_total",
            "Comments that told a client that its stream is held.",
            registry=registry,
        )
        self.ttft = Histogram(
            "tidegate_ingress_ttft_seconds",
            "Receipt to the first byte of the answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.duration = Histogram(
            "tidegate_ingress_request_seconds", "Receipt to the end.", buckets=_SECONDS, registry=registry
        )
        self.decision = Histogram(
            "tidegate_ingress_decision_seconds",
            "Asking admission to its decision, without what it was held for.",
            ["mode"],
            buckets=_FAST_SECONDS,
            registry=registry,
        )

    def unregister(self) -> None:
        """Forget them (a registry may outlive a service in tests)."""
        for metric in (
            self.requests,
            self.not_accepted,
            self.unreadable_identity,
            self.keys,
            self.keys_reload_failures,
            self.retries,
            self.hedges,
            self.tokens,
            self.text_chains,
            self.recognised,
            self.facts_dropped,
            self.bad_messages,
            self.deposed,
            self.held_comments,
            self.ttft,
            self.duration,
            self.decision,
        ):
            self._registry.unregister(metric)

    def row(self, row: TraceRow) -> None:
        """One request has ended."""
        request = row.request
        if request is None:
            return
        self.requests.labels(request.endpoint or "", request.outcome or "").inc()
        if request.hedged is not None:
            self.hedges.labels(request.hedged).inc()
        elif (request.attempts or 1) > 1:
            self.retries.inc()
        if request.ttft_ms is not None:
            self.ttft.observe(request.ttft_ms / 1000)
        if request.total_time_ms is not None:
            self.duration.observe(request.total_time_ms / 1000)
        if request.decision_ms is not None:
            self.decision.labels(request.decision_mode or "").observe(request.decision_ms / 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """What can be read at any time. Token pairs: found in the cache, encoded."""

    in_flight: Callable[[], int]
    workers: Callable[[], int]
    client_connections: Callable[[], int]
    engine_connections: Callable[[], int]
    tokenize_depth: Callable[[], int]
    held_body_bytes: Callable[[], int]
    cache_tokens: Callable[[], tuple[int, int]]
    late_events: Callable[[], Mapping[str, int]]
    http_refusals: Callable[[], Mapping[str, int]]
    hints: Callable[[], Mapping[str, int]]
    hints_waiting: Callable[[], int]
    breakers: Callable[[], Mapping[str, str]]
    breaker_trips: Callable[[], int]


class LevelsCollector(Collector):
    """Reads `Levels` when scraped."""

    def __init__(self, levels: Levels) -> None:
        self._levels = levels

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        levels = self._levels
        for name, text, read in (
            ("in_flight", "Accepted requests that have not ended.", levels.in_flight),
            ("workers", "Workers that are heard.", levels.workers),
            ("client_connections", "Open connections of clients.", levels.client_connections),
            ("engine_connections", "Open connections to engines, idle ones included.", levels.engine_connections),
            ("tokenize_depth", "Prompts being counted or waiting for a thread.", levels.tokenize_depth),
            ("held_body_bytes", "Bytes of bodies being read, or not begun to be answered.", levels.held_body_bytes),
            ("hints_waiting", "Sessions, at a worker, whose hints wait for a request.", levels.hints_waiting),
        ):
            yield GaugeMetricFamily(f"tidegate_ingress_{name}", text, value=read())
        cache = CounterMetricFamily(
            "tidegate_ingress_cache_tokens", "Tokens found in the prompt cache, and encoded.", labels=["result"]
        )
        for result, value in zip(("hit", "miss"), levels.cache_tokens(), strict=True):
            cache.add_metric([result], value)
        yield cache
        trips = CounterMetricFamily("tidegate_ingress_breaker_trips", "Times that a worker's breaker opened.")
        trips.add_metric([], levels.breaker_trips())
        yield trips
        breakers = GaugeMetricFamily(
            "tidegate_ingress_breakers",
            "1 for each worker that is left alone, or tried again.",
            labels=["worker", "state"],
        )
        for worker, state in levels.breakers().items():
            breakers.add_metric([worker, state], 1)
        yield breakers
        for name, text, label, counts in (
            ("late_events", "Events that came after their request had moved on.", "event", levels.late_events()),
            ("http_refusals", "Requests refused below the front door's routes.", "reason", levels.http_refusals()),
            ("hints", "Hints for requests to come, by what became of them.", "outcome", levels.hints()),
        ):
            family = CounterMetricFamily(f"tidegate_ingress_{name}", text, labels=[label])
            for key, value in counts.items():
                family.add_metric([key], value)
            yield family

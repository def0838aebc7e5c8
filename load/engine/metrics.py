"""``GET /metrics``: the names of vLLM 0.32 that a router reads (spec: engine-events §3), not this project's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from load.engine.config import HASH_ALGORITHM, EngineSettings
from load.engine.core import CoreStats
from load.engine.misbehave import Misbehaviour

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_LABELS = ["model_name", "engine"]


class EngineMetrics:
    """One incarnation's metrics: a restart begins with a new object. ``stats``: one entry per rank."""

    def __init__(
        self,
        settings: EngineSettings,
        stats: Callable[[], Sequence[CoreStats]],
        flags: Misbehaviour,
        start_s: float,
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(settings, stats, flags, start_s))
        self._model = settings.model

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self._registry)

        self._ttft = histogram("time_to_first_token_seconds", "Time to first token.", SECONDS)
        self._queue = histogram("request_queue_time_seconds", "Time in the waiting queue.", SECONDS)
        self._e2e = histogram("e2e_request_latency_seconds", "Whole request.", SECONDS)
        self._tpot = histogram("request_time_per_output_token_seconds", "Time per output token.", TOKEN_SECONDS)
        self._success = Counter(
            "vllm:request_success", "Finished requests.", [*_LABELS, "finished_reason"], registry=self._registry
        )

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def ended(
        self, rank: int, reason: str, *, queue_s: float | None, ttft_s: float | None, total_s: float, tokens: int
    ) -> None:
        """One request is over. Seconds; ``None`` where it did not get that far."""
        labels = (self._model, str(rank))
        self._success.labels(*labels, reason).inc()
        self._e2e.labels(*labels).observe(total_s)
        if queue_s is not None:
            self._queue.labels(*labels).observe(queue_s)
        if ttft_s is not None:
            self._ttft.labels(*labels).observe(ttft_s)
            if tokens > 1:
                self._tpot.labels(*labels).observe((total_s - ttft_s) / (tokens - 1))


class _EngineCollector(Collector):
    """Gauges and counters of the cores, read when scraped."""

    def __init__(
        self,
        settings: EngineSettings,
        stats: Callable[[], Sequence[CoreStats]],
        flags: Misbehaviour,
        start_s: float,
    ) -> None:
        self._settings = settings
        self._stats = stats
        self._flags = flags
        self._start_s = start_s

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "process_start_time_seconds", "Start time of the process since the epoch.", value=self._start_s
        )
        ranks = self._stats()
        yield self._gauge("num_requests_running", "Requests in execution.", [s.running for s in ranks])
        yield self._gauge("num_requests_waiting", "Requests waiting.", [s.waiting for s in ranks])
        yield self._gauge(
            "kv_cache_usage_perc", "KV blocks held by running requests, 0..1.", [s.kv_usage for s in ranks]
        )
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", [s.prefix_queries for s in ranks])
        yield self._counter("prefix_cache_hits", "Prompt tokens found cached.", [s.prefix_hits for s in ranks])
        for source in ("device", "host", "disk", "pool"):
            values = [s.found_tokens.get(source, 0) for s in ranks]
            yield self._counter("prompt_tokens_cached_by_source", "Prompt tokens found cached.", values, source=source)
        yield self._counter("external_prefix_cache_hits", "Prompt tokens loaded.", [_below_device(s) for s in ranks])
        for tier in ("host", "disk"):
            values = [s.tier_blocks.get(tier, 0) for s in ranks]
            yield self._gauge("sim_tier_blocks", "Blocks in a tier below the device.", values, tier=tier)
        yield self._gauge("sim_pinned_blocks", "Blocks that pins hold.", [s.pinned_blocks for s in ranks])
        yield self._counter("sim_pins_lost", "Pins that gave way.", [s.pins_lost for s in ranks])
        yield self._counter("num_preemptions", "Preemptions.", [s.preemptions for s in ranks])
        yield self._counter("prompt_tokens", "Prompt tokens processed.", [s.prompt_tokens for s in ranks])
        yield self._counter("generation_tokens", "Tokens generated.", [s.generation_tokens for s in ranks])
        yield self._cache_config(len(ranks))

    def _gauge(self, name: str, text: str, values: Sequence[float], **labels: str) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=[*_LABELS, *labels])
        for rank, value in enumerate(values):
            family.add_metric([self._settings.model, str(rank), *labels.values()], value)
        return family

    def _counter(self, name: str, text: str, values: Sequence[float], **labels: str) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=[*_LABELS, *labels])
        for rank, value in enumerate(values):
            family.add_metric([self._settings.model, str(rank), *labels.values()], value)
        return family

    def _cache_config(self, ranks: int) -> Metric:
        settings = self._settings
        size = str(self._flags.announced_block_size or settings.block_size)
        blocks = settings.sizes.num_blocks
        values = {
            "block_size": size,
            "effective_attention_block_size": size,
            "enable_prefix_caching": str(settings.prefix_caching),
            "kv_cache_size_tokens": str(blocks * settings.block_size),
            "num_gpu_blocks": str(blocks),
            "prefix_caching_hash_algo": HASH_ALGORITHM,
            "sliding_window": "None",
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "Information of the KV cache.", labels=[*values, "engine"])
        for rank in range(ranks):
            family.add_metric([*values.values(), str(rank)], 1.0)
        return family


def _below_device(stats: CoreStats) -> int:
    return sum(tokens for source, tokens in stats.found_tokens.items() if source != "device")

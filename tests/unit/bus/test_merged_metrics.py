"""Several processes' metrics on one page."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bus.merged_metrics import MergedCollector


def page(of: int) -> str:
    """Of one process."""
    registry = CollectorRegistry()
    Counter("asked_total", "Asked.", ["by"], registry=registry).labels('a "quoted" one').inc(of)
    Gauge("depth", "Depth.", registry=registry).set(of)
    Histogram("took_seconds", "Took.", buckets=(1, 2), registry=registry).observe(of)
    return generate_latest(registry).decode()


def test_each_sample_is_there_once_for_each_process() -> None:
    """One family each, counters and histograms whole, labels kept; Prometheus can read it."""
    registry = CollectorRegistry()
    registry.register(MergedCollector({"1": page(1), "2": page(2), "parent": 'up{process="1"} 1\n'}))
    assert registry.get_sample_value("asked_total", {"by": 'a "quoted" one', "process": "2"}) == 2
    assert registry.get_sample_value("depth", {"process": "1"}) == 1
    assert registry.get_sample_value("took_seconds_bucket", {"le": "1.0", "process": "1"}) == 1
    assert registry.get_sample_value("took_seconds_bucket", {"le": "1.0", "process": "2"}) == 0
    assert registry.get_sample_value("up", {"process": "1"}) == 1
    text = generate_latest(registry).decode()
    assert text.count("# TYPE asked_total counter") == 1
    assert text.count("# TYPE took_seconds histogram") == 1

"""``python -m load.bench streams``: streams are held, others are answered meanwhile, and every figure is told."""

from __future__ import annotations

from tests.integration.bench.test_bench import bench


def test_streams_are_held_and_none_fails() -> None:
    """50 for a second; its figures are not judged but for those that a machine's speed does not change."""
    result = bench("streams", "--seconds", "1")
    assert (result["streams"], result["failed"]) == (50, 0)
    assert result["seconds"] >= 1
    figures = ("rss_kb_per_stream", "growth_kb_per_stream", "healthz_p50_ms", "healthz_p99_ms", "front_cpu_percent")
    assert all(isinstance(result[figure], float) for figure in figures)

"""``python -m load.bench router``: every key, no failed request, and null for peers that are not installed."""

from __future__ import annotations

from tests.integration.bench.test_bench import bench

KEYS = (
    "cpu_us_per_chunk",
    "cpu_us_per_chunk_burst",
    "added_ttft_p50_ms",
    "200k_added_p50_ms",
    "200k_resent_added_p50_ms",
    "200k_resent_cpu_ms",
    "2k_c1_added_p50_ms",
    "2k_c128_per_s",
    "rss_mb",
)


def test_router_reports_the_house_beside_the_engines() -> None:
    """All processes start, and every cell is measured; who is not on PATH has null."""
    result = bench("router", PATH="/nowhere")
    assert result["failed"] == 0
    for name in ("ours", "ours_proxy"):
        for key in KEYS:
            assert isinstance(result[f"{name}_{key}"], float), f"{name}_{key}"
    assert result["ours_cpu_us_per_chunk"] > 0
    for key in KEYS:
        assert result[f"smg_{key}"] is None
        assert result[f"vllm_router_kv_{key}"] is None

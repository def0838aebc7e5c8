"""``python -m load.bench decision``: both ways are measured with real processes, before few and many sessions that are
known, and every key is there."""

from __future__ import annotations

from kvcore import twin
from load.bench.decision import IN_FLIGHT, INDEXES, POLICIES
from tests.integration.bench.test_bench import bench


def test_decision_reports_both_ways_at_every_load() -> None:
    """Flat keys; each figure was really measured."""
    result = bench("decision")
    for index in INDEXES:
        for in_flight in IN_FLIGHT:
            prefix = f"{index}_{in_flight}"
            p50, p99 = result[f"{prefix}_p50_ms"], result[f"{prefix}_p99_ms"]
            assert 0 < p50 <= p99
            assert result[f"{prefix}_per_s"] > 0
            parts = [result[f"{prefix}_{name}_cpu_ms"] for name in ("admission", "indexer", "nats")]
            assert min(parts) > 0
            assert abs(result[f"{prefix}_cpu_ms"] - sum(parts)) < 0.01
    few, _, many = result["known"]
    for policy in POLICIES:
        for count in result["known"]:
            p50, p99 = (result[f"known_{count}_{policy}_{name}_ms"] for name in ("p50", "p99"))
            assert 0 < p50 <= p99
            assert result[f"known_{count}_{policy}_cpu_ms"] > 0
        ratio = result[f"known_{many}_{policy}_cpu_ms"] / result[f"known_{few}_{policy}_cpu_ms"]
        assert abs(result[f"known_ratio_{policy}_cpu"] - ratio) < 0.01
    assert result["kvcore"] == twin.IMPLEMENTATION

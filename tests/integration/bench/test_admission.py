"""``python -m load.bench admission``: every policy, room and event is measured, and decisions are really made."""

from __future__ import annotations

from load.bench.admission import EVENTS, POLICIES, ROOMS
from tests.integration.bench.test_bench import bench


def test_admission_reports_every_policy_and_event() -> None:
    """Flat keys; each figure was really measured, and turns really ran."""
    result = bench("admission")
    few, many = result["programs"]
    (seats,) = result["seats"]
    for policy in POLICIES:
        for room in ROOMS:
            for programs in (few, many):
                prefix = f"{policy}_{room}_{programs}x{seats}"
                assert result[f"{prefix}_running"] > 0
                for event in EVENTS:
                    assert 0 < result[f"{prefix}_{event}_p50_ms"] <= result[f"{prefix}_{event}_p99_ms"]
            for event in EVENTS:
                assert result[f"{policy}_{room}_{seats}_{event}_p50_ratio"] > 0
    assert result["worst_ratio"] == result[result["worst"]]
    assert result["worst_p99_ms"] == result[result["worst_p99"]]

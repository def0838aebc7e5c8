"""``python -m load.bench sessions``: every key, and answers that are right. Its figures are not ours to judge here."""

from __future__ import annotations

from tests.integration.bench.test_bench import bench


def test_sessions_reports_every_key_and_no_mismatch() -> None:
    """Memory, and each kind of lookup with its median and tail."""
    result = bench("sessions")
    assert (result["mismatches"], result["sessions"], result["kvcore"]) == (0, 2_000, "python")
    assert result["distinct_blocks"] == 500 * 75 + 2_000 * 25
    assert result["bytes"] > 0
    for lookup in ("session", "block_shared", "block_own", "ends", "sharing", "place"):
        assert 0 < result[f"{lookup}_p50_us"] <= result[f"{lookup}_p99_us"]

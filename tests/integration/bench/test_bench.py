"""``python -m load.bench``: one JSON object last, with every key, and answers that are right. Its figures are not ours
to judge: machines differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from kvcore import twin
from load.bench.events import LAYOUTS, SIZES
from load.bench.fleet import MIN_CAPACITY, Fleet
from load.bench.index import KEYS


def bench(name: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """The last line of a quick run, as JSON."""
    command = [sys.executable, "-m", "load.bench", name, "--json", "--quick", "--runs", "1", *arguments]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=170
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


def test_index_reports_every_key_and_no_mismatch() -> None:
    """Every key of the first fleet, the same with its size of the second; the peer's are null where it is absent."""
    result = bench("index", "--workers", "4,8")
    assert {*KEYS, *(f"{key}_8" for key in KEYS)} <= result.keys()
    for suffix in ("", "_8"):
        assert result[f"exact_mismatches{suffix}"] == 0
        assert result[f"python_exact_mismatches{suffix}"] == 0
        assert result[f"peer_mismatches{suffix}"] in (0, None)
        assert result[f"holes{suffix}"] > 0
        assert result[f"apply_blocks_per_s{suffix}"] > 0
        assert result[f"bytes_per_worker_block{suffix}"] is not None
    assert result["kvcore"] == twin.IMPLEMENTATION
    assert (result["ratio_p50"] is None) == (result["peer"] is None)


def test_index_measures_pure_python_where_asked() -> None:
    """With ``TIDEGATE_KVCORE=python`` both names of a figure are the same one; nested prefixes are answered right."""
    result = bench("index", "--workers", "4", "--variant", "nested", TIDEGATE_KVCORE="python")
    assert result["kvcore"] == "python"
    assert result["match_p50_us"] == result["python_match_p50_us"]
    assert result["exact_mismatches"] == 0


def test_events_reports_every_layout_and_size() -> None:
    """Decoding per layout and form, applying per size, the socket; for the chosen twin and pure Python."""
    result = bench("events")
    for prefix in ("", "python_"):
        for form in ("map", "array"):
            for blocks, tokens, digest in LAYOUTS:
                assert result[f"{prefix}decode_{form}_{blocks}x{tokens}{'_digest' if digest else ''}_us"] > 0
        for blocks in SIZES:
            assert result[f"{prefix}apply_{blocks}_us"] > 0
        assert result[f"{prefix}zmq_batches_per_s"] > 0
    assert {f"peer_apply_{blocks}_us" for blocks in SIZES} <= result.keys()
    assert result["mismatches"] == 0


def test_hash_reports_both_twins_and_the_peer() -> None:
    """Chains of both block sizes and one block more, equal in both twins and to the peer's hashes."""
    result = bench("hash")
    for key in ("chain_16_us", "chain_64_us", "resent_tail_us", "python_floor_us", "ratio_to_python_floor"):
        assert result[key] > 0
    assert {"python_chain_16_us", "python_resent_tail_us", "peer_chain_16_us"} <= result.keys()
    assert result["mismatches"] == 0


def test_pool_reports_both_layouts_and_twins() -> None:
    """Applying, memory and what a match adds, of the worse layout without its name; every answer is right."""
    result = bench("pool")
    for key in ("objects_per_s", "bytes_per_object", "match_added_us", "match_added_ratio", "page_hash_us"):
        assert result[key] > 0
    for name in ("mha_tp2", "mla"):
        assert result[f"{name}_objects_per_cpu_s"] >= result["objects_per_cpu_s"]
        assert result[f"{name}_bytes_per_object"] <= result["bytes_per_object"]
        for suffix in ("", "_half", "_miss", "_scattered"):
            assert result[f"{name}_match_added{suffix}_p50_us"] > 0
    assert result["mismatches"] == 0


def test_traces_reports_both_ends_and_loses_no_row() -> None:
    """What a row costs where it is made and where it is kept; every row of the stream is on the disk once."""
    result = bench("traces")
    for key in ("rows_per_s", "cpu_us_per_row", "bytes_per_row", "mb_per_s", "added_us_per_request"):
        assert result[key] > 0
    assert result["hashes"] == 64
    assert result["bytes_per_row"] < result["raw_bytes_per_row"]
    assert (result["lost"], result["doubled"]) == (0, 0)


def test_capture_reports_both_processes_and_loses_nothing() -> None:
    """What a captured request costs in its way, in the ingress and in the writer."""
    result = bench("capture")
    for key in ("begin_us", "end_us", "in_the_way_us", "added_us_per_request", "writer_us_per_request"):
        assert result[key] > 0
    assert 0 < result["bytes_per_request"] < result["raw_bytes_per_request"]
    assert result["lost"] == 0


def test_unknown_sizes_of_fleet_are_refused() -> None:
    """A clear message, not a traceback."""
    command = [sys.executable, "-m", "load.bench", "index", "--workers", "64,x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 2
    assert "numbers with commas" in done.stderr


def test_a_fleet_is_full_and_says_the_same_every_time() -> None:
    """Every worker full, and the same bytes from the same seed."""
    first, second = (Fleet(3, MIN_CAPACITY, seed=9) for _ in range(2))
    payloads = [payload for turn in first.turns() for payload in turn.payloads]
    assert payloads == [payload for turn in second.turns() for payload in turn.payloads]
    assert [worker.used for worker in first.workers] == [MIN_CAPACITY] * 3
    assert first.resident_pairs() == 3 * MIN_CAPACITY
    with pytest.raises(ValueError, match="room for"):
        Fleet(1, MIN_CAPACITY - 1)

"""``tidegate trace export --as parquet``: tables that others read back with the right types."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from schemas.decision import Candidate
from schemas.index import TierBlocks
from schemas.trace import AgentContext, RequestMetrics, TracedDecision, TracedWorker, TraceRow, TurnFacts
from tests.unit.tidegate.trace.making import SAMPLE, Row, request_row, tool_row, write
from tidegate.cli import main
from tidegate.trace import parquet


def exported(tmp_path: Path, rows: list[Row], table: str = "requests") -> pa.Table:
    trace = write(tmp_path / "trace.jsonl", rows)
    path = tmp_path / f"{table}.parquet"
    assert main(["trace", "export", str(trace), "--as", "parquet", "--table", table, "-o", str(path)]) == 0
    return pq.read_table(path)


def at(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


def test_every_field_of_a_request_is_a_column() -> None:
    """A field that the schema gains is not forgotten here."""
    columns = {name for name, _, _ in parquet._REQUESTS}
    moved = {"request_received_ms", "replay", "finish_reason_metadata"}
    assert set(RequestMetrics.__struct_fields__) - moved - columns == set()
    assert set(TurnFacts.__struct_fields__) - columns == set()
    assert set(AgentContext.__struct_fields__) - {"session", "implicit", "turn", "compaction"} - columns == set()
    decisions = {name for name, _, _ in parquet._DECISIONS}
    assert set(TracedDecision.__struct_fields__) - decisions == set()


def test_null_is_not_zero(tmp_path: Path) -> None:
    """What is not known is null, 0 and an empty list are values; hashes keep their 64 bits."""
    large = (1 << 64) - 1
    found = exported(
        tmp_path,
        [
            request_row("a", 1_000, 1_050, "run", hashes=[1, large], cached_tokens=0, queue_depth=0),
            request_row("b", 1_000, 1_000, replay=None, output_tokens=None),
            request_row("c", 1_000, 1_000, hashes=[], max_output_tokens=1 << 80, stream=False),
        ],
    )
    rows = {row["request_id"]: row for row in found.to_pylist()}
    a, b, c = rows["a"], rows["b"], rows["c"]
    assert (a["cached_tokens"], a["queue_depth"], a["input_sequence_hashes"]) == (0, 0, [1, large])
    assert (b["cached_tokens"], b["output_tokens"], b["input_sequence_hashes"]) == (None, None, None)
    assert (c["input_sequence_hashes"], c["input_length"], c["stream"]) == ([], 0, False)
    assert c["max_output_tokens"] is None  # more than 64 bits
    assert (a["received"], a["ended"], a["session_id"], b["session_id"]) == (at(1_000), at(1_050), "run", None)
    assert a["completion_sequence_hashes"] is None
    types = {field.name: field.type for field in found.schema}
    assert types["received"] == pa.timestamp("ms", "UTC")
    assert types["input_sequence_hashes"] == pa.list_(pa.uint64())
    assert types["cached_tokens"] == pa.int64()


def test_other_readers_filter_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset reader pushes a filter down to row groups by their statistics; columns are compressed with zstd."""
    monkeypatch.setattr(parquet, "ROW_GROUP", 10)
    exported(tmp_path, [request_row(f"r{n}", 1_000 + n, 2_000 + n, "run", input_tokens=n) for n in range(25)])
    file = pq.ParquetFile(tmp_path / "requests.parquet")
    assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [10, 10, 5]
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    fragment = next(ds.dataset(tmp_path / "requests.parquet").get_fragments())
    assert [part.id for part in fragment.subset(pc.field("input_tokens") >= 20).row_groups] == [2]
    found = ds.dataset(tmp_path / "requests.parquet").to_table(filter=pc.field("worker").is_null())
    assert found.num_rows == 25


def test_tools(tmp_path: Path) -> None:
    """One a row, as told; a tool that has not ended has no end, one without times no duration."""
    found = exported(
        tmp_path,
        [
            tool_row("run", "c1", 1_500, started_at_unix_ms=1_200, output_bytes=0),
            tool_row("run", "c2", 1_500, "tool_error", error_type="exit_1"),
            tool_row("run", "c3", 1_600, "tool_start"),
        ],
        "tools",
    )
    rows = {row["tool_call_id"]: row for row in found.to_pylist()}
    c1, c2, c3 = rows["c1"], rows["c2"], rows["c3"]
    assert (c1["started"], c1["ended"], c1["duration_ms"], c1["output_bytes"]) == (at(1_200), at(1_500), 300.0, 0)
    assert (c2["status"], c2["started"], c2["duration_ms"], c2["error_type"]) == ("error", None, None, "exit_1")
    assert (c3["status"], c3["started"], c3["ended"], c3["output_bytes"]) == ("running", at(1_600), None, None)


def test_decisions(tmp_path: Path) -> None:
    """With the session of their request, and candidates as a list of their parts."""
    decision = TracedDecision(
        request_id="a",
        grant_id="g",
        worker=TracedWorker(worker="engine-1"),
        model="m",
        candidates=(
            Candidate(worker="engine-1", rank=0, cost=0.5, parts={"load": 0.5}, blocks=TierBlocks(device=3)),
            Candidate(worker="engine-2", rank=0, excluded="lost"),
        ),
        candidates_seen=2,
    )
    row = TraceRow(event_type="decision", event_time_unix_ms=1_001, decision=decision)
    rows = [request_row("a", 1_000, 1_100, "run"), json.loads(msgspec.json.encode(row))]
    (found,) = exported(tmp_path, rows, "decisions").to_pylist()
    assert (found["session_id"], found["grant_id"], found["event_time"], found["rank"]) == ("run", "g", at(1_001), 0)
    first, second = found["candidates"]
    assert (first["cost"], first["parts"], first["device_blocks"]) == (0.5, [("load", 0.5)], 3)
    assert (second["cost"], second["parts"], second["excluded"]) == (None, [], "lost")
    assert found["policies"] == []


def test_the_peers_rows(tmp_path: Path) -> None:
    path = tmp_path / "requests.parquet"
    assert main(["trace", "export", str(SAMPLE), "--as", "parquet", "-o", str(path)]) == 0
    assert pq.read_metadata(path).num_rows == 18


@pytest.mark.parametrize("arguments", [[], ["-o", "requests.parquet.gz"], ["--table", "sessions", "-o", "x"]])
def test_wrong_use(arguments: list[Any]) -> None:
    assert main(["trace", "export", str(SAMPLE), "--as", "parquet", *arguments]) == 2


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With what to install; nothing is written."""
    path = tmp_path / "requests.parquet"
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["trace", "export", str(SAMPLE), "--as", "parquet", "-o", str(path)]) == 1
    assert "pip install 'tidegate[parquet]'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "services.recorder.shell.otlp_sender", None)
    assert main(["trace", "export", str(SAMPLE), "--as", "otlp", "--endpoint", "http://127.0.0.1:9"]) == 1
    assert "pip install 'tidegate[otlp]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

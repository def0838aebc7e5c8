"""Traces as programs, and the cross-check against a peer's simulator on short prefixes of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from load.sim import crosscheck
from load.sim.crosscheck import AGENTIC, CONVERSATION, Anchor
from load.sim.run import simulate
from load.sim.traces import TraceError, load_cut, load_trace, read_trace
from services.admission.policies.round_robin import RoundRobin
from tidegate.cli import main

FIXTURES = Path(__file__).parents[2] / "fixtures" / "sim"


def line(**fields: object) -> str:
    return json.dumps({"input_length": 1024, "output_length": 10, "hash_ids": [1, 2], **fields})


def test_prefixes_in_common_are_common() -> None:
    """Equal ids up to a point: the same blocks up to there, and no further; new tokens are counted once."""
    lines = [
        line(timestamp=0, hash_ids=[1, 2, 3], input_length=1500),
        line(timestamp=5, hash_ids=[1, 2, 4, 5], input_length=2048),
        line(timestamp=9, hash_ids=[1, 2, 4, 5, 6], input_length=2400),
        line(timestamp=9, hash_ids=[7], input_length=500),
    ]
    programs = read_trace(lines)
    assert [program.turns[0].new_tokens for program in programs] == [1500, 1024, 352, 500]
    assert [program.arrival_s for program in programs] == [0.0, 0.005, 0.009, 0.009]
    paths = [program.turns[0].chain.path for program in programs]
    assert paths[0][0][0] is paths[1][0][0] is paths[2][0][0]
    assert paths[1][:-1] == (paths[1][0], paths[1][1])
    assert (paths[1][1][0], paths[1][1][1]) == (paths[2][1][0], 2)


def test_sessions_are_closed_loops() -> None:
    """Lines of one session become turns; the delay runs from the end of the turn before."""
    lines = [line(session_id="a", timestamp=1000), line(session_id="a", delay=250), line(timestamp=3000)]
    programs = read_trace(lines, speedup=2.0)
    assert [len(program.turns) for program in programs] == [2, 1]
    assert programs[0].arrival_s == 0.5
    assert programs[0].turns[0].gap_s == 0.25
    result = simulate(programs, RoundRobin(), crosscheck.config_of(Anchor(CONVERSATION, 1, 50, "", 0, 0, 0, 0, 0)))
    first, second = (row for row in result.turns if row.program == "a")
    assert second.ready_s == pytest.approx(first.finished_s + 0.25)


def test_smaller_engine_blocks() -> None:
    """An engine's blocks may divide the trace's; others are refused."""
    lines = [line(hash_ids=[1, 2]), line(hash_ids=[1, 2], input_length=1000), line(hash_ids=[1, 3])]
    programs = read_trace(lines, block_size=16)
    assert [program.turns[0].chain.fork for program in programs] == [64, 62, 64]
    assert [program.turns[0].new_tokens for program in programs] == [1024, 8, 512]
    with pytest.raises(ValueError, match="divide"):
        read_trace(lines, block_size=48)


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        line(hash_ids=[]),
        line(hash_ids=["x"]),
        line(input_length=-1),
        line(output_length="9"),
        line(timestamp=-1),
        line(input_length=True),
        line(session_id=["a"]),
        line(tool={"name": "bash"}),
        "[" * 100_000,
    ],
)
def test_a_bad_line_is_named(bad: str) -> None:
    """Hostile or broken lines: one clear error with the line's number."""
    with pytest.raises(TraceError, match="line 2"):
        read_trace([line(), bad])


@pytest.mark.parametrize(
    ("anchor", "hit_first", "makespan_ms"),
    [
        (Anchor(AGENTIC, 2, 700, "round_robin", 0.399774, 5103.698, 33.097, 11_472.906, 0), 0.399774, 327_301.989),
        (Anchor(AGENTIC, 3, 900, "round_robin", 0.512881, 1459.950, 27.633, 6_917.915, 0), 0.512881, 245_075.940),
        (
            Anchor(CONVERSATION, 2, 260, "round_robin", 0.044292, 111_407.476, 39.045, 124_949.854, 0),
            0.035684,
            457_050.2,
        ),
        (
            Anchor(CONVERSATION, 3, 400, "round_robin", 0.059623, 43_533.511, 43.200, 58_321.395, 0, 2.0),
            0.036402,
            198_759.1,
        ),
    ],
)
def test_round_robin_is_the_peers_to_the_digit(anchor: Anchor, hit_first: float, makespan_ms: float) -> None:
    """Dynamo 1.6.1's offline replay of the same lines (first 12 sessions; first 400 requests), engines small enough to
    evict and to preempt: hit ratios, times and makespan as it reported them."""
    name = {AGENTIC: "agentic_prefix.jsonl.gz", CONVERSATION: "conversation_prefix.jsonl.gz"}[anchor.trace]
    programs = load_trace(FIXTURES / name, trace_block=crosscheck.BLOCK_TOKENS[anchor.trace], speedup=anchor.speedup)
    row = crosscheck.compare(anchor, programs)
    assert row["hit"] == pytest.approx(anchor.hit, abs=1e-4)
    assert row["hit_first"] == pytest.approx(hit_first, abs=1e-4)
    assert row["ttft_ms"] == pytest.approx(anchor.ttft_ms, rel=1e-3)
    assert row["tpot_ms"] == pytest.approx(anchor.tpot_ms, rel=1e-3)
    assert row["latency_ms"] == pytest.approx(anchor.latency_ms, rel=1e-3)
    assert row["makespan_s"] == pytest.approx(makespan_ms / 1000, rel=1e-3)


def test_kv_hits_more_than_round_robin() -> None:
    """On the closed loop, with what admission knows: more hits, less regret."""
    programs = load_trace(FIXTURES / "agentic_prefix.jsonl.gz", trace_block=64)
    rows = [
        crosscheck.compare(Anchor(AGENTIC, 3, 900, name, 0, 1, 1, 1, 1), programs) for name in ("round_robin", "kv")
    ]
    assert float(str(rows[1]["hit"])) > float(str(rows[0]["hit"])) + 0.1
    assert int(str(rows[1]["overlap_regret_blocks"])) < int(str(rows[0]["overlap_regret_blocks"]))


def test_the_command_says_what_it_lacks(tmp_path: Path) -> None:
    """Without traces: no rows, both named, nothing is near."""
    result = CliRunner().invoke(crosscheck.main, ["--traces", str(tmp_path), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"rows": [], "missing": [CONVERSATION, AGENTIC], "all_near": False}
    assert f"{AGENTIC} is not in {tmp_path}" in result.stderr


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("plain.jsonl.gz", b"{}", "cannot be read: Not a gzipped file"),
        ("cut.jsonl.gz", gzip.compress(line().encode() * 100, mtime=0)[:-20], "cannot be read"),
        ("binary.jsonl", b"\xff\xfe", "no text in UTF-8"),
        ("bad.jsonl", b"{}\n", "line 1: hash_ids"),
        ("empty.jsonl", b"\n", "has no lines"),
    ],
)
def test_a_file_that_is_no_trace_is_the_users_mistake(
    name: str, content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One error that names the file, from the command too; no traceback, and not an interruption's code."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError, match=f"{name}.*{said}"):
        load_cut(path, requests=8, cut=1, block_size=16)
    arguments = ["simulate", "--trace", str(path), "--loads", "1.0rho", "--policies", "kv", "--seeds", "1,2"]
    assert main([*arguments, "--programs", "2", "--processes", "1"]) == 2
    told = capsys.readouterr().err
    assert name in told
    assert said in told


def test_sessions_are_found_in_a_window(tmp_path: Path) -> None:
    """A line that begins as a whole earlier one did (but for its last block) is its next turn; one block in common,
    which every line has, makes no session. Windows are cut one after another, and arrive from 0 s on."""
    rows = [
        line(timestamp=1_000, hash_ids=[1, 2, 3, 4]),
        line(timestamp=2_000, hash_ids=[1, 5, 6]),
        line(timestamp=61_000, hash_ids=[1, 2, 3, 9, 10], input_length=2_500),
        line(timestamp=62_000, hash_ids=[1, 7, 8]),
        line(timestamp=70_000, hash_ids=[1, 2, 3, 9, 11, 12], input_length=3_000),
        line(timestamp=80_000, hash_ids=[1, 2, 3, 9, 10, 13], input_length=3_000),
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(rows))
    programs = load_cut(path, requests=6, cut=0, block_size=16)
    assert [len(program.turns) for program in programs] == [3, 1, 1, 1]
    assert [turn.gap_s for turn in programs[0].turns] == [60.0, 9.0, 0.0]
    assert [turn.tool for turn in programs[0].turns] == [None] * 3
    assert [program.arrival_s for program in programs] == [0.0, 1.0, 61.0, 79.0]
    second = load_cut(path, requests=4, cut=1, block_size=16)
    assert [(program.arrival_s, len(program.turns)) for program in second] == [(0.0, 1), (59.0, 2), (60.0, 1)]
    backwards = tmp_path / "backwards.jsonl"
    backwards.write_text("\n".join(reversed(path.read_text().splitlines())))
    with pytest.raises(TraceError, match=r"backwards.jsonl.*order of their timestamps"):
        load_cut(backwards, requests=4, cut=0, block_size=16)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TraceError, match="no lines"):
        load_cut(tmp_path / "empty.jsonl", requests=4, cut=1, block_size=16)

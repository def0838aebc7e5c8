"""``python -m load.bench agents``: a whole system for each policy, every figure measured, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from load.bench.agents_client import RootResult, RunResult, TurnResult
from load.bench.agents_figures import OVER_KV, Sizes, measure, necessary_tokens, over_kv
from load.bench.agents_plan import TREE_EVERY, Scales, plan
from schemas.trace import RequestMetrics
from tests.integration.bench.test_bench import bench

SIZES = Sizes(shared={"swe": 40, "sub": 60}, tools=20, block_size=16, concurrency=1, scale=10.0)


def test_agents_reports_every_figure_of_a_policy_and_no_failure() -> None:
    """Through real processes: all turns end, each has its row, and its decision was the policy's."""
    result = bench("agents", "--policies", "commit", "--sessions", "3", "--concurrency", "3")
    figures = result["policies"]["commit"]
    assert (figures["turns"], figures["failures"], figures["rows_missing"]) == (result["turns"], 0, 0)
    assert figures["without_policy"] == 0
    assert figures["prompt_tokens"] >= figures["necessary_tokens"] > 0
    assert 0 < figures["prefix_hit_ratio"] < 1
    assert figures["computed_over_necessary"] >= 1
    assert figures["steps_per_min"] > 0
    assert 0 < figures["jct_mean_s"] <= figures["jct_p95_s"] <= figures["jct_p99_s"] <= figures["makespan_s"]
    assert 0 < figures["decision_p50_ms"] <= figures["decision_p99_ms"]
    assert figures["loop_lag_p99_ms"] >= 0
    assert 0 <= figures["engine_lost_share"] < 1
    assert figures["held_turns"] >= figures["held_mid_session"]
    assert figures["longest_hold_s"] >= figures["longest_mid_session_hold_s"] >= 0
    assert figures["engine_scheduling"] == "fcfs"
    assert result["sessions"] > result["root_sessions"] == 3  # sub-agents among them
    assert {figures[f"{name.removesuffix('_s')}_over_kv"] for name in OVER_KV} == {None}


def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path) -> None:
    """SIGINT while the system starts: exit code 130, no process of it, no folder."""
    command = [sys.executable, "-m", "load.bench", "agents", "--quick", "--json"]
    running = subprocess.Popen(
        command, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with running:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("*/kv/logs/nats.log")) and time.monotonic() < deadline:
            assert running.poll() is None
            time.sleep(0.05)
        assert processes_with(str(tmp_path))
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=120)
    assert (running.returncode, out, err) == (130, "", "")
    assert list(tmp_path.iterdir()) == []
    assert processes_with(str(tmp_path)) == []


def processes_with(text: str) -> list[str]:
    """Command lines of processes that have ``text`` in theirs."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text in line:
            found.append(line.replace("\0", " "))
    return found


def test_a_plan_is_the_same_every_time_and_grows_smaller_with_its_scales() -> None:
    """Equal arguments, equal plans; half the tokens at twice the scale, and tools twice as fast."""
    count = TREE_EVERY
    first, again, other = plan(count, 1, Scales(8, 8)), plan(count, 1, Scales(8, 8)), plan(count, 2, Scales(8, 8))
    assert first == again != other
    halved = plan(count, 1, Scales(16, 16))
    assert halved.turns == first.turns
    words = [
        sum(len(turn.text.split()) for session in each.sessions for turn in session.turns) for each in (first, halved)
    ]
    assert words[1] == pytest.approx(words[0] / 2, rel=0.1)
    gaps = [sum(turn.gap_s for session in each.sessions for turn in session.turns) for each in (first, halved)]
    assert gaps[1] == pytest.approx(gaps[0] / 2)
    assert [session.parent for session in first.sessions if session.kind == "sub"].count(None) == 0
    assert len(first.roots) == count < len(first.sessions)


def turn(
    session: str, number: int, prompt: int, cached: int, output: int, ended_s: float, kind: str = "swe"
) -> TurnResult:
    return TurnResult(session, kind, number, f"{session}-{number}", None, prompt, cached, output, ended_s)


def test_necessary_is_what_an_endless_memory_would_compute() -> None:
    """Two sessions with a system prompt of 40 tokens in blocks of 16: the first computes it, the second shares two
    blocks; of a second turn's prompt all whole blocks of the first's prompt and answer are there. The first of another
    kind shares the tools: one block."""
    turns = [
        turn("b", 1, 120, 0, 10, 4.0),
        turn("a", 0, 100, 0, 10, 1.0),  # 100
        turn("b", 0, 90, 32, 10, 2.0),  # 90 - 32
        turn("a", 1, 150, 96, 10, 3.0),  # 150 - 96: 109 tokens are known
        turn("c", 0, 80, 16, 10, 5.0, "sub"),  # 80 - 16
        turn("d", 0, 80, 48, 10, 6.0, "sub"),  # 80 - 48
    ]  # b's second: 120 - 96, of 99
    assert necessary_tokens(turns, SIZES) == 100 + 58 + 54 + 24 + 64 + 32


def test_figures_count_what_clients_and_rows_say() -> None:
    """Steps a minute while as many sessions run as were to run, times of the published workload, holds by turn, and
    what failed."""
    turns = (
        turn("a", 0, 100, 0, 10, 1.0),
        turn("a", 1, 150, 96, 10, 3.0),
        turn("b", 0, 90, 0, 10, 6.0),
        TurnResult("b", "swe", 1, "b-1", "status 503: no", ended_s=6.5),
    )
    roots = (RootResult("a", 0.0, 3.0), RootResult("b", 3.0, 6.5))
    rows = {
        "a-0": RequestMetrics(request_id="a-0", decision_ms=2.0, decision_mode="policy", hold_ms=500),
        "a-1": RequestMetrics(request_id="a-1", decision_ms=4.0, decision_mode="policy", hold_ms=200),
        "b-0": RequestMetrics(request_id="b-0", decision_ms=3.0, decision_mode="fallback"),
    }
    figures = measure(RunResult(turns, roots), rows, SIZES)
    assert (figures["failures"], figures["rows_missing"], figures["without_policy"]) == (1, 1, 1)
    assert figures["recomputed_tokens"] == (100 + 54 + 90) - (100 + 54 + 58)
    assert figures["steps_per_min"] == pytest.approx(4 / (6.5 * 10 / 60), abs=0.01)
    assert (figures["jct_mean_s"], figures["jct_p99_s"]) == (32.5, 35.0)
    assert (figures["decision_p50_ms"], figures["decision_p99_ms"]) == (2.0, 4.0)  # not the fallback's
    assert (figures["held_turns"], figures["held_mid_session"]) == (2, 1)
    assert (figures["longest_hold_s"], figures["longest_mid_session_hold_s"]) == (5.0, 2.0)
    assert over_kv(figures, {**figures, "jct_mean_s": 65.0})["jct_mean_over_kv"] == 0.5

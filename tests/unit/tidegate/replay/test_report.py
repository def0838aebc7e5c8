"""The report of what came of a run."""

from __future__ import annotations

from collections import Counter

from tests.unit.tidegate.replay.making import node
from tidegate.replay.player import PlayQuiet
from tidegate.replay.report import Results, Settings, report
from tidegate.replay.table import lines_of, notes_of
from tidegate.replay.told import Told
from tidegate.trace.figures import Spread


def test_the_report_compares_the_same_requests() -> None:
    """Of four requests one failed, one was skipped and one was cut: both sides count the one that was answered; the
    parts add up."""
    nodes = [
        node("a", [1, 2], play="p", recorded=(1_000, 1_500, 16)),
        node("b", [1, 2, 3], play="q", recorded=(1_000, 2_000, 16)),
        node("c", [1, 2, 3, 4], play="q", recorded=(2_000, 2_100, 16)),
        node("d", [1], play="r", recorded=(3_000, 3_100, 0)),
        node("e", [1], play="t", recorded=(4_000, 4_100, 0)),
    ]
    told = {
        0: Told(
            sent_ms=2,
            first_ms=12,
            last_ms=82,
            ended_ms=90,
            input_tokens=32,
            output_tokens=8,
            cached_tokens=0,
        ),
        1: Told(sent_ms=5, ended_ms=9, reason="status_503", detail="no worker"),
    }
    quiet = [PlayQuiet("p", "completed", 0, 0.0, 90.0), PlayQuiet("q", "failed", 1, 0.0, 9.0)]
    results = Results(told=told, due_ms={0: 0.0, 1: 0.0, 3: 80.0}, quiet=quiet, wall_s=2.0, cpu_s=0.5)
    asked = Settings(url="u", model="m", api="completions", headers="none", speed=1.0, seed=1, block_size=16)
    found = report(nodes, results, asked, Counter({"no replay block": 2}), interrupted=True)
    assert (found.answered, found.failed, found.skipped, found.unsent, found.cut) == (1, 1, 1, 1, 1)
    assert found.failures == {"status_503": 1}
    now, then = found.replayed, found.recorded
    assert (now.requests, now.input_tokens, now.output_tokens, now.prefix_hit_ratio) == (1, 32, 8, 0.0)
    assert (then.requests, then.input_tokens, then.output_tokens, then.prefix_hit_ratio) == (1, 32, 8, 0.5)
    assert now.ttft_ms == Spread(count=1, mean=10, p50=10, p90=10, p95=10, p99=10, max=10)
    assert now.itl_ms is not None
    assert now.itl_ms.p50 == 10.0
    assert now.jct_ms is not None
    assert then.jct_ms is not None
    assert (now.jct_ms.max, then.jct_ms.max) == (90.0, 500.0)
    assert found.lateness_ms is not None
    assert found.lateness_ms.max == 5.0
    lines = {line.name: line for line in lines_of(found)}
    assert lines["computed tokens"][1:] == ("32", "16", "+100.0 %")
    assert any("status_503: no worker" in note for note in notes_of(found))

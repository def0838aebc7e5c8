"""What was recorded is played again through the same front door, and agrees with the recording."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import eventually, start_process
from tests.support.system import RunningSystem, running_system
from tidegate.trace.errors import TraceFileError
from tidegate.trace.reading import read_trace

SESSIONS, TURNS, SUB_AGENTS = 6, 6, 2


async def tidegate(directory: Path, *arguments: str) -> dict[str, Any]:
    """What a command prints as JSON; it must end with 0."""
    process = await start_process([sys.executable, "-m", "tidegate", *arguments], directory, name=arguments[0])
    try:
        assert await process.wait(120) == 0, process.output
    finally:
        await process.close()
    answer: dict[str, Any] = json.loads(process.stdout)
    return answer


def recorded(system: RunningSystem) -> int:
    """Rows of requests in the recorder's files so far."""
    try:
        return len(read_trace([Path(system.addresses["traces"])]).requests)
    except TraceFileError:
        return 0


@pytest.mark.timeout(400)
async def test_a_recorded_demo_is_played_again(tmp_path: Path) -> None:
    """A demo run, played at its own speed and five times as fast: as many requests, the same tokens, no failure, and a
    hit ratio within 2 % of the recorded one. At its own speed plays take as long as they did; faster, less. One engine,
    so that only prompts decide what is found, and not which engine happened to get them."""
    async with running_system(tmp_path, "--engines", "1") as system:
        shape = ["--sessions", str(SESSIONS), "--turns", str(TURNS)]
        await tidegate(tmp_path, "demo", "--json", "--url", system.url, "--workdir", str(system.workdir), *shape)
        requests = (SESSIONS + SUB_AGENTS) * TURNS
        await eventually(lambda: recorded(system) == requests, what="the recorder has every row")
        trace = tmp_path / "demo"
        shutil.copytree(system.addresses["traces"], trace)
        took_ms = {}
        for speed in ("1", "5"):
            report = await tidegate(tmp_path, "replay", str(trace), "--url", system.url, "--json", "--speed", speed)
            now, then = report["replayed"], report["recorded"]
            assert report["failures"] == {}
            assert now["requests"] == then["requests"] == requests
            assert (now["input_tokens"], now["output_tokens"]) == (then["input_tokens"], then["output_tokens"])
            assert now["prefix_hit_ratio"] == pytest.approx(then["prefix_hit_ratio"], rel=0.02)
            assert report["plays_completed"] == SESSIONS
            assert report["answers_sent_back"] == (TURNS - 1) * (SESSIONS + SUB_AGENTS)
            took_ms[speed] = now["jct_ms"]["mean"]
        assert took_ms["5"] < took_ms["1"]
    # Offline, of the same capture, on the recorded fleet.
    offline = await tidegate(
        tmp_path, "simulate", "--trace", str(trace), "--policy", "kv", "--processes", "1", "--json"
    )
    (run,) = offline["runs"]
    for name in ("requests", "plays", "input_tokens", "output_tokens"):
        assert run[name] == offline["recorded"][name]
    assert run["prefix_hit_ratio"] == pytest.approx(then["prefix_hit_ratio"], rel=0.02)

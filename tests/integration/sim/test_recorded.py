"""`tidegate simulate --trace` with recorded traces: a demo run, every policy, equal bytes, formats, wrong use."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from load.sim.replays import Replay
from load.sim.scenarios import BOUNDS, FleetSize, policy_names
from tests.unit.tidegate.trace.making import request_row, write
from tidegate.cli import main
from tidegate.trace.agentic_mooncake import laboratory_lines
from tidegate.trace.plays import read_plays
from tidegate.trace.writing import write_lines

FIXTURES = Path(__file__).parents[2] / "fixtures" / "recorded_traces"
DEMO = FIXTURES / "demo.jsonl.gz"


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """The JSON that it prints."""
    assert main(["simulate", "--processes", "1", "--json", *arguments]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_a_demo_run_offline_is_as_it_was_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    """Requests and tokens are equal, the prefix hit ratio within 2 %, on the recorded fleet. (Issue: record a demo run
    and replay it offline.)"""
    document = simulated(capsys, "--trace", str(DEMO), "--policy", "kv")
    recorded, (run,) = document["recorded"], document["runs"]
    for name in ("requests", "plays", "input_tokens", "output_tokens"):
        assert run[name] == recorded[name]
    assert (run["requests"], document["trace"]["sessions"], run["failed"], run["unfinished"]) == (96, 16, 0, 0)
    assert run["prefix_hit_ratio"] == pytest.approx(recorded["prefix_hit_ratio"], rel=0.02)
    assert (run["policy"], run["workers"], run["kv_tokens"]) == ("kv", 2, 412_000)
    assert run["jct_ms"]["mean"] == pytest.approx(recorded["jct_ms"]["mean"], rel=0.1)
    assert set(recorded) <= set(run)
    assert None not in recorded.values()


def test_long_prompts_with_hashes_of_larger_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of 16 and of 512 tokens a block in the same sessions, sub-agents, tools: at 512, still within 2 %."""
    document = simulated(capsys, "--trace", str(FIXTURES / "agents.jsonl.gz"), "--policy", "kv")
    recorded, (run,) = document["recorded"], document["runs"]
    assert (document["trace"]["block_size"], run["requests"]) == (512, recorded["requests"])
    assert (run["input_tokens"], run["output_tokens"]) == (recorded["input_tokens"], recorded["output_tokens"])
    assert run["prefix_hit_ratio"] == pytest.approx(recorded["prefix_hit_ratio"], rel=0.02)


def test_equal_arguments_give_equal_bytes_in_any_number_of_processes(tmp_path: Path) -> None:
    """The document that is printed, and the files."""
    arguments = [
        sys.executable,
        "-m",
        "tidegate",
        "simulate",
        "--trace",
        str(DEMO),
        "--policies",
        "kv,round_robin,commit",
    ]
    arguments += ["--kv-tokens", "6000", "--json"]
    printed = []
    for processes in ("1", "2"):
        out = tmp_path / processes
        command = [*arguments, "--processes", processes, "--out", str(out)]
        printed.append(subprocess.run(command, check=True, capture_output=True, timeout=170).stdout)
    assert printed[0] == printed[1]
    assert [run["policy"] for run in json.loads(printed[0])["runs"]] == ["kv", "round_robin", "commit"]
    for name in ("simulate.json", "report.md"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def overlapping() -> list[dict[str, Any]]:
    """Six runs: a turn and its title at once, two sub-agents beside their parent, one of them to the end."""
    rows = []
    for run in range(6):
        zero, name = 40 * run, f"run-{run}"

        def row(which: str, start: int, end: int, session: str, blocks: int, zero: int = zero, **said: Any) -> Any:
            hashes = [zlib.crc32(f"{session}/{block}".encode()) for block in range(blocks)]
            parent = said.pop("parent", None)
            return request_row(f"{session}-{which}", zero + start, zero + end, session, parent, hashes=hashes, **said)

        rows += [
            row("first", 0, 400, name, 200, output_tokens=90),
            row("title", 1, 50, name, 4, kind="title"),
            row("a", 100, 300, f"{name}-a", 250, parent=name, output_tokens=60),
            row("b", 120, 2_000, f"{name}-b", 300, parent=name, output_tokens=200),
            row("second", 500, 900, name, 260, output_tokens=80),
            row("third", 600, 800, name, 262, output_tokens=20),
        ]
    return rows


HINTED = ("kv+planner", "commit+planner", "commit+continuum")


@pytest.mark.parametrize("policy", [*(name for name in policy_names() if name not in BOUNDS), *HINTED])
def test_every_policy_plays_what_overlaps(policy: str, tmp_path: Path) -> None:
    """Turns of one session at once, sub-agents that outlive their parent's turn, little memory: all requests end, and
    a second run is the same."""
    plays = read_plays([write(tmp_path / "rows.jsonl", overlapping())])
    path = tmp_path / "plays.jsonl"
    write_lines(laboratory_lines(plays), path)
    job = Replay(path, policy, FleetSize(2, 2_400, host_tokens=1_600 if policy in HINTED else 0))
    figures = job.run()
    assert "error" not in figures
    assert (figures["requests"], figures["failed"], figures["unfinished"], figures["plays"]) == (36, 0, 0, 6)
    assert job.run() == figures
    assert (figures["hints"] != {"sent": 0}) is policy.endswith("+planner")


def test_what_does_not_fit_fails_with_those_who_wait_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A request that no worker can hold, and its next turn; the rest is played. Said on standard error, and exit
    code 1, as `tidegate replay` has it."""
    rows = [
        request_row("small", 0, 10, "a", hashes=list(range(8))),
        request_row("large", 20, 30, "a", hashes=list(range(100))),
        request_row("after", 40, 50, "a", hashes=list(range(9))),
        request_row("other", 5, 50),
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    arguments = ["simulate", "--processes", "1", "--json", "--trace", str(path), "--policy", "kv", "--kv-tokens", "320"]
    assert main(arguments) == 1
    shown = capsys.readouterr()
    (run,) = json.loads(shown.out)["runs"]
    assert (run["requests"], run["failed"], run["skipped"], run["plays"]) == (2, 1, 1, 1)
    assert "1 requests could not be served, and 1 waited for them; give more --kv-tokens" in shown.err


def test_a_session_with_two_parents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says where it is and how to leave it out; then it is left out and counted, and the rest is played."""
    rows = [
        request_row("a", 0, 10, "s", "p"),
        request_row("b", 20, 30, "s", "q"),
        request_row("c", 5, 50),
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    arguments = ["simulate", "--processes", "1", "--json", "--trace", str(path), "--policy", "kv"]
    assert main(arguments) == 1
    assert "--skip-unplayable" in capsys.readouterr().err
    assert main([*arguments, "--skip-unplayable"]) == 0
    shown = capsys.readouterr()
    assert "2 requests left out: its session names two parents" in shown.err
    document = json.loads(shown.out)
    assert document["trace"]["left_out"] == {"its session names two parents": 2}
    assert document["runs"][0]["requests"] == 1
    assert main(["simulate", "--skip-unplayable"]) != 0
    assert "--skip-unplayable is of a recorded trace" in capsys.readouterr().err


def test_formats_speed_and_lanes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The peer's files, folders, and Mooncake lines that are played as recorded; a faster trace is over earlier, one
    lane later."""
    agentic = simulated(capsys, "--trace", str(FIXTURES / "peer_agentic_mooncake.jsonl"))
    assert [run["policy"] for run in agentic["runs"]] == ["kv", "commit"]
    assert (agentic["trace"]["format"], agentic["runs"][0]["plays"]) == ("agentic-mooncake", 1)
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows" / "a.jsonl", overlapping()[:18])
    write(tmp_path / "rows" / "b.jsonl", overlapping()[18:])
    walls = [
        simulated(capsys, "--trace", str(tmp_path / "rows"), "--policy", "kv", *more)["runs"][0]["wall_s"]
        for more in ([], ["--speed", "10"], ["--lanes", "1"])
    ]
    assert walls[1] < walls[0] < walls[2]
    lines = FIXTURES / "mooncake_conversation_head.jsonl"
    mooncake = simulated(capsys, "--trace", str(lines), "--policy", "kv", "--speed", "1", "--workers", "1,4")
    assert mooncake["trace"] | {"files": []} == {
        "files": [],
        "format": "mooncake",
        "block_size": 512,
        "requests": 40,
        "sessions": 40,
        "plays": 40,
        "left_out": {},
    }
    assert [run["workers"] for run in mooncake["runs"]] == [1, 4]
    assert "ttft_ms" not in mooncake["recorded"]
    assert main(["simulate", "--processes", "1", "--trace", str(lines), "--policy", "kv", "--lanes", "9"]) == 0
    shown = capsys.readouterr().out
    assert "9 plays at a time" in shown
    assert "recorded" not in shown


def test_several_models_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One fleet plays them all."""
    rows = [request_row("a", 0, 1, "s"), request_row("b", 2, 3, "s", model="small")]
    assert main(["simulate", "--trace", str(write(tmp_path / "rows.jsonl", rows)), "--policy", "kv"]) == 0
    assert "requests of 2 models (small, tiny) are played on one fleet" in capsys.readouterr().err


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """What was recorded comes first, then each policy."""
    assert main(["simulate", "--processes", "1", "--trace", str(DEMO), "--speed", "5"]) == 0
    shown = capsys.readouterr()
    assert "96 requests, 16 sessions, 12 plays, at 5x" in shown.out
    assert [line.split()[0] for line in shown.out.splitlines() if "%" in line] == ["recorded", "kv", "commit"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--loads", "1.0rho"], "a recorded trace has one load"),
        (["--seeds", "1-3"], "a recorded trace has one load"),
        (["--preset", "seeds"], "presets are of made-up workloads"),
        (["--policy", "comit"], "no policy 'comit'"),
        (["--policy", "belady"], "only policies do, with hints or without, no bounds"),
        (["--policy", "kv+plan"], "hints are none, continuum"),
        (["--set", "commit.spam=1"], "spam"),
    ],
)
def test_wrong_use(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence that says what to do, exit code 2."""
    assert main(["simulate", "--processes", "1", "--trace", str(DEMO), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_wrong_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """File, line and rule; speed without a trace."""
    path = write(tmp_path / "rows.jsonl", [request_row("a", 0, 1, "s"), request_row("a", 2, 3, "s")])
    assert main(["simulate", "--trace", str(path)]) == 1
    assert "rows.jsonl:2: request_id a was in" in capsys.readouterr().err
    assert main(["simulate", "--speed", "2"]) == 2
    assert "give one with --trace" in capsys.readouterr().err

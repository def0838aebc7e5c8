"""`tidegate simulate` as it is called: keys, equal bytes in any number of processes, files, Ctrl-C."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from load.sim.parallel import Processes, WorkerLostError
from tidegate.cli import main

SMALL = ["--quick", "--workloads", "swe", "--programs", "8", "--kv-tokens", "160000", "--seeds", "1"]
FEW = [
    "--policies",
    "kv,continuum,thunderagent,commit,clairvoyant,cap",
    "--loads",
    "0.7j50,1.4j50",
    "--concurrency",
    "4",
]

KEYS = (
    "jct_ratio_kv_over_commit",
    "jct_ratio_best_rival_over_commit",
    "p99_ratio_best_rival_over_commit",
    "jct_ratio_commit_over_clairvoyant",
    "throughput_ratio_commit_over_kv",
    "throughput_ratio_commit_over_best_cap",
    "below_knee_ratio_commit_over_kv",
    "recompute_commit",
    "queue_share_kv",
    "queue_share_commit",
    "max_hold_s_commit",
    "max_hold_s_thunderagent",
)


def simulated(*arguments: str) -> bytes:
    """What it prints in a process of its own, which must end well."""
    command = [sys.executable, "-m", "tidegate", "simulate", *arguments]
    return subprocess.run(command, check=True, capture_output=True, timeout=170).stdout


def test_equal_arguments_give_equal_bytes_in_any_number_of_processes(tmp_path: Path) -> None:
    """One object with every key, all of them numbers; the documents and the report are equal too, also where the
    calibration was read back."""
    one = simulated(*SMALL, *FEW, "--processes", "1", "--json", "--out", str(tmp_path / "one"))
    two = simulated(*SMALL, *FEW, "--processes", "2", "--json", "--out", str(tmp_path / "two"))
    assert one == two
    figures = json.loads(one.splitlines()[-1])
    assert [key for key in KEYS if not isinstance(figures[key], float)] == []
    assert figures["failed"] == []
    assert (figures["seeds_are"], figures["workload"]) == ("design", "swe")
    for name in ("simulate.json", "report.md"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    document = json.loads((tmp_path / "one" / "simulate.json").read_text())
    policies = {row["policy"] for row in document["rows"]}
    assert {"kv", "commit", "thunderagent", "clairvoyant", "cap"} <= policies
    assert document["headline"] == figures
    before = (tmp_path / "one" / "simulate.json").read_bytes()
    arguments = (*SMALL, *FEW, "--processes", "1", "--json", "--out", str(tmp_path / "one"))
    assert main(["simulate", *arguments]) == 0
    assert (tmp_path / "one" / "simulate.json").read_bytes() == before


def test_hints_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody, the plug-in and the planner on equal programs: times, tokens that were computed twice, what became of
    hints. (Issue: mean JCT and recomputed tokens of the three, with host memory and pool.)"""
    arguments = ["--preset", "hints", "--quick", "--programs", "10", "--loads", "0.8rho", "--processes", "1", "--json"]
    assert main(["simulate", *arguments]) == 0
    figures = json.loads(capsys.readouterr().out)
    (entry,) = figures["hints"]
    assert (entry["policy"], entry["host_tokens"], entry["pool_tokens"]) == ("commit", 100_000, 200_000)
    assert list(entry["arms"]) == ["none", "continuum", "planner"]
    for name, arm in entry["arms"].items():
        became = sum(arm[f"hints_{each}"] for each in ("accepted", "clipped", "deferred", "rejected", "missing"))
        assert arm["hints_sent"] == became + arm["hints_unsupported"] + arm["hints_lost"]
        assert (arm["hints_sent"] == 0) is (name == "none")
        assert arm["recomputed_tokens"] > 0
        assert arm["jct_s.mean"] > 0
    none, planner = entry["arms"]["none"], entry["arms"]["planner"]
    assert entry["recomputed_planner_over_none"] == pytest.approx(
        planner["recomputed_tokens"] / none["recomputed_tokens"], abs=1e-5
    )
    assert figures["failed"] == []


def test_fleets_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Several sizes, for people; plain lines of progress on standard error where that is no terminal."""
    arguments = "--policies kv,commit --workloads swe --loads 0.2jps --seeds 1"
    sizes = "--programs 4 --workers 1,2 --kv-tokens 130000 --processes 1"
    assert main(["simulate", *arguments.split(), *sizes.split()]) == 0
    shown = capsys.readouterr()
    assert "swe, 0.2jps, 130000 KV tokens" in shown.out
    assert "swe, 0.2jps, 2 workers, 130000 KV tokens" in shown.out
    assert "simulations: 4" in shown.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policies", "kv+nothing"], "hints are none, continuum, continuum_a, planner"),
        (["--policies", "cap+planner"], "of policies that are no bounds"),
        (["--policies", "kv+planner", "--workloads", "mix", "--perturb", "regime"], "nothing goes wrong where"),
        (["--policies", "kv,comit"], "no policy 'comit'; there are commit, commit_fcfs"),
        (["--workloads", "sweet"], "no workload 'sweet'; there are swe"),
        (["--loads", "1.0"], "for example 1.0rho, 0.07jps or 1.5j50"),
        (["--seeds", "5-1"], "for example 1-5,11"),
        (["--workers", "0"], "at least 1"),
        (["--kv-tokens", "10"], "at least a block"),
        (["--policies", ","], "nothing to run"),
        (["--quick", "--preset", "full"], "leave it out, or --preset full"),
        (["--workloads", "swe", "--programs", "4", "--kv-tokens", "4000", "--processes", "1"], "give more --kv-tokens"),
    ],
)
def test_wrong_use_says_what_to_do(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Code 2, one sentence."""
    assert main(["simulate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Told before anything runs."""
    (tmp_path / "file").write_text("a file")
    assert main(["simulate", "--out", str(tmp_path / "file" / "below")]) == 1
    assert "--out" in capsys.readouterr().err


def test_without_matplotlib_the_report_is_there_and_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plots are an extra; a run is not lost for want of them."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else find(name))
    arguments = "--policies kv,commit --workloads swe --loads 0.2jps --seeds 1"
    assert main(["simulate", *arguments.split(), "--programs", "3", "--processes", "1", "--out", str(tmp_path)]) == 0
    assert "pip install 'tidegate[simulate]'" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.md", "simulate.json"]
    assert "png" not in (tmp_path / "report.md").read_text()


def test_plots_are_written(tmp_path: Path) -> None:
    """Each that the report shows is there."""
    few = ["--policies", "kv,commit", "--loads", "0.7j50,1.4j50", "--concurrency", "2,4", "--turn-multiplier", "1,2"]
    simulated(*SMALL, *few, "--processes", "1", "--json", "--out", str(tmp_path))
    shown = {part.split(")")[0] for part in (tmp_path / "report.md").read_text().split("](")[1:]}
    assert {"jct-swe.png", "throughput-swe.png", "turns-swe.png"} <= shown
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in shown)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    """Code 130, no traceback, no file half written, no process: its group is empty. What was found is kept."""
    command = [sys.executable, "-m", "tidegate", "simulate", "--preset", "seeds", "--processes", "2", "--out"]
    process = subprocess.Popen([*command, str(tmp_path)], stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    said = [process.stderr.readline()]
    while "calibration to the knee" not in said[-1]:
        said.append(process.stderr.readline())
        assert said[-1]
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    rest = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert [path.name for path in tmp_path.iterdir()] == ["unfinished.jsonl"]
    deadline = time.monotonic() + 60
    while _group_lives(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


class Doubled:
    """A job: twice its number; 13 ends its process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def run(self) -> int:
        if self.number == 13:
            os._exit(1)
        if self.number < 0:
            raise ValueError(str(self.number))
        return 2 * self.number


def test_jobs_in_several_processes() -> None:
    """In their order; what a job raises is raised; a process that is gone is told. None stays."""
    done: list[tuple[int, int]] = []
    with Processes(2) as processes:
        results = processes.run(
            [Doubled(number) for number in range(5)], lambda place, result: done.append((place, result))
        )
        assert (results, sorted(done)) == ([0, 2, 4, 6, 8], [(number, 2 * number) for number in range(5)])
        assert processes.run([Doubled(7), Doubled(8)], lambda place, result: None) == [14, 16]
    with pytest.raises(ValueError, match="-1"), Processes(2) as processes:
        processes.run([Doubled(1), Doubled(-1), Doubled(2)], lambda place, result: None)
    with pytest.raises(WorkerLostError), Processes(2) as processes:
        processes.run([Doubled(1), Doubled(13), Doubled(2)], lambda place, result: None)
    assert multiprocessing.active_children() == []

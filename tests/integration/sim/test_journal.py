"""An interrupted experiment goes on with what it had: the journal, and the command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from load.sim import journal as journals
from load.sim.cells import Alone, Cell, MeanWork, Row
from load.sim.journal import Journal
from load.sim.scenarios import FleetSize, Load, Scenario

SCENARIO = Scenario(workload="swe", fleet=FleetSize(1, 120_000), programs=3, load=Load(1.0, "rho"))
WORK = MeanWork("swe", "h100-8b", 10)
CELL = Cell(SCENARIO, "kv", 1, 0.1, {"swe-0": 1.0}, None, (("span_s", "1"),))


def written(path: Path) -> Row:
    """A journal with two results."""
    row = Row(SCENARIO, "kv", 1, 0.1, None, {"jct_s.mean": 0.1 + 0.2}, "")
    with Journal(path) as journal:
        journal.add(WORK, 1 / 3)
        journal.add(CELL, row)
    return row


def test_what_was_written_is_known(tmp_path: Path) -> None:
    """To the last digit; other jobs are not."""
    row = written(tmp_path / "journal")
    with Journal(tmp_path / "journal") as journal:
        assert (journal.known(WORK), journal.known(CELL)) == (1 / 3, row)
        assert not journal.knows(Alone(SCENARIO, 1))
        assert not journal.knows(Cell(SCENARIO, "kv", 2, 0.1, {}, None))
        journal.add(Alone(SCENARIO, 1), {"swe-0": 2.5})
    with Journal(tmp_path / "journal") as journal:
        assert len(journal) == 3
        assert journal.known(Alone(SCENARIO, 1)) == {"swe-0": 2.5}
    journal.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_was_cut_off_is_nothing(tmp_path: Path) -> None:
    """What stands before it is known."""
    path = tmp_path / "journal"
    written(path)
    path.write_bytes(path.read_bytes()[:-5])
    with Journal(path) as journal:
        assert (journal.knows(WORK), journal.knows(CELL)) == (True, False)
    path.write_bytes(b"no journal")
    with Journal(path) as journal:
        assert len(journal) == 0


def test_results_of_other_code_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file begins anew."""
    written(tmp_path / "journal")
    monkeypatch.setattr(journals, "SOURCES", ("load/sim",))
    with Journal(tmp_path / "journal") as journal:
        assert len(journal) == 0


def test_results_of_another_trace_are_not_taken(tmp_path: Path) -> None:
    """The file that a result depends on has other lines now."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("one\n")
    with Journal(tmp_path / "journal", [trace]) as journal:
        journal.add(WORK, 1.0)
    with Journal(tmp_path / "journal", [trace]) as journal:
        assert journal.knows(WORK)
    trace.write_text("two\n")
    with Journal(tmp_path / "journal", [trace]) as journal:
        assert not journal.knows(WORK)


def test_without_a_file_nothing_is_kept() -> None:
    """And an empty journal is one too."""
    with Journal(None) as journal:
        journal.add(WORK, 1.0)
        assert not journal.knows(WORK)


def test_an_interrupted_run_reports_what_there_is_and_goes_on(tmp_path: Path) -> None:
    """Code 130 and a report; called again it ends with the bytes of a run that was not interrupted."""
    command = [sys.executable, "-m", "tidegate", "simulate", "--policies", "kv,commit", "--concurrency", "6,12"]
    command += ["--workloads", "swe,lognormal", "--programs", "14", "--seeds", "1-3", "--processes", "1"]
    command += ["--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    journal = tmp_path / "out" / "unfinished.jsonl"
    deadline = time.monotonic() + 150
    while not journal.exists() or journal.read_bytes().count(b'"figures"') < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=170)[1]
    assert process.returncode == 130, said
    assert "goes on from there" in said
    part = json.loads((tmp_path / "out" / "simulate.json").read_text())
    assert part["missing"] > 0
    assert len(part["rows"]) + part["missing"] == 24
    assert "Interrupted" in (tmp_path / "out" / "report.md").read_text()
    again = subprocess.run([*command, "--json"], check=True, capture_output=True, timeout=170)
    assert not journal.exists()
    command[-1] = str(tmp_path / "other")
    whole = subprocess.run([*command, "--json"], check=True, capture_output=True, timeout=170)
    assert again.stdout == whole.stdout
    for name in ("simulate.json", "report.md"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()

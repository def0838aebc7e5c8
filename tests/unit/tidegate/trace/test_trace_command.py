"""``tidegate trace`` as it is called."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.unit.tidegate.trace.making import SAMPLE, request_row, write
from tidegate.cli import main

CONVERSATION = SAMPLE.with_name("mooncake_conversation_head.jsonl")


@pytest.mark.parametrize("name", ["tail", "stats", "export", "import", "convert"])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", name, "--help"]) == 0
    assert "Usage: tidegate trace" in capsys.readouterr().out


def test_stats(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """For people and as one object."""
    assert main(["trace", "stats", str(SAMPLE)]) == 0
    assert b"run-1-sub (of run-1)" in capsysbinary.readouterr().out
    assert main(["trace", "stats", str(SAMPLE), "--json"]) == 0
    said = json.loads(capsysbinary.readouterr().out)
    assert (said["requests"], len(said["sessions"]), said["tools"][0]["tool"]) == (18, 9, "bash")


@pytest.mark.parametrize(("kind", "lines"), [("dynamo", 22), ("mooncake", 18), ("agentic-mooncake", 19)])
def test_export(kind: str, lines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A whole file, gzipped by its name; the size of a block is said."""
    path = tmp_path / "out.jsonl.gz"
    assert main(["trace", "export", str(SAMPLE), "--as", kind, "--model", "tiny", "-o", str(path)]) == 0
    assert len(gzip.decompress(path.read_bytes()).splitlines()) == lines
    assert "a block has 16 tokens" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_export_of_a_timeline(tmp_path: Path) -> None:
    """One JSON object; a trace that contradicts itself has one too, without arrows."""
    path = tmp_path / "run.json"
    assert main(["trace", "export", str(SAMPLE), "--as", "perfetto", "-o", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event.get("cat") == "tidegate.request" for event in events) == 18
    rows = [request_row("a", 0, 1, "s", "p"), request_row("b", 2, 3, "s", "q"), request_row("c", 0, 9, "p")]
    trace = write(tmp_path / "trace.jsonl", rows)
    assert main(["trace", "export", str(trace), "--as", "perfetto", "-o", str(path)]) == 0
    assert {event["ph"] for event in json.loads(path.read_text())["traceEvents"]} == {"M", "X"}


@pytest.mark.parametrize("said", ["--open-loop", "--deltas", "--bare", "--table=tools"])
def test_what_a_format_has_not_is_wrong_use(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody believes that it was heard."""
    assert main(["trace", "export", str(SAMPLE), "--as", "perfetto", said]) == 2
    assert said.partition("=")[0] + " is for --as " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["export --as=dynamo", "import", "convert"])
def test_what_is_read_is_not_overwritten(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recording exists once."""
    trace = write(tmp_path / "trace.jsonl", [request_row("a", 0, 1, "s")])
    before = trace.read_bytes()
    assert main(["trace", *name.split(), str(trace), "-o", str(trace)]) == 2
    assert "name another file" in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_mooncake_lines_are_no_rows_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Else a table of nothing looks like a system where nothing happened."""
    assert main(["trace", "stats", str(CONVERSATION)]) == 0
    assert "tidegate trace convert" in capsys.readouterr().err


def test_import_and_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both write rows that every other command reads."""
    for name, source, rows in (("import", SAMPLE, 22), ("convert", CONVERSATION, 40)):
        path = tmp_path / f"{name}.jsonl.gz"
        assert main(["trace", name, str(source), "-o", str(path)]) == 0
        assert f"{rows} rows" in capsys.readouterr().err
        assert main(["trace", "stats", str(path)]) == 0
        capsys.readouterr()


def test_what_is_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With file, line and rule, and exit code 1; the file that was there stays."""
    trace = write(tmp_path / "trace.jsonl", [request_row("a", 0, 1), request_row("a", 0, 1)])
    path = tmp_path / "out.jsonl"
    path.write_text("before")
    assert main(["trace", "export", str(trace), "--as", "mooncake", "-o", str(path)]) == 1
    assert f"{trace}:2: request_id a was in {trace}:1 already [duplicate_request_id]" in capsys.readouterr().err
    assert main(["trace", "convert", str(CONVERSATION), "--block-size", "64", "-o", str(path)]) == 1
    assert "(see --block-size) [hash_count]" in capsys.readouterr().err
    assert path.read_text() == "before"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.jsonl", "trace.jsonl"]


def test_a_strangers_words_drive_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids are what clients sent: in tables and in what is said of them, escape sequences are shown, not obeyed."""
    rows = [request_row("a\x1b[2J", 0, 1, "s\x1b[31m\nx"), request_row("b", 2, 3, "日本")]
    assert main(["trace", "stats", str(write(tmp_path / "rows.jsonl", rows))]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"s\x1b[31m\x0ax" in out
    table = [line for line in out.splitlines() if "日本" in line or r"s\x1b" in line]
    assert len({cell_len(line) for line in table}) == 1
    assert main(["trace", "stats", str(write(tmp_path / "twice.jsonl", [rows[0], rows[0]]))]) == 1
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert r"request_id a\x1b[2J was in" in error


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As root, a file in the place of /dev/null would be there for everybody."""
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    link.symlink_to(target)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for path in (pipe, link):
            assert main(["trace", "export", str(SAMPLE), "--as", "mooncake", "-o", str(path)]) == 0
        assert os.read(reading, 1 << 16) == target.read_bytes() != b""
    finally:
        os.close(reading)
    assert pipe.is_fifo()
    assert link.is_symlink()


def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No such format, no such folder to write to."""
    assert main(["trace", "export", str(SAMPLE), "--as", "weka"]) == 2
    assert main(["trace", "import", str(SAMPLE), "-o", str(tmp_path / "no" / "out.jsonl")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_damage_is_said_and_read_up_to_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recorder was killed: what it had flushed counts."""
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(SAMPLE.read_bytes()) + gzip.compress(b"{}\n")[:-3])
    assert main(["trace", "stats", str(path)]) == 0
    said = capsys.readouterr()
    assert "in the middle of a member; read up to there" in said.err
    assert "18 requests" in said.out

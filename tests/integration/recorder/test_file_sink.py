"""The file sink on a disk that fails: every row whole and once, whatever the disk refused before."""

from __future__ import annotations

import errno
import gzip
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.recorder import segment
from services.recorder.errors import SinkError
from services.recorder.shell.file import FileSink


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[FileSink]:
    sink = FileSink(tmp_path / "traces", "tidegate", "member")
    sink.open(100)
    yield sink
    sink.close()


def lines(directory: Path) -> list[bytes]:
    """What a reader gets of all segments together."""
    names = sorted(path for path in directory.iterdir() if path.name.endswith(".gz"))
    return [line for path in names for line in gzip.decompress(path.read_bytes()).splitlines()]


def fail_once(monkeypatch: pytest.MonkeyPatch, name: str, after: int = 0) -> None:
    """The call ``os.<name>`` fails once, as on a full disk, after it has worked ``after`` times."""
    real = getattr(os, name)
    calls: list[str] = []

    def call(*arguments: object) -> object:
        calls.append(name)
        if len(calls) == after + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, name, call)


def test_a_member_whose_sync_failed_is_not_written_twice(
    sink: FileSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes the bytes and refuses the sync: nothing stays of them, and the next try writes them once."""
    sink.append(0, b"{}\n")
    fail_once(monkeypatch, "fsync")
    with pytest.raises(SinkError):
        sink.append(0, b'{"a":1}\n')
    sink.append(0, b'{"a":1}\n')
    assert lines(tmp_path / "traces") == [b"{}", b'{"a":1}']


def test_half_a_member_that_could_not_be_cut_at_once_is_cut_later(
    sink: FileSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the cut is refused too, the next try cuts before it writes: no later member stands behind a torn one."""
    sink.append(0, b"{}\n")
    fail_once(monkeypatch, "fsync")
    fail_once(monkeypatch, "ftruncate")
    with pytest.raises(SinkError):
        sink.append(0, b'{"a":1}\n')
    sink.append(0, b'{"a":1}\n')
    assert lines(tmp_path / "traces") == [b"{}", b'{"a":1}']


def test_a_segment_that_somebody_removed_is_begun_again(sink: FileSink, tmp_path: Path) -> None:
    """Rows are acknowledged for good, so they must not go into a file that has no name any more."""
    sink.append(0, b"{}\n")
    directory = tmp_path / "traces"
    (directory / segment.segment_name("tidegate", 0)).unlink()
    sink.append(0, b'{"a":1}\n')
    assert lines(directory) == [b'{"a":1}']


def test_a_directory_that_somebody_removed_is_made_again(sink: FileSink, tmp_path: Path) -> None:
    """`rm -r traces` beside a running recorder costs what was in it, and nothing after."""
    sink.append(0, b"{}\n")
    directory = tmp_path / "traces"
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    sink.append(0, b'{"a":1}\n')
    assert lines(directory) == [b'{"a":1}']


def test_a_closed_sink_takes_nothing(tmp_path: Path) -> None:
    """A write that was still under way at the stop cannot open a file that another recorder may own by now."""
    sink = FileSink(tmp_path, "tidegate", "member")
    sink.open(100)
    sink.close()
    with pytest.raises(SinkError):
        sink.append(0, b"{}\n")
    assert list(tmp_path.glob("*.gz")) == []

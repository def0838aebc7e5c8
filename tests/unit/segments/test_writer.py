"""The writer on a real disk, also one that fails: every line whole and once, whatever the disk refused before."""

from __future__ import annotations

import errno
import gzip
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from segments.errors import PrefixTakenError, WriteError
from segments.format import segment_indices, segment_name
from segments.rules import Retention, Rolling
from segments.writer import SegmentWriter


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "traces"


@pytest.fixture
def writer(directory: Path) -> Iterator[SegmentWriter]:
    writer = SegmentWriter(directory, "t")
    writer.open()
    yield writer
    writer.close()


def lines(directory: Path) -> list[bytes]:
    """What a reader gets of all segments together."""
    names = sorted(path for path in directory.iterdir() if path.name.endswith(".gz"))
    return [line for path in names for line in gzip.decompress(path.read_bytes()).splitlines()]


def indices(directory: Path) -> list[int]:
    return segment_indices("t", [path.name for path in directory.iterdir()])


def fail_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The call ``os.<name>`` fails once, as on a full disk."""
    real = getattr(os, name)
    calls: list[str] = []

    def call(*arguments: object) -> object:
        calls.append(name)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, name, call)


def test_a_member_whose_sync_failed_is_not_written_twice(
    writer: SegmentWriter, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes the bytes and refuses the sync: nothing stays of them, and the next try writes them once."""
    writer.append([b"{}"], 0.0)
    fail_once(monkeypatch, "fsync")
    with pytest.raises(WriteError):
        writer.append([b'{"a":1}'], 0.0)
    writer.append([b'{"a":1}'], 0.0)
    assert lines(directory) == [b"{}", b'{"a":1}']


def test_half_a_member_that_could_not_be_cut_at_once_is_cut_later(
    writer: SegmentWriter, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the cut is refused too, the next try cuts before it writes: no later member stands behind a torn one."""
    writer.append([b"{}"], 0.0)
    fail_once(monkeypatch, "fsync")
    fail_once(monkeypatch, "ftruncate")
    with pytest.raises(WriteError):
        writer.append([b'{"a":1}'], 0.0)
    writer.append([b'{"a":1}'], 0.0)
    assert lines(directory) == [b"{}", b'{"a":1}']


def test_a_segment_that_somebody_removed_is_begun_again(writer: SegmentWriter, directory: Path) -> None:
    """Rows are acknowledged for good, so they must not go into a file that has no name any more."""
    writer.append([b"{}"], 0.0)
    (directory / segment_name("t", 0)).unlink()
    writer.append([b'{"a":1}'], 0.0)
    assert lines(directory) == [b'{"a":1}']


def test_a_directory_that_somebody_removed_is_made_again(writer: SegmentWriter, directory: Path) -> None:
    """`rm -r traces` beside a running recorder costs what was in it, and nothing after."""
    writer.append([b"{}"], 0.0)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    writer.append([b'{"a":1}'], 0.0)
    assert lines(directory) == [b'{"a":1}']


def test_a_closed_writer_takes_nothing(directory: Path) -> None:
    """A write that was still under way at the stop cannot open a file that another process may own by now."""
    writer = SegmentWriter(directory, "t")
    writer.open()
    writer.close()
    with pytest.raises(WriteError):
        writer.append([b"{}"], 0.0)
    assert indices(directory) == []


def test_two_writers_of_one_prefix_never_meet(writer: SegmentWriter, directory: Path) -> None:
    """The second is refused and told who writes; it leaves the first alone, and may go on when that has closed."""
    second = SegmentWriter(directory, "t")
    with pytest.raises(PrefixTakenError, match=f"process {os.getpid()} on "):
        second.open()
    writer.append([b"{}"], 0.0)
    writer.close()
    assert second.open().next_segment == 1
    second.append([b'{"a":1}'], 0.0)
    second.close()
    assert lines(directory) == [b"{}", b'{"a":1}']


def test_a_restart_begins_the_next_segment_and_knows_the_newest_lines(directory: Path) -> None:
    """Whatever a kill left at the end is cut; the lines before it are read back, newest last, at most so many."""
    first = SegmentWriter(directory, "t", Rolling(most_lines=2))
    first.open()
    rest = [b'{"n":%d}' % number for number in range(5)]
    while rest:
        del rest[: first.append(rest, 0.0).lines]
    first.close()
    with (directory / segment_name("t", 2)).open("ab") as file:
        file.write(b"\x1f\x8b\x08\x00half a member")
    second = SegmentWriter(directory, "t", Rolling(most_lines=2))
    found = second.open(window=4)
    second.append([b'{"n":5}'], 0.0)
    second.close()
    assert (found.next_segment, found.torn_bytes, found.damaged) == (3, 17, ())
    assert found.keys == tuple(b'{"n":%d}' % number for number in range(1, 5))
    assert lines(directory) == [b'{"n":%d}' % number for number in range(6)]


def test_damage_in_the_middle_is_told_and_left_alone(directory: Path) -> None:
    """A changed byte with whole members behind it is no crash's work: nothing is cut off."""
    writer = SegmentWriter(directory, "t")
    writer.open()
    for number in range(3):
        writer.append([b'{"n":%d}' % number], 0.0)
    writer.close()
    path = directory / segment_name("t", 0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    again = SegmentWriter(directory, "t")
    found = again.open()
    again.close()
    assert (found.damaged, found.torn_bytes) == ((0,), 0)
    assert path.read_bytes() == data


def test_retention_removes_the_oldest_and_fails_softly(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three segments stay; one that cannot be removed costs no line, is counted, and goes the next time."""
    writer = SegmentWriter(directory, "t", Rolling(most_lines=1), Retention(most_segments=3))
    writer.open()
    for number in range(4):
        writer.append([b'{"n":%d}' % number], float(number))
    assert (indices(directory), writer.removed) == ([1, 2, 3], 1)
    real = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError("not ours")))
    writer.append([b'{"n":4}'], 4.0)
    assert (indices(directory), writer.remove_failures) == ([1, 2, 3, 4], 1)
    monkeypatch.setattr(Path, "unlink", real)
    writer.append([b'{"n":5}'], 5.0)
    writer.close()
    assert (indices(directory), writer.removed) == ([3, 4, 5], 3)
    assert lines(directory) == [b'{"n":3}', b'{"n":4}', b'{"n":5}']


def test_old_segments_go_also_while_nothing_is_written(directory: Path) -> None:
    """An hour after the last line all but the newest have come of age; a closed writer removes nothing more."""
    writer = SegmentWriter(directory, "t", Rolling(most_lines=1), Retention(most_age_s=1_800))
    writer.open()
    for number in range(3):
        writer.append([b'{"n":%d}' % number], time.time())
    writer.tidy(time.time())
    assert indices(directory) == [0, 1, 2]
    writer.tidy(time.time() + 3_600)
    assert (indices(directory), writer.removed) == ([2], 2)
    writer.append([b'{"n":3}'], time.time())
    writer.close()
    writer.tidy(time.time() + 3_600)
    assert indices(directory) == [2, 3]

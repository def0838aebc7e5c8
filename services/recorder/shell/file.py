"""The file sink on disk: recovery at opening, appending members, syncing, one writer per prefix."""

from __future__ import annotations

import fcntl
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from services.recorder import segment
from services.recorder.config import Fsync
from services.recorder.errors import SegmentError, SinkError, SinkTakenError
from services.recorder.recent import fingerprint


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was found at opening: the next free index, the newest rows' fingerprints (oldest first), bytes cut off."""

    next_segment: int
    fingerprints: tuple[bytes, ...]
    torn_bytes: int


class FileSink:
    """Segments of one prefix in one directory. Blocking: the caller runs it in a thread.

    Raises `SinkTakenError` and `SinkError` from `open`, `SinkError` from `append` and `close`.
    """

    def __init__(self, directory: Path, prefix: str, fsync: Fsync) -> None:
        self._directory = directory
        self._prefix = prefix
        self._fsync = fsync
        self._lock = -1
        self._file = -1
        self._open_segment = -1

    @property
    def open_segment(self) -> int:
        """Index of the segment being written; -1 before the first member."""
        return self._open_segment

    def open(self, window: int) -> Recovered:
        """Take the prefix, cut a torn tail off the newest segment, and read back up to ``window`` rows."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            return self._recover(window)
        except OSError as error:
            raise SinkError(f"cannot open {self._directory}: {error}") from error

    def append(self, index: int, lines: bytes) -> int:
        """Write ``lines`` as one member of segment ``index``; returns its compressed bytes. All or nothing."""
        data = segment.member(lines)
        try:
            if index != self._open_segment:
                self._close_file()
                self._open_file(index)
            start = os.fstat(self._file).st_size
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._file, view) :]
            except OSError:
                os.ftruncate(self._file, start)
                raise
            if self._fsync == "member":
                os.fsync(self._file)
        except OSError as error:
            raise SinkError(f"cannot write {self._path(index)}: {error}") from error
        return len(data)

    def close(self) -> None:
        """Sync and close the segment, let the prefix go."""
        try:
            self._close_file()
        except OSError as error:
            raise SinkError(f"cannot close {self._path(self._open_segment)}: {error}") from error
        finally:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def _path(self, index: int) -> Path:
        return self._directory / segment.segment_name(self._prefix, index)

    def _take_lock(self) -> None:
        path = self._directory / f".{self._prefix}.lock"
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            self._lock = -1
            raise SinkTakenError(f"another recorder writes {self._prefix!r} in {self._directory}") from error

    def _open_file(self, index: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path(index), flags, 0o644)
        self._open_segment = index
        if self._fsync != "never":
            directory = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def _close_file(self) -> None:
        if self._file < 0:
            return
        file, self._file, self._open_segment = self._file, -1, -1
        try:
            if self._fsync != "never":
                os.fsync(file)
        finally:
            os.close(file)

    def _recover(self, window: int) -> Recovered:
        indices = segment.segment_indices(self._prefix, os.listdir(self._directory))
        newest_first: list[bytes] = []
        torn_bytes = 0
        for index in reversed(indices):
            data = self._path(index).read_bytes()
            end = 0
            rows: deque[bytes] = deque(maxlen=max(0, window - len(newest_first)))
            for member in segment.members(data):
                end = member.end
                rows.extend(_fingerprints(member.lines))
            if index == indices[-1] and end < len(data):
                torn_bytes = len(data) - end
                self._cut(index, end)
            newest_first.extend(reversed(rows))
            if len(newest_first) >= window:
                break
        next_segment = indices[-1] + 1 if indices else 0
        return Recovered(next_segment=next_segment, fingerprints=tuple(reversed(newest_first)), torn_bytes=torn_bytes)

    def _cut(self, index: int, end: int) -> None:
        if end == 0:
            self._path(index).unlink()
        else:
            os.truncate(self._path(index), end)


def _fingerprints(lines: tuple[bytes, ...]) -> list[bytes]:
    keys = []
    for line in lines:
        try:
            keys.append(fingerprint(segment.unwrap(line)))
        except SegmentError:
            continue  # a foreign line in our file: it is no row that could come again
    return keys

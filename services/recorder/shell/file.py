"""The file sink on disk: recovery at opening, appending members, syncing, one writer per prefix."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
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
    """Segments of one prefix in one directory. Blocking: the caller runs it in a thread; `close` waits for an `append`
    that is under way, and a closed sink takes nothing.

    Raises `SinkTakenError` and `SinkError` from `open`, `SinkError` from `append` and `close`.
    """

    def __init__(self, directory: Path, prefix: str, fsync: Fsync) -> None:
        self._directory = directory
        self._prefix = prefix
        self._fsync = fsync
        self._lock = -1
        self._file = -1
        self._open_segment = -1
        self._end = 0
        self._busy = threading.Lock()
        self._opened = False

    def open(self, window: int) -> Recovered:
        """Take the prefix, cut a torn tail off the newest segment, and read back up to ``window`` rows."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            recovered = self._recover(window)
        except OSError as error:
            raise SinkError(f"cannot open {self._directory}: {error}") from error
        self._opened = True
        return recovered

    def append(self, index: int, lines: bytes) -> int:
        """Write ``lines`` as one member of segment ``index``; returns its compressed bytes. All or nothing."""
        data = segment.member(lines)
        with self._busy:
            try:
                if not self._opened:
                    raise SinkError(f"{self._directory} is closed")
                self._use(index)
                self._write(data)
            except OSError as error:
                raise SinkError(f"cannot write {self._path(index)}: {error}") from error
        return len(data)

    def close(self) -> None:
        """Sync and close the segment, let the prefix go."""
        with self._busy:
            self._opened = False
            try:
                self._close_file()
            except OSError as error:
                raise SinkError(f"cannot close a segment in {self._directory}: {error}") from error
            finally:
                self._release_lock()

    def _path(self, index: int) -> Path:
        return self._directory / segment.segment_name(self._prefix, index)

    def _take_lock(self) -> None:
        path = self._directory / f".{self._prefix}.lock"
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._release_lock()
            raise SinkTakenError(f"another recorder writes {self._prefix!r} in {self._directory}") from error

    def _release_lock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _use(self, index: int) -> None:
        """Segment ``index`` is open and has a name: somebody may have removed it, and rows must not go nowhere."""
        if index == self._open_segment and os.fstat(self._file).st_nlink:
            return
        self._close_file()
        if not self._directory.exists():
            self._directory.mkdir(parents=True)
            self._release_lock()  # that of the removed directory
        if self._lock < 0:
            self._take_lock()
        self._open_file(index)

    def _write(self, data: bytes) -> None:
        """All of ``data`` after the last whole member, or nothing."""
        if os.fstat(self._file).st_size != self._end:
            os.ftruncate(self._file, self._end)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
            if self._fsync == "member":
                os.fsync(self._file)
        except OSError:
            with contextlib.suppress(OSError):  # then the next try begins with it
                os.ftruncate(self._file, self._end)
            raise
        self._end += len(data)

    def _open_file(self, index: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path(index), flags, 0o644)
        self._open_segment = index
        self._end = os.fstat(self._file).st_size
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

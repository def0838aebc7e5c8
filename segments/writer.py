"""Segments on disk: recovery at opening, appending members, syncing, rolling, retention, one writer per prefix."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from segments import format as segment
from segments.errors import PrefixTakenError, WriteError
from segments.rules import Filling, OnDisk, Retention, Rolling, too_many

Fsync = Literal["member", "segment", "never"]

_LOOK_S = 60.0
"""How often an open segment's writer looks whether old ones have come of age."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was found at opening: the next free index, ``key`` of the newest lines (oldest first), bytes cut off, and
    segments with damage in the middle, which are left as they are."""

    next_segment: int
    keys: tuple[bytes, ...]
    torn_bytes: int
    damaged: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Appended:
    """One member was written: of how many lines, how large (compressed), into which segment."""

    lines: int
    bytes: int
    segment: int


class SegmentWriter:
    """Segments of one prefix in one directory. Blocking: the caller runs it in a thread; `close` waits for an `append`
    that is under way, and a closed writer takes nothing.

    ``fsync``: after each ``member``, when a ``segment`` is left, or ``never``. Removing old segments is no one's
    trouble: what cannot be removed is counted (`remove_failures`) and tried again. Counters: `removed`,
    `remove_failures`.
    """

    def __init__(
        self,
        directory: Path,
        prefix: str,
        rolling: Rolling | None = None,
        retention: Retention | None = None,
        fsync: Fsync = "member",
    ) -> None:
        self._directory = directory
        self._prefix = prefix
        self._rolling = rolling or Rolling()
        self._retention = retention or Retention()
        self._fsync = fsync
        self._filling = Filling(self._rolling, 0)
        self._lock = -1
        self._file = -1
        self._open_segment = -1
        self._end = 0
        self._looked_s = 0.0
        self._busy = threading.Lock()
        self._opened = False
        self.removed = 0
        self.remove_failures = 0

    def open(self, window: int = 0, key: Callable[[bytes], bytes | None] = bytes) -> Recovered:
        """Take the prefix, cut a torn tail off the newest segment, and read back ``key`` of up to ``window`` lines
        (those for which it is ``None`` are left out). Raises `PrefixTakenError`, `WriteError`."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            recovered = self._recover(window, key)
        except OSError as error:
            self._release_lock()
            raise WriteError(f"cannot open {self._directory}: {error}") from error
        self._filling = Filling(self._rolling, recovered.next_segment)
        self._opened = True
        return recovered

    def append(self, lines: Sequence[bytes], now: float) -> Appended:
        """Write the first of ``lines`` (at least one; each without its end) as one member, as many as the segment
        takes; call again with the rest. All of the member or nothing. ``now``: Unix time.

        Raises `WriteError`.
        """
        with self._busy:
            try:
                if not self._opened:
                    raise WriteError(f"{self._directory} is closed")
                count = self._filling.fits(lines, now)
                if count == 0:
                    self._filling.leave()
                    count = self._filling.fits(lines, now)
                taken = lines[:count]
                data = segment.member(b"\n".join([*taken, b""]))
                index = self._filling.index
                began = self._use(index)
                self._write(data)
            except OSError as error:
                raise WriteError(f"cannot write {self._path(self._filling.index)}: {error}") from error
            self._filling.add(taken, now)
            if began or now - self._looked_s >= _LOOK_S or now < self._looked_s:
                self._retain(now)
        return Appended(count, len(data), index)

    def tidy(self, now: float) -> None:
        """Remove old segments, for who has appended nothing for a while: `append` does it by itself."""
        with self._busy:
            if self._opened:
                self._retain(now)

    def close(self) -> None:
        """Sync and close the segment, let the prefix go. Raises `WriteError` when the sync fails."""
        with self._busy:
            self._opened = False
            try:
                self._close_file()
            except OSError as error:
                raise WriteError(f"cannot close a segment in {self._directory}: {error}") from error
            finally:
                self._release_lock()

    def _path(self, index: int) -> Path:
        return self._directory / segment.segment_name(self._prefix, index)

    # One writer

    def _take_lock(self) -> None:
        path = self._directory / f".{self._prefix}.lock"
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock, 200, 0).decode(errors="replace").strip()
            self._release_lock()
            by = f" ({holder})" if holder else ""
            raise PrefixTakenError(
                f"another process writes {self._prefix!r} in {self._directory}{by}; stop it or choose another prefix"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _release_lock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # Writing

    def _use(self, index: int) -> bool:
        """Segment ``index`` is open and has a name (somebody may have removed it, and lines must not go nowhere);
        whether it was opened just now."""
        if index == self._open_segment and os.fstat(self._file).st_nlink:
            return False
        self._close_file()
        if not self._directory.exists():
            self._directory.mkdir(parents=True)
            self._release_lock()  # that of the removed directory
        if self._lock < 0:
            self._take_lock()
        self._open_file(index)
        return True

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

    # Old segments

    def _retain(self, now: float) -> None:
        self._looked_s = now
        if self._retention.keeps_all:
            return
        try:
            there = [self._on_disk(index) for index in self._indices()]
        except OSError:
            self.remove_failures += 1
            return
        for old in too_many([each for each in there if each is not None], self._retention, now):
            try:
                self._path(old.index).unlink(missing_ok=True)
                self.removed += 1
            except OSError:
                self.remove_failures += 1

    def _indices(self) -> list[int]:
        return segment.segment_indices(self._prefix, os.listdir(self._directory))

    def _on_disk(self, index: int) -> OnDisk | None:
        try:
            state = self._path(index).stat()
        except FileNotFoundError:
            return None
        return OnDisk(index, state.st_size, state.st_mtime)

    # Recovery

    def _recover(self, window: int, key: Callable[[bytes], bytes | None]) -> Recovered:
        indices = self._indices()
        newest_first: list[bytes] = []
        torn_bytes = 0
        damaged: list[int] = []
        for index in reversed(indices):
            newest = index == indices[-1]
            if not newest and len(newest_first) >= window:
                break
            data = self._path(index).read_bytes()
            end = 0
            keys: deque[bytes] = deque(maxlen=max(0, window - len(newest_first)))
            for member in segment.members(data):
                end = member.end
                if keys.maxlen:
                    keys.extend(found for line in member.lines if (found := key(line)) is not None)
            if end < len(data):
                if segment.holds_member(data, end) or not newest:
                    damaged.append(index)
                else:
                    torn_bytes = len(data) - end
                    self._cut(index, end)
            newest_first.extend(reversed(keys))
        next_segment = indices[-1] + 1 if indices else 0
        return Recovered(next_segment, tuple(reversed(newest_first)), torn_bytes, tuple(reversed(damaged)))

    def _cut(self, index: int, end: int) -> None:
        if end == 0:
            self._path(index).unlink()
        else:
            os.truncate(self._path(index), end)

"""The process that writes captured requests: frames in at stdin, segments on the disk, reports out at stdout.

It exists so that patterns, which may take long over a large prompt, and the disk never stand in the way of a request
(docs/adr/0023). It ends when its stdin does, having written all that came, so that it outlives an ingress that is
killed; signals to the group are for the ingress.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from segments.errors import PrefixTakenError, SegmentsError
from segments.format import wrap
from segments.rules import Retention, Rolling
from segments.writer import SegmentWriter
from services.ingress.capture import CapturedRequest, Frames, payload_row
from services.ingress.redaction import Redaction

FLUSH_S = 0.5
FLUSH_BYTES = 4 * 1024 * 1024
"""A member is written when its first row is so old, or its rows are so large together."""
_READ_BYTES = 1 << 20
_PREFIX_FREE_S = 5.0
"""How long the writer of an ingress that was killed may need to its end."""
_POLL_S = 0.05
_TIDY_S = 60.0
_DETAIL_CHARACTERS = 500
_STDIN, _STDOUT = 0, 1


class WriterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is told, as its one argument in JSON."""

    directory: str
    prefix: str
    roll_bytes: int
    roll_age_s: float
    keep_segments: int
    keep_bytes: int
    keep_age_s: float
    redact_secrets: bool
    redact: tuple[str, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of stdout. First ``ready``, or the ``error`` that kept it from starting; then, each time, how many rows
    were ``written`` (``bytes``, compressed) and how many ``failed`` and are gone, with the ``error``."""

    ready: bool = False
    written: int = 0
    bytes: int = 0
    failed: int = 0
    failure: Literal["write_failed", "row_failed"] = "write_failed"
    error: str = ""


def say(report: Report) -> None:
    """A reader that is gone is no trouble: what came is written all the same."""
    with contextlib.suppress(OSError):
        os.write(_STDOUT, msgspec.json.encode(report) + b"\n")


@dataclass
class Writing:
    """The rows of one member, and where they go."""

    writer: SegmentWriter
    redaction: Redaction
    opened_ms: int
    lines: list[bytes] = field(default_factory=list)
    size: int = 0
    due: float = 0.0

    def take(self, head: CapturedRequest, request: bytes, response: bytes) -> None:
        try:
            row = payload_row(head, request, response, self.redaction)
        except Exception as error:  # noqa: BLE001 - the border of one row: a bug costs it, and nothing else
            say(Report(failed=1, failure="row_failed", error=type(error).__name__))
            return
        if not self.lines:
            self.due = time.monotonic() + FLUSH_S
        self.lines.append(wrap(row, max(0, head.at_ms - self.opened_ms)))
        self.size += len(row)
        if self.size >= FLUSH_BYTES:
            self.flush()

    @property
    def wait_s(self) -> float:
        """How long more rows may be waited for; without any, until old segments are looked for."""
        return max(0.0, self.due - time.monotonic()) if self.lines else _TIDY_S

    def flush(self) -> None:
        """Write what there is; what the disk refuses is gone, so that nothing is ever waited for."""
        if not self.lines:
            return
        written = size = 0
        try:
            while self.lines:
                appended = self.writer.append(self.lines, time.time())
                del self.lines[: appended.lines]
                written += appended.lines
                size += appended.bytes
            say(Report(written=written, bytes=size))
        except SegmentsError as error:
            detail = str(error)[:_DETAIL_CHARACTERS]
            say(Report(written=written, bytes=size, failed=len(self.lines), error=detail))
            self.lines.clear()
        self.size = 0


def main(argument: str) -> int:
    """The whole life of the process; its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    settings = msgspec.json.decode(argument, type=WriterSettings)
    writer = SegmentWriter(
        Path(settings.directory),
        settings.prefix,
        Rolling(settings.roll_bytes, most_age_s=settings.roll_age_s),
        Retention(settings.keep_segments, settings.keep_bytes, settings.keep_age_s),
    )
    try:
        _open(writer)
    except SegmentsError as error:
        say(Report(error=str(error)[:_DETAIL_CHARACTERS]))
        return 2
    redaction = Redaction(secrets=settings.redact_secrets, patterns=settings.redact)
    writing = Writing(writer, redaction, int(time.time() * 1000))
    say(Report(ready=True))
    try:
        _write_all(writing)
    finally:
        writing.flush()
        with contextlib.suppress(SegmentsError):  # all rows are written, and synced, by now
            writer.close()
    return 0


def _open(writer: SegmentWriter) -> None:
    """Raises `SegmentsError`."""
    deadline = time.monotonic() + _PREFIX_FREE_S
    while True:
        try:
            writer.open()
        except PrefixTakenError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_POLL_S)
        else:
            return


def _write_all(writing: Writing) -> None:
    frames = Frames()
    while True:
        readable, _, _ = select.select([_STDIN], [], [], writing.wait_s)
        if readable:
            data = os.read(_STDIN, _READ_BYTES)
            if not data:
                return
            for head, request, response in frames.feed(data):
                writing.take(head, request, response)
        elif not writing.lines:
            writing.writer.tidy(time.time())  # prompts are not kept longer because nobody asks any more
        if writing.wait_s == 0.0:
            writing.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

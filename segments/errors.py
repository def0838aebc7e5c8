"""Everything that can go wrong with segments.

SegmentsError
├── BadLineError      a line is not what we write (whoever wrote the file)
├── WriteError        the disk refused (full, read-only, gone): nothing stays of what was being written
└── PrefixTakenError  another process writes under the same prefix (our user's mistake)
"""

from __future__ import annotations


class SegmentsError(Exception):
    """Root of this package's errors. ``reason`` is stable: metric label and readiness text."""

    reason = "segments_error"


class BadLineError(SegmentsError):
    """A line starts an envelope and does not end it."""

    reason = "bad_line"


class WriteError(SegmentsError):
    """The disk refused."""

    reason = "write_failed"


class PrefixTakenError(SegmentsError):
    """Another process holds this directory and prefix."""

    reason = "prefix_taken"

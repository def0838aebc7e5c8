"""Everything that can go wrong in the recorder.

RecorderError
├── BadRowError        the publisher's row is not a JSON object (the row is counted, acknowledged and skipped)
├── SegmentError       a segment file on disk is not what we write (its torn tail is cut, the rest kept)
├── SinkError          the disk refused (full, read-only): retried, nothing is acknowledged meanwhile
└── SinkTakenError     another recorder writes under the same prefix (our user's mistake)
"""

from __future__ import annotations


class RecorderError(Exception):
    """Root of this package's errors. ``reason`` is stable: metric label and readiness text."""

    reason = "recorder_error"


class BadRowError(RecorderError):
    """The row does not decode as a JSON object."""

    reason = "bad_row"


class SegmentError(RecorderError):
    """Bytes of a segment file cannot be read as gzip members of lines."""

    reason = "bad_segment"


class SinkError(RecorderError):
    """The disk refused a write."""

    reason = "sink_failed"


class SinkTakenError(RecorderError):
    """Another process holds this directory and prefix."""

    reason = "sink_taken"

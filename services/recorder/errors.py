"""Everything that can go wrong in the recorder.

RecorderError
├── BadRowError        the publisher's row is not a JSON object (the row is counted, acknowledged and skipped)
├── BadToolEventError  a harness's tool event is not what the format says (the harness's fault; counted by its reason)
└── SinkError          a sink refused (disk full, collector away): retried, nothing is acknowledged meanwhile
"""

from __future__ import annotations


class RecorderError(Exception):
    """Root of this package's errors. ``reason`` is stable: metric label and readiness text."""

    reason = "recorder_error"


class BadRowError(RecorderError):
    """The row does not decode as a JSON object."""

    reason = "bad_row"


class BadToolEventError(RecorderError):
    """One tool event is not taken. ``reason`` says which rule it breaks (`services.recorder.tool_messages`)."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class SinkError(RecorderError):
    """A sink could not write now."""

    reason = "sink_failed"

"""Settings of the recorder (section ``recorder``; environment ``TIDEGATE_RECORDER_<KEY>``)."""

from __future__ import annotations

from typing import Literal

from bus.settings import CommonSettings
from bus.subjects import TRACE_SUBJECTS

Sink = Literal["file", "stdout"]
Fsync = Literal["member", "segment", "never"]


class RecorderSettings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where rows go.

    ``fsync`` says when the disk must have them. Rows are acknowledged to JetStream after that, so a killed process
    loses nothing in any mode. ``member`` (default, one sync per flush) also survives a power cut; ``segment`` and
    ``never`` may lose the rows of the last seconds in one. ``durable`` names the consumer: two recorders with the same
    name share the rows between them, two names each get all. ``ack_wait_s``: rows that a killed recorder had taken come
    again after it. ``recent_rows`` is how far back a redelivered row is recognised.
    """

    sinks: tuple[Sink, ...] = ("file",)
    directory: str = "traces"
    prefix: str = "tidegate"
    durable: str = "recorder"
    filter_subject: str = TRACE_SUBJECTS
    fetch_rows: int = 256
    ack_wait_s: float = 5.0
    flush_bytes: int = 1_048_576
    flush_interval_ms: int = 1_000
    roll_bytes: int = 268_435_456
    roll_lines: int = 0
    fsync: Fsync = "member"
    recent_rows: int = 65_536

    def __post_init__(self) -> None:
        if not self.sinks:
            raise ValueError('sinks must name at least one of "file" and "stdout"')
        if not self.prefix or "/" in self.prefix:
            raise ValueError("prefix must be a file name's beginning, without '/'")
        if not self.durable:
            raise ValueError("durable must not be empty")
        for key in ("fetch_rows", "flush_bytes", "flush_interval_ms", "roll_bytes", "recent_rows"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")
        if self.roll_lines < 0:
            raise ValueError("roll_lines must be 0 (no limit) or more")
        if self.ack_wait_s * 1000 < 5 * self.flush_interval_ms:
            raise ValueError("ack_wait_s must be at least five flush intervals, or rows come again while they wait")

"""The recorder's counters."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

ROWS = Counter("tidegate_recorder_rows_total", "Rows written, by sink.", ["sink"])
BYTES = Counter("tidegate_recorder_written_bytes_total", "Bytes written, as the sink compresses them.", ["sink"])
BATCHES = Counter("tidegate_recorder_batches_total", "Batches written.", ["sink"])
MEMBERS = Counter("tidegate_recorder_members_total", "Gzip members written to segments.")
DROPPED = Counter("tidegate_recorder_rows_dropped_total", "Rows not written, by reason.", ["sink", "reason"])
LOST = Counter(
    "tidegate_recorder_rows_lost_total", "Rows that left the stream before this sink had them: it lags.", ["sink"]
)
FAILED_WRITES = Counter("tidegate_recorder_write_failures_total", "Writes that failed; each is tried again.", ["sink"])
FAILED_ACKS = Counter(
    "tidegate_recorder_ack_failures_total", "Acknowledgements that failed; those rows come again.", ["sink"]
)
TORN_BYTES = Counter("tidegate_recorder_torn_bytes_total", "Bytes of a torn member cut off when the sink opened.")
REMOVED = Counter("tidegate_recorder_segments_removed_total", "Segments removed because others had to stay.")
FAILED_REMOVALS = Counter(
    "tidegate_recorder_segment_removal_failures_total", "Segments that should go and could not be removed."
)
SEGMENT = Gauge("tidegate_recorder_segment", "Index of the segment being written.")
WAITING = Gauge("tidegate_recorder_rows_waiting", "Rows taken from the stream and not yet written.", ["sink"])
WRITE_SECONDS = Histogram("tidegate_recorder_write_seconds", "Write one batch, synced.", ["sink"])

"""The recorder's counters."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

ROWS = Counter("tidegate_recorder_rows_total", "Rows written, by sink.", ["sink"])
BYTES = Counter("tidegate_recorder_written_bytes_total", "Compressed bytes written to segments.")
MEMBERS = Counter("tidegate_recorder_members_total", "Gzip members written: one per flush.")
DROPPED = Counter("tidegate_recorder_rows_dropped_total", "Rows not written, by reason.", ["reason"])
FAILED_WRITES = Counter("tidegate_recorder_write_failures_total", "Writes that the disk refused; each is tried again.")
FAILED_ACKS = Counter("tidegate_recorder_ack_failures_total", "Acknowledgements that failed; those rows come again.")
TORN_BYTES = Counter("tidegate_recorder_torn_bytes_total", "Bytes of a torn member cut off when the sink opened.")
SEGMENT = Gauge("tidegate_recorder_segment", "Index of the segment being written.")
WAITING = Gauge("tidegate_recorder_rows_waiting", "Rows taken from the stream and not yet on disk.")
WRITE_SECONDS = Histogram("tidegate_recorder_write_seconds", "Compress, write and sync one member.")

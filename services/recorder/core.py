"""The decisions for one sink: what is a new row, when rows become a batch, what is acknowledged.

A row is acknowledged only after its batch is written; a redelivered row that is written is acknowledged and not written
again. So rows in the sink = rows in the stream, whenever the process is killed, where the sink can tell what it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.recorder.effects import Acknowledge, DropRow, Effect, WriteBatch
from services.recorder.errors import BadRowError
from services.recorder.events import BatchWritten, Event, RowsReceived, StopAsked
from services.recorder.recent import Recent
from services.recorder.rows import fingerprint, one_line


@dataclass(frozen=True, slots=True)
class BatchRules:
    """A batch is flushed when it holds ``flush_bytes`` or ``flush_rows``, and when its first row is
    ``flush_interval_s`` old."""

    flush_bytes: int
    flush_rows: int
    flush_interval_s: float


@dataclass(slots=True)
class _Batch:
    """Rows that wait, or are being written."""

    rows: list[bytes]
    received_s: list[float]
    keys: list[bytes]
    tokens: list[object]
    bytes: int = 0

    @classmethod
    def empty(cls) -> _Batch:
        return cls([], [], [], [])


class RecorderCore:
    """State of one sink. ``written``: the fingerprints that it has from earlier runs, oldest first; ``window``: how
    many are known."""

    def __init__(self, rules: BatchRules, written: Iterable[bytes] = (), window: int = 65_536) -> None:
        self._rules = rules
        self._recent = Recent(window)
        self._recent.write(written)
        self._number = 0
        self._batch = _Batch.empty()
        self._since_s = 0.0
        self._in_flight: dict[int, _Batch] = {}
        self._in_flight_rows = self._in_flight_bytes = 0

    @property
    def waiting_rows(self) -> int:
        """Rows taken and not yet written."""
        return len(self._batch.rows) + self._in_flight_rows

    @property
    def waiting_bytes(self) -> int:
        """Their bytes."""
        return self._batch.bytes + self._in_flight_bytes

    def next_flush_in_s(self, now: float) -> float | None:
        """Seconds until a flush is due; ``None`` while nothing waits for one."""
        if not self._batch.rows:
            return None
        return max(0.0, self._since_s + self._rules.flush_interval_s - now)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """One event at Unix time ``now``; the effects in the order in which they must happen."""
        self._since_s = min(self._since_s, now)  # a clock that is set back must not delay a flush
        if isinstance(event, RowsReceived):
            effects = self._rows_received(event, now)
        elif isinstance(event, BatchWritten):
            return self._batch_written(event)
        elif isinstance(event, StopAsked):
            return self._flush()
        else:
            effects = []
        if self._batch.rows and now - self._since_s >= self._rules.flush_interval_s:
            effects += self._flush()
        return effects

    def _rows_received(self, event: RowsReceived, now: float) -> list[Effect]:
        effects: list[Effect] = []
        known: list[object] = []
        for payload, token in zip(event.payloads, event.tokens, strict=True):
            try:
                row = one_line(payload)
            except BadRowError as error:
                effects.append(DropRow(reason="bad_row", detail=str(error)))
                known.append(token)
                continue
            key = fingerprint(row)
            state = self._recent.state(key)
            if state == "new":
                if self._take(row, key, token, now):
                    effects += self._flush()
                continue
            effects.append(DropRow(reason="duplicate", detail=f"this row is already {state}"))
            if state == "written":
                known.append(token)
        if known:
            effects.append(Acknowledge(tokens=tuple(known)))
        return effects

    def _take(self, row: bytes, key: bytes, token: object, now: float) -> bool:
        """Put a row into the batch; whether that is full now."""
        batch = self._batch
        if not batch.rows:
            self._since_s = now
        self._recent.take(key)
        batch.rows.append(row)
        batch.received_s.append(now)
        batch.keys.append(key)
        batch.tokens.append(token)
        batch.bytes += len(row)
        return batch.bytes >= self._rules.flush_bytes or len(batch.rows) >= self._rules.flush_rows

    def _flush(self) -> list[Effect]:
        batch = self._batch
        if not batch.rows:
            return []
        number = self._number
        self._number += 1
        self._in_flight[number] = batch
        self._in_flight_rows += len(batch.rows)
        self._in_flight_bytes += batch.bytes
        self._batch = _Batch.empty()
        return [WriteBatch(number, tuple(batch.rows), tuple(batch.received_s))]

    def _batch_written(self, event: BatchWritten) -> list[Effect]:
        batch = self._in_flight.pop(event.number)
        self._in_flight_rows -= len(batch.rows)
        self._in_flight_bytes -= batch.bytes
        self._recent.write(batch.keys)
        return [Acknowledge(tokens=tuple(batch.tokens))]

"""The recorder's decisions: what is a new row, when a batch becomes a gzip member, when a segment is full.

A row is acknowledged only after its member is on disk; a redelivered row that is on disk is acknowledged and not
written again. So rows on disk = rows in the stream, whenever the process is killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.recorder import segment
from services.recorder.effects import Acknowledge, DropRow, Effect, WriteMember
from services.recorder.errors import BadRowError
from services.recorder.events import Event, MemberWritten, RowReceived, StopAsked
from services.recorder.recent import Recent, fingerprint


@dataclass(frozen=True, slots=True)
class RollingRules:
    """Sizes in uncompressed bytes, times in seconds; ``roll_lines`` 0 means no limit on lines.

    A batch is flushed when it holds ``flush_bytes`` or its first row is ``flush_interval_s`` old. A segment is left
    before the line that would take it over ``roll_bytes`` or ``roll_lines``; a line alone may exceed the bytes.
    """

    flush_bytes: int
    flush_interval_s: float
    roll_bytes: int
    roll_lines: int


class RecorderCore:
    """State of one file sink. ``first_segment`` is the next free index, ``opened_s`` the Unix time of opening,
    ``written`` the fingerprints found in earlier segments, oldest first."""

    def __init__(
        self,
        rules: RollingRules,
        first_segment: int,
        opened_s: float,
        written: Iterable[bytes] = (),
        window: int = 65_536,
    ) -> None:
        self._rules = rules
        self._opened_s = opened_s
        self._segment = first_segment
        self._segment_bytes = 0
        self._segment_lines = 0
        self._member = 0
        self._recent = Recent(window)
        for key in written:
            self._recent.write(key)
        self._lines: list[bytes] = []
        self._rows: list[tuple[bytes, bytes, object]] = []
        self._batch_bytes = 0
        self._batch_since_s = 0.0
        self._in_flight: dict[int, list[tuple[bytes, bytes, object]]] = {}

    @property
    def waiting_rows(self) -> int:
        """Rows taken and not yet on disk."""
        return len(self._rows) + sum(len(rows) for rows in self._in_flight.values())

    def next_flush_in_s(self, now: float) -> float | None:
        """Seconds until a flush is due; ``None`` while nothing waits."""
        if not self._lines:
            return None
        return max(0.0, self._batch_since_s + self._rules.flush_interval_s - now)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """One event at Unix time ``now``; the effects in the order in which they must happen."""
        self._batch_since_s = min(self._batch_since_s, now)  # a clock that is set back must not delay a flush
        if isinstance(event, RowReceived):
            effects = self._row_received(event, now)
        elif isinstance(event, MemberWritten):
            return self._member_written(event)
        elif isinstance(event, StopAsked):
            return self._flush()
        else:
            effects = []
        if self._lines and now - self._batch_since_s >= self._rules.flush_interval_s:
            effects += self._flush()
        return effects

    def _row_received(self, event: RowReceived, now: float) -> list[Effect]:
        try:
            row = segment.one_line(event.payload)
        except BadRowError as error:
            return [DropRow(reason="bad_row", detail=str(error)), Acknowledge(tokens=(event.token,))]
        key = fingerprint(row)
        state = self._recent.state(key)
        if state != "new":
            dropped = DropRow(reason="duplicate", detail=f"this row is already {state}")
            return [dropped, Acknowledge(tokens=(event.token,))] if state == "written" else [dropped]
        line = segment.wrap(row, max(0, round((now - self._opened_s) * 1000)))
        effects: list[Effect] = []
        if self._is_full_with(len(line)):
            effects += self._flush()
            self._segment += 1
            self._segment_bytes = self._segment_lines = 0
        if not self._lines:
            self._batch_since_s = now
        self._recent.take(key)
        self._lines.append(line)
        self._rows.append((key, row, event.token))
        self._batch_bytes += len(line)
        self._segment_bytes += len(line)
        self._segment_lines += 1
        if self._batch_bytes >= self._rules.flush_bytes:
            effects += self._flush()
        return effects

    def _is_full_with(self, line_bytes: int) -> bool:
        rules = self._rules
        if self._segment_lines == 0:
            return False
        over_lines = bool(rules.roll_lines) and self._segment_lines + 1 > rules.roll_lines
        return over_lines or self._segment_bytes + line_bytes > rules.roll_bytes

    def _flush(self) -> list[Effect]:
        if not self._lines:
            return []
        number = self._member
        self._member += 1
        self._in_flight[number] = self._rows
        effect = WriteMember(
            number=number,
            segment=self._segment,
            lines=b"".join(self._lines),
            rows=tuple(row for _, row, _ in self._rows),
        )
        self._lines, self._rows, self._batch_bytes = [], [], 0
        return [effect]

    def _member_written(self, event: MemberWritten) -> list[Effect]:
        rows = self._in_flight.pop(event.number)
        for key, _, _ in rows:
            self._recent.write(key)
        return [Acknowledge(tokens=tuple(token for _, _, token in rows))]

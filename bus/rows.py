"""Trace rows on their way into the stream: a bounded window of unacknowledged rows, re-sent until acknowledged."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bus.errors import BusError, ClosedError, PayloadTooLargeError
from bus.interface import Bus
from bus.log import EventLog
from bus.tasks import Tasks

log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class RowStats:
    """``depth``: rows not yet acknowledged. ``duplicates``: acknowledged, but the stream had them already. ``resent``:
    further attempts. ``dropped``: lost, by reason (``window_full``, ``payload_too_large``, ``stopped``)."""

    depth: int = 0
    acknowledged: int = 0
    duplicates: int = 0
    resent: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Row:
    subject: str
    payload: bytes
    message_id: str


class RowPublisher:
    """Publishes rows into the trace stream. `publish` never waits; what does not fit into ``window`` is counted.

    As long as all goes well ``senders`` rows are on their way at once that no task waits for; what is more goes by as
    many senders, a row at a time each. A row that is not acknowledged within ``timeout_s``, or that the bus could not
    take, is sent again by a sender, after ``retry_first_s`` if that was one's, doubling up to ``retry_most_s``; its
    message id keeps the stream from storing it twice (within the stream's duplicate window).
    """

    def __init__(
        self,
        bus: Bus,
        tasks: Tasks,
        *,
        window: int = 10_000,
        senders: int = 16,
        timeout_s: float = 5.0,
        retry_first_s: float = 0.1,
        retry_most_s: float = 2.0,
    ) -> None:
        self._bus = bus
        self._window = window
        self._timeout_s = timeout_s
        self._retry_first_s = retry_first_s
        self._retry_most_s = retry_most_s
        self._waiting: deque[_Row] = deque()
        self._depth = 0
        self._acknowledged = 0
        self._duplicates = 0
        self._resent = 0
        self._dropped: Counter[str] = Counter()
        self._senders = senders
        self._under_way = 0  # without a sender
        # Of as many senders as there are new rows: an event would wake them all for each.
        self._more = asyncio.Semaphore(0)
        self._empty = asyncio.Event()
        self._empty.set()
        self._stopped = False
        self._failing = False
        for number in range(senders):
            tasks.start(f"row-sender-{number}", self._send())

    def publish(self, subject: str, payload: bytes, message_id: str) -> bool:
        """Take one row; ``False`` when the window is full or the publisher has stopped (counted)."""
        if self._stopped or self._depth >= self._window:
            self._drop("stopped" if self._stopped else "window_full", message_id)
            return False
        self._depth += 1
        self._empty.clear()
        row = _Row(subject, payload, message_id)
        if self._waiting or self._failing or self._under_way >= self._senders or not self._send_now(row):
            self._send_later(row)
        return True

    def _send_now(self, row: _Row) -> bool:
        """Without a sender; ``False`` where one is needed."""
        try:
            sent = self._bus.send_row(
                row.subject, row.payload, row.message_id, partial(self._answered, row), timeout_s=self._timeout_s
            )
        except PayloadTooLargeError as error:
            self._drop(error.reason, row.message_id)
            self._one_less()
            return True
        except ClosedError:
            return False
        self._under_way += sent
        return sent

    def _answered(self, row: _Row, outcome: bool | BusError) -> None:
        self._under_way -= 1
        if isinstance(outcome, BusError):
            self._not_acknowledged(outcome)
            if not self._stopped:
                self._send_later(row)
        else:
            self._stored(outcome)

    def _send_later(self, row: _Row) -> None:
        self._waiting.append(row)
        self._more.release()

    async def drain(self, timeout_s: float) -> int:
        """Wait until every row is acknowledged, at most ``timeout_s``; then take no more. Returns the rows given up."""
        empty = asyncio.ensure_future(self._empty.wait())
        await asyncio.wait({empty}, timeout=timeout_s)
        empty.cancel()
        self._stopped = True
        left, self._depth = self._depth, 0
        if left:
            log.error("rows_lost", rows=left, reason="stopped")
        self._waiting.clear()
        self._dropped["stopped"] += left
        return left

    @property
    def depth(self) -> int:
        """Rows not yet acknowledged."""
        return self._depth

    def stats(self) -> RowStats:
        return RowStats(self._depth, self._acknowledged, self._duplicates, self._resent, dict(self._dropped))

    async def _send(self) -> None:
        """One sender: a row at a time, until it is acknowledged."""
        while True:
            await self._more.acquire()
            if not self._waiting:  # given up by `drain`
                continue
            row = self._waiting.popleft()
            try:
                stored = await self._acknowledge(row)
            except PayloadTooLargeError as error:
                self._drop(error.reason, row.message_id)
                self._one_less()
            except ClosedError:
                return
            else:
                self._stored(stored)

    def _stored(self, is_new: bool) -> None:
        self._acknowledged += 1
        self._duplicates += not is_new
        self._one_less()

    def _one_less(self) -> None:
        if not self._stopped:
            self._depth -= 1
            if self._depth == 0:
                self._empty.set()

    async def _acknowledge(self, row: _Row) -> bool:
        retry_s = self._retry_first_s
        while True:
            try:
                stored = await self._bus.publish_row(
                    row.subject, row.payload, row.message_id, timeout_s=self._timeout_s
                )
            except (PayloadTooLargeError, ClosedError):
                raise
            except BusError as error:
                self._not_acknowledged(error)
            else:
                self._failing = False
                return stored
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, self._retry_most_s)

    def _not_acknowledged(self, error: BusError) -> None:
        self._resent += 1
        if not self._failing:
            self._failing = True
            log.warning("rows_not_acknowledged", waiting=self._depth, reason=error.reason, detail=str(error))

    def _drop(self, reason: str, message_id: str) -> None:
        count = self._dropped[reason] = self._dropped[reason] + 1
        if count & (count - 1) == 0:  # at each doubling, so that a flood does not also fill the log
            log.error("rows_dropped", rows=count, last_request=message_id, reason=reason)


class RowCollector(Collector):
    """`RowStats` as metrics, read when scraped. Register it once a process."""

    def __init__(self, rows: RowPublisher) -> None:
        self._rows = rows

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        stats = self._rows.stats()
        yield GaugeMetricFamily("tidegate_trace_rows_waiting", "Rows not yet acknowledged.", value=stats.depth)
        for name, text, value in (
            ("acknowledged", "Rows that the stream has.", stats.acknowledged),
            ("duplicates", "Rows that the stream had already.", stats.duplicates),
            ("resent", "Further attempts to send a row.", stats.resent),
        ):
            yield CounterMetricFamily(f"tidegate_trace_rows_{name}", text, value=value)
        dropped = CounterMetricFamily("tidegate_trace_rows_dropped", "Rows lost, by reason.", labels=["reason"])
        for reason in ("window_full", "payload_too_large", "stopped"):
            dropped.add_metric([reason], stats.dropped.get(reason, 0))
        yield dropped

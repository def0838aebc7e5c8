"""JetStream: the trace stream, durable consumers, ordered reading. All of it outlives restarts of the server.

nats-py's JetStream manager makes streams and consumers. Reading is our own (`bus.nats.pull`): a stream or consumer
that the server lost (restart on another store) is made again, and an ordered reader goes on where it was.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec
from nats import errors as nats_errors
from nats.js import api
from nats.js import errors as js_errors

from bus.answers import problem_of
from bus.errors import (
    BusError,
    BusTimeoutError,
    ClosedError,
    NoRespondersError,
    NotConnectedError,
    StreamError,
    WrongRevisionError,
)
from bus.interface import BusMessage, StoredRow
from bus.log import EventLog
from bus.nats.gaps import Gaps
from bus.nats.pull import SETTLE_S, Pull, RowPlace
from bus.subjects import MESSAGE_ID, TRACE_STREAM, TRACE_SUBJECTS
from schemas.base import UNDECODABLE

if TYPE_CHECKING:
    from bus.nats.connection import NatsBus

log = EventLog(__name__)

API_TIMEOUT_S = 5.0
_EXISTS, _WRONG_SEQUENCE, _WRONG_SEQUENCE_CONSTANT = 10058, 10071, 10164
_EXPIRES_S = 10.0
_RETRY_FIRST_S, _RETRY_MOST_S = 0.05, 1.0

T = TypeVar("T")
Start = Literal["all", "new", "last_per_subject"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStreamLimits:
    """Of ``TG_TRACES`` when we make it; an existing stream keeps its own. The oldest rows go first.

    ``duplicate_window_s`` bounds for how long a row may be re-sent without being stored twice.
    """

    max_bytes: int = 1024 * 1024 * 1024
    max_age_s: float = 7 * 86_400.0
    duplicate_window_s: float = 600.0


class NotThereError(StreamError):
    """No such stream, consumer or object: where that is expected it is caught, elsewhere it is as any other."""


class PublishAck(msgspec.Struct, frozen=True):
    """JetStream's answer to a publish."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: dict[str, str | int] | None = None


_ack_decoder = msgspec.json.Decoder(PublishAck)


def _acknowledged(subject: str, answer: BusMessage) -> PublishAck:
    """Raises `StreamError`, `WrongRevisionError`."""
    try:
        ack = _ack_decoder.decode(answer.payload)
    except UNDECODABLE as error:
        raise StreamError(f"{subject}: not JetStream's acknowledgement: {error}") from error
    if ack.error is not None:
        problem = str(ack.error.get("description", "refused"))
        if ack.error.get("err_code") in (_WRONG_SEQUENCE, _WRONG_SEQUENCE_CONSTANT):
            raise WrongRevisionError(f"{subject}: {problem}")
        raise StreamError(f"{subject}: {problem}")
    return ack


class JetStream:
    """What one connection does with streams."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self.manager = bus.client.jetstream(timeout=API_TIMEOUT_S)
        self._trace_stream_seen = False
        self.pulls: set[Pull] = set()

    def forget(self) -> None:
        """The connection is gone and the server may come back another: look again for what we relied on."""
        self._trace_stream_seen = False
        for pull in list(self.pulls):
            pull.fail("bus_down")

    async def call(self, what: str, action: Awaitable[T]) -> T:
        """Await a call of the manager; its errors become ours."""
        try:
            return await action
        except js_errors.NotFoundError as error:
            raise NotThereError(f"{what}: {error}") from error
        except (js_errors.NoStreamResponseError, js_errors.ServiceUnavailableError, nats_errors.NoRespondersError) as e:
            raise StreamError(f"{what}: JetStream is not available on this server") from e
        except (nats_errors.TimeoutError, TimeoutError) as error:
            if not self._bus.connected:
                raise NotConnectedError("the bus is not connected") from error
            raise BusTimeoutError(what, API_TIMEOUT_S) from error
        except (nats_errors.ConnectionClosedError, nats_errors.OutboundBufferLimitError) as error:
            raise NotConnectedError("the bus is not connected") from error
        except (js_errors.Error, nats_errors.Error) as error:
            raise StreamError(f"{what}: {error}") from error

    def check_connected(self) -> None:
        """Raises `NotConnectedError`: nats-py itself would wait out its deadline."""
        if not self._bus.connected:
            raise NotConnectedError("the bus is not connected")

    async def ensure_stream(self, config: api.StreamConfig) -> api.StreamInfo:
        """The stream as it exists, made from ``config`` if it does not."""
        self.check_connected()
        name = config.name or ""
        try:
            return await self.call(name, self.manager.stream_info(name))
        except NotThereError:
            log.info("stream_created", stream=name)
        try:
            return await self.call(name, self.manager.add_stream(config))
        except StreamError as error:
            if not isinstance(error.__cause__, js_errors.APIError) or error.__cause__.err_code != _EXISTS:
                raise
            return await self.call(name, self.manager.stream_info(name))

    async def ensure_trace_stream(self) -> api.StreamInfo:
        limits = self._bus.options.traces
        info = await self.ensure_stream(
            api.StreamConfig(
                name=TRACE_STREAM,
                description="Tidegate's trace rows",
                subjects=[TRACE_SUBJECTS],
                storage=api.StorageType.FILE,
                max_bytes=limits.max_bytes,
                max_age=limits.max_age_s,
                duplicate_window=limits.duplicate_window_s,
                discard=api.DiscardPolicy.OLD,
                allow_direct=True,
                num_replicas=self._bus.options.replicas,
            )
        )
        self._trace_stream_seen = True
        return info

    async def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None, timeout_s: float
    ) -> PublishAck:
        """Publish into whatever stream takes ``subject``. Raises `NoRespondersError` when there is none."""
        return _acknowledged(subject, await self._bus.request(subject, payload, timeout_s=timeout_s, headers=headers))

    async def publish_row(self, subject: str, payload: bytes, message_id: str, timeout_s: float) -> bool:
        """See `bus.interface.Bus.publish_row`."""
        headers = {MESSAGE_ID: message_id}
        if not self._trace_stream_seen:
            await self.ensure_trace_stream()
        try:
            ack = await self.publish(subject, payload, headers, timeout_s)
        except BusTimeoutError:
            self._trace_stream_seen = False
            raise
        except NoRespondersError:
            # The stream went while we were connected; it is made again once.
            await asyncio.sleep(SETTLE_S)
            await self.ensure_trace_stream()
            try:
                ack = await self.publish(subject, payload, headers, timeout_s)
            except NoRespondersError as error:
                raise StreamError(f"{subject} is not taken by {TRACE_STREAM}") from error
        return not ack.duplicate

    def send_row(
        self,
        subject: str,
        payload: bytes,
        message_id: str,
        answered: Callable[[bool | BusError], None],
        timeout_s: float,
    ) -> bool:
        """See `bus.interface.Bus.send_row`."""
        if not self._trace_stream_seen or not self._bus.connected:
            return False

        def take(answer: BusMessage | BusError) -> None:
            answered(self._stored(subject, answer))

        return self._bus.ask_once(subject, payload, {MESSAGE_ID: message_id}, take, timeout_s)

    def _stored(self, subject: str, answer: BusMessage | BusError) -> bool | BusError:
        try:
            if isinstance(answer, BusError):
                raise answer
            if (problem := problem_of(subject, answer)) is not None:
                raise problem
            return not _acknowledged(subject, answer).duplicate
        except (BusTimeoutError, NoRespondersError) as error:
            self._trace_stream_seen = False
            return error
        except BusError as error:
            return error


class NatsConsumer:
    """See `bus.interface.Consumer`. At least once: a row may come twice, told by its ``delivered``."""

    MAX_UNACKNOWLEDGED = 8_192

    def __init__(self, bus: NatsBus, durable: str, filter_subject: str, ack_wait_s: float) -> None:
        self._bus = bus
        self._durable = durable
        self._config = api.ConsumerConfig(
            durable_name=durable,
            filter_subject=filter_subject,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=ack_wait_s,
            deliver_policy=api.DeliverPolicy.ALL,
            max_ack_pending=self.MAX_UNACKNOWLEDGED,
        )
        self._pull = Pull(bus, TRACE_STREAM)
        self._gaps = Gaps()
        self._closed = False

    @property
    def lost(self) -> int:
        return self._gaps.lost if self._config.filter_subject == TRACE_SUBJECTS else 0

    async def open(self) -> None:
        """Find or make the consumer (and its stream)."""
        js = self._bus.js
        await js.ensure_trace_stream()
        info = await js.call(self._durable, js.manager.add_consumer(TRACE_STREAM, self._config))
        if info.delivered is not None:
            self._gaps.begin(info.delivered.stream_seq, info.delivered.consumer_seq)
        await self._pull.attach(self._durable)

    async def fetch(self, limit: int, timeout_s: float) -> list[StoredRow]:
        if self._closed:
            raise ClosedError("the consumer is closed")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        retry_s = _RETRY_FIRST_S
        while not self._pull.rows:
            left = deadline - loop.time()
            if left <= 0:
                return []
            if self._pull.broken is not None and not await self._mended(min(retry_s, left)):
                retry_s = min(retry_s * 2, _RETRY_MOST_S)
                continue
            left = max(deadline - loop.time(), 0.01)
            self._pull.ask(limit, left)
            await self._pull.wait(left + 0.25)
        waiting = self._pull.rows
        rows: list[StoredRow] = []
        while waiting and len(rows) < limit:
            row, place = waiting.popleft()
            self._gaps.see(place)
            rows.append(row)
        return rows

    async def _mended(self, pause_s: float) -> bool:
        """Make the consumer again; ``False`` after ``pause_s`` when that is not possible now."""
        log.info("consumer_recreated", durable=self._durable, reason=self._pull.broken)
        await self._pull.settle()
        try:
            await self.open()
        except (NotConnectedError, BusTimeoutError, StreamError) as error:
            await wait_for_change(self._bus, pause_s, error)
            return False
        return True

    async def ack(self, row: StoredRow) -> None:
        await self.ack_rows([row])

    async def ack_rows(self, rows: Sequence[StoredRow]) -> None:
        self._bus.send_together([str(row.token) for row in rows], b"+ACK")

    async def pending(self) -> int:
        self._bus.js.check_connected()
        try:
            info = await self._bus.js.call(
                self._durable, self._bus.js.manager.consumer_info(TRACE_STREAM, self._durable)
            )
        except NotThereError as error:
            raise StreamError(f"{self._durable}: the server lost this consumer; fetch makes it again") from error
        return (info.num_pending or 0) + (info.num_ack_pending or 0)

    async def close(self) -> None:
        """Rows that were pulled and not fetched go back at once, the unacknowledged after ``ack_wait_s``."""
        self._closed = True
        await self._pull.detach()
        if self._bus.connected:
            for row, _ in self._pull.rows:
                self._bus.publish(str(row.token), b"-NAK")
        self._pull.rows.clear()


async def wait_for_change(bus: NatsBus, pause_s: float, error: BusError) -> None:
    """Until the connection changes, at most ``pause_s``. Raises ``error`` when the bus is closed for good."""
    if bus.client.is_closed:
        raise error
    bus.changed.clear()
    try:
        await asyncio.wait_for(bus.changed.wait(), pause_s)
    except TimeoutError:
        return


_reader_numbers = itertools.count(1)


class OrderedReader:
    """A stream's rows in order, each once, for as long as wanted: over reconnects, restarts and lost consumers.

    When the stream itself was lost and made again, reading starts over with the new one (`restarts` counts that).
    ``ensure`` makes the stream if it is missing and tells its state.
    """

    BATCH = 512

    def __init__(
        self,
        bus: NatsBus,
        stream: str,
        filter_subject: str,
        start: Start,
        ensure: Callable[[], Awaitable[api.StreamInfo]],
    ) -> None:
        self._bus = bus
        self._stream = stream
        self._filter = filter_subject
        self._start: Start = start
        self._ensure = ensure
        self._pull = Pull(bus, stream)
        self._created: object = None
        self._last_seq: int | None = None
        self._expected = 1
        self._retry_s = _RETRY_FIRST_S
        self.restarts = 0
        self.pending_at_start = 0

    async def next(self, timeout_s: float = 3600.0) -> tuple[StoredRow, RowPlace] | None:
        """The next row, or ``None`` when none came for ``timeout_s`` or reading has just started over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            if self._pull.rows:
                row, place = self._pull.rows.popleft()
                if place.consumer_seq == self._expected:
                    self._expected += 1
                    self._last_seq = place.stream_seq
                    return row, place
                await self._pull.detach()
                self._pull.rows.clear()
            left = deadline - loop.time()
            if left <= 0:
                return None
            if self._pull.broken is not None:
                restarts = self.restarts
                await self._pull.settle()
                try:
                    await self.open()
                except (NotConnectedError, BusTimeoutError, StreamError) as error:
                    await wait_for_change(self._bus, min(self._retry_s, left), error)
                    self._retry_s = min(self._retry_s * 2, _RETRY_MOST_S)
                if self.restarts != restarts:
                    return None
                continue
            self._pull.ask(self.BATCH, _EXPIRES_S)
            await self._pull.wait(left)

    async def open(self) -> None:
        """A fresh consumer where we are. Raises `NotConnectedError`, `BusTimeoutError`, `StreamError`."""
        js = self._bus.js
        info = await self._ensure()
        made = await js.call(self._stream, js.manager.add_consumer(self._stream, self._config(info)))
        self._retry_s = _RETRY_FIRST_S
        self._expected = 1
        self.pending_at_start = made.num_pending or 0
        await self._pull.attach(made.name)

    def _config(self, info: api.StreamInfo) -> api.ConsumerConfig:
        config = api.ConsumerConfig(
            name=f"reader-{self._bus.client.client_id}-{next(_reader_numbers)}",
            filter_subject=self._filter,
            ack_policy=api.AckPolicy.NONE,
            mem_storage=True,
            num_replicas=1,
            inactive_threshold=30.0,
        )
        first = self._created is None
        replaced = not first and info.created != self._created
        self._created = info.created
        if replaced:
            self.restarts += 1
            self._last_seq = None
            # Everything in a stream that was not there before is new.
            self._start = "all" if self._start == "new" else self._start
        if self._last_seq is not None:
            config.deliver_policy = api.DeliverPolicy.BY_START_SEQUENCE
            config.opt_start_seq = self._last_seq + 1
        elif self._start == "last_per_subject":
            config.deliver_policy = api.DeliverPolicy.LAST_PER_SUBJECT
        elif self._start == "all":
            config.deliver_policy = api.DeliverPolicy.ALL
        else:
            # From what is stored now, so that a consumer made again loses nothing in between.
            config.deliver_policy = api.DeliverPolicy.BY_START_SEQUENCE
            self._last_seq = info.state.last_seq
            config.opt_start_seq = self._last_seq + 1
        return config

    async def close(self) -> None:
        """The server forgets the consumer after 30 s without requests."""
        await self._pull.detach()


async def tail_stream(
    bus: NatsBus,
    stream: str,
    filter_subject: str,
    start: Start,
    ensure: Callable[[], Awaitable[api.StreamInfo]],
) -> AsyncGenerator[StoredRow, None]:
    """See `bus.interface.Bus.tail`."""
    reader = OrderedReader(bus, stream, filter_subject, start, ensure)
    try:
        while True:
            found = await reader.next()
            if found is not None:
                yield found[0]
    finally:
        await reader.close()

"""What a service may ask of the bus. Two implementations pass one conformance suite: `bus.nats` and `bus.memory`.

Handlers are plain functions called on the event loop, one message after the other per subscription, in order of
arrival; what they raise is counted and logged, never lost silently, and ends nothing. Where many messages wait for one
subscription, everybody else has a turn every `TURN_S`; what waits is bounded by its ``pending_limit``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from bus.errors import BusError

TURN_S = 0.002
"""How long the handler of one subscription is called again and again before everybody else has a turn."""

FACTS_LINGER_S = 0.002
"""How long a fact may wait for others: far below what any decision depends on, and enough that those of one request
that come close together, or of several requests, cost one write, one read at the server, and one at each hearer."""


class BusMessage(msgspec.Struct, frozen=True):
    """One message as received. ``reply`` is the subject to answer on, empty for facts."""

    subject: str
    payload: bytes
    headers: Mapping[str, str] = {}
    reply: str = ""


Handler = Callable[[BusMessage], None]


@dataclass(frozen=True, slots=True)
class SubscriptionStats:
    """Messages: delivered to the handler, waiting, dropped by the bound; and handler failures."""

    delivered: int
    pending: int
    dropped: int
    failed: int


class Subscription(Protocol):
    """A live subscription."""

    @property
    def subject(self) -> str: ...

    def stats(self) -> SubscriptionStats: ...

    async def unsubscribe(self) -> None:
        """Stop; nothing is delivered after it returns."""


class StoredRow(msgspec.Struct, frozen=True, gc=False):
    """One message of a stream, with its place in it; acknowledge with `Consumer.ack`."""

    subject: str
    payload: bytes
    headers: Mapping[str, str]
    stream_seq: int
    delivered: int
    token: object


class Consumer(Protocol):
    """A durable pull consumer: what is not acknowledged comes again."""

    @property
    def lost(self) -> int:
        """Rows that had left the stream before this consumer was given them (it lags behind the stream's limits), seen
        by this process. Known only of consumers of the whole stream; where several processes share one, each may see
        the same loss."""

    async def fetch(self, limit: int, timeout_s: float) -> list[StoredRow]:
        """Up to ``limit`` rows; empty after ``timeout_s`` without any."""

    async def ack(self, row: StoredRow) -> None: ...

    async def ack_rows(self, rows: Sequence[StoredRow]) -> None:
        """Each of ``rows``, at the price of one message."""

    async def pending(self) -> int:
        """Rows not yet acknowledged (delivered or not)."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A key's value; ``value`` is ``None`` for a deletion seen by `KeyValue.watch`."""

    key: str
    value: bytes | None
    revision: int


class KeyValue(Protocol):
    """A bucket. Keys are tokens of `bus.subjects.encode_id`, joined by dots."""

    async def get(self, key: str) -> KeyEntry | None: ...

    async def check_writable(self, key: str) -> None:
        """Raises `NoRespondersError` while nobody takes what is written, because the servers that keep the bucket elect
        or are too few (reading may go on meanwhile), and any `BusError` where nobody says."""

    async def put(self, key: str, value: bytes) -> int:
        """Returns the new revision."""

    async def create(self, key: str, value: bytes) -> int:
        """Raises `WrongRevisionError` when the key exists."""

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Compare and set. Raises `WrongRevisionError`."""

    async def delete(self, key: str, revision: int | None = None) -> None:
        """With ``revision``: only if it is still the last one. Raises `WrongRevisionError`."""

    async def keys(self) -> list[str]: ...

    def watch(self, prefix: str = "") -> AsyncGenerator[KeyEntry, None]:
        """Current entries first, then changes, until the iterator is closed. ``prefix``: leading tokens of the keys.
        What expires, and what a lost bucket no longer has, is seen as deleted."""


class ObjectStore(Protocol):
    """A bucket of objects of any size (index snapshots). One that was made with ``ttl_s`` forgets what is older."""

    async def put(self, key: str, data: bytes) -> None: ...

    async def get(self, key: str) -> bytes:
        """Raises `KeyMissingError`."""

    async def delete(self, key: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A question that a service answers (NATS services API). ``queue`` empty: every instance answers.

    ``answer`` gets the message; it replies with `Bus.publish` on ``message.reply`` as often as it likes.
    """

    name: str
    subject: str
    answer: Handler
    queue: str = "q"


class AnswersToMany(Protocol):
    """An asynchronous iterator over answers."""

    def __aiter__(self) -> AnswersToMany: ...

    async def __anext__(self) -> BusMessage: ...

    async def aclose(self) -> None: ...


class ServedEndpoints(Protocol):
    """Endpoints being served, visible as ``$SRV.PING|INFO|STATS``."""

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BusStats:
    """Counters of one connection, and of those that it made (`Bus.another`), since it was opened. ``refused``: what the
    server did not permit."""

    published: int
    delivered: int
    dropped_slow_consumer: int
    publish_failed: int
    reconnects: int
    handler_failed: int
    refused: int = 0

    def __add__(self, other: BusStats) -> BusStats:
        return BusStats(
            published=self.published + other.published,
            delivered=self.delivered + other.delivered,
            dropped_slow_consumer=self.dropped_slow_consumer + other.dropped_slow_consumer,
            publish_failed=self.publish_failed + other.publish_failed,
            reconnects=self.reconnects + other.reconnects,
            handler_failed=self.handler_failed + other.handler_failed,
            refused=self.refused + other.refused,
        )


class Bus(Protocol):
    """One connection."""

    @property
    def connected(self) -> bool: ...

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""

    @property
    def serving(self) -> tuple[str, ...]:
        """Names under which this connection answers `serve`d endpoints now."""

    @property
    def max_payload(self) -> int:
        """Bytes that one message may carry (headers included)."""

    def stats(self) -> BusStats: ...

    def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None, *, linger_s: float = 0.0
    ) -> None:
        """Queue one message, at most once delivery, in order. Never blocks the loop.

        With ``linger_s`` it may wait so long for others, to be sent with them: for facts (`FACTS_LINGER_S`), of which
        nobody waits for one. Whatever is sent sooner takes it along.
        While the server is away, up to a bound is buffered, the rest is counted as ``publish_failed``.
        Raises `PayloadTooLargeError`, `ClosedError`.
        """

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Everything published before has reached the server. Raises `BusTimeoutError`, `NotConnectedError`."""

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", pending_limit: int = 65_536
    ) -> Subscription: ...

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> BusMessage:
        """One answer. Raises `NoRespondersError` at once, `BusTimeoutError`, `NotConnectedError`,
        `AnswerFailedError` when the handler on the other side raised."""

    def request_many(self, subject: str, payload: bytes, *, idle_timeout_s: float, deadline_s: float) -> AnswersToMany:
        """Every answer, until the caller closes the iterator (`contextlib.aclosing`). Raises as `request`;
        `BusTimeoutError` after ``idle_timeout_s`` of silence or ``deadline_s`` in all."""

    async def serve(
        self, name: str, version: str, description: str, endpoints: list[Endpoint], metadata: Mapping[str, str]
    ) -> ServedEndpoints: ...

    async def publish_row(self, subject: str, payload: bytes, message_id: str, *, timeout_s: float = 5.0) -> bool:
        """Durable publish into the trace stream, acknowledged; ``False`` when it was a duplicate.
        Raises `StreamError`, `BusTimeoutError`, `NotConnectedError`."""

    def send_row(
        self,
        subject: str,
        payload: bytes,
        message_id: str,
        answered: Callable[[bool | BusError], None],
        *,
        timeout_s: float = 5.0,
    ) -> bool:
        """`publish_row` without a task that waits: ``answered`` is called later, with what it would return or raise.
        ``False``: not sent, since something has to be done first, as `publish_row` does. Raises `PayloadTooLargeError`,
        `ClosedError`."""

    async def consume(self, durable: str, filter_subject: str, *, ack_wait_s: float = 30.0) -> Consumer:
        """A durable consumer of the trace stream, created or resumed by name."""

    def tail(self, filter_subject: str, *, from_start: bool = False) -> AsyncGenerator[StoredRow, None]:
        """Rows of the trace stream as they come (no acknowledgement), in order, until closed."""

    async def another(self, suffix: str, *, timeout_s: float = 5.0) -> Bus:
        """A second connection to the same server, with the same options, called ``<name>-<suffix>``: for what comes in
        floods, so that it neither delays nor ends what comes over this one. It lives and is lost by itself, counts in
        this one's `stats`, and is closed with it. Raises `NotConnectedError` after ``timeout_s``, `ClosedError`."""

    async def key_value(self, bucket: str, *, ttl_s: float | None = None) -> KeyValue: ...

    async def objects(self, bucket: str, *, ttl_s: float | None = None) -> ObjectStore: ...

    async def wait_lost(self) -> str:
        """Ends with the reason when the connection is gone for good (access revoked), not when it reconnects."""

    async def close(self) -> None:
        """Flush and disconnect. Nothing is delivered after it returns."""

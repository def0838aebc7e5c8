"""A connection to the in-memory broker; same interface and, by one conformance suite, same behaviour as NATS."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping

from bus.answers import Answers, ManyAnswers
from bus.errors import (
    BusError,
    BusTimeoutError,
    ClosedError,
    NotConnectedError,
    PayloadTooLargeError,
    WrongRevisionError,
)
from bus.interface import (
    TURN_S,
    BusMessage,
    BusStats,
    Consumer,
    Endpoint,
    Handler,
    KeyEntry,
    KeyValue,
    ObjectStore,
    ServedEndpoints,
    StoredRow,
    SubscriptionStats,
)
from bus.log import EventLog
from bus.memory.broker import MemoryBroker
from bus.memory.storage import MemoryBucket, MemoryConsumer, MemoryObjects
from bus.others import Others
from bus.services import serve_endpoints
from bus.subjects import MESSAGE_ID
from bus.validation import check_publish_subject, check_subscribe_subject, clean_headers, header_bytes

log = EventLog(__name__)

BUFFER_DOWN_BYTES = 2 * 1024 * 1024


class MemorySubscription:
    """See `bus.interface.Subscription`. Messages wait in a queue until the loop's next turn."""

    def __init__(self, bus: MemoryBus, subject: str, queue: str, handler: Handler, pending_limit: int) -> None:
        self._bus = bus
        self._subject = subject
        self._handler = handler
        self._limit = pending_limit
        self._waiting: deque[BusMessage] = deque()
        self._scheduled = False
        self._stopped = False
        self.queue = queue
        self.delivered = 0
        self.dropped = 0
        self.failed = 0

    @property
    def subject(self) -> str:
        return self._subject

    def stats(self) -> SubscriptionStats:
        return SubscriptionStats(self.delivered, len(self._waiting), self.dropped, self.failed)

    def receive(self, message: BusMessage) -> None:
        if len(self._waiting) >= self._limit:
            self.dropped += 1
            return
        self._waiting.append(message)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        loop = asyncio.get_running_loop()
        due = loop.time() + TURN_S
        while self._waiting and not self._stopped:
            if loop.time() >= due:
                self._scheduled = True
                loop.call_soon(self._deliver)
                return
            message = self._waiting.popleft()
            self.delivered += 1
            try:
                self._handler(message)
            except Exception:
                # The border to the handler: what it raises is counted and logged, and ends nothing.
                self.failed += 1
                if self.failed & (self.failed - 1) == 0:  # at each doubling: a flood shall not fill the log
                    log.exception("handler_failed", subject=message.subject, failures=self.failed)

    async def unsubscribe(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._waiting.clear()
            self._bus.forget(self)


class MemoryBus:
    """See `bus.interface.Bus`. Made by `MemoryBroker.connect`."""

    def __init__(self, broker: MemoryBroker, name: str, number: int) -> None:
        self.name = name
        self._broker = broker
        self._inbox = f"_INBOX.memory{number}."
        self._numbers = itertools.count()
        self._subscriptions: list[MemorySubscription] = []
        self._asking: set[Answers] = set()
        self._served: list[str] = []
        self._others: Others[MemoryBus] = Others()
        self._waiting: deque[BusMessage] = deque()
        self._waiting_bytes = 0
        self._published = 0
        self._publish_failed = 0
        self._reconnects = 0
        self._dropped = 0
        self._gone_delivered = 0
        self._gone_failed = 0
        self._closed = False
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    # State

    @property
    def connected(self) -> bool:
        return self._broker.running and not self._closed

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def max_payload(self) -> int:
        return self._broker.max_payload

    @property
    def serving(self) -> tuple[str, ...]:
        return tuple(self._served)

    def stats(self) -> BusStats:
        live = self._subscriptions
        own = BusStats(
            published=self._published,
            delivered=self._gone_delivered + sum(one.delivered for one in live),
            dropped_slow_consumer=self._dropped + sum(one.dropped for one in live),
            publish_failed=self._publish_failed,
            reconnects=self._reconnects,
            handler_failed=self._gone_failed + sum(one.failed for one in live),
        )
        return own + self._others.stats()

    def server_went(self) -> None:
        """Called by the broker: questions that are open fail now."""
        for answers in list(self._asking):
            answers.receive(_away())

    def server_came(self) -> None:
        """Called by the broker: what was published meanwhile goes out."""
        self._reconnects += 1
        self._waiting_bytes = 0
        while self._waiting:
            self._route(self._waiting.popleft())

    # Publish and subscribe

    def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None, *, linger_s: float = 0.0
    ) -> None:
        self._send(subject, payload, "", headers)

    def _send(self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        if self._closed:
            raise ClosedError("the bus connection is closed")
        check_publish_subject(subject)
        size = len(payload) if headers is None else len(payload) + header_bytes(headers)
        if size > self.max_payload:
            raise PayloadTooLargeError(subject, size, self.max_payload)
        message = BusMessage(subject, bytes(payload), clean_headers(headers or {}), reply)
        if self._broker.running:
            self._published += 1
            self._route(message)
        elif self._waiting_bytes + size > BUFFER_DOWN_BYTES:
            self._publish_failed += 1
        else:
            self._published += 1
            self._waiting_bytes += size
            self._waiting.append(message)

    def _route(self, message: BusMessage) -> None:
        self._broker.store(message.subject, message.payload, message.headers)
        self._broker.route(message)

    async def flush(self, timeout_s: float = 2.0) -> None:
        self._check()
        await asyncio.sleep(0)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the bus connection is closed")
        if not self._broker.running:
            raise _away()

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", pending_limit: int = 65_536
    ) -> MemorySubscription:
        if self._closed:
            raise ClosedError("the bus connection is closed")
        check_subscribe_subject(subject)
        subscription = MemorySubscription(self, subject, queue, handler, pending_limit)
        self._subscriptions.append(subscription)
        self._broker.add(subscription)
        return subscription

    def forget(self, subscription: MemorySubscription) -> None:
        """End of a subscription; its counters stay in `stats`."""
        self._subscriptions = [other for other in self._subscriptions if other is not subscription]
        self._broker.remove(subscription)
        self._gone_delivered += subscription.delivered
        self._gone_failed += subscription.failed
        self._dropped += subscription.dropped

    # Questions

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> BusMessage:
        answers = Answers(subject, limit=1)
        inbox = self._ask(subject, payload, headers, answers)
        try:
            return await answers.next(timeout_s)
        except TimeoutError:
            raise BusTimeoutError(subject, timeout_s) from None
        finally:
            self._asked(inbox, answers)

    def request_many(self, subject: str, payload: bytes, *, idle_timeout_s: float, deadline_s: float) -> ManyAnswers:
        answers = Answers(subject)
        return ManyAnswers(
            answers, lambda: self._ask(subject, payload, None, answers), self._asked, idle_timeout_s, deadline_s
        )

    def _ask(self, subject: str, payload: bytes, headers: Mapping[str, str] | None, answers: Answers) -> str:
        self._check()
        inbox = f"{self._inbox}{next(self._numbers)}"
        loop = asyncio.get_running_loop()

        def receive(message: BusMessage) -> None:
            loop.call_soon(answers.receive, message)

        self._broker.open_inbox(inbox, receive)
        self._asking.add(answers)
        try:
            self._send(subject, payload, inbox, headers)
        except BaseException:
            self._asked(inbox, answers)
            raise
        return inbox

    def _asked(self, inbox: str, answers: Answers) -> None:
        self._dropped += answers.dropped
        self._asking.discard(answers)
        self._broker.close_inbox(inbox)

    async def another(self, suffix: str, *, timeout_s: float = 5.0) -> MemoryBus:
        self._check()
        other = await self._broker.connect(name=f"{self.name}-{suffix}")
        self._others.add(other)
        return other

    async def serve(
        self, name: str, version: str, description: str, endpoints: list[Endpoint], metadata: Mapping[str, str]
    ) -> ServedEndpoints:
        return await serve_endpoints(self, self._served, name, version, description, endpoints, metadata)

    # What is stored

    async def publish_row(self, subject: str, payload: bytes, message_id: str, *, timeout_s: float = 5.0) -> bool:
        added = self._store(subject, payload, message_id)
        await asyncio.sleep(0)
        return added

    def _store(self, subject: str, payload: bytes, message_id: str) -> bool:
        self._check()
        check_publish_subject(subject)
        headers = {MESSAGE_ID: message_id}
        size = len(payload) + header_bytes(headers)
        if size > self.max_payload:
            raise PayloadTooLargeError(subject, size, self.max_payload)
        self._published += 1
        self._broker.traces()
        added = self._broker.store(subject, payload, headers)
        self._broker.route(BusMessage(subject, payload, headers))
        return added

    def send_row(
        self,
        subject: str,
        payload: bytes,
        message_id: str,
        answered: Callable[[bool | BusError], None],
        *,
        timeout_s: float = 5.0,
    ) -> bool:
        if self._closed:
            raise ClosedError("the bus connection is closed")
        if not self.connected:
            return False
        asyncio.get_running_loop().call_soon(answered, self._store(subject, payload, message_id))
        return True

    async def consume(self, durable: str, filter_subject: str, *, ack_wait_s: float = 30.0) -> Consumer:
        self._check()
        return MemoryConsumer(self._broker.traces(), durable, filter_subject, ack_wait_s)

    def tail(self, filter_subject: str, *, from_start: bool = False) -> AsyncGenerator[StoredRow, None]:
        return self._broker.traces().tail(filter_subject, from_start)

    async def key_value(self, bucket: str, *, ttl_s: float | None = None) -> KeyValue:
        self._check()
        return MemoryKeyValue(self, self._broker.buckets.setdefault(bucket, MemoryBucket(ttl_s)))

    async def objects(self, bucket: str, *, ttl_s: float | None = None) -> ObjectStore:
        self._check()
        return MemoryObjectStore(self, self._broker.objects.setdefault(bucket, MemoryObjects(ttl_s)))

    def check(self) -> None:
        """Raises `ClosedError`, `NotConnectedError`."""
        self._check()

    # The end

    async def wait_lost(self) -> str:
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        if self._closed:
            return
        await self._others.close()
        await asyncio.sleep(0)
        self._closed = True
        for subscription in list(self._subscriptions):
            await subscription.unsubscribe()
        for answers in list(self._asking):
            answers.receive(ClosedError("the bus connection is closed"))
        self._lost.cancel()
        self._broker.disconnect(self)


class MemoryKeyValue:
    """See `bus.interface.KeyValue`."""

    def __init__(self, bus: MemoryBus, bucket: MemoryBucket) -> None:
        self._bus = bus
        self._bucket = bucket

    async def get(self, key: str) -> KeyEntry | None:
        self._bus.check()
        entry = self._bucket.last(key)
        return None if entry.value is None else entry

    async def check_writable(self, key: str) -> None:
        self._bus.check()

    async def put(self, key: str, value: bytes) -> int:
        self._bus.check()
        return self._bucket.write(key, value)

    async def create(self, key: str, value: bytes) -> int:
        self._bus.check()
        last = self._bucket.last(key)
        if last.value is not None:
            raise WrongRevisionError(f"{key}: exists at revision {last.revision}")
        return self._bucket.write(key, value)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        self._bus.check()
        return self._bucket.write(key, value, revision)

    async def delete(self, key: str, revision: int | None = None) -> None:
        self._bus.check()
        self._bucket.write(key, None, revision)

    async def keys(self) -> list[str]:
        self._bus.check()
        return sorted(entry.key for entry in self._bucket.present())

    def watch(self, prefix: str = "") -> AsyncGenerator[KeyEntry, None]:
        return self._bucket.watch(prefix)


class MemoryObjectStore:
    """See `bus.interface.ObjectStore`."""

    def __init__(self, bus: MemoryBus, objects: MemoryObjects) -> None:
        self._bus = bus
        self._objects = objects

    async def put(self, key: str, data: bytes) -> None:
        self._bus.check()
        self._objects.put(key, bytes(data))

    async def get(self, key: str) -> bytes:
        self._bus.check()
        return self._objects.get(key)

    async def delete(self, key: str) -> None:
        self._bus.check()
        self._objects.delete(key)


def _away() -> NotConnectedError:
    return NotConnectedError("the bus is not connected")

"""One connection to NATS: publish, subscribe, ask, serve; it reconnects by itself for as long as it takes.

nats-py does protocol and reconnecting. Three things are done differently here, each for a measured or seen reason:

- ``publish`` is synchronous, and goes past nats-py's (four coroutines that never wait as long as its buffer has no
  limit) into its buffer. The limits are kept here, by ``pending_data_size``.
- ``flush`` sends its PING behind what is in the buffer. nats-py sends it past the buffer, so that the PONG may come
  back before the messages have left.
- one inbox subscription serves all replies, and open questions fail when the connection does, not at their deadline.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nats import errors as nats_errors
from nats.aio.client import Server
from nats.aio.subscription import Subscription as RawSubscription
from nats.protocol.parser import PERMISSIONS_ERR

from bus.answers import Answers, ManyAnswers
from bus.errors import (
    BusError,
    BusTimeoutError,
    ClosedError,
    NotConnectedError,
    PayloadTooLargeError,
    SettingsError,
)
from bus.interface import (
    BusMessage,
    BusStats,
    Consumer,
    Endpoint,
    Handler,
    KeyValue,
    ObjectStore,
    ServedEndpoints,
    StoredRow,
)
from bus.log import EventLog
from bus.nats.access import (
    NatsAccess,
    access_from_environment,
    access_of,
    inbox_prefix_of,
    login_of,
    servers_of,
    tls_context,
    without_login,
)
from bus.nats.buckets import NatsKeyValue, NatsObjectStore
from bus.nats.client import NatsClient
from bus.nats.replies import Replies, bus_is_away
from bus.nats.streams import JetStream, NatsConsumer, TraceStreamLimits, tail_stream
from bus.nats.subscription import NatsSubscription
from bus.others import NO_STATS, Others
from bus.services import serve_endpoints
from bus.settings import ENVIRONMENT_PREFIX, CommonSettings, redact
from bus.subjects import TRACE_STREAM
from bus.validation import check_publish_subject, check_subscribe_subject, header_block

log = EventLog(__name__)

REFUSED_LOGIN = "Authorization Violation"
"""In what the server says to a stranger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsOptions:
    """Bounds of one connection. Sizes in bytes, times in seconds.

    ``buffer_bytes``: waiting to be sent while connected; ``buffer_down_bytes``: while the server is away; what does
    not fit is counted as ``publish_failed``. A server that answers no ping for two ``ping_interval_s`` is lost.
    ``replicas``: copies of the streams and buckets that this connection makes. ``echo``: it hears what it publishes
    itself, where it has subscribed to it.
    """

    buffer_bytes: int = 64 * 1024 * 1024
    buffer_down_bytes: int = 2 * 1024 * 1024
    ping_interval_s: float = 5.0
    connect_timeout_s: float = 2.0
    retry_first_s: float = 0.05
    retry_most_s: float = 1.0
    log_every_s: float = 10.0
    traces: TraceStreamLimits = field(default_factory=TraceStreamLimits)
    access: NatsAccess = field(default_factory=NatsAccess)
    replicas: int = 1
    echo: bool = True


class NatsBus:
    """See `bus.interface.Bus`. Made by `connect`."""

    def __init__(self, url: str, name: str, options: NatsOptions) -> None:
        self.options = options
        self._buffer_bytes = options.buffer_bytes
        self._buffer_down_bytes = options.buffer_down_bytes
        self._url = url
        self._name = name
        access = options.access
        self._servers = servers_of(url)
        self._login = login_of(access, self._servers)
        self._tls = tls_context(access, self._servers)
        self._inbox_prefix = inbox_prefix_of(access, self._login)
        self.client = NatsClient(self._inbox_prefix, demands_tls=self._tls is not None)
        self.js = JetStream(self)
        self._subscriptions: dict[RawSubscription, NatsSubscription] = {}
        self._gone = NO_STATS
        self._others: Others[NatsBus] = Others()
        self._replies = Replies(f"{self.client.new_inbox()}.")
        self._served: list[str] = []
        self._published = 0
        self._publish_failed = 0
        self._dropped = 0
        self._dialled = False
        self._opened = False
        self._subscribed = False
        self._closed = False
        self._failures = 0
        self._refused = 0
        self._logged_at = 0.0
        self.problem = ""
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.changed = asyncio.Event()

    # Opening and its callbacks

    async def open(self) -> None:
        options = self.options
        try:
            await self.client.connect(
                [without_login(server) for server in self._servers],
                name=self._name,
                user=self._login.user,
                password=self._login.password,
                token=self._login.token,
                user_credentials=options.access.creds or None,
                tls=self._tls,
                inbox_prefix=self._inbox_prefix,
                no_echo=not options.echo,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed,
                allow_reconnect=True,
                max_reconnect_attempts=-1,
                reconnect_time_wait=options.retry_first_s,  # type: ignore[arg-type]  # declared int, used as float
                reconnect_to_server_handler=self._next_try,
                connect_timeout=options.connect_timeout_s,  # type: ignore[arg-type]
                ping_interval=options.ping_interval_s,  # type: ignore[arg-type]
                max_outstanding_pings=2,
                pending_size=1 << 50,  # the limits are ours, see `send`
                skip_subject_validation=True,  # checked, more strictly, by `bus.validation`
            )
        except ModuleNotFoundError as error:
            raise SettingsError(
                "nats_creds", f"needs the package nkeys: pip install 'tidegate[creds]' ({error})"
            ) from error
        except nats_errors.Error as error:
            raise SettingsError(
                "nats_url", f"{redact('url', self._url)!r} is not nats://host:port ({error})"
            ) from error
        self._dialled = self._opened = True
        self._failures = 0
        raw = await self.client.subscribe(self._replies.subject, cb=self._replies.deliver)
        self.client.handle_directly(raw._id, self._replies.receive)
        self._subscribed = True
        log.info("bus_connected", url=redact("url", self._url), name=self._name, max_payload=self.client.max_payload)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats_errors.SlowConsumerError):
            self._dropped += 1
            subscription = self._subscriptions.get(error.sub)
            if subscription is not None:
                subscription.dropped += 1
            self._log_sometimes("slow_consumer", subject=error.subject, name=self._name)
            return
        if _is_refusal(error):
            self._refused += 1
            if self._refused & (self._refused - 1) == 0:  # at each doubling: it comes back with every message
                log.error("bus_refused", detail=str(error).removeprefix("nats: "), name=self._name, times=self._refused)
            return
        if not self._opened:
            # nats-py waits the same time between all first tries; growing it here is its only hook for a backoff.
            self.client.options["reconnect_time_wait"] = self._backoff_s()
        self._dialled = True
        self._failures += 1
        reason = (str(error) or repr(error)).removeprefix("nats: ")
        if REFUSED_LOGIN not in self.problem:  # the server hangs up after it has said so, and sometimes before
            self.problem = reason
        self._log_sometimes("bus_unreachable", url=redact("url", self._url), reason=reason)

    def _log_sometimes(self, event: str, **fields: Any) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= self.options.log_every_s or not self._logged_at:
            self._logged_at = now
            log.warning(event, **fields)

    def _backoff_s(self) -> float:
        doubled = self.options.retry_first_s * 2.0 ** min(self._failures, 16)
        return min(doubled, self.options.retry_most_s) * random.uniform(0.75, 1.0)  # noqa: S311 - jitter

    def _next_try(self, servers: Sequence[Server], info: object) -> tuple[Server, float]:
        """Each server in turn: left to itself nats-py takes the first of them each time, be it gone for ever."""
        self.client.drop_failed_connection()
        return servers[self._failures % len(servers)], self._backoff_s()

    async def _on_disconnected(self) -> None:
        self._subscribed = False
        if not self._closed:
            self._logged_at = asyncio.get_running_loop().time()
            log.warning("bus_disconnected", url=redact("url", self._url), name=self._name)
        self._replies.fail_all(bus_is_away())
        self.js.forget()
        self.changed.set()

    async def _on_reconnected(self) -> None:
        self._subscribed = True
        self._failures = 0
        log.info(
            "bus_reconnected",
            url=redact("url", self._url),
            name=self._name,
            reconnects=self.client.stats["reconnects"],
        )
        self.changed.set()

    async def _on_closed(self) -> None:
        if not self._lost.done() and not self._closed:
            self._lost.set_result(str(self.client.last_error or "closed by the server"))
        self._replies.fail_all(bus_is_away())
        self.changed.set()

    # State

    @property
    def connected(self) -> bool:
        # nats-py calls itself connected before it has subscribed again, when answers would still be lost.
        return self._subscribed and self.client.is_connected and not self._closed

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def max_payload(self) -> int:
        return self.client.max_payload

    @property
    def serving(self) -> tuple[str, ...]:
        return tuple(self._served)

    def stats(self) -> BusStats:
        live = self._subscriptions.values()
        own = BusStats(
            published=self._published,
            delivered=self._gone.delivered + sum(one.delivered for one in live),
            dropped_slow_consumer=self._dropped,
            publish_failed=self._publish_failed,
            reconnects=self.client.stats["reconnects"],
            handler_failed=self._gone.handler_failed + sum(one.failed for one in live) + self.client.unreadable,
            refused=self._refused,
        )
        return own + self._others.stats()

    # Publish and subscribe

    def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None, *, linger_s: float = 0.0
    ) -> None:
        self.client.linger_s = linger_s
        try:
            self.send(subject, payload, "", headers)
        finally:
            self.client.linger_s = 0.0

    def send(self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str] | None) -> bool:
        """`publish` with a reply subject; ``False`` when it did not fit into the buffer (counted)."""
        if self._closed:
            raise ClosedError("the bus connection is closed")
        check_publish_subject(subject)
        client = self.client
        block = None if headers is None else header_block(headers)
        size = len(payload) if block is None else len(payload) + len(block)
        if size > client.max_payload:
            raise PayloadTooLargeError(subject, size, client.max_payload)
        limit = self._buffer_bytes if client.is_connected else self._buffer_down_bytes
        if client.pending_data_size + size > limit or client.is_closed:
            self._publish_failed += 1
            return False
        client.send(subject, payload, reply, block)
        self._published += 1
        return True

    def send_together(self, subjects: Sequence[str], payload: bytes) -> bool:
        """``payload`` to each of ``subjects``, which the server has named; ``False`` when they did not fit into the
        buffer or the server is away (counted)."""
        if self._closed:
            raise ClosedError("the bus connection is closed")
        size = sum(map(len, subjects)) + len(subjects) * len(payload)
        if not self.client.is_connected or self.client.pending_data_size + size > self._buffer_bytes:
            self._publish_failed += len(subjects)
            return False
        self.client.send_together(subjects, payload)
        self._published += len(subjects)
        return True

    async def flush(self, timeout_s: float = 2.0) -> None:
        if self._closed:
            raise ClosedError("the bus connection is closed")
        if not self.connected or not self.client.writable:
            raise bus_is_away()
        answers = Answers("flush", limit=1)
        inbox = self._replies.open(answers.receive)  # to hear that the connection is lost
        self.client.ping().add_done_callback(lambda _: answers.receive(BusMessage(inbox, b"")))
        try:
            await answers.next(timeout_s)
        except TimeoutError:
            raise BusTimeoutError("flush", timeout_s) from None
        finally:
            self._replies.close(inbox)

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", pending_limit: int = 65_536
    ) -> NatsSubscription:
        if self._closed:
            raise ClosedError("the bus connection is closed")
        check_subscribe_subject(subject)
        subscription = NatsSubscription(self, subject, handler)
        raw = await self.client.subscribe(subject, queue, cb=subscription.deliver, pending_msgs_limit=pending_limit)
        subscription.raw = raw
        self.client.handle_directly(raw._id, subscription.receive)
        self._subscriptions[raw] = subscription
        try:
            await self.flush()
        except (BusTimeoutError, NotConnectedError) as error:
            log.warning("subscribed_later", subject=subject, reason=error.reason)
        return subscription

    async def forget(self, subscription: NatsSubscription, raw: RawSubscription) -> None:
        """End of a subscription; its counters stay in `stats`."""
        self._subscriptions.pop(raw, None)
        self.client.forget_handler(raw._id)
        gone = self._gone
        self._gone = BusStats(
            0, gone.delivered + subscription.delivered, 0, 0, 0, gone.handler_failed + subscription.failed
        )
        if not self.client.is_closed:
            await raw.unsubscribe()

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
            self._replies.close(inbox)

    def request_many(self, subject: str, payload: bytes, *, idle_timeout_s: float, deadline_s: float) -> ManyAnswers:
        answers = Answers(subject)
        return ManyAnswers(
            answers, lambda: self._ask(subject, payload, None, answers), self._asked, idle_timeout_s, deadline_s
        )

    def _ask(self, subject: str, payload: bytes, headers: Mapping[str, str] | None, answers: Answers) -> str:
        inbox = self._replies.open(answers.receive)
        try:
            if not self.connected or not self.send(subject, payload, inbox, headers):
                raise bus_is_away()
        except BaseException:
            self._replies.close(inbox)
            raise
        return inbox

    def ask_once(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None,
        take: Callable[[BusMessage | BusError], None],
        timeout_s: float,
    ) -> bool:
        """`request` without a task that waits: the answer goes to ``take``. ``False``: it was not sent."""

        def answered(answer: BusMessage | BusError) -> None:
            timer.cancel()
            self._replies.close(inbox)
            take(answer)

        inbox = self._replies.open(answered)
        sent = False
        try:
            sent = self.send(subject, payload, inbox, headers)
        finally:
            if not sent:
                self._replies.close(inbox)
        if not sent:
            return False
        timer = asyncio.get_running_loop().call_later(timeout_s, lambda: answered(BusTimeoutError(subject, timeout_s)))
        return True

    def _asked(self, inbox: str, answers: Answers) -> None:
        self._dropped += answers.dropped
        self._replies.close(inbox)

    async def another(self, suffix: str, *, timeout_s: float = 5.0) -> NatsBus:
        if self._closed:
            raise ClosedError("the bus connection is closed")
        other = await connect(self._url, name=f"{self._name}-{suffix}", timeout_s=timeout_s, options=self.options)
        if self.closed:
            await other.close()
            raise ClosedError("the bus connection is closed")
        self._others.add(other)
        return other

    async def serve(
        self, name: str, version: str, description: str, endpoints: list[Endpoint], metadata: Mapping[str, str]
    ) -> ServedEndpoints:
        return await serve_endpoints(self, self._served, name, version, description, endpoints, metadata)

    # What is stored

    async def publish_row(self, subject: str, payload: bytes, message_id: str, *, timeout_s: float = 5.0) -> bool:
        return await self.js.publish_row(subject, payload, message_id, timeout_s)

    def send_row(
        self,
        subject: str,
        payload: bytes,
        message_id: str,
        answered: Callable[[bool | BusError], None],
        *,
        timeout_s: float = 5.0,
    ) -> bool:
        return self.js.send_row(subject, payload, message_id, answered, timeout_s)

    async def consume(self, durable: str, filter_subject: str, *, ack_wait_s: float = 30.0) -> Consumer:
        consumer = NatsConsumer(self, durable, filter_subject, ack_wait_s)
        await consumer.open()
        return consumer

    def tail(self, filter_subject: str, *, from_start: bool = False) -> AsyncGenerator[StoredRow, None]:
        return tail_stream(
            self, TRACE_STREAM, filter_subject, "all" if from_start else "new", self.js.ensure_trace_stream
        )

    async def key_value(self, bucket: str, *, ttl_s: float | None = None) -> KeyValue:
        store = NatsKeyValue(self, bucket, ttl_s)
        await store.open()
        return store

    async def objects(self, bucket: str, *, ttl_s: float | None = None) -> ObjectStore:
        store = NatsObjectStore(self, bucket, ttl_s)
        await store.open()
        return store

    # The end

    async def wait_lost(self) -> str:
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        if self._closed:
            return
        await self._others.close()
        try:
            if self.connected:
                await self.flush(1.0)
        except BusError as error:
            log.warning("close_without_flush", reason=error.reason)
        self._closed = True
        for subscription in list(self._subscriptions.values()):
            await subscription.unsubscribe()
        if self._dialled:
            if not self.client.writable:
                self.client.forget_pending()
            try:
                await asyncio.wait_for(self.client.close(), 2.0)
            except (TimeoutError, OSError) as error:
                log.warning("close_incomplete", reason=repr(error))
        self._replies.fail_all(ClosedError("the bus connection is closed"))
        self._lost.cancel()


def options_of(settings: CommonSettings) -> NatsOptions:
    """What a service's settings say of its connection."""
    return NatsOptions(access=access_of(settings), replicas=settings.nats_replicas, echo=settings.hears_itself)


def options_from_environment(environ: Mapping[str, str] | None = None) -> NatsOptions:
    """For commands and policies, which have no settings of their own: ``TIDEGATE_NATS_USER`` and the others. Also they
    make what they find missing, with as many copies. Raises `SettingsError`."""
    given = os.environ if environ is None else environ
    replicas = given.get(f"{ENVIRONMENT_PREFIX}NATS_REPLICAS") or "1"
    if replicas not in tuple("12345"):
        raise SettingsError(f"{ENVIRONMENT_PREFIX}NATS_REPLICAS", f"must be 1 to 5, not {replicas!r}")
    return NatsOptions(access=access_from_environment(given), replicas=int(replicas))


def _is_refusal(error: Exception) -> bool:
    """A permission that we lack; the connection lives on."""
    return isinstance(error, nats_errors.Error) and PERMISSIONS_ERR in str(error).lower()


async def connect(
    url: str, *, name: str, timeout_s: float | None = None, options: NatsOptions | None = None
) -> NatsBus:
    """Connect, trying again until the server answers, at most ``timeout_s`` (``None``: for ever).

    ``url``: ``nats://[user:password@]host:port``, or several, separated by commas. ``name`` is shown by the server's
    monitoring. Raises `SettingsError` for what is not an address and for credentials that cannot be read,
    `NotConnectedError` after ``timeout_s``.
    """
    bus = NatsBus(url, name, options or NatsOptions())
    try:
        async with asyncio.timeout(timeout_s):
            await bus.open()
    except TimeoutError:
        await bus.close()
        why = f": {bus.problem}" if bus.problem else ""
        raise NotConnectedError(f"no bus at {redact('url', url)} within {timeout_s:g} s{why}") from None
    except BaseException:
        await bus.close()
        raise
    return bus

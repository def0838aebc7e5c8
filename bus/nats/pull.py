"""Pulling rows of one JetStream consumer: ask for a batch, buffer what comes, notice when the consumer is gone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from bus.answers import STATUS
from bus.interface import StoredRow
from bus.nats.replies import NO_HEADERS

if TYPE_CHECKING:
    from bus.nats.connection import NatsBus

HEARTBEAT_S = 1.0
_SILENCE_S = 3.0
SETTLE_S = 0.25
"""Pause before something that the server has just deleted is made again. nats-server 2.15 tells consumers before it has
finished, and a stream made again at that moment exists and never acknowledges (seen 3 times in 100)."""

MOST_BYTES = 16 * 1024 * 1024
"""Of the rows that one request brings; two of the largest the server takes, where those are larger."""

DESCRIPTION = "Description"
_VERSION_LENGTH = len("NATS/1.0")
_SPACE = ord(" ")
_NO_MESSAGES, _TIMED_OUT, _CONFLICT, _HEARTBEAT = "404", "408", "409", "100"


class RowPlace(msgspec.Struct, frozen=True, gc=False):
    """A row's place, as its acknowledgement subject tells it."""

    consumer: str
    delivered: int
    stream_seq: int
    consumer_seq: int
    pending: int


def place_of(reply: str) -> RowPlace:
    """Parse ``$JS.ACK.…`` (9 tokens, or 11 and more with domain and account)."""
    tokens = reply.split(".")
    first = 4 if len(tokens) == 9 else 6
    return RowPlace(
        tokens[first - 1], int(tokens[first]), int(tokens[first + 1]), int(tokens[first + 2]), int(tokens[first + 4])
    )


def read_headers(block: bytes) -> dict[str, str]:
    """A header block ``NATS/1.0[ status[ description]]`` and its lines; status and description under their names."""
    first, *lines = block.decode(errors="replace").split("\r\n")
    headers: dict[str, str] = {}
    if len(first) > _VERSION_LENGTH:
        status, _, description = first[_VERSION_LENGTH:].strip().partition(" ")
        headers[STATUS] = status
        if description:
            headers[DESCRIPTION] = description
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name] = value.strip()
    return headers


class RowHeaders(Mapping[str, str]):
    """A row's headers, read when somebody asks for one: nobody does, of most rows."""

    __slots__ = ("_block", "_read")

    def __init__(self, block: bytes) -> None:
        self._block = block
        self._read: dict[str, str] | None = None

    def _headers(self) -> dict[str, str]:
        if self._read is None:
            self._read = read_headers(self._block)
        return self._read

    def __getitem__(self, name: str) -> str:
        return self._headers()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers())

    def __len__(self) -> int:
        return len(self._headers())


def _is_deleted(headers: Mapping[str, str]) -> bool:
    return "delete" in headers.get(DESCRIPTION, "").lower()


class Pull:
    """Requests to one consumer over one inbox. `rows` holds what has come, at most what was asked for.

    `broken` says why nothing more will come until the consumer is looked after: it is missing, was deleted, or the
    server has been silent for three heartbeats.
    """

    def __init__(self, bus: NatsBus, stream: str) -> None:
        self._bus = bus
        self._stream = stream
        self._inbox = ""
        self._loop = asyncio.get_running_loop()
        self._subscription: Subscription | None = None
        self._consumer = ""
        self._asked = 0
        self._heard_at = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self.rows: deque[tuple[StoredRow, RowPlace]] = deque()
        self.broken: str | None = "new"
        self._deleted = False

    async def attach(self, consumer: str) -> None:
        """Pull from ``consumer`` from now on; rows of another are ignored. Rows that an earlier request of the same
        consumer still brings are as good as any: the server would give them again only after ``ack_wait_s``."""
        self._consumer = consumer
        self._asked = 0
        if self._subscription is None:
            # Not one of `Replies`: pulled messages come to the inbox under the subject they were stored with.
            self._inbox = self._bus.client.new_inbox()
            self._subscription = await self._bus.client.subscribe(self._inbox, cb=self._late)
            self._bus.client.handle_bytes(self._subscription._id, self._receive)
            self._bus.js.pulls.add(self)
        self.broken = None

    async def detach(self) -> None:
        self._bus.js.pulls.discard(self)
        subscription, self._subscription = self._subscription, None
        self._asked = 0
        self.broken = "detached"
        if subscription is not None:
            self._bus.client.forget_handler(subscription._id)
            if not self._bus.client.is_closed:
                await subscription.unsubscribe()

    def ask(self, limit: int, expires_s: float) -> None:
        """One request for up to ``limit`` rows and `MOST_BYTES`, unless one is open."""
        if self._asked > 0 or self.broken is not None:
            return
        self._asked = limit
        self._heard_at = asyncio.get_running_loop().time()
        request: dict[str, int] = {
            "batch": limit,
            "max_bytes": max(MOST_BYTES, 2 * self._bus.max_payload),
            "expires": int(expires_s * 1e9),
        }
        if expires_s >= 2 * HEARTBEAT_S:
            request["idle_heartbeat"] = int(HEARTBEAT_S * 1e9)
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        # A request that waited in the buffer of a lost connection would take rows when nobody waits for them.
        if not self._bus.connected or not self._bus.send(subject, msgspec.json.encode(request), self._inbox, None):
            self.fail("bus_down")

    async def wait(self, timeout_s: float) -> None:
        """Until a row has come, the open request has ended, or `broken`; at most ``timeout_s``."""
        if self.rows or self.broken is not None or self._asked <= 0:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        waiter = self._waiter = loop.create_future()
        try:
            while not waiter.done():
                left = min(deadline, self._heard_at + _SILENCE_S) - loop.time()
                if left <= 0:
                    break
                await asyncio.wait({waiter}, timeout=left)
        finally:
            self._waiter = None
        if not waiter.done() and loop.time() >= self._heard_at + _SILENCE_S:
            self.fail("silent")

    async def _late(self, message: Msg) -> None:
        """Nothing: whatever comes is received where it is parsed, and what comes after `detach` is for nobody."""

    def _receive(self, subject: bytes, payload: bytes, block: bytes | None, reply: bytes) -> None:
        self._heard_at = self._loop.time()
        if not block or block[_VERSION_LENGTH] != _SPACE:
            token = reply.decode()
            place = place_of(token)
            if place.consumer != self._consumer:
                return
            headers = RowHeaders(block) if block else NO_HEADERS
            row = StoredRow(subject.decode(), payload, headers, place.stream_seq, place.delivered, token)
            self.rows.append((row, place))
            if self._asked > 0:
                self._asked -= 1
        else:
            self._told(read_headers(block))
        if self._waiter is not None:
            self._wake()

    def _told(self, headers: Mapping[str, str]) -> None:
        """The server says something of the request."""
        status = headers.get(STATUS)
        if status == _HEARTBEAT:
            return
        if status in (_NO_MESSAGES, _TIMED_OUT) or (status == _CONFLICT and not _is_deleted(headers)):
            self._asked = 0
        else:
            self._deleted = True
            self.fail(headers.get(DESCRIPTION, "") or f"status {status}")

    async def settle(self) -> None:
        """Before the consumer is made again: let the server finish deleting it."""
        if self._deleted:
            self._deleted = False
            await asyncio.sleep(SETTLE_S)

    def fail(self, reason: str) -> None:
        """Nothing more will come of what is open now."""
        self.broken = reason
        self._asked = 0
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

"""One inbox subscription for everything that is answered: requests, several replies, pulled rows, flushes."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable

from nats.aio.msg import Msg

from bus.errors import AnswerFailedError, BusError, NoRespondersError, NotConnectedError
from bus.interface import BusMessage

Receiver = Callable[[Msg | BusError], None]

STATUS = "Status"
SERVICE_ERROR = "Nats-Service-Error"
NO_HEADERS: dict[str, str] = {}


class Replies:
    """Receivers by the last token of their inbox. ``prefix`` is this connection's own inbox, ending in a dot."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._receivers: dict[str, Receiver] = {}
        self._numbers = itertools.count()

    @property
    def subject(self) -> str:
        """What to subscribe to."""
        return f"{self._prefix}*"

    def __len__(self) -> int:
        return len(self._receivers)

    def open(self, receiver: Receiver) -> str:
        """A fresh inbox whose messages go to ``receiver``, until `close`."""
        token = str(next(self._numbers))
        self._receivers[token] = receiver
        return self._prefix + token

    def close(self, inbox: str) -> None:
        """Later messages to ``inbox`` are ignored."""
        self._receivers.pop(inbox[len(self._prefix) :], None)

    async def deliver(self, message: Msg) -> None:
        receiver = self._receivers.get(message.subject[len(self._prefix) :])
        if receiver is not None:
            receiver(message)

    def fail_all(self, error: BusError) -> None:
        """The connection is gone: nobody will answer what is open now."""
        for receiver in list(self._receivers.values()):
            receiver(error)


class Answers:
    """The replies to one question, in order, bounded by ``limit`` (further ones are counted in `dropped`)."""

    def __init__(self, subject: str, limit: int = 1_024) -> None:
        self._subject = subject
        self._limit = limit
        self._ready: deque[Msg | BusError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.dropped = 0

    def receive(self, message: Msg | BusError) -> None:
        if len(self._ready) >= self._limit:
            self.dropped += 1
            return
        self._ready.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self, timeout_s: float) -> BusMessage:
        """Raises `TimeoutError`, and what the reply says: `NoRespondersError`, `AnswerFailedError`, ..."""
        if not self._ready:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, _expire, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                self._waiter = None
        message = self._ready.popleft()
        if isinstance(message, BusError):
            raise message
        return self._checked(message)

    def _checked(self, message: Msg) -> BusMessage:
        headers = message.headers
        if headers is None:
            return BusMessage(message.subject, message.data, NO_HEADERS, message.reply)
        if headers.get(STATUS) == "503" and not message.data:
            raise NoRespondersError(self._subject)
        if SERVICE_ERROR in headers:
            raise AnswerFailedError(self._subject, headers[SERVICE_ERROR])
        return BusMessage(message.subject, message.data, headers, message.reply)


def bus_is_away() -> NotConnectedError:
    return NotConnectedError("the bus is not connected")


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())

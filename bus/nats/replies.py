"""One inbox subscription for everything that is answered on this connection: questions and flushes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from nats.aio.msg import Msg

from bus.errors import BusError, NotConnectedError
from bus.interface import BusMessage

Receiver = Callable[[BusMessage | BusError], None]

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

    def open(self, receiver: Receiver) -> str:
        """A fresh inbox whose messages go to ``receiver``, until `close`."""
        token = str(next(self._numbers))
        self._receivers[token] = receiver
        return self._prefix + token

    def close(self, inbox: str) -> None:
        """Later messages to ``inbox`` are ignored."""
        self._receivers.pop(inbox[len(self._prefix) :], None)

    def receive(self, subject: str, payload: bytes, headers: dict[str, str] | None, reply: str) -> None:
        """One reply, to whoever asked."""
        receiver = self._receivers.get(subject[len(self._prefix) :])
        if receiver is not None:
            receiver(BusMessage(subject, payload, headers or NO_HEADERS, reply))

    async def deliver(self, message: Msg) -> None:
        """One reply that had to wait."""
        self.receive(message.subject, message.data, message.headers, message.reply)

    def fail_all(self, error: BusError) -> None:
        """The connection is gone: nobody will answer what is open now."""
        for receiver in list(self._receivers.values()):
            receiver(error)


def bus_is_away() -> NotConnectedError:
    return NotConnectedError("the bus is not connected")

"""A live subscription: messages to its handler, one after the other, and counters."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as RawSubscription

from bus.interface import TURN_S, BusMessage, Handler, SubscriptionStats
from bus.log import EventLog
from bus.nats.replies import NO_HEADERS

if TYPE_CHECKING:
    from bus.nats.connection import NatsBus

log = EventLog(__name__)


class NatsSubscription:
    """See `bus.interface.Subscription`."""

    def __init__(self, bus: NatsBus, subject: str, handler: Handler) -> None:
        self._bus = bus
        self._subject = subject
        self._handler = handler
        self._stopped = False
        self._loop = asyncio.get_running_loop()
        self._turn_began = 0.0
        self.raw: RawSubscription | None = None
        self.delivered = 0
        self.dropped = 0
        self.failed = 0

    @property
    def subject(self) -> str:
        return self._subject

    def stats(self) -> SubscriptionStats:
        pending = 0 if self.raw is None or self._stopped else self.raw.pending_msgs
        return SubscriptionStats(self.delivered, pending, self.dropped, self.failed)

    def receive(self, subject: str, payload: bytes, headers: dict[str, str] | None, reply: str) -> None:
        """One message, handled."""
        if self._stopped:
            return
        self.delivered += 1
        try:
            self._handler(BusMessage(subject, payload, headers or NO_HEADERS, reply))
        except Exception:
            # The border to the handler: what it raises is counted and logged, and ends nothing.
            self.failed += 1
            if self.failed & (self.failed - 1) == 0:  # at each doubling: a flood shall not fill the log
                log.exception("handler_failed", subject=subject, failures=self.failed)

    async def deliver(self, message: Msg) -> None:
        """One message that had to wait."""
        self.receive(message.subject, message.data, message.headers, message.reply)
        # nats-py hands over all that waits without a pause: a flood on one subject shall not make the others wait.
        if self.raw is not None and self.raw.pending_msgs and self._loop.time() - self._turn_began >= TURN_S:
            await asyncio.sleep(0)
            self._turn_began = self._loop.time()

    async def unsubscribe(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self.raw is not None:
            await self._bus.forget(self, self.raw)

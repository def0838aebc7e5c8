"""The master's event stream: one PUB socket, three frames a message, no replay (spec: pool-events §1)."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from load.pool.events import EventContext, EventEncoder, PoolEvent
from load.pool.misbehave import PoolMisbehaviour
from load.sockets import bind, open_again

SEND_HIGH_WATER_MARK = 10_000
"""Messages for one slow reader; more are lost, and leave a gap in the numbers."""


class PoolPublisher:
    """Numbers and sends messages. ``seq``: number of the next one, from 1. ``enabled`` off: as built without events."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        stamp: EventContext,
        flags: PoolMisbehaviour,
        *,
        enabled: bool,
    ) -> None:
        self.endpoint = endpoint if enabled else ""
        self.seq = 1
        self.published_batches = self.published_events = 0
        self._context = context
        self._stamp = stamp
        self._flags = flags
        self._enabled = enabled
        self._encoder = EventEncoder(stamp)
        self._socket: zmq.Socket[bytes] | None = None

    @property
    def enabled(self) -> bool:
        return self._enabled and not self._flags.events_off

    def open(self) -> None:
        """Bind. Raises `zmq.ZMQError` when the address cannot be had; nothing stays open."""
        if not self._enabled:
            return
        self._socket = socket = self._context.socket(zmq.PUB)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        try:
            self.endpoint = bind(socket, self.endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        """Close the socket; what is queued for slow readers is lost, as when a process dies."""
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = None

    async def restart(self) -> None:
        """As if the process had died and come back on the same port: numbers and ids from 1."""
        self.close()
        self.seq = 1
        self.published_batches = self.published_events = 0
        self._encoder = EventEncoder(self._stamp)
        await open_again(self.open)

    def publish(self, events: Sequence[PoolEvent], now_s: float) -> None:
        """Send ``events`` in as many messages as they need. ``now_s``: Unix seconds."""
        if not self.enabled:
            return
        for payload in self._encoder.batches(events, int(now_s * 1000)):
            seq, self.seq = self.seq, self.seq + 1
            self.published_batches += 1
            if not self._flags.take("drop_batches") and self._socket is not None:
                self._socket.send_multipart((b"", seq.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        self.published_events += len(events)

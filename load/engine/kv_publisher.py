"""KV events of one rank over ZeroMQ: a PUB socket for the live stream, a ROUTER socket for replays.

Framing (spec: engine-events §2, §2.5): live ``[topic, seq u64 big-endian, payload]``; replay asked with
``["", start seq]`` by a DEALER, answered ``["", (topic,) seq, payload]`` each and an end mark of all ones. Both sockets
live on the event loop: sending on PUB never blocks, and the ROUTER's descriptor is watched (no thread, no polling).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from load.engine.kv_events import KvEvent
from load.engine.kv_wire import KvEncoder
from load.engine.misbehave import Misbehaviour
from load.sockets import bind, open_again

log = logging.getLogger(__name__)

END_SEQ = b"\xff" * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherConfig:
    """Where and how one rank publishes. ``connect``: PUB connects (the router's SUB binds). ``hwm`` in messages."""

    endpoint: str
    replay_endpoint: str
    topic: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    replay_topic: bool = True
    connect: bool = False


def rank_endpoint(base: str, rank: int) -> str:
    """The endpoint of ``rank``: port + rank, 0 stays 0 (any); other transports get a suffix ``_dp<rank>``."""
    if not base or rank == 0:
        return base
    head, _, port = base.rpartition(":")
    if base.startswith("tcp://") and port.isdigit():
        return base if port == "0" else f"{head}:{int(port) + rank}"
    return f"{base}_dp{rank}"


class KvPublisher:
    """The event stream of one rank. ``seq`` is the number of the next batch."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], config: PublisherConfig, encoder: KvEncoder, flags: Misbehaviour
    ) -> None:
        self.config = config
        self.seq = 0
        self.replays = 0
        self.endpoint = config.endpoint
        self.replay_endpoint = config.replay_endpoint
        self._context = context
        self._encoder = encoder
        self._flags = flags
        self._topic = config.topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._held: tuple[bytes, bytes, bytes] | None = None
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.Socket[bytes] | None = None

    def open(self) -> None:
        """Bind (or connect) both sockets. Raises `zmq.ZMQError` when an address cannot be had; nothing stays open."""
        self._pub = pub = self._context.socket(zmq.PUB)
        self._router = router = self._context.socket(zmq.ROUTER)
        pub.setsockopt(zmq.SNDHWM, self.config.hwm)
        router.setsockopt(zmq.SNDHWM, 0)  # a replay is bounded by the buffer; a full queue would drop its tail
        asyncio.get_running_loop().add_reader(router.fileno(), self._serve_replays)
        try:
            if self.config.connect:
                pub.connect(self.endpoint)
            else:
                self.endpoint = bind(pub, self.endpoint)
            self.replay_endpoint = bind(router, self.replay_endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        """Close both sockets; what is queued for slow readers is lost, as when a process dies."""
        if self._router is not None:
            asyncio.get_running_loop().remove_reader(self._router.fileno())
            self._router.close(linger=0)
        if self._pub is not None:
            self._pub.close(linger=0)
        self._pub = self._router = None

    async def restart(self) -> None:
        """As if the process had died and come back on the same ports: sequence 0, no history."""
        self.close()
        self.seq = 0
        self._held = None
        self.forget()
        await open_again(self.open)

    def forget(self) -> None:
        """Lose the replay history."""
        self._buffer.clear()

    def publish(self, events: Sequence[KvEvent], ts: float) -> None:
        """One batch of one engine step. ``ts``: Unix seconds. While the sockets are closed, only replays tell of it."""
        payload = self._encoder.encode(events, ts, junk=self._flags.take("junk_batches"))
        message = (self._topic, self.seq.to_bytes(8, "big"), payload)
        self._buffer.append((self.seq, payload))
        self.seq += 1
        if self._flags.take("drop_batches"):
            return
        if self._held is not None:
            self._send(message)
            self._send(self._held)
            self._held = None
        elif self._flags.take("reorder_batches"):
            self._held = message
            return
        else:
            self._send(message)
        if self._flags.take("duplicate_batches"):
            self._send(message)

    def _send(self, message: tuple[bytes, bytes, bytes]) -> None:
        if self._pub is not None:
            self._pub.send_multipart(message, zmq.NOBLOCK)

    def _serve_replays(self) -> None:
        """The descriptor is edge-triggered: read until there is nothing left."""
        router = self._router
        while router is not None and _readable(router):
            frames = router.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 3 or len(frames[2]) > 8:
                log.debug("a replay request of %d frames is ignored", len(frames))
                continue
            self.replays += 1
            if self._flags.replay != "silent":
                self._replay(router, frames[0], int.from_bytes(frames[2], "big"))

    def _replay(self, router: zmq.Socket[bytes], client: bytes, start: int) -> None:
        head = [client, b"", self._topic] if self.config.replay_topic else [client, b""]
        if self._flags.replay == "normal":
            for seq, payload in list(self._buffer):
                if seq >= start:
                    router.send_multipart([*head, seq.to_bytes(8, "big"), payload])
        end = [client, b"", b""] if self.config.replay_topic else [client, b""]
        router.send_multipart([*end, END_SEQ, b""])


def _readable(socket: zmq.Socket[bytes]) -> bool:
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)

"""The PULL socket that harnesses push their tool events to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
import zmq.asyncio

from bus.errors import SettingsError
from bus.interface import TURN_S

_RECEIVE_HIGH_WATER = 10_000
_MESSAGE_BYTES = 64 * 1024 * 1024
"""Over an event's limit and up to this a message is received, counted and dropped. Beyond it ZeroMQ breaks off with its
sender, which connects again and loses what it had sent right behind."""

Deliver = Callable[[list[bytes]], None]


class ToolSocket:
    """Bound by us, as the peer's is; ``deliver`` hears of every message, in order of each sender.

    What is not read yet waits in the socket (`_RECEIVE_HIGH_WATER` messages of each sender), then at the sender, whose
    plug-in drops its newest when its own queue is full.
    """

    def __init__(self, endpoint: str, deliver: Deliver) -> None:
        self._endpoint = endpoint
        self._deliver = deliver
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None

    def open(self) -> str:
        """Bind; returns where (port 0 or ``*`` picks one). Raises `SettingsError` when that cannot be had."""
        socket = self._context.socket(zmq.PULL)
        socket.set(zmq.RCVHWM, _RECEIVE_HIGH_WATER)
        socket.set(zmq.MAXMSGSIZE, _MESSAGE_BYTES)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IPV6, int("[" in self._endpoint))
        try:
            socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            socket.close()
            self._context.term()
            raise SettingsError("tool_events", f"cannot bind {self._endpoint}: {error.strerror or error}") from error
        self._socket = socket
        return str(socket.get_string(zmq.LAST_ENDPOINT))

    async def read(self) -> None:
        """Deliver for ever; ends by being cancelled."""
        assert self._socket is not None, "not open"
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            self._deliver(await self._socket.recv_multipart())
            if loop.time() - began >= TURN_S:  # what waits in the socket is had without a turn of the loop
                await asyncio.sleep(0)
                began = loop.time()

    def close(self) -> None:
        """Deliver what has arrived, then let the address go."""
        if self._socket is None:
            return
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        for _ in range(_RECEIVE_HIGH_WATER):
            try:
                self._deliver(plain.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        self._socket.close()
        self._context.term()
        self._socket = None

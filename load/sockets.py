"""Binding ZeroMQ sockets of simulated processes: the endpoint that was really bound, and binding it again at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

REBIND_TIMEOUT_S = 5.0


def bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind; where it listens (port 0 picks one). Raises `zmq.ZMQError` when the address cannot be had."""
    socket.bind(endpoint)
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.decode().replace("tcp://0.0.0.0:", "tcp://*:").rstrip("\0")


def reachable(endpoint: str) -> str:
    """``endpoint`` as it is reached from this machine."""
    return endpoint.replace("tcp://*:", "tcp://127.0.0.1:")


async def open_again(open_sockets: Callable[[], None]) -> None:
    """Call ``open_sockets`` until its addresses are free: they are once ZeroMQ's own thread has closed the old
    listener. Raises `zmq.ZMQError` after `REBIND_TIMEOUT_S`."""
    deadline = asyncio.get_running_loop().time() + REBIND_TIMEOUT_S
    while True:
        try:
            open_sockets()
        except zmq.ZMQError:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.005)
        else:
            return

"""Asks an engine's ROUTER socket for what it published before (spec: engine-events §2.5).

A DEALER sends ``["", start]`` (start: 8 bytes big-endian); the engine answers one message per batch and an end mark,
in one of two framings, which `kvcore.replay` tells apart. An engine that forgot ``start`` begins later, without a
word: the caller compares.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import zmq
import zmq.asyncio

from bus.log import EventLog
from kvcore.errors import BadReplayError
from kvcore.replay import ReplayBatch, parse_reply, request_frames

log = EventLog(__name__)

MAX_BATCHES = 200_000
"""Batches that one replay may bring; an engine keeps 10,000 unless told otherwise."""

MAX_BYTES = 512 * 1024 * 1024
"""Bytes that one replay may bring."""


MAX_SECONDS = 60.0
"""Time that one replay may take."""

TURN_BATCHES = 64
"""Batches read at one turn of the loop."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came. ``problem``: why the end mark did not (``replay_timeout``, ``bad_replay``, ``replay_too_large``,
    ``bad_endpoint``)."""

    batches: tuple[tuple[int, bytes], ...]
    problem: str | None = None


async def fetch_replay(context: zmq.asyncio.Context, endpoint: str, start: int, timeout_s: float) -> Replayed:
    """Everything from sequence ``start`` on. ``timeout_s``: how long the engine may be silent before the end mark."""
    loop = asyncio.get_running_loop()
    end = loop.time() + MAX_SECONDS
    batches: list[tuple[int, bytes]] = []
    size = 0
    socket = context.socket(zmq.DEALER)
    try:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IPV6, 1)
        socket.set(zmq.RCVHWM, 0)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            log.warning("replay_endpoint_unusable", endpoint=endpoint, detail=str(error))
            return Replayed((), "bad_endpoint")
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                await socket.send_multipart(request_frames(start))
                while True:
                    # What waits in the socket is taken without a turn of the loop; others must get theirs.
                    if len(batches) % TURN_BATCHES == 0:
                        deadline.reschedule(min(loop.time() + timeout_s, end))
                        await asyncio.sleep(0)
                    reply = parse_reply(await socket.recv_multipart())
                    if not isinstance(reply, ReplayBatch):
                        return Replayed(tuple(batches))
                    batches.append((reply.seq, reply.payload))
                    size += len(reply.payload)
                    if len(batches) > MAX_BATCHES or size > MAX_BYTES:
                        return Replayed(tuple(batches), "replay_too_large")
        except TimeoutError:
            return Replayed(tuple(batches), "replay_timeout")
        except BadReplayError:
            return Replayed(tuple(batches), "bad_replay")
    finally:
        socket.close()

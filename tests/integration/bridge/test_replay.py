"""The question to a replay socket, as far as it needs no engine."""

from __future__ import annotations

import zmq.asyncio

from services.bridge.shell.replay import Replayed, fetch_replay


async def test_reason_of_an_unusable_endpoint_is_stable() -> None:
    """It becomes a metric's label and the stream's reason: a word of ours, not ZeroMQ's sentence."""
    with zmq.asyncio.Context() as context:
        assert await fetch_replay(context, "tcp://no such host:1", 0, 1.0) == Replayed((), "bad_endpoint")

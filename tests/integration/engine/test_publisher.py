"""One rank's publisher while its process restarts in place."""

from __future__ import annotations

import asyncio

import zmq

from load.engine.kv_events import AllBlocksCleared
from load.engine.kv_publisher import KvPublisher, PublisherConfig
from load.engine.kv_wire import KvEncoder
from load.engine.misbehave import Misbehaviour
from tests.integration.engine.engines import decoded, replay


async def test_batches_while_the_address_is_not_free_yet() -> None:
    """A request served before the sockets stand again: nobody hears its batch, but it is numbered and replayed."""
    with zmq.Context() as context:
        config = PublisherConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
        publisher = KvPublisher(context, config, KvEncoder("vllm-map", "int", 4, 0), Misbehaviour())
        publisher.open()
        publisher.publish([AllBlocksCleared()], 1.0)
        publisher.close()
        taken = context.socket(zmq.PUB)
        while True:
            try:
                taken.bind(publisher.endpoint)
            except zmq.ZMQError:
                await asyncio.sleep(0.001)  # until ZeroMQ has let go of it
            else:
                break
        restarting = asyncio.create_task(publisher.restart())
        await asyncio.sleep(0)
        assert not restarting.done()
        publisher.publish([AllBlocksCleared()], 2.0)
        taken.close(linger=0)
        await restarting
        publisher.publish([AllBlocksCleared()], 3.0)
        history = await replay(publisher.replay_endpoint, 0)
        publisher.close()
    assert [(seq, batch.ts) for (seq, _), batch in zip(history, decoded(history), strict=True)] == [(0, 2.0), (1, 3.0)]

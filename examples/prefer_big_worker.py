"""Prefer the worker with the most KV memory: a route policy that knows nothing of our package, only NATS and JSON.

    [[admission.policies]]
    name = "prefer-big-worker"
    asks = ["route"]
    weight = 0.25             # the biggest worker may be dearer by a quarter of the prompt's blocks

docs/custom-policies.md has the same questions and answers for any other language's NATS client.

Run it beside the system: ``python examples/prefer_big_worker.py --nats nats://127.0.0.1:4222``.
"""

import asyncio
import json
import os
import sys
from typing import Any

import nats
from nats.micro import add_service
from nats.micro.request import Request

NAME = "prefer-big-worker"
sizes: dict[str, int] = {}


async def remember(message: Any) -> None:
    state = json.loads(message.data)
    sizes[state["worker"]] = state["profile"].get("kv_tokens", 0)


async def route(request: Request) -> None:
    question = json.loads(request.data)
    usable = [one for one in question["candidates"] if "excluded" not in one]
    big = max(usable, key=lambda one: sizes.get(one["worker"], 0), default=None)
    answer = {"worker": big["worker"], "rank": big["rank"]} if big else {}
    await request.respond(json.dumps(answer).encode())


async def main(url: str) -> None:
    bus = await nats.connect(url)
    await bus.subscribe("tg.v1.worker.state.*", cb=remember)
    service = await add_service(bus, name=f"policy-{NAME}", version="1.0.0", metadata={"policy": NAME})
    await service.add_endpoint(name="route", subject=f"tg.v1.policy.route.{NAME}", handler=route)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[2] if sys.argv[1:2] == ["--nats"] else os.environ["TIDEGATE_NATS_URL"]))

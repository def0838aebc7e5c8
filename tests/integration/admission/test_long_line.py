"""A whole line may begin at once: its decisions leave everybody else a turn."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from bus import subjects
from bus.memory import MemoryBroker
from bus.tasks import Tasks
from schemas.admit import AdmitReply, Granted
from schemas.base import from_msgpack, to_json, to_msgpack
from schemas.index import MatchReply, MatchRequest
from services.admission.config import AdmissionSettings
from services.admission.shell import AdmissionService
from services.admission.shell_index import OwnIndex
from tests.support.processes import eventually
from tests.unit.admission.build import MODEL, ask, worker_state

WAITING = 300


async def test_a_line_that_may_begin_is_decided_in_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh leader has listened long enough: hundreds are granted by its own index, and heartbeats, lease and batches
    have their turns in between (it took the loop for a second with 64 workers)."""
    broker = MemoryBroker()
    bus, world = await broker.connect(name="admission"), await broker.connect(name="world")
    tasks = Tasks()
    settings = AdmissionSettings(instance="admission-1", warmup_s=0.5, policy="kv")
    service = AdmissionService(settings, CollectorRegistry())
    turns, decided_in, granted = 0, set[int](), list[str]()
    match = OwnIndex.match

    def noted(own: OwnIndex, question: MatchRequest, now: float) -> MatchReply:
        decided_in.add(turns)
        return match(own, question, now)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def asks(number: int) -> None:
        question = to_msgpack(ask(f"r{number}", f"s{number}"))
        async for answer in world.request_many(subjects.admit(MODEL), question, idle_timeout_s=5.0, deadline_s=20.0):
            reply: AdmitReply = from_msgpack(answer.payload, AdmitReply)  # type: ignore[arg-type]  # a union
            if isinstance(reply, Granted):
                granted.append(reply.request_id)
                return

    monkeypatch.setattr(OwnIndex, "match", noted)
    await service.start(bus, tasks)
    await eventually(lambda: service._leads(), what="it leads")
    world.publish(subjects.worker_state("a"), to_json(worker_state("a", ranks=4)))
    asking = [asyncio.create_task(asks(number)) for number in range(WAITING)]
    counting = asyncio.create_task(count())
    await asyncio.gather(*asking)
    counting.cancel()
    assert len(set(granted)) == WAITING
    assert len(decided_in) > 3
    await service.stop(1.0)
    await tasks.stop()
    await bus.close()
    await world.close()

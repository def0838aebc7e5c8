"""Rows of decisions in the trace stream of a real nats-server."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus import subjects
from bus.nats import NatsBus
from schemas.base import from_json
from schemas.trace import TracedDecision, TraceRow
from tests.integration.admission.world import MODEL, World
from tests.support.nats import NatsServer
from tests.support.processes import eventually, python_process, settings_arguments


@pytest.mark.parametrize("told", [True, False], ids=["told", "switched off"])
async def test_each_grant_is_one_row(nats_server: NatsServer, bus: NatsBus, tmp_path: Path, told: bool) -> None:
    """What the fact said, with as many candidates as are wanted; a grant that is asked for again is no second row."""
    world = World(bus, workers=("w1", "w2", "w3"))
    await world.start()
    settings = {"nats_url": nats_server.url, "instance": "admission-1", "warmup_s": 0.4, "index": "ask"}
    arguments = settings_arguments({**settings, "trace_candidates": 2, "trace_decisions": told})
    consumer = await bus.consume("test", f"{subjects.ROOT}.trace.decision.>")
    try:
        async with python_process("services.admission", *arguments, directory=tmp_path, name="admission") as process:
            await process.wait_said("leadership key=admission epoch=")
            request = world.request("r1", "s1")
            await world.grant(request)
            await world.ask(request)
            await world.grant(world.request("r2", "s2"))
            await eventually(lambda: len(world.decisions) == 2)
        # The process has stopped: whatever it had to say is in the stream.
        stored = await consumer.fetch(10, 30 if told else 0.3)
        while told and (more := await consumer.fetch(10, 0.5)):
            stored += more
    finally:
        await consumer.close()
        await world.stop()
    if not told:
        assert stored == []
        return
    rows = {row.decision.request_id: row for one in stored if (row := from_json(one.payload, TraceRow)).decision}
    assert (len(stored), sorted(rows)) == (2, ["r1", "r2"])
    facts = {decision.request_id: decision for decision in world.decisions}
    for request_id, row in rows.items():
        assert isinstance(row.decision, TracedDecision)
        assert row.decision.grant_id == facts[request_id].grant.grant_id
        assert (row.decision.candidates_seen, len(row.decision.candidates)) == (3, 2)
        assert row.decision.decide_us > 0  # it was asked of an index
        assert row.decision.candidates[0].worker == row.decision.worker.worker == facts[request_id].worker
    # Rows of two turns may pass each other: each says whose it is.
    assert {one.subject for one in stored} == {
        subjects.trace("decision", MODEL, f"default/dynamo/{s}/") for s in ("s1", "s2")
    }

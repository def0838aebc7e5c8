"""kill -9 of the admission leader while it holds 32 turns back: the standby goes on holding, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from contextlib import aclosing
from http.client import HTTPException
from pathlib import Path

import pytest

from bus.interface import BusMessage
from bus.nats import connect
from bus.subjects import ROOT
from bus.tasks import Tasks
from load.workload.client import WorkloadClient
from load.workload.sessions import WorkloadShape, plan
from schemas.base import from_json
from schemas.decision import Decision
from schemas.trace import RequestMetrics
from tests.integration.admission.processes import metric
from tests.support.processes import HelperProcess, eventually, python_process
from tests.support.system import RunningSystem, running_system
from tidegate.rows import read_row

HELD = 32
SHAPE = WorkloadShape(
    sessions=HELD + 12,
    turns=1,
    sub_agents=0,
    apps=HELD + 12,
    system_words=1_500,
    max_tokens=32,
    spread_s=0.0,
)
SETTINGS = """
[admission]
policy = "commit"
hold_deadline_s = 120

[ingress]
admit_deadline_s = 120

[engine]
num_blocks = 601
speed = 0.4
"""
"""9,600 tokens an engine, a few prompts of 2,000 each."""


def of_own(system: RunningSystem, name: str) -> float:
    """A metric of the system's own admission; -1 while that is on its way back."""
    try:
        return system.metric("admission", name)
    except (OSError, HTTPException):  # it is gone, or goes while it answers
        return -1.0


@pytest.mark.timeout(400)
async def test_a_standby_goes_on_holding_when_the_leader_dies(tmp_path: Path) -> None:
    """44 sessions, of which engines of this size take a few at a time. The standby is the system's own admission: ours
    leads first, for `up` would start its own again sooner than a standby takes over. Every request succeeds with one
    row and a decision of the policy, no ingress places by itself, and after the death turns are let one by one as they
    were before it."""
    config = tmp_path / "tidegate.toml"
    config.write_text(SETTINGS)
    async with running_system(tmp_path, "--config", str(config)) as system:
        arguments = ("--config", str(config), "--set", "instance=admission-2", "--set", f"nats_url={system.nats_url}")
        async with python_process("services.admission", *arguments, directory=tmp_path, name="admission-2") as leader:
            await leader.wait_said("service_started")
            await eventually(lambda: of_own(system, "tidegate_leader") == 1, 60, "the system's admission leads")
            own = system.child_pid("services.admission", "instance=admission-1")
            assert own is not None
            os.kill(own, signal.SIGTERM)  # gives the lead back, and is started again
            await eventually(lambda: metric(leader, "tidegate_leader") == 1, 60, "ours leads")
            await eventually(lambda: of_own(system, "tidegate_leader") == 0, 60, "the system's own stands by")
            await kill_under_load(system, leader)


async def kill_under_load(system: RunningSystem, leader: HelperProcess) -> None:
    bus = await connect(system.nats_url, name="test", timeout_s=30)
    tasks = Tasks()
    decisions: list[Decision] = []
    rows: dict[str, list[RequestMetrics]] = {}

    async def read_rows() -> None:
        async with aclosing(bus.tail(f"{ROOT}.trace.request_end.>", from_start=True)) as stored:
            async for each in stored:
                row = read_row(each.payload)
                assert row is not None
                assert row.request is not None
                rows.setdefault(row.request.request_id, []).append(row.request)

    def on_decision(message: BusMessage) -> None:
        decisions.append(from_json(message.payload, Decision))

    await bus.subscribe(f"{ROOT}.decision.>", on_decision)
    tasks.start("rows", read_rows())
    await bus.flush()
    client = WorkloadClient(system.url, system.addresses["model"], timeout_s=60.0)
    try:
        load = asyncio.create_task(client.run(plan(SHAPE, run_id="holding")))
        await eventually(lambda: bool(decisions), 60, "a fresh leader has listened, and lets the first go")
        await eventually(lambda: metric(leader, "tidegate_queue_depth") >= HELD, 60, "turns are held")
        await leader.kill()
        before = len(decisions)
        await eventually(lambda: of_own(system, "tidegate_leader") == 1, 15, "the standby leads")
        await eventually(lambda: of_own(system, "tidegate_queue_depth") >= HELD / 2, 15, "it holds")
        results = await load
        assert [result.error for result in results if result.failed] == [], system.logs()
        await eventually(lambda: len(rows) == len(results), 60, "every request has its row")
        await eventually(lambda: of_own(system, "tidegate_open_grants") == 0, 60, "every grant is back")
    finally:
        await client.close()
        await tasks.stop()
        await bus.close()
    assert {len(found) for found in rows.values()} == {1}
    assert {(row.outcome, row.decision_mode, row.policy) for (row,) in rows.values()} == {
        ("completed", "policy", "commit")
    }
    epochs = Counter(decision.epoch for decision in decisions)
    assert len(epochs) == 2
    assert len({decision.request_id for decision in decisions}) == len(results)
    later = decisions[before:]
    assert [decision.hold_reason for decision in later].count("policy") >= HELD / 2
    assert max(together(rows)) < HELD / 2


def together(rows: dict[str, list[RequestMetrics]]) -> list[int]:
    """At each moment at which a turn was let, how many ran."""
    spans = []
    for (row,) in rows.values():
        assert row.request_received_ms is not None
        assert row.total_time_ms is not None
        begun = row.request_received_ms + (row.admission_wait_ms or 0.0)
        spans.append((begun, row.request_received_ms + row.total_time_ms))
    return [sum(start <= moment < end for start, end in spans) for moment, _ in spans]

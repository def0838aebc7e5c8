"""A short soak: the chaos run of ``make soak`` with its first faults."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.processes import start_process

SEED, FAULTS = "5436", 4
"""An engine, a front door, the bus and the leading admission are killed, one after another."""
KILLED = {"engine", "ingress", "nats", "admission-leader"}


@pytest.mark.timeout(600)
async def test_a_short_soak_loses_no_row_and_no_grant(tmp_path: Path) -> None:
    """Every failed request is owed to the fault that touched it, every answered request has exactly one row, nothing is
    left in flight, and after each fault the system is whole again. How long that takes is the soak's to judge, where
    nothing else runs on the machine."""
    workdir = tmp_path / "soak"
    command = [sys.executable, "-m", "load.soak", "--json", "--seed", SEED, "--faults", str(FAULTS), "--workdir"]
    process = await start_process([*command, str(workdir)], tmp_path, name="soak")
    try:
        await process.wait(500)
    finally:
        await process.close()
    summary = json.loads(process.stdout.splitlines()[-1])
    assert {event["role"] for event in summary["events"]} == KILLED
    wrong = ("unexplained_failures", "rows_lost", "rows_doubled", "rows_unknown")
    assert {key: summary[key] for key in wrong} == dict.fromkeys(wrong, 0), process.output
    left = ("open_grants", "requests_open", "held", "in_flight", "engines_running")
    assert {key: summary["budget"][key] for key in left} == dict.fromkeys(left, 0), process.output
    assert [event["target"] for event in summary["events"] if event["whole_ms"] is None] == []
    assert summary["succeeded"] > 0

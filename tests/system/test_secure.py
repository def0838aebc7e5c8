"""``tidegate up --secure``: the whole system, each process under its own user of the bus."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from bus import subjects
from bus.errors import NotConnectedError
from bus.interface import BusMessage
from bus.nats import NatsBus, NatsOptions, connect
from bus.nats.access import NatsAccess
from schemas.base import from_json, to_json
from schemas.decision import Decision
from schemas.worker import WorkerState
from tests.support.processes import REPOSITORY, eventually, start_process
from tests.support.system import RunningSystem, running_system
from tests.unit.deploy.test_monitoring import metric_names
from web.client import HttpClient, Timeouts

pytestmark = pytest.mark.timeout(400)

CONFIG = """
[[admission.policies]]
name = "house-rules"
asks = ["admit"]
deadline_ms = 700
"""
POLICY = """
from tidegate import AdmitAnswer, Policy

policy = Policy("house-rules")

@policy.admit
def admit(question):
    return AdmitAnswer(action="admit", reason="welcome")

policy.main([])
"""


async def bus_of(system: RunningSystem, user: str) -> NatsBus:
    access = NatsAccess(user=user, password_file=str(system.workdir / "secrets" / user))
    return await connect(system.nats_url, name=user, timeout_s=30, options=NatsOptions(access=access))


ELSEWHERE = {"tidegate_process_restarts_total", "tidegate_ingress_tls_expires_timestamp_seconds"}
"""On pages of a front door of several processes, and of one with TLS."""


def metrics_of(system: RunningSystem) -> set[str]:
    """Names of all samples that the pages of all services can show."""
    found: set[str] = set()
    for name, ready in system.addresses["health"].items():
        if name not in ("nats", "pool") and not name.startswith("engine"):
            with urlopen(ready.replace("/readyz", "/metrics"), timeout=5) as answer:
                types = re.findall(r"^# TYPE (\S+) (\S+)$", answer.read().decode(), re.MULTILINE)
            for family, kind in types:
                found |= (
                    {f"{family}{part}" for part in ("", "_bucket", "_count", "_sum")}
                    if kind == "histogram"
                    else {family}
                )
    return found


async def turn(http: HttpClient, url: str, number: int) -> int:
    """One turn of a session; the status."""
    text = "Which block holds the prefix? " * (20 + 20 * number)
    body = {"model": "sim-8b", "max_tokens": 8, "messages": [{"role": "user", "content": text}]}
    headers = [(b"content-type", b"application/json"), (b"x-tidegate-session-id", b"secure")]
    answer = await http.fetch(
        "POST", f"{url}/v1/chat/completions", headers, json.dumps(body).encode(), Timeouts(total_s=30.0)
    )
    return answer.status


async def test_the_whole_house_under_its_own_users(tmp_path: Path) -> None:
    """Turns are decided with exact knowledge, a user's policy is heard, rows are written, commands find their way, a
    forged heartbeat goes nowhere, and no process ever asked for what it may not have."""
    (tmp_path / "tidegate.toml").write_text(CONFIG)
    (tmp_path / "rules.py").write_text(POLICY)
    async with running_system(tmp_path, "--secure", "--pool", "--config", str(tmp_path / "tidegate.toml")) as system:
        with pytest.raises(NotConnectedError, match="Authorization Violation"):
            await connect(system.nats_url, name="stranger", timeout_s=2.0)
        environment = {
            "PYTHONPATH": str(REPOSITORY),
            "TIDEGATE_NATS_URL": system.nats_url,
            "TIDEGATE_NATS_USER": "policy-house-rules",
            "TIDEGATE_NATS_PASSWORD_FILE": str(system.workdir / "secrets" / "policy-house-rules"),
        }
        policy = await start_process(
            [sys.executable, str(tmp_path / "rules.py")], tmp_path, name="rules", environment=environment
        )
        watcher, http = await bus_of(system, "watcher"), HttpClient()
        decisions: list[Decision] = []
        states: list[WorkerState] = []
        await watcher.subscribe(
            "tg.v1.decision.>", lambda message: decisions.append(from_json(message.payload, Decision))
        )
        try:
            await policy.wait_said("policy_started")
            for number in range(4):
                assert await turn(http, system.url, number) == 200
            await eventually(lambda: len(decisions) >= 4)
            assert {decision.index_health for decision in decisions[1:]} == {"synced"}
            assert {asked.outcome for decision in decisions[1:] for asked in decision.policies} == {"admit"}
            await eventually(lambda: system.metric("recorder", "tidegate_recorder_rows_total") >= 4)

            def on_state(message: BusMessage) -> None:
                states.append(from_json(message.payload, WorkerState))

            await watcher.subscribe("tg.v1.worker.state.*", on_state)
            await eventually(lambda: bool(states))
            forged = states[0]
            intruder = await bus_of(system, "policy-house-rules")
            intruder.publish(subjects.worker_state("forged"), to_json(forged))
            await intruder.flush()
            await watcher.flush()
            count = len(states)
            await eventually(lambda: len(states) > count)
            assert {state.worker for state in states} == {"engine-1", "engine-2"}
            await intruder.close()
            assert metric_names() - metrics_of(system) == ELSEWHERE
            for command in (["doctor"], ["trace", "stats", str(system.workdir / "traces")]):
                done = await start_process(
                    [
                        sys.executable,
                        "-m",
                        "tidegate",
                        *command,
                        *(["--workdir", str(system.workdir)] * (command == ["doctor"])),
                    ],
                    tmp_path,
                    name=command[0],
                )
                assert await done.wait(120) == 0, done.output
        finally:
            await policy.close()
            await watcher.close()
            await http.close()
        assert await system.process.stop(60) == 0, system.process.output
        logs = {path.name: path.read_text(errors="replace") for path in (system.workdir / "logs").glob("*.log")}
        refused = [line for text in logs.values() for line in text.splitlines() if "bus_refused" in line]
        assert refused == []
        secrets = {path.read_text().strip() for path in (system.workdir / "secrets").iterdir() if "." not in path.name}
        everything = "".join(logs.values()) + system.process.output + policy.output
        assert [secret for secret in secrets if secret in everything] == []

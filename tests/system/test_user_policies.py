"""A policy of a user's beside a whole system: what a client sees of holds and refusals, and of the policy's death."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from bus.nats import connect
from schemas.base import from_json
from schemas.decision import Decision
from tests.support.processes import REPOSITORY, eventually, start_process
from tests.support.system import running_system
from web.client import HttpClient, Timeouts

pytestmark = pytest.mark.timeout(400)

CONFIG = """
[admission]
policy = "commit"

[[admission.policies]]
name = "house-rules"
asks = ["route", "admit", "lease"]
deadline_ms = 700
"""
POLICY = """
import sys
from tidegate import AdmitAnswer, Policy

policy = Policy("house-rules")

@policy.admit
def admit(question):
    if question.identity.background and question.held_ms < 500:
        return AdmitAnswer(action="hold", hold_ms=500, reason="nobody waits for it")
    if question.identity.session_id == "unwanted":
        return AdmitAnswer(action="refuse", reason="not in this house")

@policy.route
def route(question):
    return next((one for one in question.candidates if one.worker == "engine-2" and one.excluded is None), None)

@policy.lease
def lease(question):
    print("lease", question.identity.session_id, question.worker, flush=True)
    return False

policy.main(sys.argv[1:])
"""


async def ask(
    http: HttpClient, url: str, session: str, **headers: str
) -> tuple[int, dict[bytes, bytes], dict[str, Any]]:
    """One turn of a session: status, headers, body."""
    body = {"model": "sim-8b", "max_tokens": 4, "messages": [{"role": "user", "content": "Which block?"}]}
    sent = [(b"content-type", b"application/json"), (b"x-tidegate-session-id", session.encode())]
    sent += [(f"x-tidegate-{name.replace('_', '-')}".encode(), value.encode()) for name, value in headers.items()]
    answer = await http.fetch(
        "POST", f"{url}/v1/chat/completions", sent, json.dumps(body).encode(), Timeouts(total_s=30.0)
    )
    return answer.status, {name.lower(): value for name, value in answer.headers}, json.loads(answer.body)


async def test_a_house_with_rules_of_its_own(tmp_path: Path) -> None:
    """Held and then served, refused with the reason, sent where the policy wants it, its lease given up; and when the
    policy is killed everything goes on without it."""
    (tmp_path / "tidegate.toml").write_text(CONFIG)
    (tmp_path / "rules.py").write_text(POLICY)
    async with running_system(tmp_path, "--config", str(tmp_path / "tidegate.toml")) as system:
        command = [sys.executable, str(tmp_path / "rules.py"), "--nats", system.nats_url]
        policy = await start_process(command, tmp_path, name="rules", environment={"PYTHONPATH": str(REPOSITORY)})
        bus, http = await connect(system.nats_url, name="test", timeout_s=30), HttpClient()
        decisions: dict[str, Decision] = {}

        def remember(decision: Decision) -> None:
            decisions[decision.identity.session_id] = decision

        try:
            await policy.wait_said("policy_started")
            await bus.subscribe("tg.v1.decision.>", lambda message: remember(from_json(message.payload, Decision)))
            await bus.flush()
            assert (await ask(http, system.url, "wanted"))[0] == 200
            status, headers, body = await ask(http, system.url, "unwanted")
            assert (status, headers[b"x-tidegate-reason"]) == (429, b"policy_refused")
            assert int(headers[b"retry-after"]) >= 1
            assert body["error"]["message"] == "Policy house-rules refused the request: not in this house."
            assert (await ask(http, system.url, "patient", background="true"))[0] == 200
            await eventually(lambda: "patient" in decisions, what=system.logs())
            assert decisions["wanted"].worker == "engine-2"
            outcomes = {(one.ask, one.outcome) for one in decisions["wanted"].policies}
            assert outcomes == {("admit", "no_opinion"), ("route", "used")}
            held = decisions["patient"]
            assert (held.hold_reason, held.hold_ms >= 500) == ("policy:house-rules", True)
            await policy.wait_said("lease wanted engine-2")
            policy.signal(signal.SIGKILL)
            await policy.wait()
            assert (await ask(http, system.url, "unwanted"))[0] == 200
            await eventually(lambda: "unwanted" in decisions)
            assert {one.outcome for one in decisions["unwanted"].policies} == {"absent"}
        finally:
            await policy.close()
            await http.close()
            await bus.close()

"""``tail`` and ``doctor`` over a real bus, without the rest of a system."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from bus.errors import BusTimeoutError, NotConnectedError
from bus.nats import NatsBus
from bus.subjects import trace
from bus.tasks import Tasks
from schemas.base import to_json
from schemas.session import SessionKey
from schemas.trace import AgentContext, RequestMetrics, TracedDecision, TracedLoad, TracedWorker, TraceRow
from services.admission.config import AdmissionSettings
from services.admission.shell import AdmissionService
from services.admission.user_policies import UserPolicy
from tests.support.nats import NatsServer
from tests.support.processes import HelperProcess, python_process, start_process
from tidegate import Policy


@asynccontextmanager
async def tidegate(directory: Path, *arguments: str) -> AsyncIterator[HelperProcess]:
    process = await start_process([sys.executable, "-m", "tidegate", *arguments], directory, name=arguments[0])
    try:
        yield process
    finally:
        await process.close()


def row(number: int, session: str, model: str = "m", worker: str = "w1") -> TraceRow:
    return TraceRow(
        event_type="request_end",
        event_time_unix_ms=1_000 + number,
        agent_context=AgentContext(session_id=session),
        request=RequestMetrics(
            request_id=f"r{number}", model=model, outcome="completed", worker=TracedWorker(worker=worker)
        ),
    )


async def publish(bus: NatsBus, *rows: TraceRow) -> None:
    for item in rows:
        assert item.request is not None
        assert item.agent_context is not None
        key = SessionKey(root=item.agent_context.session_id).text()
        subject = trace("request_end", item.request.model or "", key)
        await bus.publish_row(subject, to_json(item), message_id=item.request.request_id)


def shown(process: HelperProcess) -> list[str]:
    return [json.loads(line)["request"]["request_id"] for line in process.stdout.splitlines()]


ROWS = (row(0, "a"), row(1, "b", worker="w2"), row(2, "a", model="other model"), row(3, "b"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ["r0", "r1", "r2", "r3"]),
        (("--session", "a"), ["r0", "r2"]),
        (("--worker", "w2"), ["r1"]),
        (("--model", "other model"), ["r2"]),
        (("--session", "b", "--worker", "w1"), ["r3"]),
    ],
)
async def test_tail_filters(
    options: tuple[str, ...], expected: list[str], nats_server: NatsServer, bus: NatsBus, tmp_path: Path
) -> None:
    """By session, model (any characters) and worker; bare rows; --count ends it with code 0."""
    await publish(bus, *ROWS)
    count = ("--count", str(len(expected)))
    arguments = ("tail", "--json", "--from-start", "--nats", nats_server.url, *options, *count)
    async with tidegate(tmp_path, *arguments) as process:
        assert await process.wait() == 0
        assert shown(process) == expected
        assert process.stdout.splitlines()[0].encode() in {to_json(item) for item in ROWS}


async def test_tail_shows_decisions_where_it_is_asked_to(nats_server: NatsServer, bus: NatsBus, tmp_path: Path) -> None:
    """Among requests, filtered as they are; rows of other kinds are none of its business."""
    key = SessionKey(root="a").text()
    for number, worker in enumerate(("w1", "w2")):
        decision = TracedDecision(
            request_id=f"r{number}", grant_id=f"g{number}", worker=TracedWorker(worker=worker), model="m"
        )
        row = TraceRow(event_type="decision", event_time_unix_ms=1, decision=decision)
        await bus.publish_row(trace("decision", "m", key), to_json(row), message_id=f"decision:g{number}")
    load = TraceRow(event_type="worker_load", event_time_unix_ms=1, worker_load=TracedLoad(worker="w1", model="m"))
    await bus.publish_row(trace("worker_load", "m", "w1"), to_json(load), message_id="load")
    await publish(bus, *ROWS)
    arguments = ("--decisions", "--json", "--from-start", "--worker", "w1", "--count", "4", "--nats", nats_server.url)
    async with tidegate(tmp_path, "tail", *arguments) as process:
        assert await process.wait() == 0
        rows = [json.loads(line) for line in process.stdout.splitlines()]
        assert [row["event_type"] for row in rows] == ["decision", "request_end", "request_end", "request_end"]
        assert rows[0]["decision"]["grant_id"] == "g0"


async def test_tail_follows_and_ends_cleanly_on_ctrl_c(nats_server: NatsServer, bus: NatsBus, tmp_path: Path) -> None:
    """Rows published while it runs are shown; SIGINT ends it with code 130 and no traceback."""
    async with tidegate(tmp_path, "tail", "--json", "--from-start", "--nats", nats_server.url) as process:
        await publish(bus, ROWS[0])
        await process.wait_for(lambda: len(process.stdout.splitlines()) == 1)
        await publish(bus, *ROWS[1:])
        await process.wait_for(lambda: len(process.stdout.splitlines()) == 4)
        process.signal(signal.SIGINT)
        assert await process.wait() == 130
        assert shown(process) == ["r0", "r1", "r2", "r3"]
        assert process.stderr == ""


async def test_tail_into_a_closed_pipe_ends_quietly(nats_server: NatsServer, bus: NatsBus, tmp_path: Path) -> None:
    """`tidegate tail | head -1` is how people use it."""
    await publish(bus, *ROWS)
    program = f"{sys.executable} -m tidegate tail --json --from-start --nats {nats_server.url} | head -1"
    process = await start_process(["/bin/bash", "-o", "pipefail", "-c", program], tmp_path, name="pipe")
    try:
        publishing = asyncio.ensure_future(keep_publishing(bus))
        await process.wait()
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        assert shown(process) == ["r0"]
        assert process.stderr == ""
    finally:
        await process.close()


async def keep_publishing(bus: NatsBus) -> None:
    """More rows, so that the tail notices that nobody reads."""
    for number in range(100, 1000):
        await publish(bus, row(number, "more"))
        await asyncio.sleep(0.05)


async def test_without_a_bus_the_commands_say_what_to_do(tmp_path: Path) -> None:
    """One sentence, code 1, no traceback."""
    async with tidegate(tmp_path, "tail", "--nats", "nats://127.0.0.1:9") as process:
        assert await process.wait() == 1
        assert process.stderr.startswith("tidegate: no bus answers at nats://127.0.0.1:9")
        assert "tidegate up" in process.stderr
        assert len(process.stderr.splitlines()) == 1
    async with tidegate(tmp_path, "doctor", "--json", "--nats", "nats://127.0.0.1:9") as process:
        assert await process.wait() == 1
        kvcore, check = json.loads(process.stdout)["checks"]
        assert (kvcore["name"], kvcore["verdict"]) == ("kvcore here", "ok")
        assert kvcore["found"].split(":")[0] in ("native", "python")
        assert (check["name"], check["verdict"]) == ("bus", "failed")
        assert "tidegate up" in check["fix"]


async def test_up_does_not_start_anything_without_its_bus(tmp_path: Path) -> None:
    """`up --nats` with nobody there: a sentence and code 1 within seconds, and no child was started."""
    options = ("up", "--port", "0", "--workdir", str(tmp_path / "w"), "--nats", "nats://127.0.0.1:9")
    async with tidegate(tmp_path, *options) as process:
        assert await process.wait() == 1
        (said,) = [line for line in process.stderr.splitlines() if line]
        assert said.startswith("tidegate: no bus answers at nats://127.0.0.1:9")
    assert not (tmp_path / "w" / "logs").exists()


async def test_the_doctor_names_what_is_missing_on_a_bare_bus(
    nats_server: NatsServer, bus: NatsBus, tmp_path: Path
) -> None:
    """A bus and nothing else: no stream, no front door, no worker; each with what to do about it."""
    async with tidegate(tmp_path, "doctor", "--json", "--nats", nats_server.url) as process:
        assert await process.wait() == 1
        checks = {check["name"]: check for check in json.loads(process.stdout)["checks"]}
    assert checks["bus"]["verdict"] == "ok"
    for name in ("trace stream", "service ingress", "service bridge", "workers"):
        assert checks[name]["verdict"] == "failed"
        assert checks[name]["fix"]
    assert checks["service recorder"]["verdict"] == "warning"


async def test_the_doctor_bears_strangers(nats_server: NatsServer, bus: NatsBus, tmp_path: Path) -> None:
    """Answers to `$SRV.PING` that are no service's, and worker facts that are none, are counted among nobody."""

    replies: list[str] = []
    subscription = await bus.subscribe("$SRV.PING", lambda message: replies.append(message.reply or ""))
    await bus.flush()
    async with tidegate(tmp_path, "doctor", "--json", "--nats", nats_server.url) as process:
        await process.wait_for(lambda: bool(replies))
        for payload in (b"not JSON", b"[]", b"{}", b'{"name": "elsewhere", "metadata": 7}'):
            bus.publish(replies[0], payload)
        assert await process.wait() == 1
        checks = {check["name"]: check for check in json.loads(process.stdout)["checks"]}
    await subscription.unsubscribe()
    assert checks["service ingress"]["verdict"] == "failed"
    assert process.stderr == ""


async def test_a_page_out_of_the_doctors_reach_is_no_failure(
    nats_server: NatsServer, bus: NatsBus, tmp_path: Path
) -> None:
    """The service answers on the bus, its health page listens on another machine's loopback: a warning that says so."""
    answer = {"name": "tidegate-hints", "metadata": {"instance": "hints-1", "http": "http://127.0.0.1:9"}}
    replies: list[str] = []
    subscription = await bus.subscribe("$SRV.PING", lambda message: replies.append(message.reply or ""))
    await bus.flush()
    async with tidegate(tmp_path, "doctor", "--json", "--nats", nats_server.url) as process:
        await process.wait_for(lambda: bool(replies))
        bus.publish(replies[0], json.dumps(answer).encode())
        assert await process.wait() == 1
        checks = {check["name"]: check for check in json.loads(process.stdout)["checks"]}
    await subscription.unsubscribe()
    assert checks["service hints"]["verdict"] == "ok"
    assert checks["ready hints-1"]["verdict"] == "warning"
    assert "from here" in checks["ready hints-1"]["found"]


async def test_tail_goes_on_when_the_bus_comes_back(nats_server: NatsServer, bus: NatsBus, tmp_path: Path) -> None:
    """kill -9 of nats-server under a running tail: rows of before and after, each once."""
    async with tidegate(tmp_path, "tail", "--json", "--from-start", "--nats", nats_server.url) as process:
        await publish(bus, ROWS[0])
        await process.wait_for(lambda: len(process.stdout.splitlines()) == 1)
        nats_server.kill()
        nats_server.start()
        async with asyncio.timeout(30):
            while True:
                try:
                    await publish(bus, *ROWS[1:])
                    break
                except (NotConnectedError, BusTimeoutError):
                    await asyncio.sleep(0.1)
        await process.wait_for(lambda: len(process.stdout.splitlines()) >= 4)
        process.signal(signal.SIGINT)
        assert await process.wait() == 130
        assert shown(process) == ["r0", "r1", "r2", "r3"]


async def test_the_doctor_misses_a_policy_that_admission_asks(
    nats_server: NatsServer, bus: NatsBus, tmp_path: Path
) -> None:
    """Admission says in its metadata which policies it asks what; the doctor says whether somebody serves all of it."""
    settings = AdmissionSettings(policies=(UserPolicy(name="tenant-home", asks=("route", "admit")),), warmup_s=0.0)
    admission, tasks = AdmissionService(settings, CollectorRegistry()), Tasks()
    await admission.start(bus, tasks)
    policy = Policy("tenant-home")
    policy.route(lambda question: None)
    policy.admit(lambda question: None)
    try:
        for verdict in ("warning", "ok"):
            async with tidegate(tmp_path, "doctor", "--json", "--nats", nats_server.url) as process:
                assert await process.wait() == 1
                checks = {check["name"]: check for check in json.loads(process.stdout)["checks"]}
            assert checks["policy tenant-home"]["verdict"] == verdict
            if verdict == "warning":
                await policy.start(bus)
        assert policy.counts.rejected == 0
    finally:
        await policy.stop()
        await admission.stop(5.0)
        await tasks.stop()


async def test_the_doctor_speaks_to_people(nats_server: NatsServer, tmp_path: Path) -> None:
    """One line a finding with its fix, whole whatever the width, without colour codes where it is no terminal."""
    async with tidegate(tmp_path, "doctor", "--nats", nats_server.url) as process:
        assert await process.wait() == 1
        lines = process.stdout.splitlines()
        assert all(line.split("  ")[0] for line in lines)
        (ingress,) = [line for line in lines if line.startswith("service ingress")]
        assert "failed" in ingress
        assert "-> start it: python -m services.ingress --set nats_url=" in ingress
        assert "something must be fixed" in process.stdout
        assert "\x1b" not in process.stdout


async def test_up_that_is_interrupted_before_it_is_ready(tmp_path: Path) -> None:
    """Ctrl-C while the children start: they are stopped, nothing is printed as if it were up, code 130."""
    options = ("up", "--json", "--port", "0", "--workdir", str(tmp_path / "system"))
    async with python_process("tidegate", *options, directory=tmp_path) as process:
        await process.wait_for((tmp_path / "system" / "logs").exists)
        process.signal(signal.SIGINT)
        assert await process.wait() == 130
        assert process.stdout == ""
        assert "Traceback" not in process.stderr

"""Tool events through a recorder process: real ZeroMQ, real HTTP, a real nats-server; facts at once, rows on disk."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from bus.interface import BusMessage
from bus.nats import NatsBus
from bus.subjects import request, tool, worker_state
from schemas.base import from_json, to_json
from schemas.request import RequestAccepted, RequestEnd
from schemas.session import SessionIdentity, SessionKey
from schemas.tool import ToolEvent
from schemas.worker import RankLoad, WorkerProfile, WorkerState
from segments.format import segment_indices, segment_name, unwrap
from tests.support.nats import NatsServer
from tests.support.processes import HelperProcess, eventually, python_process, settings_arguments
from web.client import Answer, HttpClient, Timeouts

RECORDED = Path(__file__).parents[2] / "fixtures" / "tool_events" / "dynamo_rows.jsonl"
TOPIC = b"agent-tool-events"
CHILD = SessionKey(family="claude_code", root="main", agent="agent-1")

StartRecorder = Callable[..., AbstractAsyncContextManager[HelperProcess]]


@pytest.fixture
def start(nats_server: NatsServer, tmp_path: Path) -> StartRecorder:
    @asynccontextmanager
    async def start(name: str = "recorder", **settings: object) -> AsyncIterator[HelperProcess]:
        known: dict[str, object] = {
            "nats_url": nats_server.url,
            "directory": tmp_path / "traces",
            "flush_interval_ms": 50,
            "tool_events": "tcp://127.0.0.1:*",
            "tool_events_http_port": 0,
        }
        arguments = settings_arguments({**known, **settings})
        async with python_process("services.recorder", *arguments, directory=tmp_path, name=name) as process:
            yield process

    return start


@pytest.fixture
async def facts(bus: NatsBus) -> list[ToolEvent]:
    """Every fact about tools, as it comes."""
    heard: list[ToolEvent] = []

    def on_fact(message: BusMessage) -> None:
        fact = from_json(message.payload, ToolEvent)
        assert message.subject == tool(fact.event, fact.session.text())
        heard.append(fact)

    await bus.subscribe("tg.v1.tool.*.*", on_fact)
    await bus.flush()
    return heard


@pytest.fixture
def push() -> Iterator[Callable[[str], zmq.Socket[bytes]]]:
    """Sockets of harnesses."""
    context = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []

    def connect(endpoint: str) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.PUSH)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDTIMEO, 10_000)
        socket.connect(endpoint)
        sockets.append(socket)
        return socket

    yield connect
    for socket in sockets:
        socket.close()
    context.term()


async def opened(process: HelperProcess) -> tuple[str, str, str]:
    """Where a started recorder takes tool events: ZeroMQ endpoint, URL; and its metrics."""
    url, metrics = await opened_http(process)
    endpoint = re.search(r"tool_events_open endpoint=\W?(tcp://[\d.]+:\d+)", process.stderr)
    assert endpoint, process.stderr
    return endpoint[1], url, metrics


async def opened_http(process: HelperProcess) -> tuple[str, str]:
    """As `opened`, without ZeroMQ."""
    await process.wait_said("service_started")
    url = re.search(r"(http://[\d.:]+/v1/tool_events)", process.stderr)
    health = re.search(r"http_listening.*?(http://[\d.:]+)", process.stderr)
    assert url, process.stderr
    assert health, process.stderr
    return url[1], f"{health[1]}/metrics"


async def wait_metric(url: str, sample: str, least: float) -> None:
    """Until the metrics page says at least so much."""
    async with asyncio.timeout(30):
        while await metric(url, sample) < least:  # noqa: ASYNC110 - another process's page
            await asyncio.sleep(0.02)


async def metric(url: str, sample: str) -> float:
    page = (await fetch("GET", url)).body.decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(f"{sample} "))


async def fetch(method: str, url: str, body: bytes = b"") -> Answer:
    client = HttpClient()
    try:
        return await client.fetch(method, url, [(b"content-type", b"application/json")], body, Timeouts(total_s=20))
    finally:
        await client.close()


async def post(url: str, events: object) -> tuple[int, Any]:
    answer = await fetch("POST", url, events if isinstance(events, bytes) else json.dumps(events).encode())
    return answer.status, json.loads(answer.body)


def event(call: str, session: str = "run-1", **changes: object) -> dict[str, Any]:
    """In the compact form."""
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "tool_end",
        "event_time_unix_ms": 1_795_975_336_151,
        "session_id": session,
        "tool": {"tool_call_id": call, "tool_class": "bash", "status": "ok", "duration_ms": 150.0},
        **changes,
    }


IDENTITY = SessionIdentity(key=CHILD, session_id="agent-1", parent_session_id="main")


def accepted(request_id: str, at_ms: int) -> RequestAccepted:
    """A turn of `CHILD` arrives."""
    return RequestAccepted(
        source="ingress-1",
        epoch=1,
        seq=at_ms,
        at_ms=at_ms,
        request_id=request_id,
        model="qwen",
        identity=IDENTITY,
        received_ms=at_ms,
    )


def recorded(directory: Path) -> list[dict[str, Any]]:
    """Every row in the segments."""
    names = [path.name for path in directory.iterdir()] if directory.exists() else []
    rows: list[dict[str, Any]] = []
    for index in segment_indices("tidegate", names):
        data = gzip.decompress((directory / segment_name("tidegate", index)).read_bytes())
        rows += [json.loads(unwrap(line)) for line in data.splitlines()]
    return rows


def send(socket: zmq.Socket[bytes], *events: object, topic: bytes = TOPIC) -> None:
    for number, each in enumerate(events):
        socket.send_multipart([topic, number.to_bytes(8, "big"), msgspec.msgpack.encode(each)])


async def test_a_harness_of_the_peer_pushes_and_admission_hears_it_at_once(
    bus: NatsBus,
    start: StartRecorder,
    facts: list[ToolEvent],
    push: Callable[[str], zmq.Socket[bytes]],
    tmp_path: Path,
) -> None:
    """Both forms (report E2), bad messages in between that cost the others nothing, a session known from a request: one
    fact each, in order and numbered, and one row each on disk, as the harness said it. A giant costs itself only."""
    sent = [json.loads(line) for line in RECORDED.read_bytes().splitlines()]
    async with start() as process:
        endpoint, _, metrics = await opened(process)
        bus.publish(request("accepted", "qwen"), to_json(accepted("r1", 1)))
        await bus.flush()
        await wait_metric(metrics, "tidegate_tool_known_sessions", 1)
        socket = push(endpoint)
        socket.send_multipart([TOPIC, b"", b"\xc1"])
        socket.send_multipart([TOPIC, b""])
        send(socket, event("other"), topic=b"another-topic")
        send(
            socket,
            *sent[:4],
            {**sent[4], "event_source": "dynamo"},
            *sent[4:],
            event("mine", "agent-1", event_time_unix_ms=1),
        )
        await eventually(lambda: len(facts) > len(sent), what="facts")
        assert [fact.tool_call_id for fact in facts] == [*(row["tool"]["tool_call_id"] for row in sent), "mine"]
        assert {fact.session for fact in facts[:-1]} == {SessionKey(family="dynamo", root="run-1")}
        assert (facts[-1].session, facts[-1].duration_ms, facts[-1].status) == (CHILD, 150.0, "succeeded")
        for state in ("start", "end"):
            numbers = [fact.seq for fact in facts if fact.event == state]
            assert numbers == list(range(len(numbers)))
        await eventually(lambda: len(recorded(tmp_path / "traces")) > len(sent), what="rows")
        for reason in ("undecodable", "bad_frames", "other_topic", "bad_source"):
            assert await metric(metrics, f'tidegate_tool_events_rejected_total{{reason="{reason}"}}') == 1.0
        assert await metric(metrics, 'tidegate_tool_messages_total{intake="zmq"}') == len(sent) + 5
        send(socket, "x" * 5_000_000, event("after", "agent-1", event_time_unix_ms=2))
        await eventually(lambda: facts[-1].tool_call_id == "after", what="the fact after a giant")
        assert await metric(metrics, 'tidegate_tool_events_rejected_total{reason="too_large"}') == 1.0
        assert await process.stop() == 0
    rows = {row["event_time_unix_ms"]: row for row in recorded(tmp_path / "traces")}
    assert len(rows) == len(sent) + 2
    for row in sent:
        assert rows[row["event_time_unix_ms"]] == {**row, "schema": "tidegate.request.trace.v1"}


async def test_http_says_what_became_of_each_event(
    start: StartRecorder, facts: list[ToolEvent], tmp_path: Path
) -> None:
    """One event or several; a bad one has its reason and costs the others nothing; the same again is neither told nor
    kept twice; what is accepted is on disk after SIGTERM."""
    async with start(tool_events="") as process:
        url, metrics = await opened_http(process)
        assert await post(url, event("a")) == (202, {"accepted": 1, "duplicates": 0, "rejected": []})
        status, answer = await post(url, [event("a"), event("b", tool=None), event("c"), "text"])
        assert (status, answer["accepted"], answer["duplicates"]) == (202, 1, 1)
        assert [(each["index"], each["reason"]) for each in answer["rejected"]] == [(1, "no_tool"), (3, "undecodable")]
        assert all(each["message"] for each in answer["rejected"])
        status, answer = await post(url, event("d", session_id="  "))
        assert (status, answer["accepted"], answer["rejected"][0]["reason"]) == (400, 0, "no_session")
        for body in (b"", b"{", b"[", b"[1", b"\xff"):
            assert (await post(url, body))[0] == 400
        assert (await post(url, [event("e")] * 1001))[0] == 413
        assert (await fetch("PUT", url)).status == 405
        how = await fetch("GET", url)
        assert (how.status, url in how.body.decode()) == (200, True)
        assert (await fetch("POST", url + "s")).status == 404
        assert (await post(url, []))[0] == 202
        many = [event(f"m{number}") for number in range(500)]
        assert (await post(url, many))[1]["accepted"] == 500
        assert await metric(metrics, 'tidegate_tool_events_rejected_total{reason="duplicate"}') == 1.0
        assert await process.stop() == 0
    calls = [row["tool"]["tool_call_id"] for row in recorded(tmp_path / "traces")]
    assert sorted(calls) == sorted(["a", "c", *(f"m{number}" for number in range(500))])
    assert sorted(fact.tool_call_id for fact in facts) == sorted(calls)


async def test_while_the_stream_is_away_http_asks_to_come_again_and_what_was_taken_is_kept(
    nats_server: NatsServer, start: StartRecorder, tmp_path: Path
) -> None:
    """A server that hangs: the window of rows fills, then 503 with Retry-After; nothing accepted is lost."""
    async with start(tool_events="", tool_rows=3) as process:
        url, metrics = await opened_http(process)
        nats_server.pause()
        try:
            accepted = 0
            for number in range(5):
                status, answer = await post(url, event(f"c{number}"))
                accepted += status == 202
                assert status in (202, 503), answer
            again = await fetch("POST", url, json.dumps(event("c4")).encode())
            assert (accepted, again.status, again.header("retry-after")) == (3, 503, b"1")
            assert await metric(metrics, 'tidegate_tool_events_rejected_total{reason="queue_full"}') == 3.0
        finally:
            nats_server.resume()
        await wait_metric(metrics, "tidegate_trace_rows_acknowledged_total", 3)
        assert (await post(url, event("c4")))[0] == 202
        assert await process.stop() == 0
    calls = [row["tool"]["tool_call_id"] for row in recorded(tmp_path / "traces")]
    assert sorted(calls) == ["c0", "c1", "c2", "c4"]


async def test_where_no_harness_tells_the_next_turn_does(
    bus: NatsBus, start: StartRecorder, facts: list[ToolEvent], tmp_path: Path
) -> None:
    """With ``infer_tools`` alone: a fact that says it is inferred, no row, and what cannot be read is counted."""
    async with start(tool_events="", tool_events_http_port=-1, infer_tools="true") as process:
        await process.wait_said("service_started")
        bus.publish(request("accepted", "qwen"), b"{")
        bus.publish(request("accepted", "qwen"), to_json(accepted("r1", 1_000)))
        end = RequestEnd(
            source="ingress-1",
            epoch=1,
            seq=0,
            at_ms=2_000,
            request_id="r1",
            model="qwen",
            identity=IDENTITY,
            outcome="completed",
            tool_names=("bash",),
        )
        bus.publish(request("end", "qwen"), to_json(end))
        bus.publish(request("accepted", "qwen"), to_json(accepted("r2", 2_750)))
        await eventually(lambda: len(facts) == 1, what="the fact")
        assert (facts[0].session, facts[0].tool_class, facts[0].duration_ms) == (CHILD, "bash", 750.0)
        assert facts[0].inferred
        assert await process.stop() == 0
    assert recorded(tmp_path / "traces") == []


async def test_silence_is_said_with_what_was_rejected(bus: NatsBus, start: StartRecorder) -> None:
    """User report (the peer's 9005): a plug-in that sends to another topic than the server's, and nobody notices."""
    async with start() as process:
        url, metrics = await opened_http(process)
        assert (await post(url, event("a", session_id="")))[0] == 400
        for number in range(25):
            end = RequestEnd(
                source="ingress-1",
                epoch=1,
                seq=number,
                at_ms=number,
                request_id=f"r{number}",
                model="qwen",
                identity=IDENTITY,
                outcome="completed",
                tool_names=("bash",),
            )
            bus.publish(request("end", "qwen"), to_json(end))
        await process.wait_said("no_tool_events")
        await wait_metric(metrics, "tidegate_tool_calling_turns_total", 25)
        said = [line for line in process.stderr.splitlines() if "no_tool_events" in line]
        assert len(said) == 1
        assert "turns=20" in said[0]
        assert "no_session" in said[0]
        assert await process.stop() == 0


async def test_only_who_has_the_token_may_post(start: StartRecorder, facts: list[ToolEvent], tmp_path: Path) -> None:
    """From a file (a mounted secret); without it, and with another, nothing is taken and it is counted; how to use it
    is said to anybody, the token never."""
    secret = tmp_path / "token"
    secret.write_text("s3cret-token\n")
    async with start(tool_events="", tool_events_token_file=secret) as process:
        url, metrics = await opened_http(process)
        client = HttpClient()
        try:
            for said in (None, b"Bearer s3cret-toke", b"Bearer ", b"s3cret-token", b"Basic s3cret-token", b"\xff"):
                headers: list[tuple[bytes, bytes]] = [] if said is None else [(b"authorization", said)]
                body = json.dumps(event("a")).encode()
                answer = await client.fetch("POST", url, headers, body, Timeouts(total_s=20))
                assert (answer.status, answer.header("www-authenticate")) == (401, b"Bearer"), said
            good = [(b"authorization", b"bearer s3cret-token")]
            answer = await client.fetch("POST", url, good, json.dumps(event("b")).encode(), Timeouts(total_s=20))
            assert answer.status == 202
        finally:
            await client.close()
        assert await metric(metrics, 'tidegate_tool_events_rejected_total{reason="unauthorized"}') == 6.0
        assert b"Bearer TOKEN" in (await fetch("GET", url)).body
        await eventually(lambda: [fact.tool_call_id for fact in facts] == ["b"], what="the fact")
        assert await process.stop() == 0
    assert "s3cret" not in process.stderr
    for wrong in ({"tool_events_token_file": tmp_path / "none"}, {"tool_events_token": "two words"}):
        async with start("wrong", tool_events="", prefix="w", durable="w", **wrong) as process:
            assert await process.wait() == 2
            assert "token" in process.stderr


async def test_loads_of_workers_become_rows(bus: NatsBus, nats_server: NatsServer, tmp_path: Path) -> None:
    """Two recorders hear a bridge: a row of each sample in the stream, once, and in each one's files. What cannot be
    read ends nothing."""
    command = {"nats_url": nats_server.url, "flush_interval_ms": 50, "load_samples_s": 0.5}
    async with (
        python_process(
            "services.recorder",
            *settings_arguments({**command, "directory": tmp_path / "1", "instance": "recorder-1"}),
            directory=tmp_path,
            name="one",
        ) as one,
        python_process(
            "services.recorder",
            *settings_arguments({**command, "directory": tmp_path / "2", "durable": "other", "instance": "recorder-2"}),
            directory=tmp_path,
            name="two",
        ) as two,
    ):
        for process in (one, two):
            await process.wait_said("service_started")
        bus.publish(worker_state("engine-1"), b"{")
        for number in range(5):
            state = WorkerState(
                source="bridge-1",
                epoch=1,
                seq=number,
                at_ms=1_000_000 + 300 * number,
                worker="engine-1",
                incarnation="9.0",
                health="ready",
                profile=WorkerProfile(url="http://x", model="qwen", kv_tokens=100),
                loads=(RankLoad(rank=0, running=number, kv_usage=0.5),),
            )
            bus.publish(worker_state("engine-1"), to_json(state))
            await bus.flush()
            await asyncio.sleep(0.3)  # the recorders' own clocks bound the samples, too
        for process in (one, two):
            assert await process.stop() == 0
    ours, theirs = recorded(tmp_path / "1"), recorded(tmp_path / "2")
    running = [row["worker_load"]["loads"][0].get("running", 0) for row in ours]
    assert running == [0, 2, 4]
    assert [row["event_time_unix_ms"] for row in ours] == [1_000_000, 1_000_600, 1_001_200]
    assert sorted(map(json.dumps, theirs)) == sorted(map(json.dumps, ours))


async def test_an_address_that_is_taken_ends_it_with_a_sentence(nats_server: NatsServer, start: StartRecorder) -> None:
    """Only one process may own an address; which setting is wrong is said, with code 2."""
    async with start() as first:
        endpoint, url, _ = await opened(first)
        async with start("second", tool_events=endpoint, prefix="second", durable="second") as second:
            assert await second.wait() == 2
            assert "tool_events: cannot bind" in second.stderr
        port = url.split(":")[2].split("/")[0]
        async with start("third", tool_events_http_port=port, prefix="third", durable="third") as third:
            assert await third.wait() == 2
            assert "tool_events_http_port: 127.0.0.1" in third.stderr
        assert await first.stop() == 0

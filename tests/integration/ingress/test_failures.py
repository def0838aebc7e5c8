"""Engines that fail, clients that leave, a process that stops: every request ends once, with one row that says how."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.ingress.support import JSON, LONG, MODEL, ScriptedEngine, Stage, System, chat, until
from tests.support.pace import stands_still
from tests.support.processes import python_process, settings_arguments
from web.client import HttpClient
from web.errors import ConnectError, ConnectionLostError
from web.server import Request, Responder

pytestmark = pytest.mark.asyncio(loop_scope="session")

STREAMS = 100


def events_of(data: bytes) -> list[bytes]:
    return [event[6:] for event in data.split(b"\n\n") if event.startswith(b"data: ")]


@pytest.mark.parametrize("after", [1, 5])
async def test_an_engine_that_dies_in_its_answer(system: System, after: int) -> None:
    """C2: after bytes were sent there is no retry: the stream ends with an error event in OpenAI's shape and is cut,
    the row says `upstream_lost`, and the session's next turn is served."""
    async with system.door() as door:
        session = f"dies-{after}"
        engine = await system.engine_of(session, door)
        await engine.misbehave(die_after_chunks=after, die_requests=1)
        stream = await door.stream(
            chat(LONG, stream=True, max_tokens=32), x_tidegate_session_id=session, x_request_id=f"dead-{after}"
        )
        pieces: list[bytes] = []
        with pytest.raises(ConnectionLostError):
            await stream.pipe(pieces.append)
        *chunks, error = events_of(b"".join(pieces))
        assert len(chunks) == after
        assert json.loads(error)["error"]["code"] == "connection_lost"
        row = await system.rows.by_x_request_id(f"dead-{after}")
        assert (row.outcome, row.reason, row.attempts) == ("upstream_lost", "connection_lost", 1)
        assert row.worker is not None
        assert row.worker.worker == engine.worker
        await engine.behave()
        assert (await door.post(chat(LONG), x_tidegate_session_id=session)).status == 200
        assert door.service.in_flight == 0


async def test_an_engine_that_dies_before_its_first_byte(system: System) -> None:
    """C2, k = 0: the request is decided once more, on the other worker, and the client sees nothing of it."""
    async with system.door() as door:
        engine = await system.engine_of("dies-0", door)
        await engine.misbehave(die_after_chunks=0)
        answer = await door.post(chat(LONG, stream=True), x_tidegate_session_id="dies-0", x_request_id="dead-0")
        await engine.behave()
        assert answer.status == 200
        assert events_of(answer.body)[-1] == b"[DONE]"
        row = await system.rows.by_x_request_id("dead-0")
        assert (row.outcome, row.attempts) == ("completed", 2)
        assert row.worker is not None
        assert row.worker.worker != engine.worker


async def test_a_503_is_retried_and_the_second_failure_passed_on(system: System) -> None:
    """An engine's 503 is retried elsewhere; when that one fails too, the client gets the engine's own answer."""
    async with system.door() as door:
        engine = await system.engine_of("busy", door)
        await engine.misbehave(error_status=503, error_requests=1)
        answer = await door.post(chat(LONG), x_tidegate_session_id="busy")
        assert answer.status == 200
        for each in system.engines.values():
            await each.misbehave(error_status=503, error_requests=1)
        answer = await door.post(chat(LONG), x_tidegate_session_id="busy", x_request_id="busy-2")
        assert answer.status == 503
        row = await system.rows.by_x_request_id("busy-2")
        assert (row.outcome, row.status, row.attempts) == ("upstream_error", 503, 2)
        for each in system.engines.values():
            await each.behave()


async def test_retry_can_be_switched_off(system: System) -> None:
    """With `retry` off the first failure is the client's answer."""
    async with system.door(retry=False) as door:
        engine = await system.engine_of("no-retry", door)
        await engine.misbehave(die_after_chunks=0)
        answer = await door.post(chat(LONG, stream=True), x_tidegate_session_id="no-retry")
        assert answer.status == 502
        assert json.loads(answer.body)["error"]["code"] == "connection_lost"
        await engine.behave()


@pytest.mark.parametrize(
    ("stall", "settings", "outcome", "reason", "status"),
    [
        ("head", {"first_byte_timeout_s": 0.3}, "upstream_timeout", "first_byte_timeout", 504),
        ("first_token", {"first_byte_timeout_s": 0.3}, "upstream_timeout", "first_byte_timeout", 504),
        ("stream", {"idle_timeout_s": 1.0}, "upstream_timeout", "idle_timeout", 200),
        ("stream", {"total_timeout_s": 2.0}, "upstream_timeout", "total_timeout", 200),
    ],
)
async def test_each_time_out_is_named(
    system: System, stall: str, settings: dict[str, Any], outcome: str, reason: str, status: int
) -> None:
    """Silence before the first byte is 504, inside the stream an error event; the row names the time that ran out."""
    session = f"{stall}-{reason}"
    async with system.door() as patient:
        engine = await system.engine_of(session, patient)
    async with system.door(retry=False, **settings) as door:
        await engine.misbehave(stall=stall, stall_requests=1)
        stream = await door.stream(
            chat(LONG, stream=True, max_tokens=32), x_tidegate_session_id=session, x_request_id=session
        )
        assert stream.status == status
        pieces: list[bytes] = []
        try:
            await stream.pipe(pieces.append)
        except ConnectionLostError:
            assert status == 200
        assert reason.encode() in b"".join(pieces)
        row = await system.rows.by_x_request_id(session)
        assert (row.outcome, row.reason) == (outcome, reason)
        await engine.behave()
        assert door.service.in_flight == 0


@pytest.mark.parametrize("usage", ["normal", "null", "omit"])
@pytest.mark.parametrize("asked", [True, False])
async def test_usage_in_every_form(system: System, usage: str, asked: bool) -> None:
    """C3: null usage in every chunk, a usage chunk with empty choices, or none at all: the client that did not ask
    sees no usage, the one that did sees the engine's; rows count tokens, marked as estimated where it said nothing."""
    async with system.door() as door:
        session = f"usage-{usage}-{asked}"
        engine = await system.engine_of(session, door)
        await engine.misbehave(usage=usage)
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if asked else {}
        answer = await door.post(
            chat(LONG, stream=True, max_tokens=9, **options), x_tidegate_session_id=session, x_request_id=session
        )
        await engine.behave()
        *chunks, done = events_of(answer.body)
        assert done == b"[DONE]"
        decoded = [json.loads(chunk) for chunk in chunks]
        assert any(chunk.get("usage") for chunk in decoded) == (asked and usage != "omit")
        assert all(chunk["choices"] for chunk in decoded) == (not asked or usage == "omit")
        row = await system.rows.by_x_request_id(session)
        assert row.outcome == "completed"
        assert bool(row.usage_estimated) == (usage == "omit")
        assert row.output_tokens is not None
        assert row.output_tokens > 0


async def test_a_slow_client_stops_the_engine_and_loses_nothing(stage: Stage) -> None:
    """Back-pressure end to end: while the client does not read, the engine cannot send; then every byte arrives."""
    event = b"data: " + b"x" * 8_000 + b"\n\n"
    total = 4_000
    sent = 0

    async def flood(request: Request, responder: Responder) -> None:
        nonlocal sent
        responder.start(200, [(b"content-type", b"text/event-stream")])
        while sent < total and not responder.gone.is_set():
            responder.write(event)
            sent += 1
            await responder.drain()
            await asyncio.sleep(0)
        responder.write(b"data: [DONE]\n\n")
        responder.finish()

    for engine in stage.engines.values():
        engine.script = flood
    async with stage.door() as door:
        stream = await door.stream(chat(stream=True))
        await stands_still(lambda: sent)
        assert 0 < sent < total
        received = 0
        while piece := await stream.read():
            received += len(piece)
        assert received == total * len(event) + len(b"data: [DONE]\n\n")


async def test_a_worker_that_falls_silent_gets_nothing_more(stage: Stage) -> None:
    """A15: a worker without heartbeats is not placed on; with none left, requests fail fast."""
    async with stage.door(worker_lost_s=1.5) as door:
        await until(lambda: door.service.workers == 2)
        stage.heartbeats.silent = {"worker-0"}
        await until(lambda: door.service.workers == 1)
        for number in range(6):
            assert (await door.post(chat(), x_tidegate_session_id=f"lost-{number}")).status == 200
        assert not stage.engines["worker-0"].seen
        stage.heartbeats.silent = {"worker-0", "worker-1"}
        await until(lambda: door.service.workers == 0)
        answer = await door.post(chat())
        assert (answer.status, answer.header("retry-after")) == (503, b"1")


@pytest.mark.parametrize("status", [302, 307])
async def test_a_redirect_is_neither_followed_nor_passed_on(stage: Stage, status: int) -> None:
    """An engine that redirects has not answered: another is tried, then the client reads 502 `bad_answer`, without an
    address. What an unknown API says is its own affair."""
    elsewhere = ScriptedEngine()
    await elsewhere.start()

    async def redirect(request: Request, responder: Responder) -> None:
        responder.send(status, [(b"location", f"{elsewhere.url}{request.path}".encode())], b"")

    for engine in stage.engines.values():
        engine.script = redirect
    async with stage.door(tokenize="none", admit_idle_s=0.05) as door:
        answer = await door.post(chat())
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (502, "bad_answer")
        assert answer.header("location") is None
        assert [len(engine.seen) for engine in stage.engines.values()] == [1, 1]
        assert (await door.get("/v1/files")).status == status
        assert not elsewhere.seen
    await elsewhere.close()


async def test_too_many_requests_in_flight_are_429(stage: Stage) -> None:
    """The table of requests is bounded: the one too many is refused with Retry-After and a reason."""
    release = asyncio.Event()

    async def wait(request: Request, responder: Responder) -> None:
        await release.wait()
        responder.send(200, JSON, b"{}")

    for engine in stage.engines.values():
        engine.script = wait
    async with stage.door(max_in_flight=2) as door:
        posts = [asyncio.create_task(door.post(chat())) for _ in range(2)]
        await until(lambda: door.service.in_flight == 2)
        answer = await door.post(chat())
        assert answer.status == 429
        assert answer.header("retry-after") is not None
        release.set()
        assert [(await post).status for post in posts] == [200, 200]


async def refused(client: HttpClient, url: str) -> None:
    """Ask on new connections until one is refused: raises the client's error."""
    for _ in range(500):
        await client.fetch("GET", f"{url}/healthz", [(b"connection", b"close")], b"")
        await asyncio.sleep(0.01)


async def test_sigterm_lets_streams_finish_and_loses_no_row(stage: Stage, tmp_path: Path) -> None:
    """E2: on SIGTERM the process stops accepting, its streams finish, every row is acknowledged, exit code 0."""
    started = 0
    release = asyncio.Event()

    async def slow(request: Request, responder: Responder) -> None:
        nonlocal started
        responder.start(200, [(b"content-type", b"text/event-stream")])
        responder.write(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
        started += 1
        await release.wait()
        responder.write(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
        responder.finish()

    for engine in stage.engines.values():
        engine.script = slow
    arguments = settings_arguments(
        {"nats_url": stage.nats.url, "port": 0, "http_port": -1, "instance": "ingress-term", "stop_timeout_s": 10}
    )
    async with python_process("services.ingress", *arguments, directory=tmp_path, name="ingress") as process:
        await process.wait_said("front_door_open")
        url = process.output.split("front_door_open url=")[1].split()[0]
        client = HttpClient()
        for _ in range(500):
            if (await client.fetch("GET", f"{url}/readyz", [], b"")).status == 200:
                break
            await asyncio.sleep(0.02)

        async def post(number: int) -> bytes:
            headers = [*JSON, (b"x-request-id", b"term-%d" % number)]
            body = json.dumps(chat(stream=True)).encode()
            return (await client.fetch("POST", f"{url}/v1/chat/completions", headers, body)).body

        posts = [asyncio.create_task(post(number)) for number in range(STREAMS)]
        await until(lambda: started == STREAMS)
        process.signal(signal.SIGTERM)
        await process.wait_said("stop_asked")
        late = HttpClient()
        with pytest.raises(ConnectError):
            await refused(late, url)
        release.set()
        for answer in await asyncio.gather(*posts):
            assert answer.endswith(b"data: [DONE]\n\n")
        assert await process.wait() == 0
        await client.close()
        await late.close()
    for number in range(STREAMS):
        assert (await stage.rows.by_x_request_id(f"term-{number}")).outcome == "completed"


async def test_what_does_not_finish_in_time_is_ended_with_a_row(stage: Stage) -> None:
    """A stream that outlives the drain is broken off in-band and has its row: nothing ends in silence."""

    async def endless(request: Request, responder: Responder) -> None:
        responder.start(200, [(b"content-type", b"text/event-stream")])
        responder.write(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
        await responder.gone.wait()

    for engine in stage.engines.values():
        engine.script = endless
    pieces: list[bytes] = []
    async with stage.door(stop_timeout_s=1.0) as door:
        client = HttpClient()
        headers = [*JSON, (b"x-request-id", b"cut-1")]
        body = json.dumps(chat(stream=True)).encode()
        stream = await client.open("POST", f"{door.url}/v1/chat/completions", headers, body)
        reading = asyncio.create_task(stream.pipe(pieces.append))
        await until(lambda: bool(pieces))
    with pytest.raises(ConnectionLostError):
        await reading
    assert b"stopping" in b"".join(pieces)
    row = await stage.rows.by_x_request_id("cut-1")
    assert (row.outcome, row.reason) == ("internal_error", "stopping")
    await until(lambda: sum(engine.gone for engine in stage.engines.values()) == 1)
    await client.close()


async def test_a_bad_setting_ends_the_process_with_one_sentence(stage: Stage, tmp_path: Path) -> None:
    """A tokenizer that is not there: exit code 2 and one sentence that names the key."""
    arguments = settings_arguments(
        {"nats_url": stage.nats.url, "port": 0, "tokenizers": json.dumps({MODEL: str(tmp_path / "none")})}
    )
    async with python_process("services.ingress", *arguments, directory=tmp_path, name="ingress") as process:
        assert await process.wait() == 2
        assert "tokenizers:" in process.stderr
        assert "Traceback" not in process.stderr


async def test_an_exposed_address_warns(stage: Stage, tmp_path: Path) -> None:
    """F4: binding to every address without credentials is said loudly at start."""
    arguments = settings_arguments({"nats_url": stage.nats.url, "port": 0, "host": "0.0.0.0", "http_port": -1})
    async with python_process("services.ingress", *arguments, directory=tmp_path, name="ingress") as process:
        await process.wait_said("exposed_without_credentials")
        assert await process.stop() == 0

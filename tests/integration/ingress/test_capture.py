"""Prompts and answers are written where that is asked for, and only there; whatever becomes of the writer, requests go
on."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from segments.format import members, unwrap
from services.ingress.redaction import HIDDEN
from tests.integration.ingress.support import JSON, MODEL, Door, Stage, System, chat, until
from tests.support.processes import python_process, settings_arguments
from web.client import HttpClient
from web.errors import ConnectionLostError
from web.server import Request, Responder

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECRET = "sk-proj-Ab3dEf6hIj9kLm2nOp5q"
QUICK: dict[str, Any] = {"admit_idle_s": 0.05}
"""Nobody decides on the stage: the ingress places by itself."""


def prompts(directory: Path) -> list[str]:
    """What the captured chats say."""
    return [row["payload"]["request"]["messages"][0]["content"] for row in captured(directory)]


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("capture.*.jsonl.gz"))


def captured(directory: Path) -> list[dict[str, Any]]:
    """Every captured row; of a segment that is being written, its whole members."""
    lines = [line for path in segments(directory) for member in members(path.read_bytes()) for line in member.lines]
    return [json.loads(unwrap(line)) for line in lines]


def payloads(directory: Path) -> dict[str, dict[str, Any]]:
    """By the request's id; no request has two."""
    rows = [row["payload"] for row in captured(directory)]
    assert len({row["request_id"] for row in rows}) == len(rows)
    return {row["request_id"]: row for row in rows}


async def written(directory: Path, count: int) -> None:
    await until(lambda: len(captured(directory)) >= count)


def metric(door: Door, name: str, **labels: str) -> float:
    registry: CollectorRegistry = door.service._registry
    return registry.get_sample_value(f"tidegate_ingress_capture_{name}", labels) or 0.0


def writer_pid(door: Door) -> int:
    capture = door.service._capture
    assert capture is not None
    assert capture.writer_pid is not None
    return capture.writer_pid


async def test_nothing_is_written_unless_asked(stage: Stage, tmp_path: Path) -> None:
    """Off, the default: no process, no file, no metric, whatever else is set."""
    directory = tmp_path / "captured"
    async with stage.door(capture_directory=str(directory), **QUICK) as door:
        assert (await door.post(chat())).status == 200
        assert b"capture" not in (await door.get("/metrics")).body
        assert door.service._capture is None
    assert not directory.exists()


async def test_each_api(system: System, tmp_path: Path) -> None:
    """The client's own body and the answer as it got it, streamed or not; joined to its row by id and context."""
    asked: dict[str, tuple[dict[str, Any], bytes, bool]] = {}
    text = {"model": MODEL, "max_tokens": 8}
    said = [{"role": "user", "content": "hello"}]
    async with system.door(capture="answers", capture_directory=str(tmp_path)) as door:
        for path, body in (
            ("/v1/chat/completions", {**text, "messages": said}),
            ("/v1/chat/completions", {**text, "messages": said, "stream": True}),
            ("/v1/completions", {**text, "prompt": "hello", "stream": True}),
            ("/v1/responses", {"model": MODEL, "input": "hello", "stream": True}),
            ("/v1/messages", {**text, "messages": said}),
            ("/v1/messages", {**text, "messages": said, "stream": True}),
            ("/v1/messages/count_tokens", {"model": MODEL, "messages": said}),
        ):
            answer = await door.post(body, path, x_tidegate_session_id="s-1", x_tidegate_parent_session_id="p-1")
            assert answer.status == 200, answer.body
            request_id = (answer.header("x-request-id") or b"").decode()
            asked[request_id] = (body, answer.body, bool(body.get("stream")))
    found = payloads(tmp_path)
    assert found.keys() == asked.keys()
    for request_id, (body, answer_body, is_stream) in asked.items():
        payload, row = found[request_id], await system.rows.one(request_id)
        assert payload["request"] == body
        assert payload["response"] == (answer_body.decode() if is_stream else json.loads(answer_body))
        assert (payload["endpoint"], payload["outcome"]) == (row.endpoint, row.outcome)
        assert payload["payload_complete"] is True
    contexts = [row["agent_context"] for row in captured(tmp_path)]
    assert {(context["session_id"], context["parent_session_id"]) for context in contexts} == {("s-1", "p-1")}


async def test_prompts_without_answers(stage: Stage, tmp_path: Path) -> None:
    """`requests` keeps no answer, and says nothing of one; only of the sessions that were chosen."""
    settings = {"capture": "requests", "capture_directory": str(tmp_path), "capture_sessions": ("mine",)}
    async with stage.door(**settings, **QUICK) as door:
        await door.post(chat("a"), x_tidegate_session_id="mine")
        await door.post(chat("b"), x_tidegate_session_id="child", x_tidegate_parent_session_id="mine")
        await door.post(chat("c"), x_tidegate_session_id="other")
        await door.post(chat("d"))
    rows = captured(tmp_path)
    assert prompts(tmp_path) == ["a", "b"]
    assert [("response" in row["payload"], row["payload"]["payload_complete"]) for row in rows] == [(False, True)] * 2


async def test_secrets_headers_and_permissions(stage: Stage, tmp_path: Path) -> None:
    """A secret is hidden in the prompt, and in an answer that brings it in pieces cut anywhere, inside of events too;
    credentials of the request are nowhere; nobody else may read the files."""
    events = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in ("key: ", SECRET[:4], SECRET[4:])]
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"

    async def in_pieces(request: Request, responder: Responder) -> None:
        responder.start(200, [(b"content-type", b"text/event-stream")])
        for start in range(0, len(data), 7):
            responder.write(data[start : start + 7])
            await asyncio.sleep(0)
        responder.finish()

    for engine in stage.engines.values():
        engine.script = in_pieces
    directory = tmp_path / "new" / "captured"
    settings = {"capture": "answers", "capture_directory": str(directory), "capture_headers": ("user-agent", "x-*")}
    async with stage.door(**settings, **QUICK) as door:
        answer = await door.post(
            chat(f"use {SECRET}", stream=True),
            authorization="Bearer client-key-0123456789",
            x_api_key="client-key-0123456789",
            user_agent=f"tool/1 {SECRET}",
            x_odd="\u00e9",
        )
        assert answer.body == data
    (row,) = captured(directory)
    whole = json.dumps(row)
    assert "client-key" not in whole
    assert "sk-" not in whole
    assert row["payload"]["request"]["messages"][0]["content"] == f"use {HIDDEN}"
    assert HIDDEN in row["payload"]["response"]
    assert row["payload"]["http_request_headers"] == {"user-agent": f"tool/1 {HIDDEN}", "x-odd": "\u00c3\u00a9"}
    (segment,) = segments(directory)
    assert stat.S_IMODE(segment.stat().st_mode) == 0o600
    assert {stat.S_IMODE(path.stat().st_mode) for path in (directory, directory.parent)} == {0o700}


async def test_large_bodies_and_broken_answers(stage: Stage, tmp_path: Path) -> None:
    """Too large: left out, and said; an answer that broke off is none; an error of the engine is an answer. Who was
    never accepted has no row."""

    async def answer(request: Request, responder: Responder) -> None:
        asked = json.loads(request.body)["messages"][0]["content"]
        if asked == "large":
            responder.send(200, JSON, b'{"x":"%s"}' % (b"y" * 3000))
        elif asked == "error":
            responder.send(400, JSON, b'{"error":{"message":"no"}}')
        elif asked == "dies":
            responder.start(200, [(b"content-type", b"text/event-stream")])
            responder.write(b'data: {"choices":[{"index":0,"delta":{"content":"half"}}]}\n\n')
            responder.abort()
        else:
            responder.send(200, JSON, b"{}")

    for engine in stage.engines.values():
        engine.script = answer
    settings = {"capture": "answers", "capture_directory": str(tmp_path), "capture_bytes": 2000}
    async with stage.door(**settings, **QUICK) as door:
        for text in ("large", "error", "z" * 3000):
            await door.post(chat(text))
        stream = await door.stream(chat("dies", stream=True))
        with pytest.raises(ConnectionLostError):
            await stream.pipe(lambda data: None)
        assert (await door.post({**chat(), "model": "unknown"})).status == 404
        assert metric(door, "incomplete_total", reason="too_large") == 2
        assert metric(door, "incomplete_total", reason="no_whole_answer") == 1
    found = [row["payload"] for row in captured(tmp_path)]
    assert [
        ("request" in each, "response" in each, each["outcome"], each.get("payload_drop_reason")) for each in found
    ] == [
        (True, False, "completed", "too_large"),
        (True, True, "client_error", None),
        (False, True, "completed", "too_large"),
        (True, False, "upstream_lost", "no_whole_answer"),
    ]
    assert found[1]["response"] == {"error": {"message": "no"}}


async def test_a_disk_that_refuses(stage: Stage, tmp_path: Path) -> None:
    """Requests go on, what is lost is counted; when the disk takes rows again they are written."""
    directory = tmp_path / "captured"
    async with stage.door(capture="requests", capture_directory=str(directory), **QUICK) as door:
        directory.rename(tmp_path / "away")
        directory.write_text("in the way")
        assert (await door.post(chat("lost"))).status == 200
        await until(lambda: metric(door, "dropped_total", reason="write_failed") == 1)
        directory.unlink()
        assert (await door.post(chat("kept"))).status == 200
        await written(directory, 1)
        assert prompts(directory) == ["kept"]
        await until(lambda: metric(door, "rows_total") == 1)


async def test_a_writer_that_hangs_or_dies(stage: Stage, tmp_path: Path) -> None:
    """It takes nothing: what is over the bound is counted, and no request notices. It is killed: another one goes on,
    and what it had been given and had not written is counted."""
    settings = {"capture": "requests", "capture_directory": str(tmp_path), "capture_rows": 2}
    async with stage.door(**settings, **QUICK) as door:
        pid = writer_pid(door)
        os.kill(pid, signal.SIGSTOP)
        large = "x" * 200_000
        for _ in range(6):
            assert (await door.post(chat(large))).status == 200
        full = metric(door, "dropped_total", reason="queue_full")
        assert full >= 1
        os.kill(pid, signal.SIGKILL)
        await until(lambda: writer_pid(door) != pid)
        await until(lambda: metric(door, "waiting") == 0)
        assert (await door.post(chat("after"))).status == 200
        await until(lambda: "after" in prompts(tmp_path))
        lost = metric(door, "dropped_total", reason="writer_lost")
        assert lost >= 1
        await until(lambda: metric(door, "rows_total") + lost + full == 7)
        assert metric(door, "held_bytes") == 0


async def test_a_pattern_that_never_ends(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds up its writer, which is ended when it has taken nothing for a while; requests go on, and what comes
    after is written."""
    monkeypatch.setattr("services.ingress.shell.capture.STUCK_S", 0.5)
    settings = {"capture": "requests", "capture_directory": str(tmp_path), "capture_redact": (r"(a+)+$",)}
    async with stage.door(**settings, **QUICK) as door:
        pid = writer_pid(door)
        assert (await door.post(chat("a" * 60 + "!"))).status == 200
        for _ in range(8):
            assert (await door.post(chat("x" * 200_000))).status == 200
        await until(lambda: metric(door, "dropped_total", reason="writer_lost") >= 1)
        await until(lambda: writer_pid(door) != pid)
        assert (await door.post(chat("after"))).status == 200
        await until(lambda: "after" in prompts(tmp_path))


async def test_a_hanging_writer_does_not_keep_the_ingress_from_stopping(stage: Stage, tmp_path: Path) -> None:
    """It is ended when its time is over, and what it held is counted."""
    async with stage.door(capture="requests", capture_directory=str(tmp_path), **QUICK) as door:
        pid = writer_pid(door)
        os.kill(pid, signal.SIGSTOP)
        await door.post(chat())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_an_ingress_that_is_killed_loses_nothing(stage: Stage, tmp_path: Path) -> None:
    """Its writer has what had ended (but what ended at that very moment), writes it, and ends; every file is whole, and
    the next ingress begins another."""
    directory = tmp_path / "captured"
    settings: dict[str, object] = {"nats_url": stage.nats.url, "instance": "a/b", "capture": "requests", **QUICK}
    command = settings_arguments({**settings, "port": 0, "capture_directory": directory})
    async with python_process("services.ingress", *command, directory=tmp_path, name="ingress") as process:
        await process.wait_said("front_door_open")
        assert "prompts_are_written" in process.output
        opened = re.search(r"front_door_open url=(\S+)", process.output)
        assert opened is not None
        async with asyncio.timeout(30):
            await ask(opened[1], "012345")
        await process.kill()
        await written(directory, 5)
    assert prompts(directory)[:5] == list("01234")
    (first,) = segments(directory)
    assert first.name == "capture.a_b.000000.jsonl.gz"
    assert len(gzip.decompress(first.read_bytes()).splitlines()) == len(captured(directory))
    async with stage.door(instance="a/b", capture="requests", capture_directory=str(directory), **QUICK) as door:
        await door.post(chat("next"))
    names = [path.name for path in segments(directory)]
    assert names == ["capture.a_b.000000.jsonl.gz", "capture.a_b.000001.jsonl.gz"]


async def ask(url: str, texts: str) -> None:
    """One request for each letter, once it can be served."""
    client = HttpClient()
    while (await client.fetch("GET", f"{url}/readyz", [], b"")).status != 200:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.05)
    for text in texts:
        body = json.dumps(chat(text)).encode()
        assert (await client.fetch("POST", f"{url}/v1/chat/completions", JSON, body)).status == 200
    await client.close()


async def test_a_directory_that_cannot_be_written(stage: Stage, tmp_path: Path) -> None:
    """One sentence, exit code 2."""
    (tmp_path / "file").write_text("")
    settings = {"nats_url": stage.nats.url, "port": 0, "capture": "requests", "capture_directory": tmp_path / "file"}
    async with python_process(
        "services.ingress", *settings_arguments(settings), directory=tmp_path, name="ingress"
    ) as process:
        assert await process.wait(20) == 2
        assert "capture_directory: cannot open" in process.stderr
        assert "Traceback" not in process.stderr

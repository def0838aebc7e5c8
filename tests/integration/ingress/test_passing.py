"""Embeddings, tokenizers and unknown APIs through the front door, to engines that remember what they were sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.ingress.replies import REASON_HEADER
from tests.integration.ingress.support import JSON, MODEL, Door, Stage, running_stage
from web.client import Timeouts
from web.server import Request, Responder

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with running_stage(tmp_path_factory.mktemp("passing")) as stage:
        yield stage


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def door(stage: Stage) -> AsyncIterator[Door]:
    async with stage.door(tokenize="none") as door:
        yield door


def seen(stage: Stage) -> list[Request]:
    found = [request for engine in stage.engines.values() for request in engine.seen]
    for engine in stage.engines.values():
        engine.seen.clear()
    return found


async def test_embeddings_go_as_they_came_and_have_a_row_with_their_usage(stage: Stage, door: Door) -> None:
    async def embed(request: Request, responder: Responder) -> None:
        responder.send(200, JSON, b'{"data":[{"embedding":[0.5]}],"usage":{"prompt_tokens":7,"total_tokens":7}}')

    for engine in stage.engines.values():
        engine.script = embed
    body = b'{ "input" : ["a","b"], "model":"%b" , "x":1e5}' % MODEL.encode()
    answer = await door.post(body, "/v1/embeddings", x_request_id="embed", x_tidegate_session_id="s")
    assert (answer.status, answer.body[:8]) == (200, b'{"data":')
    (request,) = seen(stage)
    assert (request.method, request.path, request.body) == ("POST", "/v1/embeddings", body)
    row = await stage.rows.by_x_request_id("embed")
    assert (row.endpoint, row.kind, row.outcome, row.status) == ("embeddings", "passthrough", "completed", 200)
    assert (row.input_tokens, row.output_tokens, row.usage_estimated) == (7, 0, None)
    assert not row.replayable


async def test_any_api_with_any_method_query_and_body(stage: Stage, door: Door) -> None:
    async def echo(request: Request, responder: Responder) -> None:
        responder.send(201, [(b"content-type", b"application/octet-stream")], request.body[::-1])

    for engine in stage.engines.values():
        engine.script = echo
    binary = bytes(range(256)) * 50
    for method, target, body in (
        ("POST", f"/v1/audio/transcriptions?model={MODEL}", binary),
        ("DELETE", "/v1/responses/resp_1", b""),
        ("PUT", "/v1/some/thing.new", binary),
        ("HEAD", "/v1/responses/resp_1", b""),
    ):
        headers = [(b"content-type", b"audio/wav"), (b"x-request-id", target.encode())]
        answer = await door.client.fetch(method, door.url + target, headers, body, Timeouts(total_s=30))
        assert (answer.status, answer.body) == (201, body[::-1])
        (request,) = seen(stage)
        assert (request.method, request.target, request.body) == (method, target, body)
        assert request.header("content-type") == b"audio/wav"
        row = await stage.rows.by_x_request_id(target) if method != "HEAD" else None
        assert row is None or (row.endpoint, row.outcome, row.attempts) == ("passthrough", "completed", 1)


async def test_streams_of_unknown_apis_are_passed_on_in_pieces(stage: Stage, door: Door) -> None:
    go_on = asyncio.Event()

    async def stream(request: Request, responder: Responder) -> None:
        responder.start(200, [(b"content-type", b"text/event-stream")])
        responder.write(b"data: one\n\n")
        await asyncio.wait_for(go_on.wait(), 30)
        responder.write(b"data: two\n\n")
        responder.finish()

    for engine in stage.engines.values():
        engine.script = stream
    answer = await door.stream({"model": MODEL, "stream": True}, "/v1/audio/speech", x_request_id="speech")
    try:
        assert await answer.read() == b"data: one\n\n"
        go_on.set()
        assert await answer.read() == b"data: two\n\n"
        assert await answer.read() == b""
    finally:
        answer.close()
    assert (await stage.rows.by_x_request_id("speech")).outcome == "completed"


async def test_what_is_refused_reaches_no_engine(stage: Stage, door: Door) -> None:
    seen(stage)
    for method, target, body, status, reason in (
        ("POST", "/v1/load_lora_adapter", b"{}", 404, b"unknown_url"),
        ("POST", "/v1/../reset_prefix_cache", b"{}", 404, b"unknown_url"),
        ("GET", "/v1/embeddings", b"", 405, b"method_not_allowed"),
        ("TRACE", "/v1/rerank", b"", 405, b"method_not_allowed"),
        ("POST", "/v1/rerank", b'{"model":"none"}', 404, b"model_not_found"),
        ("POST", "/v1/rerank", b'{"model":', 400, b"bad_json"),
    ):
        answer = await door.client.fetch(method, door.url + target, JSON, body, Timeouts(total_s=30))
        assert (answer.status, answer.header(REASON_HEADER.decode())) == (status, reason), target
    assert seen(stage) == []
    asked = await door.client.fetch("OPTIONS", door.url + "/v1/rerank", [], b"", Timeouts(total_s=30))
    assert (asked.status, asked.header("allow")) == (204, b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS")


async def test_passing_on_can_be_switched_off(stage: Stage) -> None:
    async with stage.door(tokenize="none", passthrough=False) as door:
        for path in ("/v1/embeddings", "/tokenize", "/v1/rerank"):
            assert (await door.post({"model": MODEL}, path)).status == 404

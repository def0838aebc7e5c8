"""Messages, count_tokens and Responses through the front door: engines, bridge and admission being real, clients the
official ones."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from bus import subjects
from bus.interface import BusMessage
from services.ingress.replies import REASON_HEADER
from tests.integration.ingress.support import (
    ASSETS,
    JSON,
    MODEL,
    Door,
    Stage,
    System,
    running_bridged,
    until,
)
from web.errors import ConnectionLostError
from web.server import Request, Responder

pytestmark = pytest.mark.asyncio(loop_scope="session")

HARNESS = Path(__file__).parents[2] / "fixtures" / "harness" / "requests.jsonl.gz"
PATHS = {
    "chat_completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
LAST_EVENTS = {
    "chat_completions": b"data: [DONE]",
    "completions": b"data: [DONE]",
    "responses": b"event: response.completed",
    "messages": b"event: message_stop",
}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
LONG = "Look around in the house. " * 300


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    async with running_bridged(tmp_path_factory.mktemp("apis")) as system:
        yield system


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def door(house: System) -> AsyncIterator[Door]:
    async with house.door(tokenizers={MODEL: str(ASSETS)}, tokenize="local") as door:
        heard: set[str] = set()
        states = f"{subjects.ROOT}.worker.state.*"
        subscription = await house.bus.subscribe(states, lambda message: heard.add(message.subject))
        await until(lambda: len(heard) == 2)
        await subscription.unsubscribe()
        yield door


class Talk:
    """One session in one API, as its official client talks; `say` streams one turn and keeps it."""

    def __init__(self, api: str, url: str) -> None:
        self.api = api
        self._items: list[Any] = []
        self._call_id = ""
        self._openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)
        self._anthropic = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=20)

    async def close(self) -> None:
        await self._openai.close()
        await self._anthropic.close()

    async def say(self, text: str, request_id: str, tool: str | None = None, *, whole: bool = False) -> None:
        """A user's words, or a tool's where the model called one before."""
        session = {"x-tidegate-session-id": f"talk-{self.api}", "x-request-id": request_id}
        options: dict[str, Any] = {"model": MODEL, "extra_headers": session, "extra_body": {"sim_tool": tool}}
        if self.api == "messages":
            await self._message(text, options, whole)
        else:
            await self._response(text, options, whole)

    async def _message(self, text: str, options: dict[str, Any], whole: bool) -> None:
        result = {"type": "tool_result", "tool_use_id": self._call_id, "content": text}
        self._items.append({"role": "user", "content": [result] if self._call_id else text})
        asked = {
            "max_tokens": 200,
            "system": [{"type": "text", "text": "You are careful."}, {"type": "text", "text": "Be brief."}],
            "tools": [{"name": "bash", "description": "Runs it.", "input_schema": SCHEMA}],
            "messages": self._items,
            **options,
        }
        if whole:
            answer = await self._anthropic.messages.create(**asked)
        else:
            async with self._anthropic.messages.stream(**asked) as stream:
                answer = await stream.get_final_message()
        self._items.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
        self._call_id = next((block.id for block in answer.content if block.type == "tool_use"), "")

    async def _response(self, text: str, options: dict[str, Any], whole: bool) -> None:
        output = {"type": "function_call_output", "call_id": self._call_id, "output": text}
        self._items.append(output if self._call_id else {"role": "user", "content": text})
        asked = {
            "instructions": "You are careful.",
            "tools": [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}],
            "input": self._items,
            **options,
        }
        if whole:
            answer = await self._openai.responses.create(**asked)
        else:
            async with self._openai.responses.stream(**asked) as stream:
                answer = await stream.get_final_response()
        self._items += [item.model_dump(exclude_none=True) for item in answer.output]
        self._call_id = next((item.call_id for item in answer.output if item.type == "function_call"), "")


@pytest.mark.parametrize("api", ["messages", "responses"])
async def test_a_session_with_tools(house: System, door: Door, api: str) -> None:
    """Four turns, the last not streamed: what the decision expects to be cached is what the engine reports, to the
    token, from the second turn on; rows have the API, usage, tools and how it ended in everybody's words."""
    states: list[BusMessage] = []
    heard = await house.bus.subscribe(f"{subjects.ROOT}.worker.state.*", states.append)
    talk = Talk(api, door.url)
    rows = []
    for turn, (tool, whole) in enumerate(((None, False), ("bash", False), (None, False), (None, True))):
        await talk.say(f"{LONG} {turn}", f"{api}-{turn}", tool, whole=whole)
        rows.append(await house.rows.by_x_request_id(f"{api}-{turn}"))
        enough = len(states) + 5  # each worker's state twice: the blocks of this turn were said before them
        await until(lambda: len(states) >= enough)  # noqa: B023 - awaited here
    await talk.close()
    await heard.unsubscribe()
    assert {(row.outcome, row.status, row.endpoint, row.kind) for row in rows} == {("completed", 200, api, "turn")}
    assert [row.stream for row in rows] == [True, True, True, False]
    assert len({row.worker.worker for row in rows if row.worker}) == 1
    assert all(row.usage_estimated is None and row.replayable for row in rows)
    computed = 0
    for row in rows:
        assert row.cached_tokens == computed // 16 * 16 or not computed  # the first finds another session's tools
        assert (row.predicted_cached_tokens or 0) == row.cached_tokens
        computed = (row.input_tokens or 0) + (row.output_tokens or 0) - 1
    finishes = [row.finish_reason_metadata for row in rows]
    assert [one.finish_reason for one in finishes if one] == ["stop", "tool_calls", "stop", "stop"]
    assert [[call.name for call in one.tool_calls] for one in finishes if one] == [[], ["bash"], [], []]


def asked(api: str, text: str = "", **members: Any) -> dict[str, Any]:
    """A request that begins with ``text`` and is long enough for its session to stay where it is."""
    body: dict[str, Any] = {"model": MODEL, "stream": True, **members}
    if api == "responses":
        return body | {"input": text + LONG, "max_output_tokens": 32}
    if api == "completions":
        return body | {"prompt": text + LONG, "max_tokens": 32}
    return body | {"messages": [{"role": "user", "content": text + LONG}], "max_tokens": 32}


def in_band(api: str, event: bytes) -> str:
    """The code of an error event, whose shape is that of its API."""
    if api in ("messages", "responses"):
        kind, _, event = event.partition(b"\n")
        assert kind == b"event: error"
    assert event.startswith(b"data: ")
    error = json.loads(event[6:])
    if api == "responses":
        assert error.keys() >= {"type", "code", "message", "param"}
        assert error["type"] == "error"
        return str(error["code"])
    if api == "messages":
        assert error["type"] == "error"
        assert error["error"].keys() >= {"type", "message"}
        return str(error["error"]["type"])
    assert error.keys() == {"error"}
    assert error["error"].keys() >= {"type", "code", "message"}
    return str(error["error"]["code"])


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("api", PATHS)
async def test_an_engine_that_dies(house: System, door: Door, api: str, after: int) -> None:
    """C2: before its first byte another engine answers; after it the stream ends with an error event of its API, the
    client is cut, and the row says `upstream_lost` with what had come by then. The session's next turn is placed anew,
    on an engine that lives."""
    name = f"dies-{api}-{after}"
    body = asked(api, name, stream=False)
    first = await door.post(body, path=PATHS[api], x_tidegate_session_id=name, x_request_id=name)
    assert first.status == 200, first.body
    row = await house.rows.by_x_request_id(name)
    assert row.worker is not None
    engine = house.engines[row.worker.worker]
    await engine.misbehave(die_after_chunks=after)
    stream = await door.stream(
        asked(api, name), path=PATHS[api], x_tidegate_session_id=name, x_request_id=f"{name}-again"
    )
    pieces: list[bytes] = []
    if after:
        with pytest.raises(ConnectionLostError):
            await stream.pipe(pieces.append)
    else:
        await stream.pipe(pieces.append)
    events = b"".join(pieces).split(b"\n\n")[:-1]
    row = await house.rows.by_x_request_id(f"{name}-again")
    if after:
        assert len(events) == after + 1
        assert in_band(api, events[-1]) == ("api_error" if api == "messages" else "connection_lost")
        if api == "responses":
            numbers = [json.loads(event.partition(b"data: ")[2])["sequence_number"] for event in events]
            assert numbers == list(range(after + 1))
        assert (row.outcome, row.reason, row.usage_estimated) == ("upstream_lost", "connection_lost", True)
        assert (row.attempts, row.endpoint) == (1, api)
        assert (row.output_tokens or 0) >= after - 1
    else:
        assert (row.outcome, row.attempts) == ("completed", 2)
        assert events[-1].startswith(LAST_EVENTS[api])
    await engine.misbehave(die_after_chunks=0, die_requests=-1)
    answer = await door.post(asked(api, name), path=PATHS[api], x_tidegate_session_id=name, x_request_id=f"{name}-next")
    await engine.behave()
    assert answer.body.split(b"\n\n")[-2].startswith(LAST_EVENTS[api])
    row = await house.rows.by_x_request_id(f"{name}-next")
    assert row.outcome == "completed"
    assert row.worker is not None
    assert row.worker.worker != engine.worker
    await until(lambda: door.service.in_flight == 0)


@pytest.mark.parametrize("api", ["messages", "responses"])
async def test_a_client_that_leaves_in_its_stream(house: System, door: Door, api: str) -> None:
    """The engine stops, and the row says who went."""
    for engine in house.engines.values():
        await engine.misbehave(stall="stream", stall_after_chunks=4, stall_requests=1)
    name = f"leaves-{api}"
    stream = await door.stream(asked(api), path=PATHS[api], x_request_id=name)
    assert await stream.read()
    stream.close()
    row = await house.rows.by_x_request_id(name)
    for engine in house.engines.values():
        await engine.behave()
    assert (row.outcome, row.reason, row.endpoint) == ("client_disconnect", "client_gone", api)
    await until(lambda: door.service.in_flight == 0)


@pytest.mark.parametrize("api", ["messages", "responses"])
async def test_errors_are_in_the_shape_of_their_api(house: System, door: Door, api: str) -> None:
    """Ours and the engine's, which passes as it came; the engine's leaves a row, a request that is none does not."""
    text = await door.post(b"{", path=PATHS[api])
    model = await door.post(asked(api) | {"model": "other"}, path=PATHS[api])
    for answer, status in ((text, 400), (model, 404)):
        error = json.loads(answer.body)
        assert answer.status == status
        assert ("code" in error["error"], error.get("type")) == (
            (False, "error") if api == "messages" else (True, None)
        )
    long = asked(api, stream=False) | {"max_tokens": 10_000_000, "max_output_tokens": 10_000_000}
    answer = await door.post(long, path=PATHS[api], x_request_id=f"long-{api}")
    assert answer.status == 400
    assert "is too large" in json.loads(answer.body)["error"]["message"]
    row = await house.rows.by_x_request_id(f"long-{api}")
    assert (row.outcome, row.reason, row.status) == ("client_error", "engine_status", 400)
    if api == "responses":  # what the engine does not find is not an API that it does not serve
        answer = await door.post(asked(api, previous_response_id="resp_0"), path=PATHS[api], x_request_id="earlier")
        assert (answer.status, answer.header(REASON_HEADER.decode())) == (404, None)
        assert "resp_0" in json.loads(answer.body)["error"]["message"]
        row = await house.rows.by_x_request_id("earlier")
        assert (row.outcome, row.status, row.replayable, row.replay) == ("client_error", 404, False, None)


async def test_token_counts_are_the_engines(house: System, door: Door) -> None:
    """C6: 25 at once; as many tokens as the same messages have, no grant, one row each."""
    body = asked("messages", system="Be brief.")
    del body["stream"], body["max_tokens"]
    path = "/v1/messages/count_tokens"
    answers = await asyncio.gather(
        *(door.post(body, path=path, x_tidegate_session_id="counts", x_request_id=f"count-{n}") for n in range(25))
    )
    (counted,) = {json.loads(answer.body)["input_tokens"] for answer in answers}
    message = await door.post(body | {"max_tokens": 3}, path="/v1/messages", x_tidegate_session_id="counts")
    usage = json.loads(message.body)["usage"]
    assert counted == sum(usage[f"{kind}input_tokens"] for kind in ("", "cache_read_", "cache_creation_"))
    for number in range(25):
        row = await house.rows.by_x_request_id(f"count-{number}")
        assert (row.outcome, row.kind, row.input_tokens, row.output_tokens) == ("completed", "count_tokens", counted, 0)
        assert (row.grant_id, row.decision_mode, row.hold_ms) == (None, None, None)


async def no_such_path(request: Request, responder: Responder) -> None:
    responder.send(404, JSON, b'{"detail":"Not Found"}')


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
async def test_an_engine_without_the_api(stage: Stage, path: str) -> None:
    """501 in the API's own shape, naming the engine; the other engine was asked first; tokens may have been counted by
    ourselves, and then they are the answer."""
    for engine in stage.engines.values():
        engine.script = no_such_path
    body = asked("responses" if "responses" in path else "messages", stream=False)
    async with stage.door(admit_idle_s=0.05, tokenize="none") as door:
        answer = await door.post(body, path=path)
        error = json.loads(answer.body)["error"]
        assert (answer.status, answer.header(REASON_HEADER.decode())) == (501, b"api_not_served")
        assert "does not serve" in error["message"]
        row = await stage.rows.one((answer.header("x-request-id") or b"").decode())
        assert (row.outcome, row.reason, row.status, row.attempts) == ("client_error", "api_not_served", 501, 2)
        assert row.worker is not None
        assert row.worker.worker in error["message"]
    async with stage.door(tokenizers={MODEL: str(ASSETS)}, tokenize="local", admit_idle_s=0.05) as door:
        answer = await door.post(body, path=path)
        if path.endswith("count_tokens"):
            assert answer.status == 200
            row = await stage.rows.one((answer.header("x-request-id") or b"").decode())
            assert (row.outcome, row.attempts, row.usage_estimated) == ("completed", 1, True)
            assert json.loads(answer.body) == {"input_tokens": row.input_tokens}
        else:
            assert answer.status == 501


async def test_what_an_engine_does_not_find_passes(stage: Stage) -> None:
    """A 404 about the request, of any length, is the client's as it came."""

    async def no_such_model(request: Request, responder: Responder) -> None:
        body = b'{"type":"error","error":{"type":"not_found_error","message":"no adapter x' + b"!" * 200_000 + b'"}}'
        responder.send(404, JSON, body)

    for engine in stage.engines.values():
        engine.script = no_such_model
    async with stage.door(admit_idle_s=0.05) as door:
        answer = await door.post(asked("messages", stream=False), path="/v1/messages")
        assert (answer.status, len(answer.body) > 200_000) == (404, True)
        row = await stage.rows.one((answer.header("x-request-id") or b"").decode())
        assert (row.outcome, row.reason, row.attempts) == ("client_error", "engine_status", 1)


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/responses", b"response.completed"),
        ("/v1/messages", b"message_stop"),
        ("/v1/chat/completions", b"[DONE]"),
    ],
)
async def test_clients_leave_at_the_last_event(stage: Stage, path: str, last: bytes) -> None:
    """Codex does not wait for the end of the connection, which engines may say late (harness.md §3): a completed
    turn."""

    async def say_all_and_stay(request: Request, responder: Responder) -> None:
        responder.start(200, SSE)
        responder.write(ANSWERS[path])
        await responder.gone.wait()

    for engine in stage.engines.values():
        engine.script = say_all_and_stay
    async with stage.door(admit_idle_s=0.05) as door:
        stream = await door.stream(asked(path.removeprefix("/v1/")), path=path, x_request_id=f"leaves{path}")
        assert last in await stream.read()
        stream.close()
        row = await stage.rows.by_x_request_id(f"leaves{path}")
        assert (row.outcome, row.status, row.input_tokens, row.output_tokens) == ("completed", 200, 5, 2)
        await until(lambda: sum(engine.gone for engine in stage.engines.values()) == 1)


SSE = [(b"content-type", b"text/event-stream")]
ANSWERS = {
    "/v1/chat/completions": (
        b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'
        b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
    ),
    "/v1/responses": (
        b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r","status":"completed",'
        b'"usage":{"input_tokens":5,"output_tokens":2,"input_tokens_details":{"cached_tokens":1}}}}\n\n'
    ),
    "/v1/messages": (
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","usage":{"input_tokens":4,'
        b'"output_tokens":0,"cache_read_input_tokens":1}}}\n\n'
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":'
        b'{"input_tokens":4,"output_tokens":2,"cache_read_input_tokens":1}}\n\n'
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    ),
}
WHOLE = {
    "/v1/chat/completions": b'{"choices":[{"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":2}}',
    "/v1/responses": b'{"id":"r","status":"completed","usage":{"input_tokens":5,"output_tokens":2}}',
    "/v1/messages/count_tokens": b'{"input_tokens":5}',
}


async def answer_any(request: Request, responder: Responder) -> None:
    if json.loads(request.body).get("stream"):
        responder.send(200, SSE, ANSWERS[request.path])
    else:
        responder.send(200, JSON, WHOLE[request.path])


async def test_every_recorded_request_of_harnesses_has_its_row(stage: Stage) -> None:
    """What twelve harnesses sent, in every API: all of it is accepted, and there are as many rows as requests, each
    with its API, its tokens and its end."""
    for engine in stage.engines.values():
        engine.script = answer_any
    with gzip.open(HARNESS, "rt") as lines:
        requests = [json.loads(line) for line in lines]
    places = asyncio.Semaphore(16)

    async def send(door: Door, number: int, recorded: dict[str, Any]) -> int:
        headers = {name.lower(): value for name, value in recorded["headers"]} | {"x-request-id": f"harness-{number}"}
        async with places:
            answer = await door.post(recorded["body"] | {"model": MODEL}, path=recorded["path"], **headers)
        return answer.status

    async with stage.door(admit_idle_s=0.05, tokenize="none") as door:
        statuses = await asyncio.gather(*(send(door, number, one) for number, one in enumerate(requests)))
    assert (len(requests), set(statuses)) == (326, {200})
    names = [f"harness-{number}" for number in range(len(requests))]
    await until(lambda: len(stage.rows.named(names)) >= len(names))
    rows = {row.x_request_id: row for row in stage.rows.named(names)}
    assert len(stage.rows.named(names)) == len(rows) == 326
    for name, recorded in zip(names, requests, strict=True):
        row = rows[name]
        path = recorded["path"].partition("?")[0]
        counts = path.endswith("count_tokens")
        assert row.endpoint == {"/v1/chat/completions": "chat_completions"}.get(path, path.rpartition("/")[2])
        assert (row.outcome, row.input_tokens, row.output_tokens) == ("completed", 5, 0 if counts else 2)
        assert (row.kind == "count_tokens") is counts
        finish = row.finish_reason_metadata
        assert (finish.finish_reason if finish else None) == (None if counts else "stop")


@pytest.mark.parametrize("api", ["openai", "anthropic"])
async def test_official_clients_do_not_ask_an_engine_without_the_api_again(stage: Stage, api: str) -> None:
    """They send every 5xx again, unless they are told that it is of no use: one request, its engines tried once each,
    and the client's own exception with the reason."""
    for engine in stage.engines.values():
        engine.script = no_such_path
    async with stage.door(admit_idle_s=0.05, tokenize="none") as door:
        if api == "openai":
            async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="none", max_retries=2) as chat:
                with pytest.raises(openai.InternalServerError) as refused:
                    await chat.responses.create(model=MODEL, input="x")
            assert (refused.value.status_code, refused.value.code) == (501, "api_not_served")
        else:
            async with anthropic.AsyncAnthropic(base_url=door.url, api_key="none", max_retries=2) as claude:
                with pytest.raises(anthropic.InternalServerError, match="does not serve /v1/messages") as failed:
                    await claude.messages.create(model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "x"}])
            assert failed.value.status_code == 501
    assert sorted(len(engine.seen) for engine in stage.engines.values()) == [1, 1]

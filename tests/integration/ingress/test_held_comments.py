"""Comments to held streams over real sockets, read by the official clients; admission's part is played by the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import openai
import pytest

from bus import subjects
from bus.interface import BusMessage
from schemas.admit import AdmitCancel, AdmitReply, AdmitRequest, Refused
from schemas.base import from_msgpack, to_msgpack
from services.ingress.replies import error_event
from services.ingress.shell.serving import STREAM_HEAD
from tests.integration.ingress.support import JSON, MODEL, Door, Stage, chat, until
from tests.integration.ingress.test_asking import grant, held
from web.client import AnswerStream
from web.server import HttpServer, Request, Responder

pytestmark = pytest.mark.asyncio(loop_scope="session")

SETTINGS = {"held_comment_s": 0.1, "admit_idle_s": 10.0}
"""Comments go out with the tick, once a second: one comes within the first."""

CHUNK = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


async def stream_ok(request: Request, responder: Responder) -> None:
    """Two tokens and the last word."""
    responder.start(200, [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-engine", b"yes")])
    for text, finish in (("Hello", None), (" there", "stop")):
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
        responder.write(b"data: " + json.dumps({**CHUNK, "choices": [choice]}).encode() + b"\n\n")
    responder.write(b"data: " + json.dumps({**CHUNK, "choices": [], "usage": USAGE}).encode() + b"\n\n")
    responder.write(b"data: [DONE]\n\n")
    responder.finish()


class Leader:
    """Holds every question until it is told how to answer. ``cancels``: what it was told to forget."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._decided = asyncio.Event()
        self._answer: AdmitReply | None = None
        self.asked: list[AdmitRequest] = []
        self.cancels: list[AdmitCancel] = []

    def grant(self) -> None:
        """The first worker that the question does not exclude."""
        self._decided.set()

    def refuse(self, question: AdmitRequest) -> None:
        self._answer = Refused(
            request_id=question.request_id, epoch=3, reason="queue_full", status=429, retry_after_s=7
        )
        self._decided.set()

    def on_cancel(self, message: BusMessage) -> None:
        self.cancels.append(from_msgpack(message.payload, AdmitCancel))

    def on_question(self, message: BusMessage) -> None:
        self.asked.append(from_msgpack(message.payload, AdmitRequest))
        self._tasks.create_task(self._reply(message.reply, self.asked[-1]))

    async def _reply(self, subject: str, question: AdmitRequest) -> None:
        while not self._decided.is_set():
            self._stage.bus.publish(subject, to_msgpack(held(question)))
            with_timeout = asyncio.wait_for(self._decided.wait(), 0.2)
            await asyncio.gather(with_timeout, return_exceptions=True)
        worker = next(name for name in sorted(self._stage.engines) if name not in question.excluded)
        answer = self._answer or grant(self._stage, question, worker)
        self._stage.bus.publish(subject, to_msgpack(answer))

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[Leader]:
        bus = self._stage.bus
        questions = await bus.subscribe(f"{subjects.ROOT}.admit.*", self.on_question)
        cancels = await bus.subscribe(f"{subjects.ROOT}.admit.cancel.*", self.on_cancel)
        await bus.flush()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                yield self
                self._decided.set()
        finally:
            await questions.unsubscribe()
            await cancels.unsubscribe()


async def first_comment(stream: AnswerStream) -> bytes:
    async with asyncio.timeout(30):
        return await stream.read()


async def rest_of(stream: AnswerStream) -> bytes:
    pieces = []
    while piece := await stream.read():
        pieces.append(piece)
    return b"".join(pieces)


async def test_a_held_stream_begins_with_comments_and_goes_on_with_its_engines_bytes(stage: Stage) -> None:
    """Head and comment while it is held; then every byte of the engine's answer; the row knows the first token, the
    hold and the engine's end as ever, and comments are counted."""
    stage.engines["worker-0"].script = stream_ok
    async with stage.door(**SETTINGS) as door, Leader(stage).leading() as leader:
        stream = await door.stream(chat(stream=True, stream_options={"include_usage": True}))
        assert stream.status == 200
        head = {name.lower(): value for name, value in stream.headers}
        assert head[b"content-type"] == b"text/event-stream; charset=utf-8"
        assert (head[b"cache-control"], head[b"x-accel-buffering"]) == (b"no-cache", b"no")
        comment = await first_comment(stream)
        assert comment.startswith(b": held ")
        assert comment.endswith(b" s, no_room\n\n")
        assert not stage.engines["worker-0"].seen
        leader.grant()
        text = await rest_of(stream)
        row = await stage.rows.one(head[b"x-request-id"].decode())
        page = (await door.get("/metrics")).body
    assert text.endswith(b"\n\n")
    events = [line for line in text.split(b"\n\n") if line and not line.startswith(b":")]
    assert [event[:5] for event in events] == [b"data:"] * 4
    assert events[-1] == b"data: [DONE]"
    assert (row.outcome, row.status, row.output_tokens, row.hold_reason) == ("completed", 200, 2, "no_room")
    assert row.ttft_ms is not None
    assert row.admission_wait_ms is not None
    assert row.ttft_ms >= row.admission_wait_ms > 100
    told = (comment + text).count(b"\n\n") - len(events)
    assert b"tidegate_ingress_held_comments_total %d.0" % told in page


async def openai_chunks(door: Door, text: str = "hello") -> list[str]:
    client = openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="none", max_retries=0, timeout=20)
    try:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], stream=True
        )
        return [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
    finally:
        await client.close()


async def until_told(door: Door) -> None:
    """Until one comment has gone out."""
    async with asyncio.timeout(30):
        while b"tidegate_ingress_held_comments_total 0.0" in (await door.get("/metrics")).body:  # noqa: ASYNC110 - ours
            await asyncio.sleep(0.05)


async def test_the_openai_client_skips_comments(stage: Stage) -> None:
    """Its chunks are the engine's, and no others."""
    stage.engines["worker-0"].script = stream_ok
    async with stage.door(**SETTINGS) as door, Leader(stage).leading() as leader:
        reading = asyncio.create_task(openai_chunks(door))
        await until_told(door)
        leader.grant()
        assert await reading == ["Hello", " there"]


async def test_a_refusal_in_the_stream_is_an_error_to_the_openai_client(stage: Stage) -> None:
    """Status and Retry-After cannot be sent any more; reason and words are."""
    async with stage.door(**SETTINGS) as door, Leader(stage).leading() as leader:
        reading = asyncio.create_task(openai_chunks(door))
        await until_told(door)
        leader.refuse(leader.asked[0])
        with pytest.raises(openai.APIError, match=r"Try again in 7 s\.") as caught:
            await reading
    assert (caught.value.code, caught.value.type) == ("queue_full", "rate_limit_error")
    assert not leader.cancels


async def test_an_engines_refusal_keeps_its_words(stage: Stage) -> None:
    """The engine answers 400 to a stream that has begun: its message comes in the stream, its status in the row."""

    async def too_long(request: Request, responder: Responder) -> None:
        body = {
            "error": {"message": "This model's maximum context length is 9", "type": "BadRequestError", "code": 400}
        }
        responder.send(400, JSON, json.dumps(body).encode())

    stage.engines["worker-0"].script = too_long
    async with stage.door(**SETTINGS) as door, Leader(stage).leading() as leader:
        reading = asyncio.create_task(openai_chunks(door))
        await until_told(door)
        leader.grant()
        with pytest.raises(openai.APIError, match="maximum context length is 9"):
            await reading
        row = await stage.rows.one(leader.asked[0].request_id)
    assert (row.outcome, row.status, row.reason) == ("client_error", 400, "engine_status")


async def test_an_engine_that_dies_before_its_first_byte_is_replaced(stage: Stage) -> None:
    """The client has seen comments only: the other worker's answer follows them."""

    async def die(request: Request, responder: Responder) -> None:
        responder.abort()

    stage.engines["worker-0"].script = die
    stage.engines["worker-1"].script = stream_ok
    async with stage.door(**SETTINGS) as door, Leader(stage).leading() as leader:
        reading = asyncio.create_task(openai_chunks(door))
        await until_told(door)
        leader.grant()
        assert await reading == ["Hello", " there"]
        row = await stage.rows.one(leader.asked[0].request_id)
    assert [question.excluded for question in leader.asked] == [(), ("worker-0",)]
    assert (row.outcome, row.attempts) == ("completed", 2)


async def test_a_client_that_leaves_its_held_stream_frees_the_hold_once(stage: Stage) -> None:
    """After a comment as before one: one cancel, one row, no engine asked."""
    async with stage.door(**SETTINGS) as door, Leader(stage).leading() as leader:
        stream = await door.stream(chat(stream=True))
        await first_comment(stream)
        stream.close()
        await until(lambda: bool(leader.cancels))
        row = await stage.rows.one(leader.asked[0].request_id)
        await until(lambda: door.service.in_flight == 0)
    assert [(cancel.request_id, cancel.reason) for cancel in leader.cancels] == [
        (leader.asked[0].request_id, "client_disconnect")
    ]
    assert (row.outcome, row.ttft_ms) == ("client_disconnect", None)
    assert not any(engine.seen for engine in stage.engines.values())


async def test_an_answer_that_is_no_stream_waits_in_silence(stage: Stage) -> None:
    """Status and headers stay the engine's."""
    async with stage.door(**SETTINGS) as door, Leader(stage).leading() as leader:
        posting = asyncio.create_task(door.post(chat()))
        await until(lambda: bool(leader.asked))
        await asyncio.wait((posting,), timeout=1.5)
        assert not posting.done()
        assert b"held_comments_total 0.0" in (await door.get("/metrics")).body
        leader.refuse(leader.asked[0])
        answer = await posting
    assert (answer.status, answer.header("retry-after")) == (429, b"7")


def anthropic_events(*events: dict[str, object]) -> bytes:
    lines = (f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    return "".join(lines).encode()


ANTHROPIC = anthropic_events(
    {
        "type": "message_start",
        "message": {
            "id": "m",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": "m",
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 3, "output_tokens": 1},
        },
    },
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {"output_tokens": 2},
    },
    {"type": "message_stop"},
)


@asynccontextmanager
async def anthropic_client(last: bytes) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Before a server that says what a held Messages stream would begin with (the front door does not serve that API
    yet), and ``last``."""

    async def serve(request: Request, responder: Responder) -> None:
        responder.start(200, list(STREAM_HEAD))
        responder.write(b": held 15 s, policy\n\n")
        responder.write(b": waiting for the engine\n\n")
        responder.write(last)
        responder.finish()

    server = HttpServer(serve)
    await server.start("127.0.0.1", 0)
    client = anthropic.AsyncAnthropic(
        base_url=f"http://127.0.0.1:{server.port}", api_key="none", max_retries=0, timeout=20
    )
    try:
        yield client
    finally:
        await client.close()
        await server.close()


async def test_the_anthropic_client_skips_comments_and_reads_errors_after_them() -> None:
    """Comments before the first event, in the stream's own shape."""
    messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hello"}]
    async with (
        anthropic_client(ANTHROPIC) as client,
        client.messages.stream(model=MODEL, max_tokens=8, messages=messages) as stream,
    ):
        assert await stream.get_final_text() == "Hello"
    async with anthropic_client(error_event("messages", 429, "queue_full", "No room.")) as client:
        with pytest.raises(anthropic.APIError, match="No room"):
            async with client.messages.stream(model=MODEL, max_tokens=8, messages=messages) as stream:
                await stream.get_final_text()

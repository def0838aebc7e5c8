"""One request for an answer, of any API, from its bytes to its last event, and every stage at which it can go wrong."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

from load.engine import api
from load.engine.api import ApiError, ChatBody, CommonBody, CompletionBody
from load.engine.block_hash import ExtraKeys
from load.engine.embeddings import EmbeddingsBody, embeddings_answer, inputs_of
from load.engine.engine import Engine
from load.engine.errors import EngineError
from load.engine.hints import read_envelope
from load.engine.messages_api import CountTokensBody, MessagesBody, MessageStream, whole_message
from load.engine.misbehave import Stage
from load.engine.outputs import OutputLimits, PlannedOutput, ToolCall, invent_arguments, wanted_call
from load.engine.rank import Ticket
from load.engine.requests import EngineRequest
from load.engine.responses import AnswerHead, AnswerStream, Endpoint, UsageNumbers, whole_answer
from load.engine.responses_api import ResponsesBody, ResponseStream, whole_response
from load.engine.tokens import BadConversationError, arguments_text
from load.engine.tool_pins import job_step_of
from web.server import Headers, Request, Responder

SSE: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
JSON: Headers = [(b"content-type", b"application/json")]


@dataclass(frozen=True, slots=True)
class Job:
    """A request that was read and planned. ``asked``: as the client sent it, ``body``: as chat or completions."""

    head: AnswerHead
    asked: CommonBody
    body: CommonBody
    ticket: Ticket
    plan: PlannedOutput
    headers: Headers
    death: int | None


_BODIES: dict[Endpoint, type[CommonBody]] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "messages": MessagesBody,
    "responses": ResponsesBody,
}
_ID_PREFIXES: dict[Endpoint, str] = {
    "chat": "chatcmpl-",
    "completions": "cmpl-",
    "messages": "chatcmpl-",
    "responses": "resp_",
}
"""vLLM's Messages are chat completions to the last but their shape."""


class Completions:
    """Serves every API over one `Engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def serve(self, endpoint: Endpoint, request: Request, responder: Responder) -> None:
        """Answer one request. Raises `ApiError` for what the client got wrong, before anything was sent."""
        self._fail_if_told()
        job = await self._read(endpoint, request)
        async with self._running(job, responder):
            if job.body.stream:
                await self._stream(job, responder)
            else:
                await self._answer(job, responder)

    async def count(self, request: Request) -> int:
        """Tokens of a Messages prompt; nothing runs for it. Raises `ApiError`."""
        self._fail_if_told()
        asked = api.read_body(request.body, CountTokensBody)
        self._model(asked.model)
        return len(await self._prompt(asked.as_chat()))

    async def embed(self, body: EmbeddingsBody, created: int) -> bytes:
        """The answer of ``/v1/embeddings``; ``created`` in Unix seconds. Raises `ApiError`."""
        self._fail_if_told()
        model, _ = self._model(body.model)
        inputs = inputs_of(body.input)
        prompts = [await self._engine.tokenize(one) if isinstance(one, str) else one for one in inputs]
        return embeddings_answer(prompts, model, created, body)

    def _fail_if_told(self) -> None:
        flags = self._engine.flags
        if flags.take("error_requests"):
            self._engine.ledger.count("refused")
            kind = "InternalServerError" if flags.error_status >= 500 else "BadRequestError"
            raise ApiError("the engine was told to fail", status=flags.error_status, kind=kind)

    # Reading

    async def _read(self, endpoint: Endpoint, request: Request) -> Job:
        asked = api.read_body(request.body, _BODIES[endpoint])
        body = asked.as_chat() if isinstance(asked, CountTokensBody | ResponsesBody) else asked
        api.check_common(body)
        model, adapter = self._model(body.model)
        prompt = await self._prompt(body)
        longest = body.longest_output
        room = api.output_room(len(prompt), longest, self._engine.max_model_len)
        limits = OutputLimits(
            max_tokens=room, min_tokens=body.min_tokens or 0, ignore_eos=body.ignore_eos, asked=longest is not None
        )
        call = self._call(body, prompt, request)
        plan = self._engine.speaker.plan(
            prompt,
            limits,
            seed=body.seed,
            call=call,
            starts_message=endpoint != "completions",
        )
        name = _request_id(body, request)
        rank = self._engine.choose_rank(api.rank_of(request.header, len(self._engine.ranks)))
        core_request = EngineRequest(
            f"{name}-{uuid4().hex[:8]}",
            prompt,
            plan.tokens,
            finish_reason="length" if plan.finish == "length" else "stop",
            priority=api.priority_of(body, request.header),
            extra=ExtraKeys(adapter, body.cache_salt),
            session_id=api.session_of(body, request.header),
            job_step=job_step_of(body.vllm_xargs, None if call is None else call.name),
        )
        return Job(
            AnswerHead(
                endpoint=endpoint,
                answer_id=_ID_PREFIXES[endpoint] + name,
                model=model,
                created=int(time.time()),
                call_id=f"chatcmpl-tool-{core_request.request_id[-8:]}",
            ),
            asked,
            body,
            Ticket(core_request, rank.number, name, self._engine.settings.chunk_tokens),
            plan,
            [(b"x-request-id", name.encode("latin-1", "replace"))],
            self._engine.flags.take_death(),
        )

    def _model(self, asked: str | None) -> tuple[str, str | None]:
        """(name as asked, adapter or ``None``). Raises `ApiError` 404 for a model that is not served."""
        settings = self._engine.settings
        if asked is None or asked == settings.model:
            return settings.model, None
        if asked in settings.adapters:
            return asked, asked
        raise ApiError(f"The model `{asked}` does not exist.", status=404, kind="NotFoundError", param="model")

    async def _prompt(self, body: CommonBody) -> array[int]:
        engine = self._engine
        if isinstance(body, ChatBody):
            if not body.messages:
                raise ApiError("messages must not be empty", param="messages")
            try:
                text = engine.tokenizer.template.render(body.messages, body.tools, body.add_generation_prompt)
            except BadConversationError as error:
                raise ApiError(str(error), param="messages") from error
            return await engine.tokenize(text)
        assert isinstance(body, CompletionBody)
        prompt = api.completion_prompt(body.prompt)
        return await engine.tokenize(prompt) if isinstance(prompt, str) else prompt

    def _call(self, body: CommonBody, prompt: array[int], request: Request) -> ToolCall | None:
        if not isinstance(body, ChatBody) or not body.tools:
            return None
        name, arguments = api.sim_tool_of(body, request.header)
        try:
            function = wanted_call(body.tools, body.tool_choice, name)
        except ValueError as error:
            raise ApiError(str(error), param="tool_choice") from error
        if function is None:
            return None
        if arguments is not None:
            return ToolCall(str(function.get("name")), arguments_text(arguments))
        speaker = self._engine.speaker
        text = invent_arguments(function, speaker.generator(prompt, body.seed), speaker.words)
        return ToolCall(str(function.get("name")), text)

    # Serving

    @asynccontextmanager
    async def _running(self, job: Job, responder: Responder) -> AsyncIterator[None]:
        """The request is in the engine while this holds; it leaves with its client."""
        engine, ticket = self._engine, job.ticket
        try:
            if job.body.kv_hints is not None and engine.settings.kv_hints:
                await engine.take_hints(read_envelope(job.body.kv_hints), ticket.rank)
            await engine.look_into_pool(ticket)
            engine.submit(ticket)
        except EngineError as error:
            raise ApiError(str(error)) from error
        watch = asyncio.get_running_loop().create_task(_leave_with(responder, ticket))
        try:
            yield
        finally:
            watch.cancel()
            engine.close_ticket(ticket, job.plan.finish if ticket.finished else "abort")
            if responder.finished and ticket.finished and not responder.gone.is_set() and job.death is None:
                engine.ledger.serve(ticket.name)
            else:
                engine.ledger.count("lost" if ticket.lost or job.death is not None else "disconnected")
            await asyncio.gather(watch, return_exceptions=True)

    async def _answer(self, job: Job, responder: Responder) -> None:
        await self._stall("head", responder)
        while not job.ticket.over:
            await job.ticket.progress()
        await self._stall("first_token", responder)
        if not job.ticket.finished or job.death is not None:
            responder.abort()
            return
        wants_ids = job.body.return_token_ids
        prompt = job.ticket.request.tokens[: job.ticket.request.prompt_tokens].tolist() if wants_ids else None
        usage = self._usage(job) if self._engine.flags.usage == "normal" else None
        if isinstance(job.asked, ResponsesBody):
            answer = whole_response(job.head, job.asked, job.plan, job.plan.finish, usage)
        elif job.head.endpoint == "messages":
            answer = whole_message(job.head, job.plan, job.plan.finish, usage)
        else:
            answer = whole_answer(job.head, job.plan, job.plan.finish, usage, prompt)
        responder.send(200, [*JSON, *job.headers], answer)

    async def _stream(self, job: Job, responder: Responder) -> None:
        flags, ticket = self._engine.flags, job.ticket
        options = job.body.stream_options
        stream = self._events(job)
        writer = _Writer(responder, job.death, flags.stall_after_chunks if flags.take_stall("stream") else None)
        await self._stall("head", responder)
        if job.death != 0 and flags.take_stall("first_token"):
            responder.start(200, [*SSE, *job.headers])
            await self._hang(responder)
        while True:
            start, end = await ticket.progress()
            if ticket.lost or ticket.gone or job.death == 0:
                responder.abort()
                return
            if not responder.started:
                responder.start(200, [*SSE, *job.headers])
            usage = self._usage(job)
            events = stream.opening(usage) if start == 0 else []
            events += stream.tokens(start, end, job.plan.finish if ticket.finished else None, usage)
            if ticket.finished:
                events += stream.closing(usage, include_usage=options is not None and bool(options.include_usage))
            if writer.careful and await writer.write_some(events, self._hang):
                return
            if not writer.careful:
                responder.write(b"".join(events))
            if ticket.finished:
                responder.finish()
                return
            if responder.congested:
                await responder.drain()

    def _events(self, job: Job) -> AnswerStream | MessageStream | ResponseStream:
        """The stream of the request's API."""
        mode = self._engine.flags.usage
        if isinstance(job.asked, ResponsesBody):
            return ResponseStream(job.head, job.asked, job.plan, usage_mode=mode)
        if job.head.endpoint == "messages":
            return MessageStream(job.head, job.plan, usage_mode=mode)
        options = job.body.stream_options
        return AnswerStream(
            job.head,
            job.plan,
            usage_mode=mode,
            continuous=options is not None and bool(options.continuous_usage_stats),
            token_ids=bool(job.body.return_token_ids),
        )

    def _usage(self, job: Job) -> UsageNumbers:
        request = job.ticket.request
        return UsageNumbers(
            prompt_tokens=request.prompt_tokens,
            completion_tokens=job.ticket.produced,
            cached_tokens=0 if self._engine.flags.cached_zero else job.ticket.cached_tokens,
            created_tokens=None if job.head.endpoint == "completions" else request.created_tokens,
        )

    async def _stall(self, stage: Stage, responder: Responder) -> None:
        if self._engine.flags.take_stall(stage):
            await self._hang(responder)

    async def _hang(self, responder: Responder) -> None:
        """Do nothing for ``stall_s``, or until the client goes or the engine stops."""
        await hang(self._engine, responder)


Hang = Callable[[Responder], Awaitable[None]]


class _Writer:
    """Writes events one by one where the stream is to die or to hang after some of them."""

    def __init__(self, responder: Responder, death: int | None, stall_after: int | None) -> None:
        self._responder = responder
        self._death = death
        self._stall_after = stall_after
        self._written = 0

    @property
    def careful(self) -> bool:
        return self._death is not None or self._stall_after is not None

    async def write_some(self, events: list[bytes], hang: Hang) -> bool:
        """``True`` when the connection was cut."""
        for event in events:
            if self._written == self._death:
                self._responder.break_off()
                return True
            if self._written == self._stall_after:
                self._stall_after = None
                await hang(self._responder)
            self._responder.write(event)
            self._written += 1
        return False


async def hang(engine: Engine, responder: Responder) -> None:
    """Wait ``stall_s`` seconds (0: for ever), but not longer than the client or the engine lives."""
    loop = asyncio.get_running_loop()
    waits = {loop.create_task(responder.gone.wait()), loop.create_task(engine.stopping.wait())}
    try:
        await asyncio.wait(waits, timeout=engine.flags.stall_s or None, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def _leave_with(responder: Responder, ticket: Ticket) -> None:
    await responder.gone.wait()
    ticket.leave()


def _request_id(body: CommonBody, request: Request) -> str:
    """The client's header, its body's field, or a new id."""
    raw = request.header("x-request-id")
    return raw.decode("latin-1") if raw else body.request_id or uuid4().hex

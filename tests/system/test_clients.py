"""The official `openai` and `anthropic` clients before ``tidegate up``, as users have them: every API, whole and
streamed, sync and async, with tools, with errors, retries, time-outs, and with clients that leave.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from itertools import groupby
from typing import Any
from urllib.request import Request, urlopen

import anthropic
import openai
import pytest
import pytest_asyncio

from tests.support.processes import eventually
from tests.support.system import RunningSystem, running_system

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

WAIT_S = 120.0
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "seconds": {"type": "integer"}},
    "required": ["command", "seconds"],
    "additionalProperties": False,
}
CHAT_TOOL: Any = {
    "type": "function",
    "function": {"name": "bash", "description": "Runs it.", "parameters": SCHEMA, "strict": True},
}
RESPONSES_TOOL: Any = {
    "type": "function",
    "name": "bash",
    "description": "Runs it.",
    "parameters": SCHEMA,
    "strict": True,
}
MESSAGES_TOOL: Any = {"name": "bash", "description": "Runs it.", "input_schema": SCHEMA}
USER: Any = [{"role": "user", "content": "Which files are here?"}]
IN_FLIGHT = "tidegate_ingress_in_flight"
RETRY_AFTER_S = 1.0
"""What the simulated engine says beside a 429 and a 503."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningSystem]:
    async with running_system(tmp_path_factory.mktemp("clients")) as system:
        yield system
        assert await system.process.stop(40) == 0, system.process.output


@pytest.fixture
def model(system: RunningSystem) -> str:
    return str(system.addresses["model"])


@pytest_asyncio.fixture(loop_scope="module")
async def chat(system: RunningSystem) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(**openai_options(system)) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def claude(system: RunningSystem) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(**anthropic_options(system)) as client:
        yield client


@pytest.fixture
def sync_chat(system: RunningSystem) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(**openai_options(system)) as client:
        yield client


@pytest.fixture
def sync_claude(system: RunningSystem) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(**anthropic_options(system)) as client:
        yield client


def openai_options(system: RunningSystem) -> dict[str, Any]:
    return {"base_url": system.addresses["base_url"], "api_key": "none", "max_retries": 0, "timeout": WAIT_S}


def anthropic_options(system: RunningSystem) -> dict[str, Any]:
    return {"base_url": system.url, "api_key": "none", "max_retries": 0, "timeout": WAIT_S}


def tell_engines(system: RunningSystem, **flags: Any) -> None:
    """Set flags of every engine (`load.engine.misbehave`)."""
    for engine in system.addresses["engines"]:
        body = json.dumps(flags).encode()
        with urlopen(Request(f"{engine['url']}/sim/misbehave", body, method="POST"), timeout=WAIT_S) as answer:
            assert answer.status == 200


@pytest.fixture
def engines(system: RunningSystem) -> Iterator[Any]:
    """Tells all engines to misbehave; they behave again after the test."""
    yield lambda **flags: tell_engines(system, **flags)
    tell_engines(system, behave=True)


# Chat Completions


async def test_chat_whole_and_streamed_say_the_same(chat: openai.AsyncOpenAI, model: str) -> None:
    """One choice, a finish reason, usage that adds up; the chunks' text is the whole answer's."""
    asked: dict[str, Any] = {"model": model, "messages": USER, "max_tokens": 20, "seed": 5}
    whole = await chat.chat.completions.create(**asked)
    assert (whole.object, whole.model, whole.choices[0].finish_reason) == ("chat.completion", model, "length")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.completion_tokens == 20
    text, usages = "", []
    stream = await chat.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usages += [chunk.usage] if chunk.usage is not None else []
    assert text == whole.choices[0].message.content
    assert [(usage.prompt_tokens, usage.completion_tokens) for usage in usages] == [(whole.usage.prompt_tokens, 20)]


async def test_a_stream_without_usage_has_none(chat: openai.AsyncOpenAI, model: str) -> None:
    """Tidegate asks the engine for usage; a client that did not ask sees no chunk without a choice."""
    stream = await chat.chat.completions.create(model=model, messages=USER, max_tokens=5, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)


async def test_the_synchronous_client_chats(sync_chat: openai.OpenAI, model: str) -> None:
    """Whole, and streamed by the helper, which takes an answer that was cut at its bound for an error."""
    asked: dict[str, Any] = {"model": model, "messages": USER, "max_tokens": 12, "seed": 1}
    whole = sync_chat.chat.completions.create(**asked)
    with sync_chat.chat.completions.stream(**asked) as stream:
        kinds = Counter(event.type for event in stream)
        with pytest.raises(openai.LengthFinishReasonError) as cut:
            stream.get_final_completion()
    assert kinds["content.delta"] > 1
    assert cut.value.completion.choices[0].message.content == whole.choices[0].message.content


async def test_chat_calls_a_tool_and_takes_its_result(chat: openai.AsyncOpenAI, model: str) -> None:
    """The call is the same whole and streamed, its arguments fit the schema; the next turn has its result."""
    asked: dict[str, Any] = {"model": model, "messages": USER, "tools": [CHAT_TOOL], "tool_choice": "required"}
    whole = await chat.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "tool_calls"
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    async with chat.chat.completions.stream(**asked) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or []
    assert (streamed.function.name, streamed.function.arguments) == ("bash", call.function.arguments)
    pieces = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(pieces) == call.function.arguments
    assert set(json.loads(call.function.arguments)) == {"command", "seconds"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "README.md"}
    said = whole.choices[0].message.model_dump(exclude_none=True)
    after = await chat.chat.completions.create(**asked | {"messages": [*USER, said, result], "tool_choice": "auto"})
    assert after.choices[0].finish_reason == "stop"
    assert after.usage is not None
    assert whole.usage is not None
    assert after.usage.prompt_tokens > whole.usage.total_tokens


# Completions, embeddings, models, tokens


async def test_completions(chat: openai.AsyncOpenAI, sync_chat: openai.OpenAI, model: str) -> None:
    """Of a text, of token ids, streamed."""
    whole = await chat.completions.create(model=model, prompt="Once upon", max_tokens=8, seed=2)
    same = sync_chat.completions.create(model=model, prompt="Once upon", max_tokens=8, seed=2)
    assert (whole.object, len(whole.choices), whole.choices[0].finish_reason) == ("text_completion", 1, "length")
    assert same.choices[0].text == whole.choices[0].text
    stream = await chat.completions.create(model=model, prompt="Once upon", max_tokens=8, seed=2, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text
    tokens = await chat.completions.create(model=model, prompt=[1, 2, 3], max_tokens=2)
    assert tokens.usage is not None
    assert tokens.usage.prompt_tokens == 3


async def test_embeddings(chat: openai.AsyncOpenAI, sync_chat: openai.OpenAI, model: str) -> None:
    """As the client asks by itself (base64), and as numbers; equal inputs have equal vectors."""
    packed = await chat.embeddings.create(model=model, input=["one", "two"])
    plain = sync_chat.embeddings.create(model=model, input="one", encoding_format="float")
    first, second = (entry.embedding for entry in packed.data)
    assert first == pytest.approx(plain.data[0].embedding)
    assert first != second
    assert math.isclose(sum(value * value for value in first), 1.0, rel_tol=1e-4)
    assert packed.usage.prompt_tokens > 0
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        await chat.embeddings.create(model=model, input="one", dimensions=100_000)


async def test_models_for_both_families_of_clients(
    chat: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, model: str
) -> None:
    """The list and one of it; a model that nobody serves is not found."""
    listed = [entry async for entry in chat.models.list()]
    assert [entry.id for entry in listed] == [model]
    assert (await chat.models.retrieve(model)).model_extra == listed[0].model_extra
    assert (listed[0].model_extra or {})["max_model_len"] > 0
    pages = [entry async for entry in claude.models.list()]
    assert [(entry.id, entry.type, entry.display_name) for entry in pages] == [(model, "model", model)]
    one = await claude.models.retrieve(model)
    assert one.created_at.timestamp() == listed[0].created
    with pytest.raises(openai.NotFoundError):
        await chat.models.retrieve("none")


async def test_tokens_there_and_back(chat: openai.AsyncOpenAI, model: str) -> None:
    """/tokenize of a prompt and of messages, /detokenize; as many tokens as the answer's usage says."""
    root = str(chat.base_url).removesuffix("/v1/")

    async def ask(path: str, **body: Any) -> Any:
        return await chat.post(f"{root}/{path}", body={"model": model, **body}, cast_to=object)

    tokens = (await ask("tokenize", prompt="Which files are here?"))["tokens"]
    assert (await ask("detokenize", tokens=tokens))["prompt"] == "Which files are here?"
    counted = await ask("tokenize", messages=USER, tools=[CHAT_TOOL])
    answer = await chat.chat.completions.create(model=model, messages=USER, tools=[CHAT_TOOL], max_tokens=1)
    assert answer.usage is not None
    assert counted["count"] == len(counted["tokens"]) == answer.usage.prompt_tokens


# Responses


async def test_responses_whole_and_streamed(chat: openai.AsyncOpenAI, model: str) -> None:
    """The text of the deltas is the final response's; events are numbered without a hole and end with `completed`."""
    asked: dict[str, Any] = {"model": model, "input": "Which files are here?", "instructions": "Be brief."}
    whole = await chat.responses.create(**asked)
    assert (whole.status, whole.object, whole.error) == ("completed", "response", None)
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    async with chat.responses.stream(**asked) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == whole.output_text != ""
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == final.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")


async def test_responses_call_a_tool_and_take_its_result(chat: openai.AsyncOpenAI, model: str) -> None:
    """As in chat; items go back as they came."""
    asked: dict[str, Any] = {"model": model, "tools": [RESPONSES_TOOL], "tool_choice": "required"}
    whole = await chat.responses.create(**asked, input=USER)
    (call,) = [item for item in whole.output if item.type == "function_call"]
    async with chat.responses.stream(**asked, input=USER) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    (streamed,) = [item for item in final.output if item.type == "function_call"]
    assert (streamed.name, streamed.arguments) == ("bash", call.arguments)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done.arguments == call.arguments
    items: Any = [item.model_dump(exclude_none=True) for item in whole.output]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "README.md"}
    after = await chat.responses.create(**asked | {"tool_choice": "auto"}, input=[*USER, *items, result])
    assert after.status == "completed"
    assert after.output_text


async def test_the_synchronous_client_gets_a_cut_response(sync_chat: openai.OpenAI, model: str) -> None:
    """At its bound a response is incomplete, and says why."""
    cut = sync_chat.responses.create(model=model, input="Which files are here?", max_output_tokens=4)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


async def test_an_earlier_response_that_nobody_stored_is_not_found(chat: openai.AsyncOpenAI, model: str) -> None:
    """`previous_response_id` is passed through; the engine's words come back."""
    with pytest.raises(openai.NotFoundError, match="resp_0"):
        await chat.responses.create(model=model, input="go on", previous_response_id="resp_0")


# Messages


async def test_messages_stream_events_in_anthropics_order(claude: anthropic.AsyncAnthropic, model: str) -> None:
    """Start, a text block, a tool block with its input in pieces, the stop reason, the end; what is put together of
    them is what comes whole."""
    asked: dict[str, Any] = {
        "model": model,
        "max_tokens": 300,
        "system": [{"type": "text", "text": "You are careful."}],
        "messages": USER,
        "tools": [MESSAGES_TOOL],
        "tool_choice": {"type": "any"},
    }
    whole = await claude.messages.create(**asked)
    raw = [event async for event in await claude.messages.create(**asked, stream=True)]
    blocks = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [kind for kind, _ in groupby(event.type for event in raw)] == [
        "message_start", *blocks, *blocks, "message_delta", "message_stop"
    ]  # fmt: skip
    deltas = [(event.index, event.delta.type) for event in raw if event.type == "content_block_delta"]
    assert [key for key, _ in groupby(deltas)] == [(0, "text_delta"), (1, "input_json_delta")]
    async with claude.messages.stream(**asked) as stream:
        kinds = Counter([event.type async for event in stream])
        final = await stream.get_final_message()
    assert min(kinds["text"], kinds["input_json"]) > 0
    assert (final.stop_reason, whole.stop_reason) == ("tool_use", "tool_use")
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    call = whole.content[-1]
    assert call.type == "tool_use"
    assert set(call.input) == {"command", "seconds"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "README.md"}]}
    said = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in whole.content]}
    turn: Any = {"messages": [*USER, said, {"role": "user", "content": [result]}], "tool_choice": {"type": "auto"}}
    after = await claude.messages.create(**asked | turn)
    assert after.stop_reason == "end_turn"


async def test_messages_count_as_many_tokens_as_they_take(
    claude: anthropic.AsyncAnthropic, sync_claude: anthropic.Anthropic, model: str
) -> None:
    """count_tokens, and the usage of the same messages; sync as async."""
    asked: dict[str, Any] = {"model": model, "messages": USER, "tools": [MESSAGES_TOOL], "system": "Be brief."}
    counted = await claude.messages.count_tokens(**asked)
    assert sync_claude.messages.count_tokens(**asked).input_tokens == counted.input_tokens
    usage = sync_claude.messages.create(**asked, max_tokens=5).usage
    beside = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == usage.input_tokens + beside
    assert usage.output_tokens == 5


# Errors, retries, time-outs


async def test_errors_are_the_clients_own_exceptions(
    chat: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, model: str
) -> None:
    """By status: a bad request, an unknown model; with type, code and parameter where the API has them."""
    with pytest.raises(openai.NotFoundError) as missing:
        await chat.chat.completions.create(model="none", messages=USER)
    assert (missing.value.code, missing.value.type) == ("model_not_found", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="too large") as large:
        await chat.chat.completions.create(model=model, messages=USER, max_tokens=10**9)
    assert large.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:
        await chat.chat.completions.create(model=model, messages=USER, stream="yes")  # type: ignore[call-overload]
    assert (bad.value.code, bad.value.param) == ("bad_request", "stream")
    with pytest.raises(openai.NotFoundError):
        await chat.responses.create(model="none", input="x")
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await claude.messages.create(model="none", messages=USER, max_tokens=1)
    assert unknown.value.type == "not_found_error"
    assert unknown.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="too large"):
        await claude.messages.create(model=model, messages=USER, max_tokens=10**9)
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.count_tokens(model="none", messages=USER)


CLASSES = {
    429: (openai.RateLimitError, anthropic.RateLimitError),
    500: (openai.InternalServerError, anthropic.InternalServerError),
    503: (openai.InternalServerError, anthropic.InternalServerError),
}


@pytest.mark.parametrize("status", CLASSES)
async def test_an_engines_errors_are_too(
    chat: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, model: str, engines: Any, status: int
) -> None:
    """Status and words as the engine gave them, in a stream that has not begun as in a whole answer."""
    engines(error_status=status, error_requests=-1)
    for stream in (False, True):
        with pytest.raises(CLASSES[status][0], match="told to fail") as caught:
            await chat.chat.completions.create(model=model, messages=USER, stream=stream)
        assert caught.value.status_code == status
        with pytest.raises(CLASSES[status][1], match="told to fail"):
            await claude.messages.create(model=model, messages=USER, max_tokens=5, stream=stream)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("api", ["openai", "anthropic"])
async def test_retries_wait_as_long_as_they_are_told(
    system: RunningSystem, model: str, engines: Any, api: str, status: int
) -> None:
    """Each engine refuses once. The client tries again by itself, after what `Retry-After` says (its own first pause is
    0.5 s at most), and is served; a 503 Tidegate has tried at the other engine before."""
    engines(error_status=status, error_requests=1)
    clock = asyncio.get_running_loop().time
    began = clock()
    answer: Any
    if api == "openai":
        async with openai.AsyncOpenAI(**openai_options(system) | {"max_retries": 3}) as chat:
            create: Any = chat.chat.completions.with_raw_response.create
            answer = await create(model=model, messages=USER, max_tokens=2)
    else:
        async with anthropic.AsyncAnthropic(**anthropic_options(system) | {"max_retries": 3}) as claude:
            create = claude.messages.with_raw_response.create
            answer = await create(model=model, messages=USER, max_tokens=2)
    assert answer.status_code == 200
    assert answer.retries_taken >= 1
    assert clock() - began >= RETRY_AFTER_S * answer.retries_taken


async def test_clients_that_give_up_leave_nothing_behind(
    system: RunningSystem, chat: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, model: str, engines: Any
) -> None:
    """An engine hangs before its first byte: the clients' own time-out is theirs to raise, and nothing stays open."""
    engines(stall="head")
    with pytest.raises(openai.APITimeoutError):
        await chat.with_options(timeout=1.0).chat.completions.create(model=model, messages=USER)
    with pytest.raises(openai.APITimeoutError):
        await chat.with_options(timeout=1.0).responses.create(model=model, input="x", stream=True)
    with pytest.raises(anthropic.APITimeoutError):
        await claude.with_options(timeout=1.0).messages.create(model=model, messages=USER, max_tokens=5)
    await nothing_runs(system)


async def test_clients_that_leave_in_their_stream(
    system: RunningSystem, chat: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, model: str, engines: Any
) -> None:
    """After the first pieces, in each API: the engine is told to stop, and nothing stays open."""
    engines(stall="stream", stall_after_chunks=4)
    streams: list[Any] = [
        await chat.chat.completions.create(model=model, messages=USER, stream=True),
        await chat.completions.create(model=model, prompt="Once upon", stream=True),
        await chat.responses.create(model=model, input="x", stream=True),
        await claude.messages.create(model=model, messages=USER, max_tokens=500, stream=True),
    ]
    for stream in streams:
        assert await anext(aiter(stream)) is not None
    assert system.metric("ingress", IN_FLIGHT) == len(streams)
    for stream in streams:
        await stream.close()
    await nothing_runs(system)


async def nothing_runs(system: RunningSystem) -> None:
    """In the front door and in the engines."""
    pages = [f"{engine['url']}/metrics" for engine in system.addresses["engines"]]

    def idle() -> bool:
        running = sum(sample(page, "vllm:num_requests_running") for page in pages)
        return running == system.metric("ingress", IN_FLIGHT) == 0

    await eventually(idle, 60, "nothing runs any more")


def sample(page: str, name: str) -> float:
    """The sum of a metric's samples on an engine's page."""
    with urlopen(page, timeout=WAIT_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == name)


async def test_every_answer_says_which_request_it_was(
    system: RunningSystem, chat: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, model: str
) -> None:
    """`with_raw_response` and the clients' own `request_id`: ours, 32 hex digits, another for each."""
    raw = await chat.chat.completions.with_raw_response.create(model=model, messages=USER, max_tokens=1)
    whole = await chat.responses.create(model=model, input="x", max_output_tokens=1)
    message = await claude.messages.create(model=model, messages=USER, max_tokens=1)
    counted = await claude.messages.with_raw_response.count_tokens(model=model, messages=USER)
    async with claude.messages.stream(model=model, messages=USER, max_tokens=1) as stream:
        streamed = stream.request_id
    assert raw.headers["x-request-id"] == raw.request_id
    ids = {raw.request_id, whole._request_id, message._request_id, counted.request_id, streamed}
    assert len(ids) == 5
    assert all(name is not None and re.fullmatch("[0-9a-f]{32}", name) for name in ids)

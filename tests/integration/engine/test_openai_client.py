"""The official client against a real engine process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from tests.integration.engine.engines import running_engine

MODEL = "sim-8b"
BLOCK = 16
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}, "seconds": {"type": "integer"}}},
    },
}


async def test_sessions_tools_and_errors_through_the_official_client(tmp_path: Path) -> None:
    """Streams, whole answers, cached tokens over turns, tool calls both ways, completions, and errors as exceptions."""
    options = ("--max-model-len", "4096", "--adapters", '["lora-a"]')
    async with running_engine(tmp_path, *options) as engine, engine.openai() as client:
        await three_turns(client)
        await a_stream(client)
        await tool_calls(client)
        await completions(client)
        await errors(client)
        assert [model.id async for model in client.models.list()] == [MODEL, "lora-a"]


async def three_turns(client: openai.AsyncOpenAI) -> None:
    """Each turn's cached tokens are all full blocks of the turn before it, prompt and output."""
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": "You are a careful agent. " * 20}]
    computed = 0
    for turn in range(3):
        messages.append({"role": "user", "content": f"turn {turn}"})
        answer = await client.chat.completions.create(model=MODEL, messages=messages)
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == computed // BLOCK * BLOCK
        assert answer.choices[0].finish_reason == "stop"
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        computed = usage.total_tokens - 1


async def a_stream(client: openai.AsyncOpenAI) -> None:
    """Chunks join to the whole answer's text; usage comes once, last, with no choices; the id is the request's."""
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "stream"}], "max_tokens": 12}
    whole = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}, extra_headers={"X-Request-Id": "my-id"}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert {chunk.id for chunk in chunks} == {"chatcmpl-my-id"}
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-2].choices[0].finish_reason == "length"


async def tool_calls(client: openai.AsyncOpenAI) -> None:
    """Required and flagged calls come streamed and whole, and their result's turn hits the cache."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "use a tool"}]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": [TOOL], "tool_choice": "required"}
    first = await client.chat.completions.create(**asked)
    call = (first.choices[0].message.tool_calls or [])[0]
    assert first.choices[0].finish_reason == "tool_calls"
    assert call.type == "function"
    assert set(json.loads(call.function.arguments)) == {"command", "seconds"}
    name, arguments, finish = "", "", None
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for part in choice.delta.tool_calls or []:
                assert part.function is not None
                name += part.function.name or ""
                arguments += part.function.arguments or ""
    assert (name, arguments, finish) == ("bash", call.function.arguments, "tool_calls")
    messages.append(
        {
            "role": "assistant",
            "content": first.choices[0].message.content,
            "tool_calls": [
                {"id": call.id, "type": "function", "function": {"name": "bash", "arguments": call.function.arguments}}
            ],
        }
    )
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
    second = await client.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], extra_headers={"X-Sim-Tool": "bash"}
    )
    assert second.choices[0].finish_reason == "tool_calls"
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == (first.usage.total_tokens - 1) // BLOCK * BLOCK


async def completions(client: openai.AsyncOpenAI) -> None:
    """Text completions, whole and streamed, over text and token ids; an adapter has its own cache."""
    prompt = list(range(100, 164))
    answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=5)
    text = "".join(
        [
            choice.text
            async for chunk in await client.completions.create(model=MODEL, prompt=prompt, max_tokens=5, stream=True)
            for choice in chunk.choices
        ]
    )
    assert text == answer.choices[0].text
    adapter = await client.completions.create(model="lora-a", prompt=prompt, max_tokens=1)
    assert adapter.usage is not None
    assert adapter.usage.prompt_tokens_details is not None
    assert adapter.usage.prompt_tokens_details.cached_tokens == 0


async def errors(client: openai.AsyncOpenAI) -> None:
    """Unknown model 404; too long, n > 1, empty salt and unknown tool 400; each with a message."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.NotFoundError, match="`other` does not exist"):
        await client.chat.completions.create(model="other", messages=messages)
    long: list[ChatCompletionMessageParam] = [{"role": "user", "content": "word " * 6000}]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096"):
        await client.chat.completions.create(model=MODEL, messages=long)
    with pytest.raises(openai.BadRequestError, match="n = 1"):
        await client.chat.completions.create(model=MODEL, messages=messages, n=2)
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        await client.chat.completions.create(model=MODEL, messages=messages, extra_body={"cache_salt": ""})
    with pytest.raises(openai.BadRequestError, match="not among the tools"):
        await client.chat.completions.create(
            model=MODEL, messages=messages, tools=[TOOL], extra_body={"sim_tool": "nope"}
        )


async def test_tokenize_and_the_other_pages(tmp_path: Path) -> None:
    """Prompt and messages give the ids that the engine uses; ids turn back into text; mistakes are 4xx."""
    async with running_engine(tmp_path, "--num-blocks", "100", "--engine-version", "0.31.0") as engine:
        messages = [{"role": "user", "content": "hello world"}]
        status, page = await engine.post("/tokenize", {"messages": messages, "tools": [TOOL]})
        assert (status, page["max_model_len"]) == (200, 99 * BLOCK)
        body = {"messages": messages, "tools": [TOOL], "return_token_ids": True, "max_tokens": 1}
        _, answer = await engine.post("/v1/chat/completions", body)
        assert answer["prompt_token_ids"] == page["tokens"]
        assert answer["usage"]["prompt_tokens"] == page["count"]
        _, text = await engine.post("/detokenize", {"tokens": page["tokens"]})
        _, again = await engine.post("/tokenize", {"prompt": text["prompt"], "return_token_strs": True})
        assert again["tokens"] == page["tokens"]
        assert len(again["token_strs"]) == page["count"]
        assert await engine.get("/version") == {"version": "0.31.0", "features": ["kv_hints"]}
        assert (await engine.http.fetch("GET", engine.url + "/health", [], b"")).status == 200
        info = await engine.metric("vllm:cache_config_info")
        assert 'block_size="16"' in next(iter(info))
        assert 'num_gpu_blocks="100"' in next(iter(info))
        sources = await engine.get("/kv_event_sources")
        assert sources["0"]["endpoint"] == engine.kv_events[0]
        assert sources["0"]["replay_endpoint"] == engine.replay[0]
        for path, raw, expected in (
            ("/v1/chat/completions", b"{", 400),
            ("/v1/chat/completions", b'{"messages": []}', 400),
            ("/v1/chat/completions", b'{"messages": [{"content": 1}]}', 400),
            ("/tokenize", b"{}", 400),
            ("/detokenize", b'{"tokens": [99999999]}', 400),
            ("/sim/misbehave", b'{"stall": "lunch"}', 400),
            ("/nope", b"{}", 404),
            ("/v1/models", b"{}", 405),
        ):
            status, page = await engine.post(path, raw)
            assert (status, page["error"]["code"]) == (expected, expected), path

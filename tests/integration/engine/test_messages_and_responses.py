"""Messages and Responses against a real engine process, through the official clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.integration.engine.engines import WAIT_S, RunningEngine, running_engine

MODEL = "sim-8b"
BLOCK = 16
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "seconds": {"type": "integer"}}}
USER = "Look around, then tell me. " * 20


def anthropic_client(engine: RunningEngine) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=engine.url, api_key="none", max_retries=0, timeout=WAIT_S)


async def test_messages_through_the_official_client(tmp_path: Path) -> None:
    """Three turns with tools, whole and streamed: text, calls, stop reasons; what came from the cache is all full
    blocks of the turn before, and what went into it the full blocks of the rest; both stand beside ``input_tokens`` as
    Anthropic counts (vllm-project/vllm #40912)."""
    async with running_engine(tmp_path) as engine, anthropic_client(engine) as client:
        messages: list[Any] = [{"role": "user", "content": USER}]
        asked: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 200,
            "system": [{"type": "text", "text": "You are careful. "}, {"type": "text", "text": "Answer briefly."}],
            "tools": [{"name": "bash", "description": "Run it.", "input_schema": SCHEMA}],
        }
        whole = await client.messages.create(**asked, messages=messages, tool_choice={"type": "any"})
        assert whole.stop_reason == "tool_use"
        assert whole.usage.cache_read_input_tokens == 0
        assert whole.usage.cache_creation_input_tokens == prompt(whole.usage) // BLOCK * BLOCK > 0
        async with client.messages.stream(**asked, messages=messages, tool_choice={"type": "any"}) as stream:
            events = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        assert events[0] == "message_start"
        assert events[-1] == "message_stop"
        assert [block.model_dump(exclude={"id"}) for block in streamed.content] == [
            block.model_dump(exclude={"id"}) for block in whole.content
        ]
        call = streamed.content[-1]
        assert call.type == "tool_use"
        assert set(call.input) == {"command", "seconds"}
        computed = total(whole.usage) - 1
        messages.append({"role": "assistant", "content": [block.model_dump() for block in streamed.content]})
        messages.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "done"}]}
        )
        counted = await client.messages.count_tokens(
            model=MODEL, messages=messages, system=asked["system"], tools=asked["tools"]
        )
        for _ in range(2):
            turn = await client.messages.create(**asked, messages=messages)
            assert turn.stop_reason == "end_turn"
            assert turn.usage.cache_read_input_tokens == computed // BLOCK * BLOCK
            assert prompt(turn.usage) == counted.input_tokens
            assert turn.usage.input_tokens == counted.input_tokens % BLOCK
            computed = total(turn.usage) - 1
            messages.append({"role": "assistant", "content": [block.model_dump() for block in turn.content]})
            messages.append({"role": "user", "content": "and then?"})
            counted = await client.messages.count_tokens(
                model=MODEL, messages=messages, system=asked["system"], tools=asked["tools"]
            )
        short = await client.messages.create(model=MODEL, max_tokens=3, messages=messages)
        assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
        with pytest.raises(anthropic.NotFoundError, match="`other` does not exist"):
            await client.messages.create(model="other", max_tokens=3, messages=messages)
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await client.post("/v1/messages", body={"model": MODEL, "messages": []}, cast_to=object)


def prompt(usage: anthropic.types.Usage) -> int:
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


def total(usage: anthropic.types.Usage) -> int:
    """Tokens of prompt and answer."""
    return prompt(usage) + usage.output_tokens


async def test_responses_through_the_official_client(tmp_path: Path) -> None:
    """The same of Responses: items, events in order, statuses, usage; nothing is stored, so that an earlier response is
    not found, as vLLM's default is (vllm-project/vllm #22137)."""
    async with running_engine(tmp_path) as engine, engine.openai() as client:
        items: list[Any] = [{"role": "user", "content": USER}]
        asked: dict[str, Any] = {
            "model": MODEL,
            "instructions": "You are careful.",
            "tools": [
                {"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False},
                {"type": "web_search"},
            ],
        }
        whole = await client.responses.create(**asked, input=items, tool_choice="required")
        assert whole.status == "completed"
        async with client.responses.stream(**asked, input=items, tool_choice="required") as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1].type == "response.completed"
        assert streamed.output_text == whole.output_text
        call = streamed.output[-1]
        assert call.type == "function_call"
        assert (call.name, set(json.loads(call.arguments))) == ("bash", {"command", "seconds"})
        assert whole.usage is not None
        computed = whole.usage.total_tokens - 1
        items += [item.model_dump(exclude_none=True) for item in whole.output]
        items.append({"type": "function_call_output", "call_id": whole.output[-1].call_id, "output": "done"})
        for _ in range(2):
            turn = await client.responses.create(**asked, input=items)
            assert turn.usage is not None
            assert turn.usage.input_tokens_details.cached_tokens == computed // BLOCK * BLOCK
            computed = turn.usage.total_tokens - 1
            items += [item.model_dump(exclude_none=True) for item in turn.output]
            items.append({"role": "user", "content": [{"type": "input_text", "text": "and then?"}]})
        short = await client.responses.create(model=MODEL, input="hello", max_output_tokens=3)
        assert short.status == "incomplete"
        assert short.incomplete_details is not None
        assert short.incomplete_details.reason == "max_output_tokens"
        with pytest.raises(openai.NotFoundError, match="not found"):
            await client.responses.create(model=MODEL, input="on", previous_response_id=whole.id)


async def test_engines_without_these_apis_know_no_such_path(tmp_path: Path) -> None:
    """As an older engine: 404, in words that are of no request."""
    async with running_engine(tmp_path, "--messages-api", "false", "--responses-api", "false") as engine:
        for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses"):
            status, answer = await engine.post(path, {"model": MODEL})
            assert (status, answer["error"]["message"]) == (404, "Not Found")

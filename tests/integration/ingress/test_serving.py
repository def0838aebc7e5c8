"""Requests through the front door, engines and admission being real."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, cast

import pytest
from openai import AsyncOpenAI

from bus import subjects
from bus.interface import BusMessage
from schemas.base import from_json
from schemas.decision import Decision
from tests.integration.ingress.support import ASSETS, MODEL, Heartbeats, Stage, System, chat, until
from web.server import Request, Responder

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_one_chat_request(system: System) -> None:
    """A request is answered by an engine, byte for byte, and leaves exactly one row with its session and usage."""
    async with system.door() as door:
        answer = await door.post(chat(), x_tidegate_session_id="s1", x_request_id="mine-1")
        assert answer.status == 200
        usage = json.loads(answer.body)["usage"]
        request_id = (answer.header("x-request-id") or b"").decode()
        row = await system.rows.one(request_id)
        assert (row.outcome, row.status, row.x_request_id) == ("completed", 200, "mine-1")
        assert (row.input_tokens, row.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert row.decision_mode == "policy"
        assert row.worker is not None
        served = (await system.engines[row.worker.worker].page())["served"]
        assert any(request_id in name for name in served)


async def test_the_official_client_streams(system: System) -> None:
    """The official `openai` client streams three turns of a session; all of them run on one worker."""
    async with system.door() as door:
        client = AsyncOpenAI(base_url=f"{door.url}/v1", api_key="none", max_retries=0)
        messages: list[dict[str, str]] = []
        workers = set()
        for turn in range(3):
            messages.append({"role": "user", "content": f"turn {turn}"})
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=cast(Any, messages),
                stream=True,
                max_tokens=16,
                extra_headers={"x-dynamo-session-id": "openai-1", "x-request-id": f"openai-{turn}"},
            )
            text = ""
            async for chunk in stream:
                assert chunk.usage is None
                text += chunk.choices[0].delta.content or ""
            assert text
            messages.append({"role": "assistant", "content": text})
            row = await system.rows.by_x_request_id(f"openai-{turn}")
            assert row.outcome == "completed"
            assert row.worker is not None
            workers.add(row.worker.worker)
        assert len(workers) == 1
        assert [model.id async for model in client.models.list()] == [MODEL]
        await client.close()


TOOLS = [
    {
        "type": "function",
        "function": {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
    }
]
CONVERSATION = [
    {"role": "system", "content": "You are a coding agent. é 😀"},
    {"role": "user", "content": [{"type": "text", "text": "read it"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "print('hello')\n" * 40},
]


PATH_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
MESSAGES = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: 1"},
        {"type": "text", "text": "You are an agent."},
    ],
    "tools": [{"name": "read_file", "input_schema": PATH_SCHEMA}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "read"}, {"type": "text", "text": "it é"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "t", "name": "read_file", "input": {"path": "a.py"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "print()\n" * 40}]},
    ],
}
RESPONSE = {
    "instructions": "You are an agent.",
    "max_output_tokens": 4,
    "tools": [
        {"type": "function", "name": "read_file", "parameters": PATH_SCHEMA},
        {"type": "web_search"},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn", "parameters": {}}]},
    ],
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "read"}, {"type": "input_text", "text": "it"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "read_file", "arguments": '{"path": "a.py"}'},
        {"type": "function_call", "call_id": "d", "namespace": "agents", "name": "spawn", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "print()\n" * 40},
        {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "done"}]},
    ],
}


def prompt_tokens(usage: dict[str, Any]) -> int:
    """As each API says it; Anthropic's counts what came from the cache, or went into it, beside the rest."""
    if "prompt_tokens" in usage:
        return int(usage["prompt_tokens"])
    return sum(int(usage.get(f"{kind}input_tokens", 0)) for kind in ("", "cache_read_", "cache_creation_"))


@pytest.mark.parametrize("tokenize", ["local", "engine"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CONVERSATION, "tools": TOOLS}),
        ("/v1/chat/completions", {"messages": CONVERSATION[:2]}),
        ("/v1/messages", MESSAGES),
        ("/v1/responses", RESPONSE),
        ("/v1/completions", {"prompt": "def f(x):" * 30}),
        ("/v1/completions", {"prompt": [1, 2, 3] * 20}),
    ],
)
async def test_tokens_are_counted_as_the_engine_counts_them(
    system: System, tokenize: str, path: str, body: dict[str, Any]
) -> None:
    """A14: the tokens that placement works with are the engine's own, by the local tokenizer and by `/tokenize`."""
    decisions: list[Decision] = []

    def on_decision(message: BusMessage) -> None:
        decisions.append(from_json(message.payload, Decision))

    subscription = await system.bus.subscribe(f"{subjects.ROOT}.decision.*", on_decision)
    tokenizers = {MODEL: str(ASSETS)} if tokenize == "local" else {}
    async with system.door(tokenize=tokenize, tokenizers=tokenizers) as door:
        answer = await door.post({"model": MODEL, "max_tokens": 4, **body}, path=path)
        usage = json.loads(answer.body)["usage"]
        request_id = (answer.header("x-request-id") or b"").decode()
        await until(lambda: any(decision.request_id == request_id for decision in decisions))
    (decision,) = [decision for decision in decisions if decision.request_id == request_id]
    assert decision.input_tokens == prompt_tokens(usage)
    row = await system.rows.one(request_id)
    assert row.replay is not None
    assert row.replay.input_length == decision.input_tokens
    assert decision.block_size == 16
    await subscription.unsubscribe()


async def test_the_chosen_rank_is_named_to_the_engine(stage: Stage) -> None:
    """A13: of a worker with several ranks, the decided one is pinned by header; rank 0 is a rank."""
    beats = Heartbeats(stage.bus, {"ranked": stage.engines["worker-0"].url}, model="ranked-model", ranks=2)
    async with stage.door() as door:
        beats.say("ranked")
        await until(lambda: door.service.workers == 3)
        ranks = set()
        for number in range(12):
            body = {**chat(), "model": "ranked-model"}
            answer = await door.post(body, x_tidegate_session_id=f"rank-{number}")
            row = await stage.rows.one((answer.header("x-request-id") or b"").decode())
            assert row.worker is not None
            request = stage.engines["worker-0"].seen[-1]
            assert request.header("x-data-parallel-rank") == b"%d" % row.worker.rank
            ranks.add(row.worker.rank)
        assert ranks == {0, 1}
        beats.say("ranked", "left")


async def test_the_facts_of_a_requests_life(stage: Stage) -> None:
    """accepted, dispatched, first_token, progress at most once a second, end: in order, each numbered without a gap."""
    facts: list[tuple[str, dict[str, Any]]] = []
    ended = asyncio.Event()

    def on_fact(message: BusMessage) -> None:
        fact = json.loads(message.payload)
        if fact["source"] == "ingress-facts":
            facts.append((message.subject.split(".")[3], fact))
            if facts[-1][0] == "progress":
                ended.set()

    async def drip(request: Request, responder: Responder) -> None:
        responder.start(200, [(b"content-type", b"text/event-stream")])
        while not ended.is_set():
            responder.write(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
            await asyncio.sleep(0.02)
        responder.write(b"data: [DONE]\n\n")
        responder.finish()

    for engine in stage.engines.values():
        engine.script = drip
    subscription = await stage.bus.subscribe(f"{subjects.ROOT}.request.*.*", on_fact)
    async with stage.door(instance="ingress-facts") as door:
        began = time.monotonic()
        await door.post(chat(stream=True), x_tidegate_session_id="facts")
        took = time.monotonic() - began
        await until(lambda: bool(facts) and facts[-1][0] == "end")
    names = [name for name, _ in facts]
    assert names[:3] == ["accepted", "dispatched", "first_token"]
    assert 1 <= names.count("progress") <= took + 1
    for name in set(names):
        numbers = [fact["seq"] for said, fact in facts if said == name]
        assert numbers == list(range(len(numbers)))
    assert len({fact["request_id"] for _, fact in facts}) == 1
    assert facts[-1][1]["outcome"] == "completed"
    await subscription.unsubscribe()

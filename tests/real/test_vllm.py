"""The house in front of a real vLLM on CPU: what is predicted is what vLLM reports, what is indexed is what it holds.

Runs where ``VLLM_PYTHON`` names a Python that has vLLM; the model is built here. One vLLM serves all tests of the file,
in front of it first a house that counts tokens itself, then one that asks vLLM for them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from bus.subjects import INDEX_MATCH
from kvcore.hashing import pack_chain
from schemas.base import from_msgpack, to_msgpack
from schemas.index import MatchReply, MatchRequest
from schemas.trace import RequestMetrics
from tests.real.house import Conversation, House, assert_predicted, running_house, summed, system_prompt
from tests.support.processes import eventually, start_process
from tests.support.vllm import BLOCK_SIZE, MODEL, Vllm, interpreter

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

KV_BLOCKS = 161
"""One is vLLM's null block; 160 of 32 tokens hold four sessions of 1,200 tokens and little else."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file, <b>whole</b> or in part.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string", "description": "größer"}}},
        },
    }
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Vllm]:
    vllm = Vllm(interpreter(), tiny_model, tmp_path_factory.mktemp("vllm"), blocks=KV_BLOCKS)
    try:
        await vllm.start()
        yield vllm
    finally:
        await vllm.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["local", "engine"])
async def house(
    request: pytest.FixtureRequest, vllm: Vllm, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[House]:
    """With the event endpoints given, and each way of counting tokens."""
    directory = tmp_path_factory.mktemp(f"house-{request.param}")
    async with running_house(directory, vllm, vllm.address, request.param) as house:
        yield house


def place(house: House) -> str:
    """What this house's prompts name, so that the caches of two houses do not mix."""
    return house.system.workdir.parent.name


def conversation(house: House, name: str, system: str = "", **options: Any) -> Conversation:
    """A session that no other test's house shares a prefix with."""
    session = f"{name}-{place(house)}"
    return Conversation(house, session, [{"role": "system", "content": system or system_prompt(session)}], **options)


async def test_the_worker_is_what_vllm_says_of_itself(house: House) -> None:
    """Model, block size, capacity and version come from vLLM's own pages; its one stream is synced."""
    await eventually(lambda: bool(house.states) and house.states[-1].health == "ready", 20, "a ready worker")
    state = house.states[-1]
    profile = state.profile
    assert (profile.engine, profile.model, profile.block_size) == ("vllm", MODEL, BLOCK_SIZE)
    assert profile.max_model_len == 2048
    assert profile.kv_tokens in (KV_BLOCKS * BLOCK_SIZE, (KV_BLOCKS - 1) * BLOCK_SIZE)
    assert profile.engine_version
    assert [(stream.rank, stream.state) for stream in state.streams] == [(0, "synced")]


async def test_what_is_predicted_is_what_vllm_reports(house: House) -> None:
    """Two sessions in turn, streamed and not, with a shared beginning: the cached tokens of every decision are those
    that vLLM then reports, and the client, the row and vLLM agree on them."""
    common = system_prompt(f"harbour {place(house)}")
    sessions = [conversation(house, f"harbour-{number}", common) for number in range(2)]
    for turn in range(5):
        for number, session in enumerate(sessions):
            await session.turn(f"Step {turn}: agent {number} reads the tide table.", stream=(turn + number) % 2 == 0)
    for session in sessions:
        rows = await house.rows_of(session.session)
        assert [row.cached_tokens for row in rows] == session.cached
        assert [row.outcome for row in rows] == ["completed"] * 5
        assert {row.decision_mode for row in rows} == {"policy"}
        assert_predicted(rows)
    assert sessions[1].cached[0] > 0


async def test_the_index_is_what_the_events_say(house: House) -> None:
    """Sessions that do not fit together make vLLM evict. Then: as many blocks as its whole history leaves, and of
    every conversation the prefix that it leaves."""
    before = (await house.vllm.cache()).evicted
    topics = ("cranes", "locks", "pilots", "buoys")
    sessions = [conversation(house, topic, system_prompt(f"{topic} {place(house)}", 300)) for topic in topics]
    for turn in range(3):
        for session in sessions:
            await session.turn(f"Step {turn}: go on.", stream=True)
    prefixes = []
    for session in sessions:
        tokens = session.tokens()
        engine = await house.agree(tokens)
        prefixes.append(engine.prefix(tokens))
    print(f"resident {engine.resident}, evicted {engine.evicted}, batches {engine.batches}, prefixes {prefixes}")
    assert engine.evicted > before
    assert max(prefixes) > 10
    assert_predicted([row for session in sessions for row in await house.rows_of(session.session)])


async def test_salt_tools_and_parts_are_counted_as_vllm_counts_them(house: House) -> None:
    """Prompts with a cache salt, with tools, tool calls and their results, and with content in parts: the prediction
    holds, and the index knows the salted prefix under its salt only."""
    function = {"name": "read_file", "arguments": '{"path": "/größe", "n": 1}'}
    session = conversation(house, "salted", salt="tenant-a", tools=TOOLS)
    session.messages += [
        {"role": "user", "content": [{"type": "text", "text": "First part."}, {"type": "text", "text": "Second."}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "line one\n\tline <two> & “three” 東京"},
    ]
    for turn in range(4):
        await session.turn(f"Turn {turn}.", stream=turn % 2 == 0)
    rows = await house.rows_of(session.session)
    assert rows[0].cached_tokens in (0, None)
    assert_predicted(rows)
    tokens = session.tokens()
    engine = await house.agree(tokens, "tenant-a")
    assert engine.prefix(tokens, "tenant-a") > 5
    assert engine.prefix(tokens) == 0
    await house.agree(tokens)


async def test_messages_are_counted_as_vllm_counts_them(house: House) -> None:
    """System blocks (Claude Code's attribution line among them), tools, a tool's call and its result with blocks: our
    count is vLLM's usage and its `count_tokens`, and what is cached from the second time on is what was said. A text,
    one block of it and one with a cache mark are the same."""
    name = conversation(house, "messages").session
    call = {"type": "tool_use", "id": "t1", "name": "read_file", "input": {"path": "/größe", "n": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "line <one> & 東京"}]}
    asked: dict[str, Any] = {
        "model": MODEL,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.abc; cc_entrypoint=cli;"},
            {"type": "text", "text": system_prompt(name, 200), "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief."},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "First."}, {"type": "text", "text": "Second."}]},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
            {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
        ],
        "tools": [{"name": "read_file", "description": "Reads.", "input_schema": TOOLS[0]["function"]["parameters"]}],
        "tool_choice": {"type": "none"},
    }
    address = house.system.url
    async with anthropic.AsyncAnthropic(base_url=address, api_key="none", max_retries=0, timeout=60) as client:
        counts: list[int] = []
        for number in range(1, 5):
            counts.append((await client.messages.count_tokens(**asked)).input_tokens)
            headers = {"x-dynamo-session-id": name, "x-request-id": f"{name}#{number}"}
            answer = await client.messages.create(**asked, max_tokens=8, extra_headers=headers)
            rows = await house.rows_of(name)
            assert rows[-1].replay is not None
            assert rows[-1].replay.input_length == counts[-1] == whole_prompt(answer.usage)
            if number == len(SHAPES) + 1:
                break
            asked["messages"] += [
                {"role": "assistant", "content": "Done."},
                {"role": "user", "content": SHAPES[number]},
            ]
            await settled(house, rows[-1])
    assert {after - before for before, after in pairwise(counts)} == {counts[1] - counts[0]}
    assert_predicted(rows)
    assert rows[-1].cached_tokens


SHAPES: dict[int, Any] = {
    1: "Again and again.",
    2: [{"type": "text", "text": "Again and again."}],
    3: [{"type": "text", "text": "Again and again.", "cache_control": {"type": "ephemeral"}}],
}


def whole_prompt(usage: anthropic.types.Usage) -> int:
    """What came from the cache and what was put into it stand beside what did neither (vllm-project/vllm #40912)."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


async def test_responses_are_counted_as_vllm_counts_them(house: House) -> None:
    """Instructions, a developer's message, tools, a thought, a call and its output: our count is vLLM's usage."""
    name = conversation(house, "responses").session
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": system_prompt(name, 200)}]},
        {"type": "message", "role": "user", "content": "First."},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "read_file", "arguments": '{"path": "/größe", "n": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "line <one> & 東京"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
    ]
    tool = {"type": "function", "strict": False, **TOOLS[0]["function"]}
    create: Any = house.client.responses.create
    for number in range(1, 4):
        headers = {"x-dynamo-session-id": name, "x-request-id": f"{name}#{number}"}
        asked = {"model": MODEL, "instructions": "Be brief.", "tools": [tool], "tool_choice": "none", "input": items}
        answer = await create(**asked, max_output_tokens=8, store=False, extra_headers=headers)
        rows = await house.rows_of(name)
        assert rows[-1].replay is not None
        assert rows[-1].replay.input_length == answer.usage.input_tokens
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]}
        items += [said, {"type": "message", "role": "user", "content": f"Again {number}."}]
        await settled(house, rows[-1])
    assert_predicted(rows)
    assert rows[-1].cached_tokens


async def settled(house: House, row: RequestMetrics) -> None:
    """The index has what vLLM stored of this prompt, as after a tool call."""
    assert row.replay is not None
    assert row.replay.trace_block_size == BLOCK_SIZE
    whole = row.replay.input_sequence_hashes[: row.replay.input_length // BLOCK_SIZE]
    question = MatchRequest(model=MODEL, block_size=BLOCK_SIZE, chain=pack_chain(whole))
    async with asyncio.timeout(30):
        while True:
            answer = await house.bus.request(INDEX_MATCH, to_msgpack(question), timeout_s=2)
            if any(match.blocks.reach >= len(whole) for match in from_msgpack(answer.payload, MatchReply).matches):
                return
            await asyncio.sleep(0.02)


async def test_text_and_token_prompts(house: House) -> None:
    """/v1/completions with a text, then with the same text's token ids: all but the last block is cached, as said."""
    name = conversation(house, "text").session
    text = f"{name} " + system_prompt("completions", 200)
    create: Any = house.client.completions.create
    tokens = house.vllm.tokens(prompt=text)
    for number, prompt in enumerate((text, text, tokens), start=1):
        headers = {"x-dynamo-session-id": name, "x-request-id": f"{name}#{number}"}
        await create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0, extra_headers=headers)
        await house.agree(tokens)
    rows = await house.rows_of(name)
    assert [row.input_tokens for row in rows] == [len(tokens)] * 3
    assert_predicted(rows)


async def test_many_hasty_sessions_at_once(house: House) -> None:
    """Six sessions side by side that never pause: a prediction may miss what was published a moment ago, but hardly
    ever promises what is not there."""
    common = system_prompt(f"crew {place(house)}")
    sessions = [conversation(house, f"crew-{number}", common, hasty=True) for number in range(6)]
    await sessions[0].turn("Tell the others.", stream=False)

    async def run(number: int, session: Conversation) -> None:
        for turn in range(3):
            await session.turn(f"Order {turn} for number {number}.", stream=turn % 2 == number % 2)

    await asyncio.gather(*(run(number, session) for number, session in enumerate(sessions)))
    predicted, cached = summed([row for session in sessions for row in await house.rows_of(session.session)])
    print(f"hasty: predicted {predicted}, vLLM reports {cached}")
    assert cached > 0
    assert 0.5 * cached <= predicted <= 1.02 * cached
    await house.agree(sessions[0].tokens())


async def test_a_client_that_leaves_stops_its_request_in_vllm(house: House) -> None:
    """It goes after the first chunk of a long answer: vLLM runs nothing soon after, and the row says who left."""
    create: Any = house.client.chat.completions.create
    session = conversation(house, "leaver")
    chunks = await create(
        model=MODEL,
        messages=session.messages,
        max_tokens=1500,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"x-dynamo-session-id": session.session, "x-request-id": f"{session.session}#1"},
    )
    async with chunks:
        await anext(aiter(chunks))
    (row,) = await house.rows_of(session.session)
    assert row.outcome == "client_disconnect"
    assert (row.output_tokens or 0) < 1000
    await eventually(lambda: house.vllm.running() == 0, 3, "vLLM runs nothing")
    await house.agree(session.tokens())


async def test_a_reset_cache_is_believed_with_the_next_step(house: House) -> None:
    """vLLM says that its cache was reset with the step after it (spec: engine-events §2.4); from then on the index is
    as empty as the cache."""
    session = conversation(house, "reset")
    await session.turn("Remember this.", stream=False)
    assert house.vllm.post("/reset_prefix_cache", {})["success"]
    await conversation(house, "next", "Short.").turn("A step.", stream=False)
    engine = await house.agree(session.tokens())
    assert engine.resident < 5
    await session.turn("What was it?", stream=True)
    await session.turn("And again?", stream=False)
    rows = await house.rows_of(session.session)
    assert rows[1].cached_tokens in (0, None)
    assert_predicted(rows[1:])


async def test_the_doctor_finds_everything_well(house: House, tmp_path: Path) -> None:
    """`tidegate doctor --json`: every check is ok."""
    command = [sys.executable, "-m", "tidegate", "doctor", "--json", "--workdir", str(house.system.workdir)]
    process = await start_process(command, tmp_path, name="doctor")
    try:
        assert await process.wait(30) == 0, process.output
    finally:
        await process.close()
    checks = json.loads(process.stdout)["checks"]
    assert [check for check in checks if check["verdict"] != "ok"] == []


@pytest.mark.parametrize("house", ["engine"], indirect=True)
async def test_a_killed_vllm_is_forgotten_and_learned_again(house: House) -> None:
    """kill -9 while it streams: the client is told at once, the worker is unhealthy, and after the restart nothing of
    the old cache is believed; then prediction and index hold again. One row for every request, also the failed."""
    session = conversation(house, "killed")
    await session.turn("Before the storm.", stream=True)
    kept = list(session.messages)
    old = house.states[-1].incarnation
    long = asyncio.ensure_future(session.turn("A long answer.", stream=True, max_tokens=1500))
    await eventually(lambda: house.states[-1].loads[0].running > 0, 10, "vLLM is at work")
    await house.vllm.kill()
    with pytest.raises(openai.APIError):
        await asyncio.wait_for(long, 10)
    await eventually(lambda: house.states[-1].health == "unhealthy", 15, "an unhealthy worker")
    with pytest.raises(openai.APIStatusError) as refusal:
        await conversation(house, "refused").turn("Is anybody there?", stream=False)
    assert refusal.value.status_code == 503
    await house.vllm.start()
    await eventually(lambda: house.states[-1].health == "ready" and house.states[-1].incarnation != old, 30, "ready")
    session.messages = kept
    assert (await house.agree(session.tokens())).resident == 0
    for turn in range(3):
        await session.turn(f"After the storm, {turn}.", stream=turn % 2 == 0)
    rows = await house.rows_of(session.session)
    assert [row.outcome for row in rows] == ["completed", "upstream_lost", *["completed"] * 3]
    assert rows[2].cached_tokens in (0, None)
    assert_predicted(rows[2:])
    await house.agree(session.tokens())
    print(Counter(row.outcome for row in house.rows.values()))
    assert set(house.count.values()) == {1}

"""The house in front of a real vLLM: running, watched, asked; and an agent's conversation through it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import openai

from bus.interface import BusMessage
from bus.nats import NatsBus, connect
from bus.subjects import INDEX_MATCH, ROOT
from bus.tasks import Tasks
from kvcore.hashing import chain_hashes, pack_tokens
from schemas.base import from_json, from_msgpack, to_msgpack
from schemas.index import MatchReply, MatchRequest, WorkerMatch
from schemas.request import RequestAccepted
from schemas.trace import RequestMetrics
from schemas.worker import WorkerState
from tests.support.processes import eventually
from tests.support.system import RunningSystem, running_system
from tests.support.vllm import BLOCK_SIZE, MODEL, EngineCache, Vllm
from tidegate.demo.observe import recorded_requests
from tidegate.rows import read_row

TOLERANCE = 0.02


@dataclass
class House:
    """The system, its bus, its client, every row that it has written, and what its bridge says."""

    system: RunningSystem
    vllm: Vllm
    bus: NatsBus
    client: openai.AsyncOpenAI
    accepted: set[str] = field(default_factory=set)
    rows: dict[str, RequestMetrics] = field(default_factory=dict)
    count: Counter[str] = field(default_factory=Counter)
    states: list[WorkerState] = field(default_factory=list)

    async def rows_of(self, session: str) -> list[RequestMetrics]:
        """In the order of their requests, once every accepted request has its row."""
        await eventually(lambda: self.accepted <= set(self.rows), 15, "every accepted request has a row")
        return [row for row in self.rows.values() if row.x_request_id and row.x_request_id.startswith(f"{session}#")]

    async def match(self, tokens: list[int], salt: str | None = None, rank: int = 0) -> WorkerMatch | None:
        """What the index says of a prompt on one rank of this vLLM."""
        chain = chain_hashes(pack_tokens(tokens), BLOCK_SIZE, salt=salt)
        question = MatchRequest(model=MODEL, block_size=BLOCK_SIZE, chain=chain)
        answer = await self.bus.request(INDEX_MATCH, to_msgpack(question), timeout_s=2)
        reply = from_msgpack(answer.payload, MatchReply)
        assert reply.error is None, reply
        return next((match for match in reply.matches if match.rank == rank), None)

    async def agree(
        self, tokens: list[int], salt: str | None = None, rank: int = 0, timeout_s: float = 10
    ) -> EngineCache:
        """Until the index, synced, holds as many blocks as vLLM's history leaves, and as much of this prompt (vLLM's
        publisher may be late). Raises `AssertionError` with both views."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            engine, match = await self.vllm.cache(rank), await self.match(tokens, salt, rank)
            wanted = (engine.resident, engine.prefix(tokens, salt))
            synced = match is not None and match.health == "synced"
            if match is not None and synced and (match.resident_blocks, match.blocks.reach) == wanted:
                return engine
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"vLLM holds {wanted} (blocks, of them this prompt's); the index says {match}")
            await asyncio.sleep(0.02)


@dataclass
class Conversation:
    """One agent session through the official client. A turn is over when the index knows of it, as after a tool call;
    ``hasty``: with its answer."""

    house: House
    session: str
    messages: list[Any]
    salt: str | None = None
    tools: list[Any] | None = None
    hasty: bool = False
    turns: int = 0
    cached: list[int] = field(default_factory=list)

    def tokens(self) -> list[int]:
        """By vLLM's own tokenizer."""
        more = {"tools": self.tools} if self.tools else {}
        return self.house.vllm.tokens(messages=self.messages, add_generation_prompt=False, **more)

    async def turn(self, text: str, *, stream: bool, max_tokens: int = 24) -> None:
        """Ask; the answer becomes part of the conversation."""
        self.messages.append({"role": "user", "content": text})
        self.turns += 1
        asked: dict[str, Any] = {
            "model": MODEL,
            "messages": self.messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "extra_headers": {"x-dynamo-session-id": self.session, "x-request-id": f"{self.session}#{self.turns}"},
            "extra_body": {"cache_salt": self.salt} if self.salt else None,
        }
        if self.tools:
            asked |= {"tools": self.tools, "tool_choice": "none"}
        answer, usage = await (self._streamed(asked) if stream else self._whole(asked))
        details = usage.prompt_tokens_details
        self.cached.append((details.cached_tokens if details else None) or 0)
        self.messages.append({"role": "assistant", "content": answer})
        if not self.hasty:
            worker = (await self.house.rows_of(self.session))[-1].worker
            await self.house.agree(self.tokens(), self.salt, worker.rank if worker else 0)

    async def _streamed(self, asked: dict[str, Any]) -> tuple[str, Any]:
        create: Any = self.house.client.chat.completions.create
        answer, usage = "", None
        chunks = await create(**asked, stream=True, stream_options={"include_usage": True})
        async with chunks:
            async for chunk in chunks:
                answer += "".join(choice.delta.content or "" for choice in chunk.choices)
                usage = chunk.usage or usage
        return answer, usage

    async def _whole(self, asked: dict[str, Any]) -> tuple[str, Any]:
        create: Any = self.house.client.chat.completions.create
        reply = await create(**asked)
        return reply.choices[0].message.content or "", reply.usage


def system_prompt(topic: str, words: int = 90) -> str:
    """About so many words that no other topic begins with."""
    rules = (f"Rule {number}: look at {topic} {number * 7}." for number in range(words // 6))
    return f"You are an agent for {topic}. " + " ".join(rules)


def assert_predicted(rows: list[RequestMetrics]) -> None:
    """Predicted and reported cached tokens are the same within 2 % in all; prompts are counted as vLLM counts them."""
    each = [(row.input_tokens, row.predicted_cached_tokens, row.cached_tokens) for row in rows]
    predicted, cached = summed(rows)
    print(f"predicted {predicted}, vLLM reports {cached}: {each}")
    assert cached > 0, each
    assert abs(predicted - cached) <= TOLERANCE * cached, each
    assert {row.index_health for row in rows} == {"synced"}
    assert [row.replay and row.replay.input_length for row in rows] == [row.input_tokens for row in rows]


def summed(rows: list[RequestMetrics]) -> tuple[int, int]:
    """Predicted and reported cached tokens."""
    return sum(row.predicted_cached_tokens or 0 for row in rows), sum(row.cached_tokens or 0 for row in rows)


@asynccontextmanager
async def running_house(
    directory: Path, vllm: Vllm, address: str, tokenize: Literal["local", "engine"]
) -> AsyncIterator[House]:
    """``tidegate up`` in front of ``vllm``; at the end the recorder must have one row for every request.

    ``local``: the front door has the model's tokenizer and template; ``engine``: it asks vLLM's /tokenize.
    """
    config = directory / "tidegate.toml"
    lines = ["[ingress]", f'tokenize = "{tokenize}"']
    if tokenize == "local":
        lines.append(f"tokenizers = {{ {MODEL} = {json.dumps(str(vllm.model))} }}")
    config.write_text("\n".join([*lines, ""]))
    async with running_system(directory, "--engine", address, "--config", str(config)) as system:
        bus = await connect(system.nats_url, name="test", timeout_s=10)
        client = openai.AsyncOpenAI(base_url=system.addresses["base_url"], api_key="none", max_retries=0, timeout=30)
        house = House(system, vllm, bus, client)
        tasks = Tasks()
        try:
            await _watch(house, tasks)
            yield house
        finally:
            await client.close()
            await tasks.stop()
            await bus.close()
        assert await system.process.stop(60) == 0, system.process.output
        recorded = Counter(recorded_requests(Path(system.addresses["traces"])))
        assert recorded == house.count
        assert set(recorded.values()) == {1}


async def _watch(house: House, tasks: Tasks) -> None:
    def on_accepted(message: BusMessage) -> None:
        house.accepted.add(from_json(message.payload, RequestAccepted).request_id)

    def on_state(message: BusMessage) -> None:
        house.states.append(from_json(message.payload, WorkerState))

    async def read_rows() -> None:
        async with aclosing(house.bus.tail(f"{ROOT}.trace.request_end.>", from_start=True)) as rows:
            async for stored in rows:
                row = read_row(stored.payload)
                assert row is not None
                assert row.request is not None
                house.rows[row.request.request_id] = row.request
                house.count[row.request.request_id] += 1

    await house.bus.subscribe(f"{ROOT}.request.accepted.>", on_accepted)
    await house.bus.subscribe(f"{ROOT}.worker.state.>", on_state)
    tasks.start("rows", read_rows())
    await house.bus.flush()

"""Engines that publish no events, models that nobody can tokenize, and an index that is wrong: turns still meet their
prefixes, by what was sent where, and every answer says that this is what it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from bus.interface import BusMessage
from bus.nats import NatsBus, connect
from bus.subjects import ROOT
from schemas.base import from_json
from schemas.decision import Decision
from schemas.index import IndexSource
from schemas.worker import WorkerState
from tests.integration.engine.engines import RunningEngine, running_engine, until
from tests.support.processes import eventually
from tests.support.system import RunningSystem, running_system

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(400)]

Messages = list[ChatCompletionMessageParam]
MODEL = "sim-8b"
ENGINES = 3
CONFIG = """
[common]
log_level = "warning"
[ingress]
tokenize = "{tokenize}"
[indexer]
{keys}
[admission]
index = "{index}"
[admission.replica]
{keys}
"""


@dataclass
class House:
    """A system in front of engines of its own, watched."""

    system: RunningSystem
    engines: list[RunningEngine]
    bus: NatsBus
    front: openai.AsyncOpenAI
    direct: list[openai.AsyncOpenAI]
    decisions: list[Decision] = field(default_factory=list)
    by_request: dict[str, Decision] = field(default_factory=dict)
    health: list[tuple[str, str | None]] = field(default_factory=list)
    incarnations: dict[str, str] = field(default_factory=dict)
    heard: int = 0

    async def turn(self, messages: Messages) -> tuple[int, Decision]:
        """One request through the front door: cached tokens as the engine says, and how it was decided."""
        _, cached, request_id = await turn(self.front, messages)
        await eventually(lambda: request_id in self.by_request, 60, "decided")
        return cached, self.by_request[request_id]

    def on_decision(self, message: BusMessage) -> None:
        decision = from_json(message.payload, Decision)
        self.decisions.append(decision)
        self.by_request[decision.request_id] = decision

    def on_source(self, message: BusMessage) -> None:
        fact = from_json(message.payload, IndexSource)
        self.health.append((fact.health, fact.reason))

    def on_worker(self, message: BusMessage) -> None:
        self.heard += 1
        state = from_json(message.payload, WorkerState)
        self.incarnations[state.profile.url] = state.incarnation


@asynccontextmanager
async def running_house(
    directory: Path,
    *,
    engines: int = ENGINES,
    events: bool = False,
    tokenize: str = "auto",
    index: str = "own",
    keys: str = "",
) -> AsyncIterator[House]:
    """Engines, without events unless ``events``; ``keys`` go to every replica of the index."""
    config = directory / "tidegate.toml"
    config.write_text(CONFIG.format(tokenize=tokenize, index=index, keys=keys))
    async with AsyncExitStack() as stack:
        running = []
        for number in range(engines):
            own = directory / f"engine-{number}"
            own.mkdir()
            kv_events = "true" if events else "false"
            running.append(await stack.enter_async_context(running_engine(own, "--kv-events", kv_events)))
        options = [option for engine in running for option in ("--engine", engine.url)]
        system = await stack.enter_async_context(running_system(directory, "--config", str(config), *options))
        bus = await connect(system.nats_url, name="test", timeout_s=30)
        stack.push_async_callback(bus.close)
        urls = [str(system.addresses["base_url"]), *(f"{engine.url}/v1" for engine in running)]
        clients = [openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) for url in urls]
        for client in clients:
            stack.push_async_callback(client.close)
        house = House(system, running, bus, clients[0], clients[1:])
        await bus.subscribe(f"{ROOT}.decision.*", house.on_decision)
        await bus.subscribe(f"{ROOT}.index.source.*.*", house.on_source)
        await bus.subscribe(f"{ROOT}.worker.state.*", house.on_worker)
        await bus.flush()
        await eventually(lambda: len(house.incarnations) == engines, 60, "every engine is known")
        yield house


async def turn(client: openai.AsyncOpenAI, messages: Messages) -> tuple[int, int, str]:
    """One request without any session id, its answer appended; input and cached tokens as the engine says, and the
    front door's id of the request."""
    raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=16)
    answer = raw.parse()
    messages.append({"role": "assistant", "content": answer.choices[0].message.content or "-"})
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    cached = (details.cached_tokens if details else None) or 0
    return answer.usage.prompt_tokens, cached, raw.headers.get("x-request-id", "")


def conversation(run: str, number: int) -> Messages:
    """Two conversations share a long system prompt; no two runs share anything."""
    shared = f"{run}: these are the rules of house {number // 2}, which everybody has to keep at all times. "
    return [{"role": "system", "content": shared * 25}]


async def hit_ratio(clients: list[openai.AsyncOpenAI], run: str, conversations: int = 7, turns: int = 4) -> float:
    """Conversations side by side, whose requests go to ``clients`` in turn (no multiple of them, so that turns move):
    the share of tokens found in a cache."""
    talks = [conversation(run, number) for number in range(conversations)]
    asked = cached = sent = 0
    for step in range(turns):
        for number, messages in enumerate(talks):
            messages.append({"role": "user", "content": f"Step {step} of talk {number}: go on with the work. " * 5})
            tokens, hits, _ = await turn(clients[sent % len(clients)], messages)
            asked, cached, sent = asked + tokens, cached + hits, sent + 1
    return cached / asked


@pytest.mark.parametrize(
    ("tokenize", "reason", "index"), [("auto", "no_events", "ask"), ("none", "text_blocks", "own")]
)
async def test_turns_meet_their_prefixes_without_events(tmp_path: Path, tokenize: str, reason: str, index: str) -> None:
    """Engines without events, then without a tokenizer as well; clients that name no session: shared system prompts and
    earlier turns are found where they were sent, much more often than by taking the engines in turn. Decisions say what
    they are based on. An engine that began anew is known to be empty."""
    async with running_house(tmp_path, tokenize=tokenize, index=index) as house:
        in_turn = await hit_ratio(house.direct, "in turn")
        routed = await hit_ratio([house.front], "routed")
        assert routed > in_turn + 0.15, (routed, in_turn)
        assert routed > 0.65
        await eventually(lambda: len(house.decisions) == 28, 60, "all decisions")
        assert {(decision.index_health, decision.index_reason) for decision in house.decisions} == {
            ("approximate", reason)
        }
        predicted = sum(decision.predicted_cached_tokens for decision in house.decisions)
        asked = sum(decision.input_tokens for decision in house.decisions)
        assert 0.5 < predicted / asked <= 1.0
        assert len({decision.worker for decision in house.decisions}) > 1, "not all on one engine"

        messages = conversation("restarted", 0)
        for number in range(2):
            messages.append({"role": "user", "content": f"Step {number}. " * 20})
            hits, decision = await house.turn(messages)
        assert (hits > 0, decision.predicted_cached_tokens > 0) == (True, True)
        before = dict(house.incarnations)
        for engine in house.engines:
            await engine.misbehave(restart=True)
        await eventually(
            lambda: all(house.incarnations[url] != was for url, was in before.items()), 60, "engines began anew"
        )
        messages.append({"role": "user", "content": "Once more. " * 20})
        hits, decision = await house.turn(messages)
        assert (hits, decision.predicted_cached_tokens) == (0, 0)


async def test_sent_blocks_have_their_time(tmp_path: Path) -> None:
    """After the time-to-live what was sent does not count any more, though the engine may still have it."""
    async with running_house(tmp_path, engines=1, tokenize="none", keys="approximate_ttl_s = 1.5") as house:
        messages = conversation("timed", 0)

        async def predicted() -> int:
            _, decision = await house.turn([*messages, {"role": "user", "content": "Again? " * 20}])
            return decision.predicted_cached_tokens

        assert await predicted() == 0
        assert await predicted() > 0
        await asyncio.sleep(1.6)  # what is tested is that this much time makes the difference
        assert await predicted() == 0


async def test_a_wrong_index_is_noticed_and_left_and_taken_back(tmp_path: Path) -> None:
    """User case A14: the engine reports no cached tokens where the index predicts many: an alarm, its source becomes
    approximate and says so in decisions; when reports agree again it is synced, and stays so."""
    keys = "parity_window = 8\nparity_min_requests = 4"
    async with running_house(tmp_path, engines=1, events=True, keys=keys) as house:
        messages = conversation("wrong", 0)

        async def talk(turns: int) -> list[Decision]:
            asked = ([*messages, {"role": "user", "content": f"{number} " * 40}] for number in range(turns))
            return [(await house.turn(prompt))[1] for prompt in asked]  # type: ignore[arg-type]

        async def synced() -> bool:
            return (await talk(1))[0].index_health == "synced"

        await until(synced)
        await house.engines[0].misbehave(cached_zero=True)

        async def said(what: tuple[str, str | None]) -> bool:
            await talk(1)
            return house.health[-1:] == [what]

        await until(lambda: said(("approximate", "parity")))
        wrong = (await talk(2))[-1]
        assert (wrong.index_health, wrong.index_reason) == ("approximate", "parity")
        assert wrong.predicted_cached_tokens > 0, "it was sent there"
        assert house.system.metric("indexer", "tidegate_parity_alarms_total") == 1
        await house.engines[0].misbehave(cached_zero=False)
        await until(lambda: said(("synced", None)))
        await until(synced)
        assert [decision.index_health for decision in await talk(8)] == ["synced"] * 8
        assert house.health[-1] == ("synced", None), "and not back again"
        assert house.system.metric("indexer", "tidegate_parity_alarms_total") == 1


async def test_a_fan_out_rings_no_alarm(tmp_path: Path) -> None:
    """Bursts of sub-agents with one new system prompt each: the engine finds for most of them what the index could not
    have known when they were placed together. The index is right all the same, and stays `synced`."""
    async with running_house(tmp_path, engines=2, events=True) as house:
        for burst in range(10):
            talks = [conversation(f"burst {burst}", 0) for _ in range(6)]
            for number, messages in enumerate(talks):
                messages.append({"role": "user", "content": f"{number} " * 20})
            found = [hits for hits, _ in await asyncio.gather(*(house.turn(messages) for messages in talks))]
            assert sum(hits > 0 for hits in found) >= 3, "most find it"
        heard = house.heard
        await eventually(lambda: house.heard > heard + 8, 60, "the heartbeats that make them count")
        assert ("approximate", "parity") not in house.health
        assert house.system.metric("indexer", "tidegate_parity_alarms_total") == 0

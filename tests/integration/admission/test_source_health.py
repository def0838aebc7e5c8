"""How far a source can be trusted is one thing, whoever says it: the indexer's fact, an answer, a decision."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bus import subjects
from bus.nats import NatsBus
from schemas.admit import Granted
from schemas.base import from_json, from_msgpack, to_msgpack
from schemas.index import IndexSource, MatchReply, MatchRequest
from tests.integration.admission.world import World
from tests.integration.bridge.house import Watcher, chain_of_prompt, running_bridge, running_indexer, until, until_async
from tests.integration.bridge.scripted_engine import ScriptedEngine, batch, stored
from tests.support.processes import python_process, settings_arguments

BLOCK = 4
PROMPT = list(range(3 * BLOCK))
Health = tuple[str, str | None]


class Voices:
    """Everybody who speaks of the one source."""

    def __init__(self, bus: NatsBus, world: World, facts: Watcher) -> None:
        self._bus = bus
        self._world = world
        self._facts = facts
        self._asked = 0

    def fact(self) -> Health | None:
        """The indexer's newest fact."""
        if not self._facts.messages:
            return None
        fact = from_json(self._facts.messages[-1].payload, IndexSource)
        return fact.health, fact.reason

    async def answer(self) -> Health | None:
        """What `index.match` answers."""
        request = MatchRequest(model="tiny", block_size=BLOCK, chain=chain_of_prompt(PROMPT, BLOCK))
        answer = await self._bus.request(subjects.INDEX_MATCH, to_msgpack(request), timeout_s=2.0)
        matches = from_msgpack(answer.payload, MatchReply).matches
        return (matches[0].health, matches[0].reason) if matches else None

    async def decision(self) -> tuple[Health, Health, Health]:
        """What a grant says, and of the candidate and the whole what the decision says that everybody hears."""
        self._asked += 1
        name = f"r{self._asked}"
        request = self._world.request(
            name, f"s{self._asked}", tokens=len(PROMPT), block_size=BLOCK, chain=chain_of_prompt(PROMPT, BLOCK)
        )
        granted: Granted = await self._world.grant(request)
        await until(lambda: any(d.request_id == name for d in self._world.decisions), "the decision is heard")
        self._world.end(request, granted.grant.worker)
        decision = next(d for d in self._world.decisions if d.request_id == name)
        [candidate] = decision.candidates
        return (
            (granted.index_health, granted.index_reason),
            (candidate.health, candidate.health_reason),
            (decision.index_health, decision.index_reason),
        )

    async def all_say(self, health: Health) -> None:
        """Fact and answer come to say it; then a decision says it in each place."""

        async def said() -> bool:
            return self.fact() == health == await self.answer()

        await until_async(said, f"{health} is said")
        assert await self.decision() == (health,) * 3


@pytest.fixture
async def world(bus: NatsBus) -> AsyncIterator[World]:
    world = World(bus, workers=(), model="tiny")
    await world.start(index=False)
    yield world
    await world.stop()


async def test_a_worker_of_another_block_size_is_said_everywhere(
    url: str, bus: NatsBus, world: World, tmp_path: Path
) -> None:
    """User case A10: blocks of 4 declared, events of 64: nothing of it is scored; fact, answer and decision say why."""
    facts = await Watcher.of(bus, subjects.index_source("w", 0))
    settings = {"nats_url": url, "warmup_s": 0.4}
    async with (
        ScriptedEngine(block_size=BLOCK) as engine,
        running_indexer(url),
        running_bridge(engine, url),
        python_process("services.admission", *settings_arguments(settings), directory=tmp_path) as admission,
    ):
        voices = Voices(bus, world, facts)
        await admission.wait_said("leadership key=admission epoch=")
        await voices.all_say(("synced", None))
        await engine.publish(batch(stored([1], list(range(64)), block_size=64)))
        await voices.all_say(("blind", "block_size"))


@pytest.mark.parametrize("index", ["ask", "own"])
async def test_fact_answer_and_decision_agree_through_a_gap(
    url: str, bus: NatsBus, world: World, tmp_path: Path, index: str
) -> None:
    """User case A1: in sync, with a hole that the engine does not fill yet, in sync again, then with history lost for
    good; whether admission asks the indexer or has an index of its own."""
    facts = await Watcher.of(bus, subjects.index_source("w", 0))
    settings = {"nats_url": url, "warmup_s": 0.4, "index": index, "worker_lost_s": 30.0}
    async with (
        ScriptedEngine(block_size=BLOCK) as engine,
        running_indexer(url, worker_lost_s=30.0),
        running_bridge(engine, url, replay_timeout_s=2.0, replay_attempts=2),
        python_process("services.admission", *settings_arguments(settings), directory=tmp_path) as admission,
    ):
        voices = Voices(bus, world, facts)
        await engine.publish(batch(stored([1], PROMPT[:BLOCK])))
        await admission.wait_said("leadership key=admission epoch=")
        await voices.all_say(("synced", None))
        [rank] = engine.ranks
        rank.replay = "silent"
        await engine.publish(batch(stored([2], PROMPT[BLOCK : 2 * BLOCK], parent=1)), lost=True)
        await engine.publish(batch(stored([3], PROMPT[2 * BLOCK :], parent=2)))
        await voices.all_say(("catching_up", "gap"))
        rank.replay = "normal"
        await voices.all_say(("synced", None))
        await engine.publish(batch(stored([4], PROMPT[:BLOCK])), lost=True)
        engine.forget_before(4)
        await engine.publish(batch(stored([5], PROMPT[:BLOCK])))
        await voices.all_say(("approximate", "history_gone"))

"""Clients that name nobody, through ingress, indexer and admission: known by what they say, or not at all."""

from __future__ import annotations

from typing import Any, cast

import pytest
from openai import AsyncOpenAI

from bus import subjects
from bus.interface import BusMessage
from schemas.base import from_json, from_msgpack, to_json
from schemas.decision import Decision
from schemas.index import SessionQuery, SessionResidency
from schemas.placed import Placed
from schemas.session import SessionKey
from schemas.trace import AgentContext
from tests.integration.bridge.house import running_indexer
from tests.integration.ingress.support import ASSETS, MODEL, Stage, System, chat, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

Messages = list[dict[str, str]]


class Conversation:
    """The official client without a single header of identity; ``name`` tells its rows apart."""

    def __init__(self, url: str, system: System, name: str) -> None:
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._system = system
        self._name = name
        self._sent = 0

    async def send(self, messages: Messages) -> tuple[str, AgentContext | None]:
        """One request to its end: what was answered, and whose its row says it was."""
        self._sent += 1
        mine = f"{self._name}-{self._sent}"
        answer = await self._client.chat.completions.create(
            model=MODEL, messages=cast(Any, messages), max_tokens=12, extra_headers={"x-request-id": mine}
        )
        await self._system.rows.by_x_request_id(mine)
        (row,) = [row for row in self._system.rows.rows if row.request is not None and row.request.x_request_id == mine]
        return answer.choices[0].message.content or "", row.agent_context

    async def three_turns_and_a_fork(self) -> list[AgentContext | None]:
        """Three turns; then, from the first answer, something else."""
        messages: Messages = [{"role": "system", "content": f"You are {self._name}."}]
        contexts = []
        for turn in range(3):
            messages.append({"role": "user", "content": f"turn {turn}"})
            text, context = await self.send(messages)
            contexts.append(context)
            messages.append({"role": "assistant", "content": text})
        _, context = await self.send([*messages[:3], {"role": "user", "content": "no, something else"}])
        return [*contexts, context]

    async def close(self) -> None:
        await self._client.close()


async def test_three_turns_are_one_session_and_a_fork_is_its_child(system: System) -> None:
    """In rows, in admission's decisions and in the indexer; and it says how sure it was."""
    decisions: list[Decision] = []
    placed: list[Placed] = []

    def on_placed(message: BusMessage) -> None:
        placed.append(from_msgpack(message.payload, Placed))

    def on_decision(message: BusMessage) -> None:
        decisions.append(from_json(message.payload, Decision))

    subscriptions = [
        await system.bus.subscribe(f"{subjects.ROOT}.decision.*", on_decision),
        await system.bus.subscribe(f"{subjects.ROOT}.placed.*", on_placed),
    ]
    async with (
        running_indexer(system.nats.url) as indexer,
        system.door(
            recognise_sessions=True,
            tokenizers={MODEL: str(ASSETS)},
            recognise_deadline_ms=5000,
            recognise_confidence=0.5,  # the indexer has just begun
        ) as door,
    ):
        await until(lambda: len(indexer.core.replica.workers) == 2)
        conversation = Conversation(door.url, system, "implicit")
        contexts = [context for context in await conversation.three_turns_and_a_fork() if context is not None]
        await conversation.close()
        assert len(contexts) == 4
        first, second, third, fork = contexts
        assert first.session is not None
        assert (first.session.family, first.session.root) == ("prefix", first.session_id)
        assert [context.session for context in (second, third)] == [first.session] * 2
        assert fork.session != first.session
        assert (fork.session_id != first.session_id, fork.parent_session_id) == (True, first.session_id)
        said = [context.implicit for context in contexts]
        assert [(each.relation, each.confidence) for each in said if each is not None] == [
            ("new", 1.0), ("continues", 0.5), ("continues", 0.99), ("forks", 0.99)
        ]  # fmt: skip

        await until(lambda: len(decisions) == len(placed) == 4)
        assert [(fact.source, fact.session) for fact in placed] == [
            ("admission-1", context.session) for context in contexts
        ]
        assert len({decision.worker for decision in decisions[:3]}) == 1
        assert [decision.previous_worker for decision in decisions[:3]] == [None, *[decisions[0].worker] * 2]
        query = to_json(SessionQuery(session=first.session))
        answer = await system.bus.request(subjects.INDEX_SESSION, query, timeout_s=30)
        told = from_json(answer.payload, SessionResidency)
        assert (told.children, told.error) == ((fork.session,), None)
        assert told.depth == told.unique_blocks + told.shared_blocks > 0
    for subscription in subscriptions:
        await subscription.unsubscribe()


async def test_off_each_request_is_its_own(system: System) -> None:
    """Without the setting nothing is recognised, whoever could."""
    async with running_indexer(system.nats.url) as indexer, system.door() as door:
        await until(lambda: len(indexer.core.replica.workers) == 2)
        conversation = Conversation(door.url, system, "explicit")
        assert await conversation.three_turns_and_a_fork() == [None] * 4
        await conversation.close()
        assert len(indexer.core.recogniser.index) == 0


async def test_without_an_indexer_each_is_a_new_session(stage: Stage) -> None:
    """Nobody answers: requests are served at once, as sessions of their own, and say why."""
    async with stage.door(recognise_sessions=True, admit_idle_s=0.05) as door:
        answer = await door.post(chat("anybody there?"))
        assert answer.status == 200
        request_id = (answer.header("x-request-id") or b"").decode()
        await stage.rows.one(request_id)
        context = stage.rows.rows[-1].agent_context
        assert context is not None
        assert context.session == SessionKey(family="prefix", root=request_id)
        assert context.implicit is not None
        assert context.implicit.reason == "no_indexer"

"""``x-codex-turn-state`` as Codex uses it: what an answer gives is sent back, and the turn goes on where it ran."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.ingress.turn_state import HEADER, PREFIX
from tests.integration.ingress.support import JSON, MODEL, Door, Stage, running_stage
from web.client import Answer
from web.server import Request, Responder

pytestmark = pytest.mark.asyncio(loop_scope="session")

CODEX = {"session_id": "11111111-2222-7333-8444-555555555555", "originator": "codex_exec", "x_codex_beta_features": "a"}
BODY = {"model": MODEL, "input": "hello"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with running_stage(tmp_path_factory.mktemp("turns"), engines=3) as stage:
        yield stage


async def ask(door: Door, thread: str, token: bytes | None = None) -> Answer:
    told = {} if token is None else {HEADER.replace("-", "_"): token.decode()}
    return await door.post(BODY, "/v1/responses", **CODEX, thread_id=thread, **told)


def asked(stage: Stage) -> tuple[str, Request]:
    """Who was asked last, and what."""
    ((name, request),) = [(name, request) for name, engine in stage.engines.items() for request in engine.seen]
    stage.engines[name].seen.clear()
    return name, request


async def test_a_turn_goes_on_where_it_ran_also_by_another_front_door(stage: Stage) -> None:
    """Nobody decides here, and the worker that its hash names has come back meanwhile."""
    secret = {"cache_salt_secret": "0123456789abcdef0123456789abcdef", "tokenize": "none"}
    async with stage.door(**secret) as one, stage.door(**secret, instance="other") as other:
        thread = "aaaaaaaa-2222-7333-8444-555555555555"
        await ask(one, thread)
        home, _ = asked(stage)

        async def broken(request: Request, responder: Responder) -> None:
            responder.send(503, JSON, b"{}")

        good, stage.engines[home].script = stage.engines[home].script, broken
        answer = await ask(one, thread)
        stage.engines[home].script = good
        stage.engines[home].seen.clear()
        token = answer.header(HEADER)
        assert token is not None
        second, _ = asked(stage)
        assert second != home
        for door in (one, other):
            assert (await ask(door, thread, token)).status == 200
            name, request = asked(stage)
            assert name == second
            assert request.header(HEADER) is None  # it is ours
        assert (await ask(one, thread)).status == 200
        assert asked(stage)[0] == home  # the next turn brings none


async def test_only_codex_is_given_one_and_an_engines_own_passes(stage: Stage) -> None:
    async def own(request: Request, responder: Responder) -> None:
        responder.send(200, [*JSON, (b"X-Codex-Turn-State", b"engine's")], b"{}")

    async with stage.door(tokenize="none") as door:
        plain = await door.post(BODY, "/v1/responses", x_tidegate_session_id="s")
        assert plain.header(HEADER) is None
        asked(stage)
        for engine in stage.engines.values():
            engine.script = own
        answer = await ask(door, "bbbbbbbb-2222-7333-8444-555555555555", b"engine's")
        assert answer.header(HEADER) == b"engine's"
        assert asked(stage)[1].header(HEADER) == b"engine's"


async def test_it_can_be_switched_off(stage: Stage) -> None:
    async with stage.door(tokenize="none", turn_state_s=0) as door:
        for engine in stage.engines.values():
            engine.seen.clear()
        answer = await ask(door, "cccccccc-2222-7333-8444-555555555555", PREFIX.encode() + b"AAAA")
        assert answer.status == 200
        assert asked(stage)[1].header(HEADER) is None

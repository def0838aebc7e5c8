"""What a turn tells its engine's cache, on the wire."""

from __future__ import annotations

import json
import time

import pytest

from bus import subjects
from schemas.base import to_json
from schemas.hint import HintAction, HintCommand, HintEnvelope
from schemas.session import SessionKey
from tests.integration.ingress.support import Stage, chat, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_turn_says_whose_step_it_is_where_asked(stage: Stage) -> None:
    """`splice_continuum`: one member more, and otherwise the client's own bytes; the last step says so."""
    body = json.dumps(chat(temperature=1.0, stream=False), indent=1).encode()
    async with stage.door(splice_continuum=True, splice_priority=False) as door:
        await door.post(body, x_tidegate_session_id="mine", x_tidegate_session_final="true")
        await door.post(body)
    with_identity, without = [request for engine in stage.engines.values() for request in engine.seen]
    if b"vllm_xargs" in without.body:
        with_identity, without = without, with_identity
    assert with_identity.body == body.replace(b"{", b'{"vllm_xargs":{"job_id":"mine","is_last_step":1},', 1)
    assert without.body == body


async def test_hints_go_with_the_sessions_next_turn(stage: Stage) -> None:
    """`splice_kv_hints`, to a worker whose bridge says that this is how its engine takes them: once, to that worker."""
    stage.heartbeats.features = ("request:kv_hints",)
    key = SessionKey(family="tidegate", root="mine")
    payload = {"target": {"session_id": "mine"}, "expires_ms": int(time.time() * 1000) + 60_000, "ttl_ms": 1_000}
    action = HintAction(action_id="a1", action_type="pin", payload=payload)
    try:
        async with stage.door(splice_kv_hints=True) as door:
            await until(lambda: door.service.workers == len(stage.engines))
            for worker in stage.engines:
                command = HintCommand(
                    source="hints-1", epoch=1, seq=0, at_ms=0, worker=worker, rank=0, session=key, session_id="mine",
                    envelope=HintEnvelope(message_id=f"to-{worker}", actions=(action,)),
                )  # fmt: skip
                stage.bus.publish(subjects.hint(worker), to_json(command))
            await until(lambda: door.service.hints_waiting == len(stage.engines))
            for _ in range(2):
                await door.post(chat(), x_tidegate_session_id="mine")
    finally:
        stage.heartbeats.features = ()
    (used,) = [name for name, engine in stage.engines.items() if engine.seen]
    first, second = [json.loads(request.body) for request in stage.engines[used].seen]
    envelope = first["kv_hints"]
    assert (first["session_id"], envelope["message_id"], envelope["protocol_version"]) == ("mine", f"to-{used}", "0.1")
    assert [(each["action_id"], each["payload"]) for each in envelope["actions"]] == [("a1", payload)]
    assert "kv_hints" not in second

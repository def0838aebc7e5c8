"""Requests through the front door, engines and admission being real."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from openai import AsyncOpenAI

from tests.integration.ingress.support import MODEL, System, chat

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

"""A harness tells of its tools, and admission learns how long they take: through all processes of ``tidegate up``."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
import zmq

from bus.nats import connect
from bus.subjects import BUCKET_LEARNED, ROOT
from schemas.base import from_json
from schemas.session import SessionKey
from schemas.trace import TraceRow
from tests.support.system import running_system
from web.client import HttpClient, Timeouts

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(400)]

CONFIG = """
[admission]
policy = "commit"
store_learned_s = 0.2
[recorder]
load_samples_s = 0.2
tool_events = "tcp://127.0.0.1:*"
tool_events_http_port = 0
"""
JSON = [(b"content-type", b"application/json")]


def event(call: str, tool: str, event_type: str = "tool_end", **said: object) -> dict[str, object]:
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": event_type,
        "event_time_unix_ms": 1_795_975_336_151 if event_type == "tool_end" else 1_795_975_336_000,
        "session_id": "main",
        "tool": {"tool_call_id": call, "tool_class": tool, **said},
    }


async def test_admission_learns_at_once_what_a_harness_tells(tmp_path: Path) -> None:
    """Over ZeroMQ and over HTTP, with a duration and as a start and an end that tell none: the estimator has each
    sample although the session has made no further request. The session is the one that its request's headers named;
    the durable row is the same call's. Beside them are rows of what the engine's bridge says of its load."""
    config = tmp_path / "tidegate.toml"
    config.write_text(CONFIG)
    async with running_system(tmp_path, "--config", str(config), "--engines", "1") as system:
        client = HttpClient()
        bus = await connect(system.nats_url, name="test", timeout_s=30)
        context = zmq.Context()
        push: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        try:
            chat = {"model": "sim-8b", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            headers = [*JSON, (b"x-claude-code-session-id", b"main")]
            url = f"{system.url}/v1/chat/completions"
            answer = await client.fetch("POST", url, headers, json.dumps(chat).encode(), Timeouts(total_s=60))
            assert answer.status == 200, system.logs()

            log = "".join(path.read_text() for path in (system.workdir / "logs").glob("recorder*.log"))
            endpoint = re.search(r"tool_events_open endpoint=\W?(tcp://[\d.]+:\d+)", log)
            posts = re.search(r"(http://[\d.:]+/v1/tool_events)", log)
            assert endpoint, log
            assert posts, log
            push.connect(endpoint[1])
            told = event("c1", "told-by-zeromq", status="ok", duration_ms=1_234.5)
            push.send_multipart([b"agent-tool-events", bytes(8), msgspec.msgpack.encode(told)])
            pair = [event("c3", "told-by-a-pair", "tool_start"), event("c3", "told-by-a-pair")]
            body = json.dumps([event("c2", "told-by-http", status="ok", duration_ms=1_234.5), *pair]).encode()
            answer = await client.fetch("POST", posts[1], JSON, body, Timeouts(total_s=20))
            assert answer.status == 202, answer.body

            learned = await bus.key_value(BUCKET_LEARNED)
            async with asyncio.timeout(30), aclosing(learned.watch()) as entries:
                async for entry in entries:
                    names = (b"told-by-zeromq", b"told-by-http", b"told-by-a-pair")
                    if all(name in (entry.value or b"") for name in names):
                        break
            async with aclosing(bus.tail(f"{ROOT}.trace.tool.>", from_start=True)) as rows:
                first = from_json((await anext(rows)).payload, TraceRow)
            assert first.agent_context is not None
            assert first.agent_context.session == SessionKey(family="claude_code", root="main")
            async with asyncio.timeout(30), aclosing(bus.tail(f"{ROOT}.trace.worker_load.>", from_start=True)) as rows:
                load = from_json((await anext(rows)).payload, TraceRow).worker_load
            assert load is not None
            assert (load.worker, load.model, [each.rank for each in load.loads]) == ("engine-1", "sim-8b", [0])
            assert load.kv_tokens
        finally:
            push.close(linger=0)
            context.term()
            await client.close()
            await bus.close()

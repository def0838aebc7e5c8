"""The whole way of a hint: front door, admission, planner, bridge, engine, each a process of its own.

Hints are soft (docs/hints.md): without the planner, and at an engine that takes none, clients read the same answers
and rows say the same, but for times and cached tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bus import subjects
from bus.interface import BusMessage
from bus.nats import NatsBus, connect
from bus.tasks import Tasks
from schemas.base import from_json
from schemas.hint import HintResult
from schemas.trace import TraceRow
from tests.support.nats import running_bus
from tests.support.processes import HelperProcess, eventually, python_process, settings_arguments
from web.client import HttpClient, Timeouts

MODEL = "sim-8b"
SESSIONS, TURNS, WORDS = 5, 4, 40
WARM_UP = "warm-up-"
TIMES = ("_ms", "hit_rate", "queue_depth", "cached_tokens", "predicted_shared_tokens", "_id", "worker_time")
"""Endings of what may differ: times, what was cached or predicted to be, and ids of requests and grants."""


@dataclass
class House:
    """``results``: what bridges answered."""

    url: str
    hints: HelperProcess | None
    results: list[HintResult]
    rows: list[TraceRow]
    client: HttpClient

    async def warm_up(self) -> None:
        """Other sessions' turns, until decisions are made with the engine's own events, which rows tell."""
        for number in range(100):
            await self.turn(f"{WARM_UP}{number}", [{"role": "user", "content": f"hello {number} " * 20}], final=True)
            await eventually(lambda number=number: len(self.rows) == number + 1)  # type: ignore[misc]
            last = self.rows[-1].request
            if last is not None and last.index_health == "synced":
                return
        raise AssertionError("admission's index never came to know the engine")

    def played(self) -> list[TraceRow]:
        """Rows of the sessions that are compared."""
        return [row for row in self.rows if row.agent_context and not row.agent_context.session_id.startswith(WARM_UP)]

    async def turn(self, session: str, messages: list[dict[str, Any]], *, final: bool = False) -> dict[str, Any]:
        headers = [(b"content-type", b"application/json"), (b"x-tidegate-session-id", session.encode())]
        if final:
            headers.append((b"x-tidegate-session-final", b"true"))
        body = {"model": MODEL, "messages": messages, "max_tokens": 16, "seed": 7}
        answer = await self.client.fetch(
            "POST", f"{self.url}/v1/chat/completions", headers, json.dumps(body).encode(), Timeouts(total_s=30)
        )
        assert answer.status == 200, answer.body
        return dict(json.loads(answer.body))


@asynccontextmanager
async def house(directory: Path, *, planner: bool = True, **engine: Any) -> AsyncIterator[House]:
    """One engine with little room and a host tier. ``engine``: more settings of it."""
    async with AsyncExitStack() as stack:
        nats, _ = await stack.enter_async_context(running_bus(directory))

        async def start(module: str, name: str, settings: dict[str, Any]) -> HelperProcess:
            arguments = settings_arguments(settings)
            return await stack.enter_async_context(python_process(module, *arguments, directory=directory, name=name))

        room = {"num_blocks": 160, "block_size": 16, "host_blocks": 512, "profile": "instant", "model": MODEL}
        process = await start("load.engine", "engine", {**room, **engine})
        ready = json.loads(await process.wait_line())
        common = {"nats_url": nats.url}
        watched, rows = await _watch(stack, nats.url)
        admission = await start("services.admission", "admission", {**common, "warmup_s": 0.2, "policy": "commit"})
        await start(
            "services.bridge",
            "bridge",
            {
                **common,
                "engine_url": ready["url"],
                "worker": "w",
                "engine": "simulated",
                "kv_events": json.dumps(ready["kv_events"]),
                "scrape_interval_s": 0.2,
                "heartbeat_interval_s": 0.2,
            },
        )
        hints = await start("services.hints", "hints", {**common}) if planner else None
        if hints is not None:
            await hints.wait_said("leadership key=hints epoch=")
        await admission.wait_said("leadership")
        door = await start("services.ingress", "ingress", {**common, "port": 0, "tokenize": "engine"})
        await door.wait_said("front_door_open")
        client = HttpClient()
        stack.push_async_callback(client.close)
        url = _said(door, "front_door_open", "url")
        await eventually_serves(client, url)
        system = House(url, hints, watched, rows, client)
        await system.warm_up()
        yield system


async def _watch(stack: AsyncExitStack, url: str) -> tuple[list[HintResult], list[TraceRow]]:
    """What bridges answer, and every row, as they come."""
    bus: NatsBus = await connect(url, name="watch", timeout_s=30)
    stack.push_async_callback(bus.close)
    results: list[HintResult] = []
    rows: list[TraceRow] = []
    tasks = Tasks()
    stack.push_async_callback(tasks.stop)

    def on_result(message: BusMessage) -> None:
        results.append(from_json(message.payload, HintResult))

    async def follow() -> None:
        async with aclosing(bus.tail(f"{subjects.ROOT}.trace.request_end.>", from_start=True)) as tail:
            async for stored in tail:
                rows.append(from_json(stored.payload, TraceRow))  # noqa: PERF401 - one at a time, as it comes

    await bus.subscribe(subjects.hint_result("w"), on_result)
    tasks.start("rows", follow())
    return results, rows


def _said(process: HelperProcess, event: str, field: str) -> str:
    (line,) = [line for line in process.stderr.splitlines() if event in line]
    return next(word.partition("=")[2] for word in line.split() if word.startswith(f"{field}="))


async def eventually_serves(client: HttpClient, url: str) -> None:
    """Until the front door knows the engine."""
    async with asyncio.timeout(30):
        while (await client.fetch("GET", f"{url}/readyz", [], b"", Timeouts(total_s=5))).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def play(system: House) -> list[Any]:
    """Sessions by turns, more than the device holds; each ends with its last step. What clients read of them."""
    said = []
    conversations: dict[str, list[dict[str, Any]]] = {f"s{number}": [] for number in range(SESSIONS)}
    for turn in range(TURNS):
        for session, messages in conversations.items():
            text = " ".join(f"{session} {turn} word{place}" for place in range(WORDS))
            messages.append({"role": "user", "content": text})
            answer = await system.turn(session, messages, final=turn == TURNS - 1)
            choice = answer["choices"][0]
            usage = answer["usage"]
            said.append(
                (
                    session,
                    choice["message"],
                    choice["finish_reason"],
                    usage["prompt_tokens"],
                    usage["completion_tokens"],
                )
            )
            messages.append({"role": "assistant", "content": choice["message"]["content"]})
    return said


def comparable(rows: list[TraceRow]) -> list[str]:
    """Rows without what may differ."""

    def stripped(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: stripped(inner)
                for key, inner in value.items()
                if not key.endswith(TIMES) or key in ("session_id", "parent_session_id")
            }
        return [stripped(inner) for inner in value] if isinstance(value, list) else value

    return sorted(json.dumps(stripped(msgspec.to_builtins(row)), sort_keys=True) for row in rows)


@pytest.mark.timeout(180)
async def test_hints_change_no_answer_and_no_row(tmp_path: Path) -> None:
    """Carried out, without a planner, with one that is killed on the way, and at an engine that takes none."""
    said: dict[str, list[Any]] = {}
    rows: dict[str, list[str]] = {}
    outcomes: dict[str, Counter[str]] = {}
    for name, options in (
        ("carried out", {}),
        ("no planner", {"planner": False}),
        ("killed", {}),
        ("unsupported", {"kv_hints": False}),
    ):
        directory = tmp_path / name.replace(" ", "-")
        directory.mkdir()
        async with house(directory, **options) as system:
            if name == "killed":
                assert system.hints is not None
                await eventually(lambda system=system: bool(system.results))  # type: ignore[misc]
                await system.hints.kill()
            said[name] = await play(system)
            await eventually(lambda system=system: len(system.played()) == SESSIONS * TURNS)  # type: ignore[misc]
            rows[name] = comparable(system.played())
            outcomes[name] = Counter(each.outcome for result in system.results for each in result.results)
    assert outcomes["carried out"]["accepted"] > 10, outcomes
    assert outcomes["no planner"] == Counter()
    assert set(outcomes["unsupported"]) == {"unsupported"}
    assert {name for name in said if said[name] == said["carried out"]} == set(said)
    assert {name for name in rows if rows[name] == rows["carried out"]} == set(rows)

"""Every way in which the engine misbehaves on purpose, seen from outside."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvcore.events import Stored
from tests.integration.engine.engines import (
    Listener,
    RunningEngine,
    decoded,
    replay,
    resident_after,
    running_engine,
    until,
)
from web.client import HttpClient, Timeouts
from web.errors import ConnectionLostError, FirstByteTimeoutError, IdleTimeoutError

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 8}
QUICK = Timeouts(first_byte_s=1.0, idle_s=1.0)


async def stream_of(engine: RunningEngine, timeouts: Timeouts | None = None, **fields: Any) -> list[bytes]:
    """The events of one stream, on a connection of its own. Raises as `web.client` does."""
    client = HttpClient()
    try:
        body = json.dumps({**CHAT, **fields}).encode()
        answer = await client.fetch("POST", engine.url + "/v1/chat/completions", [], body, timeouts)
        assert answer.status == 200, answer.body
        return [event for event in answer.body.split(b"\n\n") if event]
    finally:
        await client.close()


async def partial_stream(engine: RunningEngine, timeouts: Timeouts | None = None) -> tuple[int, type[Exception] | None]:
    """How many events came before the stream broke, and with what."""
    client = HttpClient()
    received = b""
    try:
        stream = await client.open("POST", engine.url + "/v1/chat/completions", [], json.dumps(CHAT).encode(), timeouts)
        while piece := await stream.read():
            received += piece
    except (ConnectionLostError, FirstByteTimeoutError, IdleTimeoutError) as error:
        return received.count(b"\n\n"), type(error)
    finally:
        await client.close()
    return received.count(b"\n\n"), None


async def test_event_batches_dropped_doubled_swapped_and_spoiled(tmp_path: Path) -> None:
    """A1, A5: what is lost live is in the replay; doubles and swaps keep their numbers; junk is among good ones."""
    async with running_engine(tmp_path) as engine:
        listener = Listener(engine.kv_events[0])
        try:
            await listener.subscribed(engine)
            first = listener.messages[-1][0] + 1

            async def batch(number: int) -> None:
                await engine.complete([number * 100 + i for i in range(20)])

            await engine.misbehave(drop_batches=2)
            for number in range(4):
                await batch(number)
            assert await listener.take(2) == [first + 2, first + 3]
            await engine.misbehave(duplicate_batches=1)
            await batch(4)
            assert await listener.take(2) == [first + 4, first + 4]
            await engine.misbehave(reorder_batches=1)
            await batch(5)
            await batch(6)
            assert await listener.take(2) == [first + 6, first + 5]
            await engine.misbehave(junk_batches=1)
            await batch(7)
            assert await listener.take(1) == [first + 7]
        finally:
            listener.close()
        spoiled = decoded(listener.messages[-1:])[0]
        assert [type(event) for event in spoiled.events] == [Stored]
        assert sum(spoiled.rejected.values()) == 3
        replayed = await replay(engine.replay[0], first)
        assert [seq for seq, _ in replayed] == list(range(first, first + 8))


async def test_restart_loses_everything_and_counts_from_zero(tmp_path: Path) -> None:
    """A3: requests cut, cache and history gone, sequence 0 and a new start time, on the same ports, SUB still there."""
    async with running_engine(tmp_path, "--profile", "h100-8b") as engine:
        listener = Listener(engine.kv_events[0])
        try:
            await listener.subscribed(engine)
            started_s = (await engine.metric("process_start_time_seconds"))[""]
            before = (await engine.counts())["started"]
            running = asyncio.create_task(stream_of(engine, max_tokens=4000, ignore_eos=True))
            await engine.wait_count("started", before + 1)
            await engine.misbehave(restart=True)
            with pytest.raises(ConnectionLostError):
                await running
            assert (await engine.get("/sim/resident"))["ranks"]["0"]["engine_hashes"] == []
            assert (await engine.metric("process_start_time_seconds"))[""] > started_s
            assert await replay(engine.replay[0], 0) == []
            await listener.subscribed(engine)
        finally:
            listener.close()
        replayed = await replay(engine.replay[0], 0)
        assert [seq for seq, _ in replayed] == list(range(len(replayed)))
        assert listener.messages[-1] in replayed
        resident = (await engine.get("/sim/resident"))["ranks"]["0"]
        assert resident_after(decoded(replayed)) == set(resident["engine_hashes"])


async def test_replay_history_lost_empty_or_silent(tmp_path: Path) -> None:
    """A1, A4: history that begins later than asked, a router that always answers END, and one that does not answer."""
    async with running_engine(tmp_path, "--buffer-steps", "3") as engine:
        for number in range(5):
            await engine.complete([number * 100 + i for i in range(20)])
        assert [seq for seq, _ in await replay(engine.replay[0], 0)] == [2, 3, 4]
        await engine.misbehave(lose_history=True)
        await engine.complete([9] * 20)
        assert [seq for seq, _ in await replay(engine.replay[0], 0)] == [5]
        await engine.misbehave(replay="end_only")
        assert await replay(engine.replay[0], 0) == []
        await engine.misbehave(replay="silent")
        with pytest.raises(TimeoutError):
            await replay(engine.replay[0], 0, timeout_s=0.2)
        await engine.misbehave(behave=True)
        assert len(await replay(engine.replay[0], 0)) == 1


async def test_dies_after_k_chunks(tmp_path: Path) -> None:
    """C2: the connection ends after exactly k events, k = 0 before the first byte; then it serves again."""
    async with running_engine(tmp_path) as engine:
        for chunks in (0, 1, 5):
            await engine.misbehave(die_after_chunks=chunks, die_requests=1)
            assert await partial_stream(engine) == (chunks, ConnectionLostError)
        assert (await stream_of(engine))[-1] == b"data: [DONE]"
        counts = await engine.counts()
        assert (counts["lost"], counts["served"]) == (3, 1)


@pytest.mark.parametrize(
    ("stage", "events", "error"),
    [
        ("accept", 0, FirstByteTimeoutError),
        ("head", 0, FirstByteTimeoutError),
        ("first_token", 0, FirstByteTimeoutError),
        ("stream", 2, IdleTimeoutError),
    ],
)
async def test_hangs_at_every_stage(tmp_path: Path, stage: str, events: int, error: type[Exception]) -> None:
    """A hang is a client's time-out; the client that goes frees everything; a stop does not wait for the hung."""
    async with running_engine(tmp_path) as engine:
        await engine.misbehave(stall=stage, stall_requests=2, stall_after_chunks=2)
        assert await partial_stream(engine, QUICK) == (events, error)
        if stage != "accept":
            await engine.wait_count("disconnected", 1)
        hung = asyncio.create_task(partial_stream(engine))

        async def second_hangs() -> bool:
            return bool((await engine.get("/sim/misbehave"))["stall_requests"] == 0)

        await until(second_hangs)
        assert await engine.process.stop() == 0
        await asyncio.gather(hung, return_exceptions=True)


async def test_a_short_stall_goes_on(tmp_path: Path) -> None:
    """C4: with ``stall_s`` the answer comes late and whole."""
    async with running_engine(tmp_path) as engine:
        await engine.misbehave(stall="first_token", stall_s=0.3)
        began = asyncio.get_running_loop().time()
        events = await stream_of(engine)
        assert asyncio.get_running_loop().time() - began >= 0.3
        assert events[-1] == b"data: [DONE]"


async def test_errors_and_false_reports(tmp_path: Path) -> None:
    """n answers of a status, then none; usage omitted or null (C3); cached always 0 (A14); a wrong block size (A10)."""
    async with running_engine(tmp_path) as engine:
        await engine.misbehave(error_status=429, error_requests=2)
        body = {"prompt": list(range(64)), "max_tokens": 1}
        assert [(await engine.post("/v1/completions", body))[0] for _ in range(3)] == [429, 429, 200]
        options: dict[str, Any] = {"stream_options": {"include_usage": True}}
        await engine.misbehave(usage="omit")
        assert not any(b'"usage"' in event for event in await stream_of(engine, **options))
        await engine.misbehave(usage="null")
        events = await stream_of(engine, **options)
        assert all(b'"usage":null' in event for event in events[:-2])
        assert b'"prompt_tokens"' in events[-2]
        await engine.misbehave(behave=True, cached_zero=True)
        answer = await engine.complete(list(range(64)))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await engine.misbehave(cached_zero=False)
        answer = await engine.complete(list(range(64)))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        await engine.misbehave(announced_block_size=64)
        assert 'block_size="64"' in next(iter(await engine.metric("vllm:cache_config_info")))


async def test_flags_can_be_set_at_start(tmp_path: Path) -> None:
    """The same flags as JSON on the command line."""
    async with running_engine(tmp_path, "--misbehave", '{"error_status": 500, "error_requests": 1}') as engine:
        assert (await engine.post("/v1/completions", {"prompt": [1], "max_tokens": 1}))[0] == 500
        assert (await engine.get("/sim/misbehave"))["error_requests"] == 0

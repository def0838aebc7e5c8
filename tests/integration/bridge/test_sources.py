"""Where an engine's events are, and which process publishes them: as every kind of engine lets it be known."""

from __future__ import annotations

from typing import Literal

import pytest

from bus.interface import Bus
from schemas.worker import RankStream
from tests.integration.bridge.house import running_bridge, until
from tests.integration.bridge.scripted_engine import ScriptedEngine
from tests.integration.bridge.test_bridge import Stream, block
from tests.integration.bridge.test_checkpoint import snapshot


@pytest.mark.parametrize("page", ["kv_event_sources", "server_info"])
async def test_ranks_are_discovered(url: str, bus: Bus, page: Literal["kv_event_sources", "server_info"]) -> None:
    """User case A13: vLLM names each rank's wildcard endpoint, SGLang one base port; each rank is a source of its own,
    on the engine's host, with its own replay socket."""
    stream = await Stream.of(bus)
    async with (
        ScriptedEngine(ranks=2, discovery=page, block_size=4) as engine,
        running_bridge(engine, url, kv_events=(), kv_replay=()),
    ):
        for rank in (0, 1):
            for number in range(2 + rank):
                await engine.publish(block(10 * rank + number), rank=rank, lost=number == 0)
        for rank in (0, 1):
            await stream.until_numbers(2 + rank, rank=rank)
            assert [seq for _, seq in stream.numbers(rank)] == list(range(2 + rank))
            await stream.until_stream("synced", rank=rank)
        payloads = {(headers.rank, headers.seq): payload for headers, payload in stream.messages()}
        assert payloads == {(rank, n): block(10 * rank + n) for rank in (0, 1) for n in range(2 + rank)}
        assert set(stream.state().profile.features) == {"kv_events", "kv_replay"}


async def test_discovered_engine_that_connects_to_us(url: str, bus: Bus) -> None:
    """A concrete endpoint in /kv_event_sources: vLLM connects there, so the bridge binds it; and again after the
    engine's restart."""
    stream = await Stream.of(bus)
    async with (
        ScriptedEngine(connect=True, discovery=True, block_size=4) as engine,
        running_bridge(engine, url, kv_events=(), kv_replay=()),
    ):
        for number in range(2):
            await engine.publish(block(number))
        await stream.until_numbers(2)
        await engine.restart()
        await engine.publish(block(7))
        await stream.until_numbers(3)
        assert [seq for _, seq in stream.numbers()] == [0, 1, 0]
        assert (await stream.until_stream("synced")).seq == 0


@pytest.mark.parametrize("told_by", ["start time and newest batch", "newest batch", "start time", "its socket alone"])
async def test_restarted_engine_that_reaches_the_same_number_before_anybody_looks(
    url: str, bus: Bus, told_by: str
) -> None:
    """User case A3, at its worst: the new process has published as many batches as the old one when it is seen first,
    and is idle. What it shows of itself, start time and replay socket, each without the other or neither: nothing of
    the old process is left, and what cannot be known is not called synced."""
    stream = await Stream.of(bus)
    replays = "newest batch" in told_by
    async with ScriptedEngine(block_size=4, metrics="start time" in told_by) as engine:
        changes: dict[str, object] = {} if replays else {"kv_replay": ()}
        async with running_bridge(engine, url, **changes):
            await stream.until_stream(*(("synced", None) if replays else ("blind", "no_events")))
            for number in range(3):
                await engine.publish(block(number))
            await stream.until_numbers(3)
            old = stream.rank().incarnation
            await engine.restart()
            for number in range(10, 13):
                await engine.publish(block(number), lost=True)

            def followed() -> bool:
                rank: RankStream = stream.rank()
                return rank.incarnation != old and (rank.seq, rank.state) == (
                    (2, "synced") if replays else (-1, "blind")
                )

            await until(followed, "the new process")
            _, own = await snapshot(bus)
            assert own.resident("w", 0) == (3 if replays else 0)
            await engine.publish(block(13))
            await stream.until_numbers(7 if replays else 4)
            await until(lambda: stream.rank().seq == 3, "the newest batch is told")
            assert stream.rank().state == ("synced" if replays else "catching_up")
    new = [payload for headers, payload in stream.messages() if headers.incarnation != old]
    assert new == [block(number) for number in range(10 if replays else 13, 14)]

"""The indexer on a real bus, with real bridges before it."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
from prometheus_client import REGISTRY, generate_latest

from bus import subjects
from bus.interface import Bus
from schemas.base import from_json, from_msgpack, to_json, to_msgpack
from schemas.index import IndexSource, MatchReply, MatchRequest, SessionQuery, SessionResidency, WorkerMatch
from schemas.placed import Placed
from schemas.request import RequestEnd, Usage
from schemas.session import SessionIdentity, SessionKey
from tests.integration.bridge.house import (
    Watcher,
    chain_of_prompt,
    running_bridge,
    running_indexer,
    source_of,
    until,
    until_applied,
    until_async,
)
from tests.integration.bridge.scripted_engine import ScriptedEngine, batch, removed, stored

BLOCK = 4
SESSION = SessionKey(family="dynamo", root="s1")


def tokens(blocks: int, start: int = 0) -> list[int]:
    return list(range(start, start + blocks * BLOCK))


def placed(prompt: list[int], **more: Any) -> Placed:
    """A prompt that went to rank 0 of the worker."""
    values = {"source": "admission-1", "epoch": 1, "seq": 0, "at_ms": 0, "request_id": "r", "model": "tiny", **more}
    return Placed(worker="w", rank=0, block_size=BLOCK, chain=chain_of_prompt(prompt, BLOCK), **values)


async def ask(bus: Bus, prompt: list[int], *, block_size: int = BLOCK, model: str = "tiny", **more: Any) -> MatchReply:
    """One match question for a prompt."""
    request = MatchRequest(model=model, block_size=block_size, chain=chain_of_prompt(prompt, block_size), **more)
    answer = await bus.request(subjects.INDEX_MATCH, to_msgpack(request), timeout_s=30)
    return from_msgpack(answer.payload, MatchReply)


async def ask_one(bus: Bus, prompt: list[int], rank: int = 0, **more: Any) -> WorkerMatch:
    reply = await ask(bus, prompt, **more)
    return next(match for match in reply.matches if match.rank == rank)


def health_facts(watcher: Watcher, rank: int = 0) -> list[tuple[str, str | None]]:
    facts = [from_json(message.payload, IndexSource) for message in watcher.messages]
    return [(fact.health, fact.reason) for fact in facts if fact.rank == rank]


async def test_match_over_the_bus(url: str, bus: Bus) -> None:
    """A chain in, per worker and rank the reachable blocks and their health out; other models have other pools; the
    size and the reasons of misfits are said."""
    async with (
        ScriptedEngine(block_size=BLOCK) as engine,
        running_indexer(url) as indexer,
        running_bridge(engine, url),
    ):
        await engine.publish(batch(stored([1, 2, 3], tokens(3))))
        await until_applied(indexer, 0)
        match = await ask_one(bus, tokens(5))
        assert (match.blocks.device, match.blocks.reach, match.resident_blocks) == (3, 3, 3)
        assert (match.health, match.reason) == ("synced", None)
        assert (await ask_one(bus, tokens(2))).blocks.reach == 2
        assert (await ask_one(bus, tokens(5, start=100))).blocks.reach == 0
        assert (await ask(bus, tokens(5), model="other")).matches == ()
        misfit = await ask_one(bus, tokens(4), block_size=8)
        assert (misfit.health, misfit.reason, misfit.blocks.reach) == ("blind", "block_size", 0)
        salted = await ask_one(bus, tokens(4), salt_rule="none")
        assert (salted.health, salted.reason) == ("blind", "salt_rule")
        await engine.publish(batch(removed([2])))
        await until_applied(indexer, 1)
        assert (await ask_one(bus, tokens(5))).blocks.reach == 1
        junk = await bus.request(subjects.INDEX_MATCH, b"\xc1", timeout_s=30)
        assert (from_msgpack(junk.payload, MatchReply).error or "").startswith("bad_message")


async def test_late_indexer_and_late_bridge(url: str, bus: Bus) -> None:
    """User case A2: the engine has published five batches, then the bridge starts, then the indexer: the blocks of the
    first batch are found, through replay and snapshot."""
    async with ScriptedEngine(block_size=BLOCK) as engine:
        for number in range(5):
            await engine.publish(batch(stored([number], tokens(1, start=number * 100))))
        stream = await Watcher.of(bus, subjects.kv("w", 0))
        async with running_bridge(engine, url):
            await until(lambda: len(stream.messages) == 5, "the bridge has read the history")
            async with running_indexer(url) as indexer:
                await until_applied(indexer, 4)
                assert (await ask_one(bus, tokens(1))).blocks.reach == 1
                assert indexer.core.replica.gaps["w", "restored"] == 1


async def test_gap_is_repaired_before_what_follows(url: str) -> None:
    """User case A1, end to end: batch 5 removes, batch 7 stores again, 4-6 are lost: the index is that of 0-9."""
    async with (
        ScriptedEngine(block_size=BLOCK) as engine,
        running_indexer(url) as indexer,
        running_bridge(engine, url),
    ):
        await engine.publish(batch(stored([1], tokens(1))))
        await until_applied(indexer, 0)
        for number in range(1, 10):
            event = stored([100 + number], tokens(1, start=number * 50))
            if number in (5, 7):
                event = removed([1]) if number == 5 else stored([1], tokens(1))
            await engine.publish(batch(event), lost=number in (4, 5, 6))
        await until_applied(indexer, 9)
        ranks = indexer.core.replica.index.content()
        own = int.from_bytes(chain_of_prompt(tokens(1), BLOCK), "little")
        assert ranks["w", 0][own] == ((0, 0, 1),)
        assert len(ranks["w", 0]) == 8


async def test_history_gone_is_said(url: str, bus: Bus) -> None:
    """User case A1, second run: replay begins too late: the rank is cleared and `approximate` until rebuilt."""
    facts = await Watcher.of(bus, subjects.index_source("w", 0))
    async with (
        ScriptedEngine(block_size=BLOCK) as engine,
        running_indexer(url) as indexer,
        running_bridge(engine, url),
    ):
        for number in range(3):
            await engine.publish(batch(stored([number], tokens(1, start=number * 100))))
        await until_applied(indexer, 2)
        for number in range(3, 6):
            await engine.publish(batch(stored([number], tokens(1, start=number * 100))), lost=True)
        engine.forget_before(5)
        await engine.publish(batch(stored([6], tokens(1, start=600))))
        await until_applied(indexer, 6)
        await until(lambda: ("approximate", "history_gone") in health_facts(facts), "approximate is a fact")
        match = await ask_one(bus, tokens(1))
        assert (match.blocks.reach, match.health, match.reason) == (0, "approximate", "history_gone")
        assert (await ask_one(bus, tokens(1, start=500))).blocks.reach == 1
        await engine.publish(batch({"type": "AllBlocksCleared"}, stored([7], tokens(1, start=700))))
        await until(lambda: health_facts(facts)[-1] == ("synced", None), "synced once the pool was emptied")


async def test_engine_restart(url: str, bus: Bus) -> None:
    """User case A3: killed and restarted on the same port: the old prefix scores 0, the new one scores."""
    async with (
        ScriptedEngine(block_size=BLOCK) as engine,
        running_indexer(url) as indexer,
        running_bridge(engine, url),
    ):
        await engine.publish(batch(stored([1, 2], tokens(2))))
        await until_applied(indexer, 0)
        await engine.restart()
        await engine.publish(batch(stored([3], tokens(1, start=500))))

        async def new_prefix_scores() -> bool:
            return (await ask_one(bus, tokens(1, start=500))).blocks.reach == 1

        await until_async(new_prefix_scores, "the new prefix scores")
        assert (await ask_one(bus, tokens(2))).blocks.reach == 0
        assert source_of(indexer).health == "synced"


async def test_mixed_encodings(url: str) -> None:
    """User case A5: array and map events in one batch, junk between them: the junk is counted, the rest applied; and a
    batch whose envelope is a map."""
    async with (
        ScriptedEngine(block_size=BLOCK) as engine,
        running_indexer(url) as indexer,
        running_bridge(engine, url),
    ):
        await engine.publish(
            batch(
                stored([1], tokens(1), shape="array"),
                stored([2], tokens(1, start=4), parent=1),
                {"type": "BlockStored", "block_hashes": None},
                removed([2]),
            )
        )
        await until_applied(indexer, 0)
        assert indexer.core.replica.counters.blocks_stored == 2
        assert indexer.core.replica.counters.blocks_removed == 1
        assert indexer.core.replica.rejected == {"bad_field": 1}
        assert indexer.core.replica.index.resident("w", 0) == 1
        events = [stored([3], tokens(1, start=8), shape="array"), removed([1], shape="array")]
        await engine.publish(msgspec.msgpack.encode({"ts": 1.0, "events": events, "data_parallel_rank": 0}))
        await until_applied(indexer, 1)
        own = int.from_bytes(chain_of_prompt(tokens(1, start=8), BLOCK), "little")
        assert list(indexer.core.replica.index.content()["w", 0]) == [own]


async def test_two_ranks(url: str, bus: Bus) -> None:
    """User case A13: the answer names the rank, 0 included, and each has its own blocks."""
    async with (
        ScriptedEngine(block_size=BLOCK, ranks=2, discovery=True) as engine,
        running_indexer(url) as indexer,
        running_bridge(engine, url, kv_events=(), kv_replay=()),
    ):
        await engine.publish(batch(stored([1, 2], tokens(2)), rank=0), rank=0)
        await engine.publish(batch(stored([1], tokens(1)), rank=1), rank=1)
        for rank in (0, 1):
            await until_applied(indexer, 0, rank)
        reply = await ask(bus, tokens(2))
        assert [(match.worker, match.rank, match.blocks.reach) for match in reply.matches] == [("w", 0, 2), ("w", 1, 1)]


async def test_worker_without_events_is_approximate(url: str, bus: Bus) -> None:
    """Known from its heartbeat, without an event source: `approximate: no_events`, with what was sent there."""
    async with (
        ScriptedEngine(block_size=BLOCK) as engine,
        running_indexer(url) as indexer,
        running_bridge(engine, url, kv_events=(), kv_replay=()),
    ):

        def known() -> bool:
            worker = indexer.core.replica.workers.get("w")
            return worker is not None and bool(worker.state.profile.model)

        await until(known, "the worker and its model are known")
        match = await ask_one(bus, tokens(2))
        assert (match.health, match.reason, match.blocks.reach) == ("approximate", "no_events", 0)
        bus.publish(subjects.placed("w"), to_msgpack(placed(tokens(2))))
        bus.publish(subjects.placed("w"), b"no message")

        async def sent() -> bool:
            return (await ask_one(bus, tokens(3))).blocks.reach == 2

        await until_async(sent, "what was sent is known")
        assert indexer.core.replica.rejected["bad_message"] == 1


async def test_mismatched_worker_is_blind(url: str, bus: Bus) -> None:
    """User case A10: events of 64 against 16 declared: nothing of it is scored, and the reason is said."""
    async with (
        ScriptedEngine(block_size=16) as engine,
        running_indexer(url) as indexer,
        running_bridge(engine, url),
    ):
        await engine.publish(batch(stored([1], list(range(64)), block_size=64)))

        def quarantined() -> bool:
            worker = indexer.core.replica.workers.get("w")
            return worker is not None and worker.state.health == "mismatch"

        await until(quarantined, "mismatch")
        for size in (16, 64):
            match = await ask_one(bus, list(range(64)), block_size=size)
            assert (match.health, match.reason, match.blocks.reach) == ("blind", "block_size", 0)


async def test_leaving_and_silence(url: str, bus: Bus) -> None:
    """User case A15: `left` removes at once; a bridge that only falls silent is lost after the time-out; both are facts
    with a reason, and a worker that comes back is synced again."""
    facts = await Watcher.of(bus, subjects.index_source("w", 0))
    async with ScriptedEngine(block_size=BLOCK) as engine, running_indexer(url, worker_lost_s=2.0) as indexer:
        await engine.publish(batch(stored([1], tokens(1))))
        async with running_bridge(engine, url):
            await until_applied(indexer, 0)
        await until(lambda: "w" not in indexer.core.replica.workers, "left")
        assert (await ask(bus, tokens(1))).matches == ()
        await until(lambda: health_facts(facts)[-1] == ("blind", "left"), "left is a fact")
        async with running_bridge(engine, url, heartbeat_interval_s=30.0):
            await until_applied(indexer, 0)
            await until(lambda: "w" not in indexer.core.replica.workers, "lost")
            await until(lambda: health_facts(facts)[-1] == ("blind", "lost"), "lost is a fact")
        async with running_bridge(engine, url):
            await until_applied(indexer, 0)
            assert (await ask_one(bus, tokens(1))).blocks.reach == 1


async def test_an_indexer_that_could_not_listen_loses_nobody(url: str, bus: Bus) -> None:
    """While its loop is busy (a large snapshot), heartbeats wait unread: that silence is its own, not the workers'."""
    facts = await Watcher.of(bus, subjects.index_source("w", 0))
    async with ScriptedEngine(block_size=BLOCK) as engine, running_indexer(url, worker_lost_s=0.5) as indexer:
        await engine.publish(batch(stored([1], tokens(1))))
        async with running_bridge(engine, url):
            await until_applied(indexer, 0)
            time.sleep(0.8)  # noqa: ASYNC251 - the loop is to be blocked
            heard_at = indexer.core.replica.workers["w"].heard_at
            await until(lambda: indexer.core.replica.workers["w"].heard_at > heard_at + 0.5, "heard again")
            assert ("blind", "lost") not in health_facts(facts)


async def test_parity_alarm(url: str, bus: Bus) -> None:
    """User case A14: the router predicts 400 cached tokens, the engine reports 0, again and again: the source becomes
    approximate, answered for by what is sent there; the counters show both sums."""
    facts = await Watcher.of(bus, subjects.index_source("w", 0))
    async with (
        ScriptedEngine(block_size=BLOCK) as engine,
        running_indexer(url, parity_min_requests=4) as indexer,
        running_bridge(engine, url),
    ):
        await engine.publish(batch(stored([1], tokens(1))))
        await until_applied(indexer, 0)
        for number in range(4):
            bus.publish(subjects.placed("w"), to_msgpack(placed(tokens(1), request_id=f"r{number}", indexed=100)))
        await until(lambda: len(indexer.core.replica.expectations) == 4, "four are on their way")
        for number in range(4):
            end = RequestEnd(
                source="ingress-1",
                epoch=1,
                seq=number,
                at_ms=0,
                request_id=f"r{number}",
                model="tiny",
                identity=SessionIdentity(key=SESSION, session_id="s1"),
                outcome="completed",
                worker="w",
                rank=0,
                usage=Usage(input_tokens=500, cached_tokens=0),
                predicted_cached_tokens=400,
            )
            bus.publish(subjects.request("end", "tiny"), to_json(end))
        await until(lambda: health_facts(facts)[-1] == ("approximate", "parity"), "approximate is a fact")
        assert (indexer.core.replica.predicted["w"], indexer.core.replica.reported["w"]) == (1600, 0)
        match = await ask_one(bus, tokens(1))
        assert (match.blocks.reach, match.indexed) == (0, 1)
        bus.publish(subjects.placed("w"), to_msgpack(placed(tokens(1))))

        async def sent() -> bool:
            return (await ask_one(bus, tokens(1))).blocks.reach == 1

        await until_async(sent, "what was sent is known")


async def test_session_question(url: str, bus: Bus) -> None:
    """A session in: frontier, depth, parent and residency out; a block in: the sessions that hold it out."""
    parent = SessionKey(family="dynamo", root="p")
    async with (
        ScriptedEngine(block_size=BLOCK) as engine,
        running_indexer(url) as indexer,
        running_bridge(engine, url),
    ):
        await engine.publish(batch(stored([1, 2], tokens(2))))
        await until_applied(indexer, 0)
        bus.publish(subjects.placed("w"), to_msgpack(placed(tokens(3), session=SESSION, parent=parent)))
        await bus.flush()

        async def known() -> SessionResidency:
            answer = await bus.request(subjects.INDEX_SESSION, to_json(SessionQuery(session=SESSION)), timeout_s=30)
            return from_json(answer.payload, SessionResidency)

        async def parent_known() -> bool:
            return (await known()).parent == parent

        await until_async(parent_known, "the turn was seen")
        found = await known()
        frontier = chain_of_prompt(tokens(3), BLOCK)[-8:]
        assert (found.depth, found.frontier) == (3, f"{int.from_bytes(frontier, 'little'):016x}")
        assert [(match.worker, match.rank, match.blocks.reach) for match in found.resident] == [("w", 0, 2)]
        answer = await bus.request(subjects.INDEX_SESSION, to_json(SessionQuery(block=found.frontier)), timeout_s=30)
        assert from_json(answer.payload, SessionResidency).sessions == (SESSION,)
        for bad in (SessionQuery(), SessionQuery(block="zz")):
            answer = await bus.request(subjects.INDEX_SESSION, to_json(bad), timeout_s=30)
            assert (from_json(answer.payload, SessionResidency).error or "").startswith("bad_message")


async def test_what_is_counted(url: str) -> None:
    """The metrics of the specification (conventions §4.4) are on the page, of bridge and indexer, with their labels."""
    async with (
        ScriptedEngine(block_size=BLOCK) as engine,
        running_indexer(url) as indexer,
        running_bridge(engine, url),
    ):
        for number in range(4):
            event = stored([number], tokens(1, start=number * 100))
            await engine.publish(batch(event, {"type": "Nonsense"}), lost=number == 2)
            if number != 2:
                await until_applied(indexer, number)
        page = generate_latest(REGISTRY).decode()
    for line in (
        'tidegate_kv_gaps_total{result="found",worker="w"} 1.0',
        'tidegate_index_state{rank="0",state="synced",worker="w"} 1.0',
        'tidegate_index_state{rank="0",state="blind",worker="w"} 0.0',
        'tidegate_index_blocks{rank="0",worker="w"} 4.0',
        'tidegate_kv_stream_state{rank="0",state="synced",worker="w"} 1.0',
        'tidegate_worker_health{health="ready",worker="w"} 1.0',
        'tidegate_bridge_kv_batches_total{worker="w"} 4.0',
        "tidegate_index_batches_total 4.0",
    ):
        assert line in page.splitlines()
    assert page.count('tidegate_events_rejected_total{reason="unknown_tag"} 4.0') == 2
    assert "tidegate_index_match_seconds_bucket" in page
    assert "tidegate_kv_gaps" not in generate_latest(REGISTRY).decode()


async def test_endpoints_are_visible(url: str, bus: Bus) -> None:
    """``$SRV.INFO`` lists the indexer with its three questions."""
    async with running_indexer(url):
        info = json.loads((await bus.request("$SRV.INFO.tidegate-indexer", b"", timeout_s=30)).payload)
    assert {endpoint["subject"] for endpoint in info["endpoints"]} == {
        subjects.INDEX_MATCH,
        subjects.INDEX_SESSION,
        subjects.INDEX_RECOGNISE,
    }

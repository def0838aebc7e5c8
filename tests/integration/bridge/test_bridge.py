"""The bridge between real sockets: a scripted engine's HTTP, PUB and ROUTER, and a real nats-server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from bus import subjects
from bus.errors import KeyMissingError
from bus.interface import Bus
from bus.nats import connect
from kvcore.events import decode_batch
from kvcore.index import PrefixIndex
from schemas.base import from_json, to_json
from schemas.hint import HintAction, HintCommand, HintEnvelope, HintResult
from schemas.kv import KvHeaders, SnapshotReply, SnapshotRequest
from schemas.session import SessionKey
from schemas.worker import RankStream, WorkerState
from tests.integration.bridge.house import Watcher, running_bridge, until, until_async
from tests.integration.bridge.scripted_engine import ScriptedEngine, batch, removed, stored
from tests.support.nats import NatsServer

FIRST = "1795973180250.0"
SECOND = "1795973280250.0"


class Stream:
    """What a bridge publishes: batches and worker facts."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    @classmethod
    async def of(cls, bus: Bus) -> Stream:
        return cls(await Watcher.of(bus, "tg.v1.kv.*.*", subjects.worker_state("w")))

    def messages(self) -> list[tuple[KvHeaders, bytes]]:
        return [
            (KvHeaders.from_headers(dict(message.headers)), message.payload)
            for message in self.watcher.messages
            if message.subject.startswith("tg.v1.kv.") and not message.reply
        ]

    def numbers(self, rank: int = 0) -> list[tuple[str, int]]:
        return [(headers.incarnation, headers.seq) for headers, _ in self.messages() if headers.rank == rank]

    def state(self) -> WorkerState:
        newest = self.watcher.newest()
        assert newest is not None
        return newest

    def rank(self, number: int = 0) -> RankStream:
        return next(stream for stream in self.state().streams if stream.rank == number)

    async def until_health(self, health: str) -> WorkerState:
        await until(lambda: self.watcher.newest() is not None and self.state().health == health, health)
        return self.state()

    async def until_stream(self, state: str, reason: str | None = None, rank: int = 0) -> RankStream:
        def reached() -> bool:
            newest = self.watcher.newest()
            wanted = (rank, state, reason)
            return newest is not None and any((s.rank, s.state, s.reason) == wanted for s in newest.streams)

        await until(reached, f"stream {state}, reason {reason}")
        return self.rank(rank)

    async def until_numbers(self, count: int, rank: int = 0) -> None:
        await until(lambda: len(self.numbers(rank)) >= count, f"{count} batches")


def block(number: int, *, block_size: int = 4) -> bytes:
    """A batch that stores one block of its own chain."""
    tokens = [number * block_size + place for place in range(block_size)]
    return batch(stored([100 + number], tokens, block_size=block_size), ts=float(number))


# What it says of its engine


async def test_engine_becomes_a_worker(url: str, bus: Bus) -> None:
    """Profile, load and health are learned over HTTP, told each heartbeat, and kept in the registry bucket; the last
    fact says `left`, and facts are numbered without a hole."""
    stream = await Stream.of(bus)
    async with ScriptedEngine(block_size=4) as engine, running_bridge(engine, url) as service:
        await stream.until_stream("synced")
        state = await stream.until_health("ready")
        profile = state.profile
        assert (profile.model, profile.engine, profile.engine_version) == ("tiny", "vllm", "0.32.0")
        assert (profile.block_size, profile.block_size_from, profile.kv_tokens) == (4, "metrics", 256)
        assert (profile.features, profile.max_model_len) == (("kv_events", "kv_replay"), 640)
        assert [(load.rank, load.running) for load in state.loads] == [(0, 1)]
        assert (state.streams[0].incarnation, state.streams[0].seq) == (FIRST, -1)
        assert service.not_ready() is None
        registry = await bus.key_value(subjects.BUCKET_WORKERS)

        async def registered() -> bool:
            entry = await registry.get("w")
            value = entry.value if entry is not None else None
            return value is not None and from_json(value, WorkerState).health == "ready"

        await until_async(registered, "registry entry")
    await stream.until_health("left")
    assert stream.state().reason == "stopped"
    numbers = [state.seq for state in stream.watcher.states()]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


async def test_engine_that_is_not_there_yet(url: str, bus: Bus) -> None:
    """The bridge starts before its engine: starting, then unhealthy with the reason, ready once it answers; and
    unhealthy again while it does not (user case A15), without a restart being imagined."""
    stream = await Stream.of(bus)
    async with ScriptedEngine(block_size=4) as engine:
        engine.failing = 503
        async with running_bridge(engine, url) as service:
            state = await stream.until_health("unhealthy")
            assert state.reason == "http_503"
            assert service.not_ready() == "unhealthy: http_503"
            engine.failing = None
            await stream.until_health("ready")
            await engine.publish(block(0))
            await stream.until_numbers(1)
            engine.failing = 500
            state = await stream.until_health("unhealthy")
            assert state.reason == "http_500"
            engine.failing = None
            await stream.until_health("ready")
            await engine.publish(block(1))
            await stream.until_numbers(2)
    assert stream.numbers() == [(FIRST, 0), (FIRST, 1)]


async def test_block_size_mismatch(url: str, bus: Bus) -> None:
    """User case A10: the engine declares 16, its events carry 64: health `mismatch` with both numbers."""
    stream = await Stream.of(bus)
    async with ScriptedEngine(block_size=16) as engine, running_bridge(engine, url):
        await stream.until_health("ready")
        await engine.publish(block(0, block_size=64))
        state = await stream.until_health("mismatch")
        assert state.reason == "its events carry blocks of 64 tokens, its metrics says 16"


async def test_block_size_other_than_expected(url: str, bus: Bus) -> None:
    """User case A10, at registration: configured 32, declared 16."""
    stream = await Stream.of(bus)
    async with ScriptedEngine(block_size=16) as engine, running_bridge(engine, url, block_size=32):
        state = await stream.until_health("mismatch")
        assert state.reason == "blocks of 32 tokens are expected, its /metrics says 16"


async def test_block_size_unknown_until_events_tell(url: str, bus: Bus) -> None:
    """User case A10: no size in the metrics: not ready, no crash; learned from the first event with tokens."""
    stream = await Stream.of(bus)
    async with ScriptedEngine(block_size=None) as engine, running_bridge(engine, url) as service:
        await stream.until_stream("synced")
        state = await stream.until_health("starting")
        assert "block size is not known" in (state.reason or "")
        assert "block size is not known" in (service.not_ready() or "")
        await engine.publish(block(0))
        state = await stream.until_health("ready")
        assert (state.profile.block_size, state.profile.block_size_from) == (4, "events")


async def test_engine_without_events(url: str, bus: Bus) -> None:
    """Nothing configured, nothing discovered: a worker all the same, placed by load; no features, no streams."""
    stream = await Stream.of(bus)
    async with ScriptedEngine() as engine, running_bridge(engine, url, kv_events=(), kv_replay=()):
        state = await stream.until_health("ready")
        assert (state.streams, state.profile.features) == ((), ())


# The stream


async def test_batches_are_forwarded_untouched(url: str, bus: Bus) -> None:
    """The engine's own bytes, in order, with rank, incarnation, seq and dialect in the headers; `first` marked once."""
    stream = await Stream.of(bus)
    async with ScriptedEngine() as engine, running_bridge(engine, url):
        sent = [block(number) for number in range(3)]
        for payload in sent:
            await engine.publish(payload)
        await stream.until_numbers(3)
    assert [payload for _, payload in stream.messages()] == sent
    assert [headers for headers, _ in stream.messages()] == [
        KvHeaders(worker="w", rank=0, incarnation=FIRST, seq=seq, dialect="vllm", first=seq == 0) for seq in range(3)
    ]


async def test_gap_is_replayed_in_order(url: str, bus: Bus) -> None:
    """User case A1: 4-6 are lost and replayed, live ones wait; duplicates are dropped."""
    stream = await Stream.of(bus)
    async with ScriptedEngine() as engine, running_bridge(engine, url):
        await stream.until_stream("synced")
        for number in range(10):
            await engine.publish(block(number), lost=number in (4, 5, 6))
        await engine.resend(9)
        await engine.publish(block(10))
        await stream.until_numbers(11)
        assert stream.numbers() == [(FIRST, seq) for seq in range(11)]
        assert engine.ranks[0].replay_requests == [0, 3]
        assert (await stream.until_stream("synced")).gaps == 1


@pytest.mark.parametrize("with_topic", [True, False])
async def test_both_replay_framings(url: str, bus: Bus, with_topic: bool) -> None:
    """User case A6: replay answers with and without a topic frame."""
    stream = await Stream.of(bus)
    async with ScriptedEngine(with_topic=with_topic) as engine:
        for number in range(3):
            await engine.publish(block(number))
        async with running_bridge(engine, url):
            await stream.until_numbers(3)
    assert stream.numbers() == [(FIRST, seq) for seq in range(3)]


async def test_history_gone(url: str, bus: Bus) -> None:
    """User case A1, second run: the buffer begins at 6. A new incarnation begins there, its first batch is marked, the
    state says so until the engine empties its pool."""
    stream = await Stream.of(bus)
    async with ScriptedEngine() as engine, running_bridge(engine, url):
        for number in range(4):
            await engine.publish(block(number))
        await stream.until_numbers(4)
        for number in (4, 5, 6):
            await engine.publish(block(number), lost=True)
        engine.forget_before(6)
        await engine.publish(block(7))
        await stream.until_numbers(6)
        assert (await stream.until_stream("catching_up", "history_gone")).seq == 7
        name = stream.rank().incarnation
        assert stream.numbers()[4:] == [(name, 6), (name, 7)]
        assert name.startswith("1795973180250.")
        assert [headers.first for headers, _ in stream.messages()] == [True, False, False, False, True, False]
        await engine.publish(batch({"type": "AllBlocksCleared"}))
        await stream.until_stream("synced")


@pytest.mark.parametrize(("replay", "reason"), [("only_end", "history_gone"), ("silent", "replay_timeout")])
async def test_useless_replay_is_asked_a_bounded_number_of_times(
    url: str, bus: Bus, replay: Literal["only_end", "silent"], reason: str
) -> None:
    """User case A4: a ROUTER that answers only its end mark, or nothing: few questions, then live goes on."""
    stream = await Stream.of(bus)
    async with ScriptedEngine() as engine, running_bridge(engine, url, replay_timeout_s=0.2):
        await engine.publish(block(0))
        await stream.until_numbers(1)
        asked = len(engine.ranks[0].replay_requests)
        engine.ranks[0].replay = replay
        await engine.publish(block(1), lost=True)
        for number in range(2, 20):
            await engine.publish(block(number))
        await stream.until_numbers(19)
        await stream.until_stream("catching_up", reason)
        assert [seq for _, seq in stream.numbers()] == [0, *range(2, 20)]
        assert len(engine.ranks[0].replay_requests) - asked <= 2


async def test_restart_on_the_same_port(url: str, bus: Bus) -> None:
    """User case A3: the engine is killed and comes back on its ports with sequence 0: a new incarnation from 0."""
    stream = await Stream.of(bus)
    async with ScriptedEngine() as engine, running_bridge(engine, url):
        for number in range(3):
            await engine.publish(block(number))
        await stream.until_numbers(3)
        await engine.restart()
        await engine.publish(block(50))
        await stream.until_numbers(4)
        await stream.until_stream("synced")
        assert stream.numbers()[3:] == [(SECOND, 0)]
        assert stream.state().incarnation == "1795973280250"


async def test_a_bridge_says_that_it_found_the_bus_again(nats_server: NatsServer, url: str, bus: Bus) -> None:
    """Who had asked it something before asks again: nobody can tell whether the question came."""
    stream = await Stream.of(bus)
    async with ScriptedEngine() as engine, running_bridge(engine, url):
        assert (await stream.until_health("ready")).reconnects == 0
        nats_server.restart()
        await until(lambda: stream.state().reconnects == 1, "the heartbeat names the reconnection")


async def test_bridge_restart(url: str, bus: Bus) -> None:
    """The bridge restarts while the engine runs: it reads the history again under the same incarnation."""
    stream = await Stream.of(bus)
    async with ScriptedEngine() as engine:
        async with running_bridge(engine, url):
            for number in range(3):
                await engine.publish(block(number))
            await stream.until_numbers(3)
        await engine.publish(block(3))
        async with running_bridge(engine, url):
            await stream.until_numbers(7)
    assert stream.numbers() == [(FIRST, seq) for seq in (0, 1, 2, 0, 1, 2, 3)]


async def test_bridge_restart_after_history_is_gone(url: str, bus: Bus) -> None:
    """As before, but the engine has forgotten its beginning: another incarnation, and the state says why."""
    stream = await Stream.of(bus)
    async with ScriptedEngine() as engine:
        async with running_bridge(engine, url):
            for number in range(3):
                await engine.publish(block(number))
            await stream.until_numbers(3)
        engine.forget_before(2)
        async with running_bridge(engine, url):
            await stream.until_numbers(4)
            rank = await stream.until_stream("catching_up", "history_gone")
            assert rank.incarnation != FIRST
            assert stream.numbers()[3:] == [(rank.incarnation, 2)]
            first = rank.incarnation
        async with running_bridge(engine, url):
            await stream.until_numbers(5)
            assert stream.numbers()[4][0] not in (FIRST, first)


async def test_lost_tail_of_an_idle_engine(url: str, bus: Bus) -> None:
    """A batch lost last is betrayed by no later one: the bridge asks a silent engine now and then."""
    stream = await Stream.of(bus)
    async with ScriptedEngine() as engine, running_bridge(engine, url, probe_after_s=0.2):
        await engine.publish(block(0))
        await stream.until_numbers(1)
        await engine.publish(block(1), lost=True)
        await stream.until_numbers(2)
    assert stream.numbers() == [(FIRST, 0), (FIRST, 1)]


async def test_ranks_are_told_apart(url: str, bus: Bus) -> None:
    """User case A13: two ranks, one instance, base port + rank; number 0 of rank 0 and of rank 1 are two batches."""
    stream = await Stream.of(bus)
    async with (
        ScriptedEngine(ranks=2, discovery=True) as engine,
        running_bridge(engine, url, kv_events=(), kv_replay=()),
    ):
        await engine.publish(block(0), rank=0)
        await engine.publish(block(1), rank=1)
        await stream.until_numbers(1, rank=0)
        await stream.until_numbers(1, rank=1)
        assert stream.state().profile.ranks == 2
        assert [(load.rank, load.running) for load in stream.state().loads] == [(0, 1), (1, 2)]
        assert {headers.rank: payload for headers, payload in stream.messages()} == {0: block(0), 1: block(1)}


async def test_engine_that_connects_to_us(url: str, bus: Bus) -> None:
    """The bind rule of engine-events §2.6, other way round: the SUB binds, the engine's PUB connects."""
    stream = await Stream.of(bus)
    async with ScriptedEngine(connect=True) as engine, running_bridge(engine, url, kv_events_bind=True):
        for number in range(3):
            await engine.publish(block(number))
        await stream.until_numbers(3)
    assert stream.numbers() == [(FIRST, seq) for seq in range(3)]


async def test_large_batches_travel_in_parts(tmp_path: Path) -> None:
    """User case E1: a batch beyond the bus's 64 KB goes as numbered parts that join to the engine's bytes."""
    server = NatsServer(tmp_path / "nats", max_payload=65_536).start()
    try:
        bus = await connect(server.url, name="test")
        stream = await Stream.of(bus)
        payload = batch(*(stored([number], [number] * 4) for number in range(3000)))
        assert len(payload) > 3 * 65_536
        async with ScriptedEngine() as engine, running_bridge(engine, server.url):
            await engine.publish(payload)
            await until(lambda: b"".join(piece for _, piece in stream.messages()) == payload, "all parts")
        parts = [(headers.part, headers.parts) for headers, _ in stream.messages()]
        assert parts == [(number, len(parts)) for number in range(len(parts))]
        await bus.close()
    finally:
        server.stop()


async def test_malformed_events_are_counted_and_forwarded(url: str, bus: Bus) -> None:
    """User case A5: the bytes go on as they are (the receiver judges by itself); the fact counts what is bad."""
    stream = await Stream.of(bus)
    async with ScriptedEngine(block_size=4) as engine, running_bridge(engine, url):
        await engine.publish(batch(stored([1], [1, 2, 3, 4]), {"type": "BlockStored", "block_hashes": "x"}, 7))
        await engine.publish(b"\x01")
        await stream.until_numbers(2)
        await until(lambda: stream.rank().rejected == 3, "three rejected")


# Questions and commands


async def test_snapshot_is_the_engines_index(url: str, bus: Bus) -> None:
    """The dump, its marks and its size; asked twice without a change, written once."""
    stream = await Stream.of(bus)
    async with ScriptedEngine(block_size=4) as engine, running_bridge(engine, url) as service:
        sent = [block(0), block(1), batch(removed([100]))]
        for payload in sent:
            await engine.publish(payload)
        await stream.until_numbers(3)
        for _ in range(2):
            answer = await bus.request(
                subjects.kv_snapshot("w"), to_json(SnapshotRequest(indexer="test")), timeout_s=30.0
            )
        reply = from_json(answer.payload, SnapshotReply)
        assert [(mark.rank, mark.incarnation, mark.seq) for mark in reply.marks] == [(0, FIRST, 2)]
        dump = await (await bus.objects(reply.bucket)).get(reply.key)
        assert len(dump) == reply.size_bytes
        restored, expected = PrefixIndex(), PrefixIndex()
        restored.load(dump)
        for payload in sent:
            expected.apply("w", 0, decode_batch(payload))
        assert restored.content() == expected.content()
        assert len(expected.content()["w", 0]) == 1
        assert service.snapshots_written == 1


async def test_snapshot_that_the_store_lost_is_written_again(url: str, bus: Bus) -> None:
    """A store that came back empty: who asks a bridge of an idle engine gets a snapshot that is there, before long."""
    stream = await Stream.of(bus)
    objects = await bus.objects(subjects.OBJECTS_SNAPSHOTS)
    async with ScriptedEngine(block_size=4) as engine, running_bridge(engine, url):
        await engine.publish(block(0))
        await stream.until_numbers(1)

        async def key() -> str:
            question = to_json(SnapshotRequest(indexer="test"))
            answer = await bus.request(subjects.kv_snapshot("w"), question, timeout_s=30)
            return from_json(answer.payload, SnapshotReply).key

        async def readable() -> bool:
            try:
                return bool(await objects.get(await key()))
            except KeyMissingError:
                return False

        await objects.delete(await key())
        await until_async(readable, "a snapshot that can be fetched")


async def test_snapshots_of_a_bridge_that_leaves_go_with_it(url: str, bus: Bus) -> None:
    """Workers come and go under new names: their dumps do not fill the store. The newest one stays, for a bridge that
    is only being replaced, until the store forgets it by itself."""
    stream = await Stream.of(bus)
    objects = await bus.objects(subjects.OBJECTS_SNAPSHOTS)
    async with ScriptedEngine(block_size=4) as engine:
        async with running_bridge(engine, url):
            keys = []
            for number in range(2):
                await engine.publish(block(number))
                await stream.until_numbers(number + 1)
                question = to_json(SnapshotRequest(indexer="test"))
                answer = await bus.request(subjects.kv_snapshot("w"), question, timeout_s=30)
                keys.append(from_json(answer.payload, SnapshotReply).key)
        with pytest.raises(KeyMissingError):
            await objects.get(keys[0])
        assert await objects.get(keys[1])


async def test_hints_are_answered(url: str, bus: Bus) -> None:
    """An engine that takes none, as those of today: `unsupported` per action; junk is answered too."""
    results = await Watcher.of(bus, subjects.hint_result("w"))
    async with ScriptedEngine() as engine, running_bridge(engine, url):
        command = HintCommand(
            source="hints-1",
            epoch=1,
            seq=0,
            at_ms=0,
            worker="w",
            rank=0,
            session=SessionKey(family="dynamo", root="s"),
            session_id="s",
            envelope=HintEnvelope(
                message_id="m",
                actions=(
                    HintAction(
                        action_id="a",
                        action_type="retain",
                        payload={"target": {"session_id": "s"}, "expires_ms": 1 << 50},
                    ),
                ),
            ),
        )
        bus.publish(subjects.hint("w"), to_json(command))
        bus.publish(subjects.hint("w"), b"junk")
        await until(lambda: len(results.messages) == 2, "two results")
    first, second = (from_json(message.payload, HintResult) for message in results.messages)
    assert (first.message_id, [(r.action_id, r.outcome) for r in first.results]) == ("m", [("a", "unsupported")])
    assert (second.results, second.error is not None) == ((), True)
    assert (first.seq, second.seq) == (0, 1)


async def test_endpoints_are_visible(url: str, bus: Bus) -> None:
    """``$SRV.INFO`` lists the bridge with its worker and its endpoints."""
    async with ScriptedEngine() as engine, running_bridge(engine, url):
        info: dict[str, Any] = json.loads((await bus.request("$SRV.INFO.tidegate-bridge", b"", timeout_s=30)).payload)
    assert info["metadata"]["worker"] == "w"
    assert {endpoint["subject"] for endpoint in info["endpoints"]} == {"tg.v1.kv.snapshot.w", "tg.v1.hint.w"}
    assert msgspec.json.encode(info)

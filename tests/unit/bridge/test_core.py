"""The bridge's core: facts when something changes, parts, own index, discovery. No sockets, no clock."""

from __future__ import annotations

import msgspec
import pytest

from bus.errors import SettingsError
from kvcore.dump import at_once
from schemas.base import from_json
from schemas.kv import KvHeaders, RankMark
from schemas.worker import WorkerState
from services.bridge.checkpoint import Restorable
from services.bridge.config import BridgeSettings
from services.bridge.core import HEADERS_ROOM, BridgeCore
from services.bridge.effects import (
    BridgeEffect,
    Discard,
    Discover,
    FetchReplay,
    Publish,
    PutWorker,
    ScrapeNow,
    Subscribe,
)
from services.bridge.endpoints import RankSource
from services.bridge.engine import Sight
from services.bridge.events import (
    Beat,
    CheckpointRead,
    EngineBatch,
    EngineConnected,
    EngineDisconnected,
    ReplayAnswered,
    Scraped,
    ScrapeFailed,
    SocketsOpened,
    SourcesFound,
    Stopping,
)
from services.bridge.profile import MetricsReport, ModelsReport

SOURCE = RankSource(0, "tcp://e:1", "tcp://e:2")
SIGHT = Sight(ModelsReport("tiny", ("tiny",), max_model_len=640, engine="vllm"), "0.32.0")
METRICS = MetricsReport("vllm", 1000.0, 16, 1024)


def payload(hashes: list[int], tokens: list[int], block_size: int) -> bytes:
    return msgspec.msgpack.encode([1.0, [["BlockStored", hashes, None, tokens, block_size]], 0])


def new_core(max_payload: int = 1_000_000, **changes: object) -> BridgeCore:
    values = {"engine_url": "http://e:8000", "worker": "w", "instance": "bridge-w", **changes}
    return BridgeCore(BridgeSettings(**values), 5, max_payload)  # type: ignore[arg-type]  # the test's own values


def ready_core(max_payload: int = 1_000_000) -> BridgeCore:
    """A core whose engine is known, whose socket stands and whose past is read."""
    core = new_core(max_payload)
    core.handle(SourcesFound((SOURCE,)), 1.0)
    core.handle(EngineConnected(0), 1.1)
    effects = core.handle(Scraped(1.2, METRICS, SIGHT), 1.2)
    (fetch,) = [effect for effect in effects if isinstance(effect, FetchReplay)]
    core.handle(ReplayAnswered(0, fetch.ticket, ()), 1.3)
    return core


@pytest.mark.parametrize("sources", [(SOURCE,), ()])
def test_what_is_left_of_a_checkpoint_is_given_back(sources: tuple[RankSource, ...]) -> None:
    """Once every rank's process is known; an engine that publishes no events any more has no rank that needs it."""
    core = new_core()
    prepared = at_once(core.own.index.prepare(core.own.index.dump(), set()))
    core.handle(CheckpointRead(Restorable({}, prepared)), 1.0)
    core.handle(Scraped(1.0, METRICS, SIGHT), 1.0)
    effects = core.handle(SourcesFound(sources), 1.1)
    effects += core.handle(Scraped(1.2, METRICS, SIGHT), 1.2)
    effects += core.handle(Scraped(1.3, METRICS, SIGHT), 1.3)
    assert [effect.prepared for effect in effects if isinstance(effect, Discard)] == [prepared]


def states(effects: list[BridgeEffect]) -> list[WorkerState]:
    return [
        from_json(effect.payload, WorkerState)
        for effect in effects
        if isinstance(effect, Publish) and ".worker.state." in effect.subject
    ]


def test_discovery_is_asked_for_once_and_again_after_a_restart() -> None:
    """Without configured endpoints the first page makes the core ask; another process is asked again."""
    core = new_core()
    assert Discover() in core.handle(Scraped(1.0, METRICS, SIGHT), 1.0)
    assert Discover() not in core.handle(Scraped(1.1, METRICS), 1.1)
    assert core.health() == ("starting", "it is being asked where its KV events are")
    assert Subscribe((SOURCE,)) in core.handle(SourcesFound((SOURCE,)), 1.2)
    assert core.health() == ("ready", None)
    assert Discover() not in core.handle(Scraped(2.0, METRICS), 2.0)
    restarted = MetricsReport("vllm", 2000.0, 16, 1024)
    assert Discover() in core.handle(Scraped(3.0, restarted), 3.0)
    assert not any(isinstance(effect, Subscribe) for effect in core.handle(SourcesFound((SOURCE,)), 3.1))


def test_changes_are_facts_at_once_and_heartbeats_come_anyway() -> None:
    """A change of health is said and registered when it happens, not a heartbeat later; nothing new, nothing said."""
    core = ready_core()
    assert states(core.handle(Scraped(2.0, METRICS), 2.0)) == []
    (beat,) = states(core.handle(Beat(reconnects=3), 2.1))
    assert (beat.health, beat.reconnects) == ("ready", 3)
    for number in range(3):
        effects = core.handle(ScrapeFailed(3.0 + number, "connect_error"), 3.0 + number)
    (state,) = states(effects)
    assert (state.health, state.reason, state.at_ms) == ("unhealthy", "connect_error", 5000)
    assert any(isinstance(effect, PutWorker) for effect in effects)
    assert states(core.handle(Scraped(6.0, METRICS), 6.0)) == []
    (state,) = states(core.handle(Scraped(7.0, METRICS), 7.0))
    assert (state.health, state.seq) == ("ready", beat.seq + 2)


def test_left_is_the_last_fact() -> None:
    """Stopping says `left` with its reason."""
    core = ready_core()
    (state,) = states(core.handle(Stopping("stopped"), 9.0))
    assert (state.health, state.reason) == ("left", "stopped")


def test_socket_events_ask_for_the_page() -> None:
    """Both the loss of the engine and its return make the core ask at once which process is there."""
    core = ready_core()
    assert ScrapeNow() in core.handle(EngineDisconnected(0), 2.0)
    assert core.feeds[0].state() == ("catching_up", "reconnecting")
    assert ScrapeNow() in core.handle(EngineConnected(0), 2.1)
    assert core.handle(EngineConnected(7), 2.2) == []


def test_unusable_sockets_are_said() -> None:
    """A port that is taken does not end the bridge: ready, with the reason beside it, until the sockets open."""
    core = ready_core()
    (state,) = states(core.handle(SocketsOpened("KV event endpoint: in use"), 2.0))
    assert (state.health, state.reason) == ("ready", "KV event endpoint: in use")
    (state,) = states(core.handle(SocketsOpened(), 3.0))
    assert (state.health, state.reason) == ("ready", None)


@pytest.mark.parametrize(("size", "parts"), [(1, 1), (1000, 1), (1001, 2), (2000, 2), (5001, 6)])
def test_parts_join_to_the_engines_bytes(size: int, parts: int) -> None:
    """User case E1: no message is larger than the bus takes; joined in order they are what the engine sent."""
    core = ready_core(1000 + HEADERS_ROOM)
    sent = bytes(number % 251 for number in range(size))
    published = [
        effect
        for effect in core.handle(EngineBatch(0, 0, sent), 2.0)
        if isinstance(effect, Publish) and effect.subject == "tg.v1.kv.w.0"
    ]
    headers = [KvHeaders.from_headers(dict(effect.headers)) for effect in published]
    assert b"".join(effect.payload for effect in published) == sent
    assert [(h.part, h.parts, h.seq, h.incarnation) for h in headers] == [
        (number, parts, 0, "1000000.0") for number in range(parts)
    ]


def test_own_index_and_its_marks() -> None:
    """Snapshot and marks belong together: the batches applied so far, under the incarnation of now."""
    core = ready_core()
    core.handle(EngineBatch(0, 0, payload([1, 2], list(range(32)), 16)), 2.0)
    made = at_once(core.snapshot())
    assert made is not None
    dump, marks = made
    assert [rank.mark for rank in marks] == [RankMark(rank=0, incarnation="1000000.0", seq=0)]
    assert core.blocks == 2
    assert dump
    core.handle(Scraped(3.0, MetricsReport("vllm", 2000.0, 16)), 3.0)
    assert (core.blocks, core.marks()[0].seq) == (0, -1)


def test_undecodable_batches_are_forwarded_and_counted() -> None:
    """What the bridge cannot read is not its to judge; it counts it and goes on."""
    core = ready_core()
    effects = core.handle(EngineBatch(0, 0, b"\x01"), 2.0)
    assert any(isinstance(effect, Publish) and effect.subject == "tg.v1.kv.w.0" for effect in effects)
    assert core.rejected == {"bad_batch": 1}
    (state,) = states(core.handle(Beat(), 2.1))
    assert (state.streams[0].rejected, state.streams[0].seq) == (1, 0)


def test_settings() -> None:
    """The worker's name comes from the URL; ``snapshot`` is reserved; every mistake names its key."""
    assert BridgeSettings(engine_url="http://127.0.0.1:8000").worker_id == "127-0-0-1-8000"
    for key, values in {
        "engine_url": {"engine_url": "127.0.0.1:8000"},
        "worker": {"engine_url": "http://snapshot"},
        "block_size": {"engine_url": "http://e", "block_size": 0},
        "kv_replay": {"engine_url": "http://e", "kv_replay": ("tcp://e:1",)},
        "kv_events": {"engine_url": "http://e", "kv_events": ("tcp://e:1", "tcp://e:1")},
        "scrape_interval_s": {"engine_url": "http://e", "scrape_interval_s": 0.0},
    }.items():
        with pytest.raises(SettingsError) as caught:
            BridgeSettings(**values)  # type: ignore[arg-type]  # wrong on purpose
        assert caught.value.key == key

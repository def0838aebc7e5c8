"""Hints through a real bridge to a real engine process: what each action does, and that failures stay failures."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bus import subjects
from bus.interface import Bus
from schemas.base import from_json, to_json
from schemas.hint import ActionResult, ActionType, HintAction, HintCommand, HintEnvelope, HintResult
from schemas.session import SessionFact, SessionKey
from services.bridge.config import BridgeSettings
from services.bridge.shell.service import BridgeService
from tests.integration.bridge.house import Watcher, running, until
from tests.integration.bridge.pools import running_pool
from tests.integration.engine.engines import RunningEngine, running_engine
from web.server import HttpServer, Request, Responder

KEY = SessionKey(family="dynamo", root="s")
BLOCK = 16
SESSION = list(range(1000, 1160))
"""Ten blocks."""
OTHER = list(range(5000, 5400))
"""25 blocks: with 40 on the device, two of them leave no room for the session."""
DEVICE = ("--num-blocks", "40", "--block-size", "16")

Outcome = tuple[str, str | None]


class Hinter:
    """Sends commands as the planner does and hears the results."""

    def __init__(self, bus: Bus, results: Watcher, bridge: BridgeService) -> None:
        self._bus = bus
        self._results = results
        self._sent = 0
        self.bridge = bridge

    def send(self, *actions: HintAction, rank: int = 0) -> str:
        self._sent += 1
        command = HintCommand(
            source="hints-1",
            epoch=1,
            seq=self._sent,
            at_ms=0,
            worker="w",
            rank=rank,
            session=KEY,
            session_id=KEY.root,
            envelope=HintEnvelope(message_id=f"m{self._sent}", actions=actions),
        )
        self._bus.publish(subjects.hint("w"), to_json(command))
        return command.envelope.message_id

    async def results(self, message_id: str) -> tuple[ActionResult, ...]:
        """Of one envelope; it is answered once."""

        def found() -> list[HintResult]:
            heard = [from_json(message.payload, HintResult) for message in self._results.messages]
            return [each for each in heard if each.message_id == message_id]

        await until(lambda: bool(found()), f"the result of {message_id}")
        (result,) = found()
        return result.results

    async def hint(self, kind: ActionType, **fields: Any) -> Outcome:
        message_id = self.send(self.action(kind, **fields))
        (result,) = await self.results(message_id)
        return result.outcome, result.reason

    def action(self, kind: ActionType, **fields: Any) -> HintAction:
        target = {"session_id": KEY.root, "session": KEY.text()}
        expires_ms = int(time.time() * 1000) + 60_000
        number = f"{kind}-{self._sent}-{len(fields)}"
        return HintAction(
            action_id=number, action_type=kind, payload={"target": target, "expires_ms": expires_ms, **fields}
        )

    def close_session(self) -> None:
        fact = SessionFact(
            source="admission-1", epoch=1, seq=0, at_ms=0, session=KEY, session_id=KEY.root, state="closed"
        )
        self._bus.publish(subjects.session("closed", KEY.text()), to_json(fact))


@asynccontextmanager
async def hinting(url: str, bus: Bus, engine_url: str, **changes: Any) -> AsyncIterator[Hinter]:
    """A bridge of the engine, that has seen it."""
    values: dict[str, Any] = {
        "nats_url": url, "worker": "w", "instance": "bridge-w", "engine_url": engine_url, "scrape_interval_s": 0.1,
        "heartbeat_interval_s": 0.1, **changes,
    }  # fmt: skip
    service = BridgeService(BridgeSettings(**values))
    async with running(url, service, "bridge-w"):
        results = await Watcher.of(bus, subjects.hint_result("w"))
        await until(lambda: service.core.engine.sight is not None, "the engine's pages")
        yield Hinter(bus, results, service)


def cached(answer: Any) -> int:
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


async def from_source(engine: RunningEngine, source: str) -> float:
    """Prompt tokens that were found there so far."""
    samples = await engine.metric("vllm:prompt_tokens_cached_by_source_total")
    return sum(value for labels, value in samples.items() if f'source="{source}"' in labels)


async def test_a_pinned_prefix_survives_pressure(url: str, bus: Bus, tmp_path: Path) -> None:
    """Without the pin the same traffic evicts it; once the pin is taken back, it goes."""
    async with running_engine(tmp_path, *DEVICE) as engine, hinting(url, bus, engine.url) as hinter:

        async def pressed() -> int:
            await engine.complete(OTHER, session_id="o")
            await engine.complete(OTHER[::-1], session_id="o")
            return cached(await engine.complete([*SESSION, 1], session_id="s"))

        await engine.complete(SESSION, session_id="s")
        assert await pressed() == 0
        assert await hinter.hint("pin", ttl_ms=60_000) == ("accepted", None)
        assert await pressed() == 160
        assert await hinter.hint("dereference", reason="unpinned") == ("accepted", None)
        assert await pressed() == 0


async def test_a_prefetched_prefix_is_found_on_the_device(url: str, bus: Bus, tmp_path: Path) -> None:
    """Demoted, it would be loaded with its next turn; prefetched, that turn finds it where it is needed."""
    options = (*DEVICE, "--host-blocks", "64")
    async with running_engine(tmp_path, *options) as engine, hinting(url, bus, engine.url) as hinter:
        assert {"kv_hints", "tier:host"} <= set(hinter.bridge.core.engine.profile().features)
        await engine.complete(SESSION, session_id="s")
        assert await hinter.hint("demote", to="host") == ("accepted", None)
        assert cached(await engine.complete([*SESSION, 1], session_id="s")) == 160
        assert await from_source(engine, "host") == 160
        assert await hinter.hint("demote", to="host", ttl_ms=60_000) == ("accepted", None)
        before = await from_source(engine, "device")
        assert await hinter.hint("prefetch", to="device") == ("accepted", None)
        assert cached(await engine.complete([*SESSION, 1], session_id="s")) == 160
        assert (await from_source(engine, "host"), await from_source(engine, "device") - before) == (160, 160)


async def test_every_action_has_its_outcome(url: str, bus: Bus, tmp_path: Path) -> None:
    """All six are accepted where the engine can; else it says what is missing. In one envelope, too, and in order."""
    for name in ("pool", "engine"):
        (tmp_path / name).mkdir()
    async with running_pool(tmp_path / "pool") as pool:
        options = (*DEVICE, "--host-blocks", "64", "--pool-url", pool.url, "--ranks", "2", "--max-pinned-ratio", "0.2")
        async with (
            running_engine(tmp_path / "engine", *options) as engine,
            hinting(url, bus, engine.url, ranks=2) as hinter,
        ):
            assert await hinter.hint("pin", ttl_ms=60_000) == ("missing", "unknown_session")
            await engine.complete(SESSION, [(b"x-data-parallel-rank", b"1")], session_id="s")
            wanted: tuple[tuple[ActionType, dict[str, Any]], ...] = (
                ("retain", {"priority": 5}),
                ("retain", {"priority": 99}),
                ("pin", {"ttl_ms": 60_000}),
                ("share", {"to": "pool"}),
                ("demote", {"to": "disk"}),
                ("demote", {"to": "host"}),
                ("prefetch", {"to": "device"}),
                ("dereference", {"reason": "closed"}),
            )
            actions = [hinter.action(kind, x=number, **fields) for number, (kind, fields) in enumerate(wanted)]
            named = [
                HintAction(action_id=str(number), action_type=each.action_type, payload=each.payload)
                for number, each in enumerate(actions)
            ]
            results = await hinter.results(hinter.send(*named, rank=1))
            assert [(each.action_type, each.outcome, each.reason) for each in results] == [
                ("retain", "accepted", None),
                ("retain", "clipped", "priority"),
                ("pin", "clipped", "pin_budget"),
                ("share", "accepted", None),
                ("demote", "unsupported", "tier"),
                ("demote", "accepted", None),
                ("prefetch", "clipped", "no_room"),
                ("dereference", "accepted", None),
            ]
            assert hinter.bridge.core.hints.counts["retain", "clipped"] == 1


async def test_a_hint_after_its_sessions_end_is_rejected(url: str, bus: Bus, tmp_path: Path) -> None:
    """The engine never hears of it; letting go it does."""
    async with running_engine(tmp_path, *DEVICE) as engine, hinting(url, bus, engine.url) as hinter:
        await engine.complete(SESSION, session_id="s")
        hinter.close_session()
        await until(lambda: len(hinter.bridge.core.hints.closed) == 1, "the session's end")
        assert await hinter.hint("pin", ttl_ms=60_000) == ("rejected", "session_closed")
        assert sum((await engine.metric("vllm:sim_pinned_blocks")).values()) == 0
        assert await hinter.hint("dereference", reason="closed") == ("accepted", None)


async def test_an_engine_without_hints_says_so(url: str, bus: Bus, tmp_path: Path) -> None:
    """The feature off: as every real engine today."""
    options = (*DEVICE, "--kv-hints", "false")
    async with running_engine(tmp_path, *options) as engine, hinting(url, bus, engine.url) as hinter:
        assert "kv_hints" not in hinter.bridge.core.engine.profile().features
        await engine.complete(SESSION, session_id="s")
        assert await hinter.hint("pin", ttl_ms=60_000) == ("unsupported", "engine_has_no_hint_interface")


async def test_an_engine_that_dies_rejects_and_the_bridge_lives(url: str, bus: Bus, tmp_path: Path) -> None:
    """Nobody listens: `engine_unreachable`, at once."""
    async with running_engine(tmp_path, *DEVICE) as engine, hinting(url, bus, engine.url) as hinter:
        await engine.process.kill()
        assert await hinter.hint("pin", ttl_ms=60_000) == ("rejected", "engine_unreachable")


@pytest.mark.parametrize("takes", ["slow", "refuses", "lies"])
async def test_engines_that_misbehave_at_hints_alone(url: str, bus: Bus, takes: str) -> None:
    """One that hangs is given up in time, and a flood meanwhile is bounded; its health is not judged by it."""

    async def answer(request: Request, responder: Responder) -> None:
        if request.path == "/v1/models":
            responder.send(200, [], b'{"data":[{"id":"m","owned_by":"vllm"}]}')
        elif request.path != "/kv_hints":
            responder.send(404, [], b"")
        elif request.method == "GET":
            responder.send(200, [], b'{"protocol_versions":["0.1"],"actions":{"pin":["1.0"]}}')
        elif takes == "slow":
            await responder.gone.wait()
        elif takes == "refuses":
            responder.send(500, [], b"no")
        else:
            responder.send(200, [], b'{"results":[{"action_id":"another","outcome":"accepted"}]}')

    server = HttpServer(answer)
    await server.start("127.0.0.1", 0)
    try:
        settings = {"hint_timeout_s": 0.3 if takes == "slow" else 10.0, "hint_calls": 8, "block_size": 16}
        async with hinting(url, bus, f"http://127.0.0.1:{server.port}", **settings) as hinter:
            sent = [hinter.send(hinter.action("pin", ttl_ms=1000)) for _ in range(200)]
            outcomes = [(await hinter.results(each))[0] for each in sent]
            reasons = [each.reason for each in outcomes]
            assert {each.outcome for each in outcomes} == {"rejected"}
            expected = {"slow": "engine_timeout", "refuses": "engine_error", "lies": "not_answered"}[takes]
            assert reasons.count(expected) >= 8
            assert set(reasons) <= {expected, "bridge_busy"}
            assert hinter.bridge.core.hints.waiting == 0
            await until(lambda: hinter.bridge.core.health()[0] == "ready", "its health")
    finally:
        await server.close()

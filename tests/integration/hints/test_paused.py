"""A session that admission pauses makes room on the device, and comes back when it is resumed: real processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from bus import subjects
from bus.nats import NatsBus
from schemas.admit import AdmitRequest, Granted, Held
from schemas.base import from_json, to_json
from schemas.hint import HintResult
from schemas.request import RequestEnd
from schemas.worker import WorkerState
from tests.integration.admission.processes import is_ready
from tests.integration.admission.world import World
from tests.integration.bridge.house import chain_of_prompt, until_async
from tests.integration.engine.engines import RunningEngine, running_engine
from tests.support.processes import HelperProcess, eventually, python_process, settings_arguments

MODEL = "sim-8b"
BLOCKS = 640
"""10,240 tokens of 16: the long session and the short one do not fit together."""
SHORT, MIDDLE, LONG, GROWTH = 3_200, 5_600, 7_600, 320


class House:
    """What a test asks of the engine and admission; ``results``: what the bridge answered of the short session."""

    def __init__(self, world: World, engine: RunningEngine) -> None:
        self.world = world
        self.engine = engine
        self.results: list[tuple[str, str]] = []
        self.held: list[Held] = []
        self.health = ""

    def on_result(self, result: HintResult) -> None:
        if result.session.root == "short":
            self.results += [(each.action_type, each.outcome) for each in result.results]

    def on_worker(self, state: WorkerState) -> None:
        self.health = state.health

    def told(self, session: str) -> list[str]:
        return [fact.state for fact in self.world.sessions if fact.session.root == session]

    async def granted(self, name: str, prompt: list[int]) -> AdmitRequest:
        """The session of this name (before the dash) may run its next turn."""
        chain = chain_of_prompt(prompt, 16)
        session = name.partition("-")[0]
        request = self.world.request(name, session, tokens=len(prompt), chain=chain, tokens_from="tokenizer")
        self.world.accept(request)
        answer = await self.world.ask(request, held=self.held)
        assert isinstance(answer, Granted), answer
        return request

    async def turn(self, name: str, prompt: list[int], *, tokens: int = 16, final: bool = False) -> None:
        """One turn from its ask to its end."""
        request = await self.granted(name, prompt)
        await self.engine.complete(prompt, session_id=request.identity.session_id, max_tokens=tokens)
        if final:
            self._end_of_session(request)
        else:
            self.world.end(request, "w")

    def _end_of_session(self, request: AdmitRequest) -> None:
        self.world.in_flight.pop(request.request_id)
        fact = RequestEnd(
            **self.world.stamp(self.world.ingress),
            request_id=request.request_id,
            model=MODEL,
            identity=request.identity,
            outcome="completed",
            kind="final",
            worker="w",
            rank=0,
        )
        self.world.bus.publish(subjects.request("end", MODEL), to_json(fact))


@asynccontextmanager
async def house(url: str, bus: NatsBus, directory: Path, **admission: Any) -> AsyncIterator[House]:
    """An engine with a host tier, its bridge, admission and hints, ready."""
    async with AsyncExitStack() as stack:

        async def start(module: str, name: str, **settings: Any) -> HelperProcess:
            arguments = settings_arguments({"nats_url": url, **settings})
            process = python_process(module, *arguments, directory=directory, name=name)
            return await stack.enter_async_context(process)

        world = World(bus, workers=(), model=MODEL)
        stack.push_async_callback(world.stop)
        await world.start(index=False)
        room = ("--num-blocks", str(BLOCKS), "--block-size", "16", "--host-blocks", "2048", "--profile", "h100-8b")
        engine = await stack.enter_async_context(running_engine(directory, *room, "--max-model-len", "10000"))
        system = House(world, engine)
        await bus.subscribe(subjects.hint_result("w"), lambda m: system.on_result(from_json(m.payload, HintResult)))
        await bus.subscribe(subjects.worker_state("w"), lambda m: system.on_worker(from_json(m.payload, WorkerState)))
        hints = await start("services.hints", "hints")
        await hints.wait_said("leadership key=hints epoch=")
        patience = {"worker_lost_s": 30.0}  # a busy machine is no loss
        leader = await start(
            "services.admission", "admission", warmup_s=0.3, paused_after_s=0.3, **patience, **admission
        )
        await start(
            "services.bridge",
            "bridge",
            worker="w",
            engine_url=engine.url,
            engine="simulated",
            kv_events=json.dumps([engine.kv_events[0]]),
            kv_replay=json.dumps([engine.replay[0]]),
            scrape_interval_s=0.1,
            heartbeat_interval_s=0.1,
        )
        await leader.wait_said("service_started")
        await until_async(lambda: asyncio.to_thread(is_ready, leader), "admission is ready")
        await eventually(lambda: system.health == "ready")
        async with asyncio.timeout(60):
            yield system


async def test_a_session_that_is_held_gives_room_and_has_it_again(url: str, bus: NatsBus, tmp_path: Path) -> None:
    """Policy ``commit``: its lease was revoked, and its turn is held. ``resumed`` comes with its grant, and a prefetch
    with it."""
    prompt = list(range(100, 100 + SHORT))
    async with house(url, bus, tmp_path, policy="commit", policy_parameters='{"output_tokens": 100}') as system:
        await system.turn("short-1", prompt)
        await eventually(lambda: "leased" in system.told("short"))
        async with asyncio.TaskGroup() as group:
            group.create_task(system.turn("long-1", list(range(20_000, 20_000 + LONG)), tokens=400))
            await eventually(lambda: "revoked" in system.told("short"))
            group.create_task(system.turn("short-2", prompt + [7] * GROWTH))
            await eventually(lambda: "paused" in system.told("short"))
            await eventually(lambda: ("demote", "accepted") in system.results)
            assert "resumed" not in system.told("short")
        await eventually(lambda: system.told("short").count("acting") == 2)
        await eventually(lambda: "prefetch" in dict(system.results))
    assert {each.reason for each in system.held} == {"policy"}
    states = [state for state in system.told("short") if state not in ("leased", "released", "revoked")]
    assert states == ["opened", "acting", "paused", "resumed", "acting"]
    paused, resumed = (fact for fact in system.world.sessions if fact.state in ("paused", "resumed"))
    assert (paused.worker, paused.rank, paused.reason) == ("w", 0, "policy")
    assert paused.context_tokens == SHORT + 10
    assert paused.numbers["held_s"] >= 0.3
    assert (resumed.worker, resumed.rank, resumed.reason) == ("w", 0, "granted")
    assert system.told("long").count("paused") == 0


async def test_a_session_that_the_policy_puts_aside_gives_room_and_is_resumed_before_its_turn(
    url: str, bus: NatsBus, tmp_path: Path
) -> None:
    """Policy ``thunderagent`` pauses whom it likes, idle as it is; its turn waits until the policy resumes it."""
    parameters = json.dumps({"dynamo": {"scheduler_interval_seconds": 0.3}})
    prompt, other = list(range(100, 100 + SHORT)), list(range(20_000, 20_000 + LONG))
    async with house(url, bus, tmp_path, policy="thunderagent", policy_parameters=parameters) as system:
        await system.turn("short-1", prompt)
        await system.turn("long-1", other[:MIDDLE])
        async with asyncio.TaskGroup() as group:
            group.create_task(system.turn("long-2", other, tokens=400, final=True))
            await eventually(lambda: "paused" in system.told("short"))
            await eventually(lambda: ("demote", "accepted") in system.results)
            group.create_task(system.turn("short-2", prompt + [7] * GROWTH))
            await eventually(lambda: bool(system.held))
            assert "resumed" not in system.told("short")
        await eventually(lambda: system.told("short").count("acting") == 2)
        await eventually(lambda: "prefetch" in dict(system.results))
    assert system.told("short") == ["opened", "acting", "paused", "resumed", "acting"]
    paused, resumed = (fact for fact in system.world.sessions if fact.state in ("paused", "resumed"))
    assert (paused.worker, paused.reason) == ("w", "idle")
    assert (resumed.worker, resumed.rank, resumed.reason) == ("w", 0, "policy")

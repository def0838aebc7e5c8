"""Admission under policy `commit` beside `kv`: real processes, two simulated engines, more sessions than memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bus import subjects
from bus.errors import BusError
from bus.nats import NatsBus
from schemas.admit import AdmitRequest, Granted, Held
from schemas.base import to_json
from schemas.request import RequestEnd, Usage
from tests.integration.admission.processes import is_ready, metric
from tests.integration.admission.world import World, identity
from tests.integration.bridge.house import chain_of_prompt, until_async
from tests.integration.engine.engines import RunningEngine, running_engine
from tests.integration.indexer.test_processes import BLOCK, MODEL
from tests.support.processes import python_process, settings_arguments

SESSIONS = 12
AT_ONCE = 10
TURNS = 6
FIRST_TOKENS = 9_600
TURN_TOKENS = 1_280
OUTPUT_TOKENS = 64
TOOL_S = 0.05
BLOCKS = 2_049
"""About 32,800 tokens an engine: two sessions at their end, of the ten."""


@dataclass
class Outcome:
    """What one policy made of the sessions: tokens that engines reported, turns that ended, and replies on the way."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    turns: int = 0
    held: list[Held] = field(default_factory=list)
    leases: set[str] = field(default_factory=set)

    @property
    def recomputed(self) -> float:
        """Prompt tokens that engines computed, over those that had to be computed at all."""
        return (self.prompt_tokens - self.cached_tokens) / self.new_tokens


@asynccontextmanager
async def house(url: str, directory: Path, policy: str) -> AsyncIterator[list[RunningEngine]]:
    """Two engines, their bridges, and admission under ``policy``, ready."""
    async with AsyncExitStack() as stack:
        engines = []
        for name in ("w1", "w2"):
            options = ("--num-blocks", str(BLOCKS), "--max-model-len", "32768", "--profile", "h100-8b", "--speed", "2")
            engine = await stack.enter_async_context(running_engine(directory, *options))
            bridge = {
                "nats_url": url,
                "worker": f"{policy}-{name}",
                "engine_url": engine.url,
                "kv_events": f'["{engine.kv_events[0]}"]',
                "kv_replay": f'["{engine.replay[0]}"]',
                "scrape_interval_s": 0.2,
                "heartbeat_interval_s": 0.2,
            }
            arguments = settings_arguments(bridge)
            await stack.enter_async_context(
                python_process("services.bridge", *arguments, directory=directory, name=f"{policy}-bridge-{name}")
            )
            engines.append(engine)
        settings: dict[str, object] = {"nats_url": url, "warmup_s": 0.5, "policy": policy, "hold_deadline_s": 120}
        process = await stack.enter_async_context(
            python_process("services.admission", *settings_arguments(settings), directory=directory, name=policy)
        )
        await process.wait_said("service_started")
        await until_async(lambda: asyncio.to_thread(is_ready, process), f"{policy} is ready")
        yield engines


async def session(world: World, engines: dict[str, RunningEngine], policy: str, number: int, outcome: Outcome) -> None:
    """One session: its context grows with every turn; a tool runs between them."""
    prompt = [5_000 + number] * FIRST_TOKENS
    outcome.new_tokens += len(prompt)
    for turn in range(TURNS):
        name = f"{policy}-{number}"
        request = world.request(
            f"{name}-{turn}",
            name,
            tokens=len(prompt),
            chain=chain_of_prompt(prompt, BLOCK),
            tokens_from="tokenizer",
            identity=identity(name),
        )
        world.accept(request)
        answer = await world.ask(request, deadline_s=60.0, held=outcome.held)
        assert isinstance(answer, Granted), answer
        assert answer.policy == policy
        answered = await engines[answer.url].complete(prompt, max_tokens=OUTPUT_TOKENS)
        usage = answered["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        outcome.prompt_tokens += usage["prompt_tokens"]
        outcome.cached_tokens += cached
        outcome.turns += 1
        world.in_flight.pop(request.request_id)
        end = RequestEnd(
            **world.stamp(world.ingress),
            request_id=request.request_id,
            model=world.model,
            identity=request.identity,
            outcome="completed",
            kind="turn" if turn + 1 < TURNS else "final",
            worker=answer.grant.worker,
            rank=0,
            usage=Usage(input_tokens=len(prompt), output_tokens=OUTPUT_TOKENS, cached_tokens=cached),
            tool_names=("bash",) if turn + 1 < TURNS else (),
        )
        world.bus.publish(subjects.request("end", world.model), to_json(end))
        if turn + 1 < TURNS:
            await asyncio.sleep(TOOL_S)  # the tool runs
            prompt = prompt + [6_000 + 100 * number + turn] * TURN_TOKENS
            outcome.new_tokens += TURN_TOKENS


async def run(url: str, bus: NatsBus, directory: Path, policy: str) -> Outcome:
    outcome = Outcome()
    world = World(bus, workers=(), model=MODEL)
    await world.start(index=False)
    try:
        async with house(url, directory, policy) as running, asyncio.timeout(90):
            engines = {engine.url: engine for engine in running}
            places = asyncio.Semaphore(AT_ONCE)

            async def one(number: int) -> None:
                async with places:
                    await session(world, engines, policy, number, outcome)

            await asyncio.gather(*(one(number) for number in range(SESSIONS)))
    finally:
        await world.stop()
    outcome.leases = {fact.state for fact in world.sessions}
    return outcome


async def test_commit_finishes_every_session_and_computes_less_twice_than_kv(
    url: str, bus: NatsBus, tmp_path: Path
) -> None:
    """Ten sessions at a time, of which two fit an engine: `kv` lets all of them run, and engines evict what they come
    back for; `commit` holds turns back, says so, and everybody's last turn ends within the deadline."""
    kv = await run(url, bus, tmp_path, "kv")
    commit = await run(url, bus, tmp_path, "commit")
    assert kv.turns == commit.turns == SESSIONS * TURNS
    assert "policy" in {each.reason for each in commit.held}
    assert {"leased", "released"} <= commit.leases
    assert not {each.reason for each in kv.held} & {"policy"}
    assert commit.recomputed < 0.8 * kv.recomputed


async def test_a_standby_knows_what_memory_is_taken_when_its_leader_dies(
    url: str, bus: NatsBus, tmp_path: Path
) -> None:
    """kill -9 of the leader while a turn runs and another is held: the next leader holds it too, for the same reason,
    and lets it go when the first ends."""
    world = World(bus, workers=("w1",))
    await world.start(index=False)
    settings: dict[str, object] = {
        "nats_url": url,
        "warmup_s": 0.5,
        "policy": "commit",
        "policy_parameters": '{"output_tokens": 100}',
    }
    try:
        async with AsyncExitStack() as stack:
            first, second = [
                await stack.enter_async_context(
                    python_process(
                        "services.admission",
                        *settings_arguments({**settings, "instance": name}),
                        directory=tmp_path,
                        name=name,
                    )
                )
                for name in ("admission-1", "admission-2")
            ]
            for process in (first, second):
                await process.wait_said("service_started")
                await until_async(lambda each=process: asyncio.to_thread(is_ready, each), "ready")  # type: ignore[misc]
            running = world.request("r1", "s1", tokens=9_000)
            granted = await world.grant(running)
            leader = first if metric(first, "tidegate_leader") else second
            other = b"\x02" * 8 * (9_000 // 16)  # what prompts have in common is charged once
            waiting = world.request("r2", "s2", tokens=9_000, chain=other)
            world.accept(waiting)
            await leader.kill()
            held: list[Held] = []
            asked = asyncio.create_task(_ask_until_granted(world, waiting, held))
            await until_async(lambda: asyncio.sleep(0, len(held) >= 3), "held by the next leader")
            assert {each.reason for each in held} == {"policy"}
            assert granted.epoch not in {each.epoch for each in held}
            world.end(running, "w1")
            answer = await asyncio.wait_for(asked, 30)
            assert (answer.grant.worker, answer.hold_reason) == ("w1", "policy")
    finally:
        await world.stop()


async def _ask_until_granted(world: World, request: AdmitRequest, held: list[Held]) -> Granted:
    """As an ingress does that never decides by itself."""
    while True:
        try:
            answer = await world.ask(request, idle_s=1.5, deadline_s=20.0, held=held)
        except BusError:
            await asyncio.sleep(0.05)
            continue
        assert isinstance(answer, Granted), answer
        return answer

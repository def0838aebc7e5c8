"""``tidegate up --pool``: engines that share a simulated Mooncake master; turns go where its pages are of use."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from bus.interface import BusMessage
from bus.nats import NatsBus, connect
from bus.subjects import ROOT
from schemas.base import from_json
from schemas.decision import Candidate, Decision
from schemas.request import RequestEnd
from schemas.worker import WorkerState
from tests.support.processes import eventually, python_process, settings_arguments, start_process
from tests.support.system import RunningSystem, running_system
from web.client import HttpClient, Timeouts

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(400)]

MODEL = "sim-8b"
BLOCK = 16
CONFIG = """
[admission]
policy = "kv"
[engine]
pool_threshold_tokens = 16
profile = "instant"
{engine}
"""
"""Another policy may let a turn wait; what is asked here is where it goes. SGLang says at once that its cache was
reset, vLLM with its next step."""

Messages = list[ChatCompletionMessageParam]


@dataclass
class House:
    """A system whose engines share a pool, watched."""

    system: RunningSystem
    directory: Path
    stack: AsyncExitStack
    client: openai.AsyncOpenAI
    bus: NatsBus
    decisions: dict[str, Decision] = field(default_factory=dict)
    workers: dict[str, WorkerState] = field(default_factory=dict)
    ends: list[RequestEnd] = field(default_factory=list)

    async def turn(self, session: str, messages: Messages) -> tuple[int, Decision]:
        """One turn of a session, its answer appended: cached tokens as the engine says, and how it was decided."""
        raw = await self.client.chat.completions.with_raw_response.create(
            model=MODEL, messages=messages, max_tokens=8, extra_headers={"x-dynamo-session-id": session}
        )
        answer = raw.parse()
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or "-"})
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        request_id = raw.headers["x-request-id"]
        await eventually(lambda: request_id in self.decisions, 60, "decided")
        return (details.cached_tokens if details else None) or 0, self.decisions[request_id]

    async def flush(self) -> None:
        """Every engine forgets what is on its device; the index hears of it."""
        http = HttpClient()
        try:
            for engine in {state.profile.url for state in self.workers.values()}:
                answer = await http.fetch("POST", f"{engine}/reset_prefix_cache", [], b"", Timeouts(total_s=5))
                assert answer.status == 200
                # A prompt of less than a block: its step brings what vLLM says of the reset.
                body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
                kind = [(b"content-type", b"application/json")]
                answer = await http.fetch("POST", f"{engine}/v1/completions", kind, body, Timeouts(total_s=5))
                assert answer.status == 200
        finally:
            await http.close()
        await eventually(lambda: self.admission("blocks") == 0, 60, "devices are empty")

    async def settle(self) -> None:
        """What the engines have written to the pool is known to admission."""
        seen = -1.0

        def still() -> bool:
            nonlocal seen
            before, seen = seen, self.admission("pool_objects")
            return before == seen > 0

        await eventually(still, 15, "pages are in the pool")

    def admission(self, name: str) -> float:
        """A metric of admission's own index."""
        return self.system.metric("admission", f"tidegate_admission_index_{name}")

    def usable(self) -> bool:
        """Whether admission gives credit for the pool."""
        return self.admission("pool_layout_usable") == 1.0

    async def join(self, name: str, *, shares: bool, **engine: object) -> None:
        """Another engine with its bridge."""
        directory = self.directory / name
        directory.mkdir()
        pool_url = re.sub(r"/health$", "", str(self.system.addresses["health"]["pool"]))
        given = {"model": MODEL, "http_port": 0, "profile": "instant", "event_form": "sglang", **engine}
        given["pool_threshold_tokens"] = 16
        if shares:
            given |= {"pool_url": pool_url, "pool_name": name}
        process = await self.stack.enter_async_context(
            python_process("load.engine", *settings_arguments(given), directory=directory)
        )
        ready = json.loads(await process.wait_line())
        bridge = {
            "nats_url": self.system.nats_url,
            "http_port": 0,
            "engine_url": ready["url"],
            "worker": name,
            "engine": "simulated",
            "shared_pool": "pool-a" if shares else "",
            "instance": f"bridge-{name}",
        }
        await self.stack.enter_async_context(
            python_process("services.bridge", *settings_arguments(bridge), directory=directory)
        )
        await eventually(lambda: name in self.workers and self.workers[name].health == "ready", 60, f"{name} is ready")

    def on_decision(self, message: BusMessage) -> None:
        decision = from_json(message.payload, Decision)
        self.decisions[decision.request_id] = decision

    def on_end(self, message: BusMessage) -> None:
        self.ends.append(from_json(message.payload, RequestEnd))

    def on_worker(self, message: BusMessage) -> None:
        state = from_json(message.payload, WorkerState)
        self.workers[state.worker] = state


@asynccontextmanager
async def running_house(directory: Path, engine: str = 'event_form = "sglang"') -> AsyncIterator[House]:
    """``engine``: settings of the engines that share the pool."""
    config = directory / "tidegate.toml"
    config.write_text(CONFIG.format(engine=engine))
    async with AsyncExitStack() as stack:
        system = await stack.enter_async_context(running_system(directory, "--pool", "--config", str(config)))
        bus = await connect(system.nats_url, name="test", timeout_s=30)
        stack.push_async_callback(bus.close)
        client = openai.AsyncOpenAI(
            base_url=str(system.addresses["base_url"]), api_key="none", max_retries=0, timeout=20
        )
        stack.push_async_callback(client.close)
        house = House(system, directory, stack, client, bus)
        await bus.subscribe(f"{ROOT}.decision.*", house.on_decision)
        await bus.subscribe(f"{ROOT}.worker.state.*", house.on_worker)
        await bus.subscribe(f"{ROOT}.request.end.*", house.on_end)
        await bus.flush()
        await eventually(lambda: len(house.workers) == 2 and house.usable(), 60, "both engines read the pool")
        yield house


def prompt(name: str) -> Messages:
    """A system prompt that nobody else has, and a question."""
    rules = f"These are the rules of house {name}, which everybody has to keep at all times. " * 30
    return [{"role": "system", "content": rules}, {"role": "user", "content": "What is the first thing to do?"}]


def by_worker(decision: Decision) -> dict[str, Candidate]:
    return {candidate.worker: candidate for candidate in decision.candidates}


async def test_what_a_device_lost_is_found_in_the_pool(tmp_path: Path) -> None:
    """A session runs on one engine, whose device cache is dropped; its pages are in the pool. The next turn is promised
    them, and finds what was promised. A new session with the same beginning goes to an engine that can read them, and
    not to the idle one that reads no pool. The ends of requests tell of it, and parity finds nothing wrong."""
    async with running_house(tmp_path) as house:
        messages = prompt("one")
        cached, first = await house.turn("s", messages)
        assert (cached, first.predicted_cached_tokens, first.predicted_shared_tokens) == (0, 0, 0)
        await house.settle()
        await house.flush()

        messages.append({"role": "user", "content": "And the next one?"})
        cached, second = await house.turn("s", messages)
        assert second.predicted_cached_tokens == 0
        assert second.predicted_shared_tokens > 20 * BLOCK
        assert cached == second.predicted_cached_tokens + second.predicted_shared_tokens
        shared = [each.parts["shared_credit"] for each in second.candidates]
        assert shared == [second.predicted_shared_tokens / BLOCK / 2] * 2

        await house.join("apart", shares=False)
        await eventually(lambda: house.admission("state") == 3, 60, "three sources")
        for number in range(3):
            await house.flush()
            again = prompt("one")
            cached, decision = await house.turn(f"new-{number}", again)
            seats = by_worker(decision)
            assert decision.worker != "apart"
            assert seats["apart"].parts["shared_credit"] == 0.0
            assert (seats[decision.worker].cost or 0.0) < (seats["apart"].cost or 0.0)
            assert cached == decision.predicted_cached_tokens + decision.predicted_shared_tokens > 20 * BLOCK
        assert house.system.metric("indexer", "tidegate_parity_alarms_total") == 0
        assert [end.usage.cached_tokens for end in house.ends] == [
            (end.predicted_cached_tokens or 0) + (end.predicted_shared_tokens or 0) for end in house.ends
        ]
        predicted, reported = (
            house.system.metric("indexer", f"tidegate_{name}_cached_tokens_total") for name in ("predicted", "reported")
        )
        assert predicted == reported > 0


async def test_a_pool_that_is_keyed_by_the_engines_own_hashes(tmp_path: Path) -> None:
    """vLLM's connector: nobody can compute the keys, they are learned from the engines' events; what it stores is found
    after the devices have lost it, by another session as well. `tidegate doctor` names the pool."""
    async with running_house(tmp_path, 'pool_scheme = "vllm_mooncake"') as house:
        await house.turn("s", prompt("four"))
        await house.settle()
        await house.flush()
        cached, decision = await house.turn("t", prompt("four"))
        assert decision.predicted_cached_tokens == 0
        assert cached == decision.predicted_shared_tokens > 20 * BLOCK
        command = [sys.executable, "-m", "tidegate", "doctor", "--json", "--workdir", str(house.system.workdir)]
        doctor = await start_process(command, tmp_path, name="doctor")
        await doctor.wait(120)
        checks = {check["name"]: check for check in json.loads(doctor.stdout)["checks"]}
        assert checks["pool pool-a"]["verdict"] == "ok"


async def test_without_its_bridge_a_pool_counts_for_nothing_and_turns_go_on(tmp_path: Path) -> None:
    """The pool's bridge hangs: within seconds nobody believes what it said, and turns are served all the same. It is
    killed and started again: it reads the master's list, and what is there counts again."""
    async with running_house(tmp_path) as house:
        messages = prompt("two")
        await house.turn("s", messages)
        await house.settle()
        bridge = ("services.bridge", "pool=pool-a")
        pid = house.system.child_pid(*bridge)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await eventually(
            lambda: 'pool_state{pool="pool-a",state="blind"} 1.0' in house_page(house), 60, "the pool is blind"
        )
        await house.flush()
        messages.append({"role": "user", "content": "Go on."})
        _, blind = await house.turn("s", messages)
        assert (blind.predicted_shared_tokens, blind.index_health) == (0, "synced")

        os.kill(pid, signal.SIGKILL)
        await eventually(
            lambda: 'pool_state{pool="pool-a",state="synced"} 1.0' in house_page(house), 40, "the pool is back"
        )
        await house.settle()
        await house.flush()
        messages.append({"role": "user", "content": "And on."})
        cached, decision = await house.turn("s", messages)
        assert cached == decision.predicted_cached_tokens + decision.predicted_shared_tokens > 20 * BLOCK


async def test_an_engine_with_another_layout_switches_the_pool_off(tmp_path: Path) -> None:
    """It has two tensor-parallel ranks, the others one: no credit for the model, one clear line, a metric; turns go
    on. When it has left, credit comes back."""
    async with running_house(tmp_path) as house:
        messages = prompt("three")
        await house.turn("s", messages)
        await house.settle()
        async with AsyncExitStack() as stack:
            house.stack = stack
            await house.join("other", shares=True, pool_tp=2)
            await eventually(lambda: house.admission("pool_layout_usable") == 0.0, 60, "they disagree")
            await house.flush()
            messages.append({"role": "user", "content": "Go on."})
            _, decision = await house.turn("s", messages)
            assert decision.predicted_shared_tokens == 0
        assert house.admission("pool_layout_disagreements_total") == 1
        lines = [
            line
            for line in (house.system.workdir / "logs" / "admission.log").read_text().splitlines()
            if "pool_layouts_disagree" in line
        ]
        assert len(lines) == 1
        assert "other" in lines[0]
        await eventually(house.usable, 40, "they agree again")


def house_page(house: House) -> str:
    """Admission's metrics."""
    page = house.system.addresses["health"]["admission"].replace("/readyz", "/metrics")
    with urlopen(page, timeout=5) as answer:
        text: str = answer.read().decode()
    return text

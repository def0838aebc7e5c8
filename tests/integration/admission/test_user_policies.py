"""Users' policies beside a running admission: they decide, and whatever becomes of them stalls nothing."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bus import subjects
from bus.interface import BusMessage, Endpoint
from bus.nats import NatsBus
from schemas.admit import AdmitRequest, Granted, Held, Refused
from schemas.base import from_json, to_json
from schemas.policy import AdmitAnswer, LeaseQuestion, RouteAnswer, RouteQuestion
from schemas.session import SessionIdentity, SessionKey
from tests.integration.admission.processes import page
from tests.integration.admission.world import World, identity
from tests.support.processes import HelperProcess, eventually, python_process, settings_arguments, start_process
from tidegate import Policy
from tidegate.services import find_services, subjects_of

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
async def world(bus: NatsBus) -> AsyncIterator[World]:
    world = World(bus)
    await world.start()
    yield world
    await world.stop()


@asynccontextmanager
async def admission(
    url: str, directory: Path, policies: list[dict[str, Any]], **settings: object
) -> AsyncIterator[HelperProcess]:
    """An admission process that leads and asks these."""
    known: dict[str, object] = {"nats_url": url, "warmup_s": 0.4, "index": "ask", "policies": json.dumps(policies)}
    known["policy"] = "kv"
    arguments = settings_arguments({**known, **settings})
    async with python_process("services.admission", *arguments, directory=directory, name="admission") as process:
        await process.wait_said("leadership key=admission epoch=")
        yield process


@asynccontextmanager
async def example(name: str, url: str, bus: NatsBus, directory: Path, ask: str = "admit") -> AsyncIterator[None]:
    """One of ``examples/`` as a process, answering."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--nats", url]
    process = await start_process(command, directory, name=name)
    subject = subjects.policy(ask, name.replace("_", "-"))
    try:
        while not any(subject in subjects_of(service) for service in await find_services(bus, "INFO")):
            assert process.returncode is None, process.output
        yield
    finally:
        await process.close()


def counts(process: HelperProcess) -> dict[tuple[str, str], int]:
    """Questions to the one policy, by ask and outcome."""
    found = re.findall(
        r'tidegate_policy_questions_total\{ask="(\w+)",outcome="(\w+)",policy="[^"]*"\} (\d+)',
        page(process, "/metrics"),
    )
    return {(ask, outcome): int(count) for ask, outcome, count in found}


def of_tenant(tenant: str, name: str) -> SessionIdentity:
    return SessionIdentity(key=SessionKey(tenant=tenant, family="dynamo", root=name), session_id=name)


@pytest.mark.parametrize(
    ("behaviour", "worker", "mode", "counted"),
    [
        ("answers", "w1", "custom", "used"),
        ("late", "w2", "policy", "late"),
        ("absent", "w2", "policy", "absent"),
        ("nonsense", "w2", "policy", "malformed"),
        ("speech", "w2", "policy", "malformed"),
        ("raises", "w2", "policy", "failed"),
    ],
)
async def test_a_route_policy_can_choose_and_can_do_no_harm(
    behaviour: str, worker: str, mode: str, counted: str, url: str, world: World, tmp_path: Path
) -> None:
    """A policy that answers is followed; late, absent, with nonsense, too much or an error, the built-in choice
    stands."""

    def answer(message: BusMessage) -> None:
        question = from_json(message.payload, RouteQuestion)
        assert question.candidates[question.choice].worker == "w2"
        if behaviour == "answers":
            world.bus.publish(message.reply, to_json(RouteAnswer(worker="w1")))
        elif behaviour == "nonsense":
            world.bus.publish(message.reply, b"\xff not json")
        elif behaviour == "speech":
            world.bus.publish(message.reply, to_json(RouteAnswer(worker="w1", reason="because " * 10_000)))
        elif behaviour == "raises":
            raise KeyError("a bug in somebody's policy")

    world.reach = {"w2": 3}
    if behaviour != "absent":
        endpoint = Endpoint("route", subjects.policy("route", "mine"), answer)
        await world.bus.serve("policy-mine", "1.0.0", "a test's policy", [endpoint], {})
    deadline_ms = 100 if behaviour in ("late", "absent") else 700
    async with admission(url, tmp_path, [{"name": "mine", "deadline_ms": deadline_ms}]) as process:
        granted = await world.grant(world.request("r1", "s1"))
        assert (granted.grant.worker, granted.mode) == (worker, mode)
        assert counts(process) == {("route", counted): 1}
        await eventually(lambda: len(world.decisions) == 1)
        (told,) = world.decisions[0].policies
        assert (told.policy, told.outcome) == ("mine", counted)


async def test_a_turn_is_held_and_asked_about_again_and_another_is_refused(
    url: str, world: World, bus: NatsBus, tmp_path: Path
) -> None:
    """The ingress hears the policy's name while it waits, and the policy's words when it may not run at all."""
    policy = Policy("gate")
    asked: list[int] = []

    @policy.admit
    def admit(question: Any) -> AdmitAnswer:
        if question.request_id == "never":
            return AdmitAnswer(action="refuse", reason="not today")
        asked.append(question.held_ms)
        return AdmitAnswer(action="hold", hold_ms=100) if len(asked) < 3 else AdmitAnswer(action="admit")

    await policy.start(bus)
    async with admission(url, tmp_path, [{"name": "gate", "asks": ["admit"], "deadline_ms": 700}]) as process:
        held: list[Held] = []
        granted = await world.grant(world.request("r1", "s1"), held=held)  # type: ignore[arg-type]
        assert {each.reason for each in held} - {"warming_up"} == {"policy:gate"}
        assert asked == sorted(asked)
        assert len(asked) == 3
        assert granted.hold_reason == "policy:gate"
        assert granted.hold_ms >= 200
        refused = await world.ask(world.request("never", "s2"))
        assert isinstance(refused, Refused)
        assert (refused.status, refused.reason, refused.policy, refused.detail) == (
            429, "policy_refused", "gate", "not today",
        )  # fmt: skip
        assert counts(process) == {("admit", "hold"): 2, ("admit", "admit"): 1, ("admit", "refuse"): 1}
    await policy.stop()


async def test_a_policy_that_hangs_dies_and_comes_back_stalls_nobody(
    url: str, world: World, bus: NatsBus, tmp_path: Path
) -> None:
    """kill -9 in the middle of an ask: that one is decided at the deadline, later ones at once, and when it is there
    again it is asked again."""
    script = tmp_path / "hanging.py"
    script.write_text(
        "import sys, time\n"
        "from tidegate import Policy\n"
        "policy = Policy('gate')\n"
        "@policy.admit\n"
        "def admit(question):\n"
        "    print('asked', flush=True)\n"
        "    time.sleep(60 if sys.argv[1] == 'hang' else 0)\n"
        "    return 'admit'\n"
        "policy.main(sys.argv[2:])\n"
    )

    async def run(mode: str) -> HelperProcess:
        environment = {"PYTHONPATH": str(EXAMPLES.parent)}
        command = [sys.executable, str(script), mode, "--nats", url]
        process = await start_process(command, tmp_path, name=f"policy-{mode}", environment=environment)
        await process.wait_said("policy_started")
        return process

    async with admission(url, tmp_path, [{"name": "gate", "asks": ["admit"], "deadline_ms": 700}]) as process:
        hanging = await run("hang")
        turn = asyncio.create_task(world.grant(world.request("r1", "s1")))
        await hanging.wait_said("asked")
        hanging.signal(signal.SIGKILL)
        await hanging.close()
        await turn
        outcomes = counts(process)
        assert outcomes == {("admit", "late"): 1}
        for number in range(3):
            await world.grant(world.request(f"n{number}", f"n{number}"))
        assert counts(process) == {("admit", "late"): 1, ("admit", "absent"): 3}
        healthy = await run("answer")
        await world.grant(world.request("r2", "s2"))
        assert counts(process)["admit", "admit"] == 1
        await healthy.close()


async def test_leases_are_asked_about_and_nobody_waits_for_the_answer(
    url: str, world: World, bus: NatsBus, tmp_path: Path
) -> None:
    """Under `commit`: the session's lease is told, its policy hears tools and numbers, and its word is counted."""
    policy = Policy("keeper")
    about: list[LeaseQuestion] = []

    @policy.lease
    def lease(question: LeaseQuestion) -> bool:
        about.append(question)
        return True

    await policy.start(bus)
    policies = [{"name": "keeper", "asks": ["lease"], "deadline_ms": 1000}]
    async with admission(url, tmp_path, policies, policy="commit") as process:
        request = world.request("r1", "s1", tokens=4_000)
        granted = await world.grant(request)
        world.end(request, granted.grant.worker)
        await eventually(lambda: len(about) == 1 and counts(process) == {("lease", "keep"): 1})
        assert (about[0].identity.session_id, about[0].worker) == ("s1", granted.grant.worker)
        assert about[0].context_tokens == 4_010
        await eventually(lambda: "leased" in [fact.state for fact in world.sessions])
    await policy.stop()


# The examples at work


async def ask_in_background(world: World, request: AdmitRequest, held: list[Held]) -> asyncio.Task[Granted]:
    """Ask, and return when it is held."""
    before = len(held)
    task = asyncio.create_task(world.grant(request, held=held))  # type: ignore[arg-type]
    await eventually(lambda: len(held) > before)
    return task


async def test_fairness_lets_the_other_tenant_go_first(url: str, world: World, bus: NatsBus, tmp_path: Path) -> None:
    """One tenant runs all that may run, and its next turn came first: the place that comes free is the other's."""
    policies = [{"name": "tenant-fairness", "asks": ["admit"], "deadline_ms": 700}]
    async with (
        admission(url, tmp_path, policies, max_grants_per_rank=2) as process,
        example("tenant_fairness", url, bus, tmp_path),
    ):
        running = [world.request(f"a{number}", "-", identity=of_tenant("acme", f"a{number}")) for number in range(4)]
        grants = [await world.grant(request) for request in running]
        held: list[Held] = []
        greedy = await ask_in_background(world, world.request("a4", "-", identity=of_tenant("acme", "a4")), held)
        modest = await ask_in_background(world, world.request("z0", "-", identity=of_tenant("zeta", "z0")), held)
        world.end(running[0], grants[0].grant.worker)
        assert (await modest).request_id == "z0"
        assert not greedy.done()
        assert counts(process)["admit", "hold"] >= 1
        world.end(running[1], grants[1].grant.worker)
        assert (await greedy).hold_reason in ("policy:tenant-fairness", "at_limit")


async def test_background_sub_agents_let_main_agents_go_first(
    url: str, world: World, bus: NatsBus, tmp_path: Path
) -> None:
    """The same with a sub-agent that nobody waits for, and a main agent that came later."""
    policies = [{"name": "hold-background-sub-agents", "asks": ["admit"], "deadline_ms": 700}]
    async with (
        admission(url, tmp_path, policies, max_grants_per_rank=1) as process,
        example("hold_background_sub_agents", url, bus, tmp_path),
    ):
        running = [world.request(f"m{number}", f"m{number}") for number in range(2)]
        grants = [await world.grant(request) for request in running]
        child = msgspec.structs.replace(
            identity("child"), parent=identity("m0").key, parent_session_id="m0", background=True
        )
        held: list[Held] = []
        background = await ask_in_background(world, world.request("b0", "-", identity=child), held)
        main = await ask_in_background(world, world.request("m2", "m2"), held)
        world.end(running[0], grants[0].grant.worker)
        assert (await main).request_id == "m2"
        assert not background.done()
        assert counts(process)["admit", "hold"] >= 1
        world.end(running[1], grants[1].grant.worker)
        assert (await background).request_id == "b0"


async def test_the_big_worker_is_preferred_by_a_plain_nats_client(
    url: str, world: World, bus: NatsBus, tmp_path: Path
) -> None:
    """It knows no type of ours, learns the sizes from `worker.state`, and its weight leaves room for the cost."""
    world.kv_tokens = {"w1": 16_000, "w2": 64_000}
    policies = [{"name": "prefer-big-worker", "asks": ["route"], "weight": 2, "deadline_ms": 700}]
    async with admission(url, tmp_path, policies) as process, example("prefer_big_worker", url, bus, tmp_path, "route"):
        granted = await world.grant(world.request("first", "s0"))
        while granted.mode != "custom":  # it has not heard of both yet
            granted = await world.grant(world.request(f"r{len(world.in_flight)}", f"s{len(world.in_flight)}"))
        assert granted.policy == "prefer-big-worker"
        await eventually(lambda: any(each.worker == "w2" and each.mode == "custom" for each in world.decisions))
        assert counts(process)["route", "used"] >= 1

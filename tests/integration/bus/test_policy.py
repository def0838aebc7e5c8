"""The policy SDK over both buses, and the example of the documentation as its user runs it."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bus import subjects
from bus.errors import BusTimeoutError, NoRespondersError
from bus.interface import Bus, BusMessage
from bus.nats import connect as connect_nats
from bus.policy_asking import ask_policy
from schemas.admit import Grant
from schemas.base import from_json, to_json
from schemas.decision import Candidate, Decision
from schemas.hint import HintIntent
from schemas.policy import (
    AdmitAnswer,
    AdmitQuestion,
    HintAnswer,
    HintQuestion,
    LeaseAnswer,
    LeaseQuestion,
    PlannedAction,
    RouteAnswer,
    RouteQuestion,
)
from schemas.session import SessionIdentity, SessionKey
from tests.integration.bus.support import Server
from tests.support.nats import NatsServer
from tests.support.processes import eventually
from tidegate import Policy, connect

EXAMPLE = Path(__file__).parents[3] / "examples" / "tenant_home.py"
IDENTITY = SessionIdentity(key=SessionKey(tenant="acme", root="a"), session_id="a")
CANDIDATES = (
    Candidate(worker="w1", rank=0),
    Candidate(worker="w2", rank=0),
    Candidate(worker="w2", rank=1),
    Candidate(worker="w3", rank=0, excluded="starting"),
)


def question(deadline_s: float = 10.0) -> RouteQuestion:
    return RouteQuestion(
        request_id="r1",
        model="m",
        identity=IDENTITY,
        candidates=CANDIDATES,
        choice=0,
        deadline_ms=int((time.time() + deadline_s) * 1000),
    )


def decision(worker: str) -> Decision:
    grant = Grant(grant_id="g", request_id="r0", worker=worker, rank=0, owner="ingress-1", epoch=1, expires_ms=1)
    return Decision(
        source="admission-1",
        epoch=1,
        seq=0,
        at_ms=1,
        request_id="r0",
        model="m",
        worker=worker,
        rank=0,
        identity=IDENTITY,
        grant=grant,
    )


async def ask(bus: Bus, name: str, asked: RouteQuestion | None = None, timeout_s: float = 5.0) -> RouteAnswer:
    answer = await bus.request(subjects.policy("route", name), to_json(asked or question()), timeout_s=timeout_s)
    return from_json(answer.payload, RouteAnswer)


async def test_a_decorated_function_answers(server: Server) -> None:
    """A worker's name, a candidate with its rank, an own answer, or no opinion."""
    bus, admission = await server.connect(), await server.connect()
    choices: list[object] = ["w2", CANDIDATES[2], RouteAnswer(worker="w1", reason="because"), None]
    policy = Policy("mine: first")

    @policy.route
    def route(asked: RouteQuestion) -> object:
        assert asked.identity == IDENTITY
        return choices.pop(0)

    await policy.start(bus)
    assert [await ask(admission, "mine: first") for _ in range(4)] == [
        RouteAnswer(worker="w2"),
        RouteAnswer(worker="w2", rank=1),
        RouteAnswer(worker="w1", reason="because"),
        RouteAnswer(),
    ]
    assert (policy.counts.answered, policy.counts.no_opinion) == (3, 1)
    await policy.stop()
    with pytest.raises(NoRespondersError):
        await ask(admission, "mine: first")


async def test_a_subclass_answers_by_what_it_has_watched(server: Server) -> None:
    """Facts come decoded; the class keeps state between them and the question."""
    bus, admission = await server.connect(), await server.connect()

    class Follow(Policy):
        last = ""

        def choose(self, asked: RouteQuestion) -> str:
            return self.last

    policy = Follow("follow")

    @policy.on("tg.v1.decision.>")
    def remember(fact: Decision) -> None:
        policy.last = fact.worker

    await policy.start(bus)
    assert await ask(admission, "follow") == RouteAnswer()
    admission.publish(subjects.decision("w2"), to_json(decision("w2")))
    await eventually(lambda: policy.counts.facts == 1)
    assert await ask(admission, "follow") == RouteAnswer(worker="w2")
    admission.publish(subjects.decision("w2"), b"{not json")
    await eventually(lambda: policy.counts.rejected == 1)
    await policy.stop()


async def test_what_a_policy_gets_wrong_changes_nothing(server: Server) -> None:
    """It raises, names an unknown or an excluded worker, is asked nonsense: an answer without opinion, counted."""
    bus, admission = await server.connect(), await server.connect()
    choices = [KeyError("bug"), "w9", "w3", RouteAnswer(worker="w1", rank=7)]
    policy = Policy("wrong")

    @policy.route
    def route(asked: RouteQuestion) -> object:
        choice = choices.pop(0)
        if isinstance(choice, Exception):
            raise choice
        return choice

    await policy.start(bus)
    answers = [await ask(admission, "wrong") for _ in range(4)]
    assert [answer.worker for answer in answers] == [""] * 4
    assert [answer.reason for answer in answers] == ["policy_failed", *["not_a_candidate"] * 3]
    assert (policy.counts.failed, policy.counts.unusable) == (1, 3)
    answer = await admission.request(subjects.policy("route", "wrong"), b"nonsense", timeout_s=30)
    assert from_json(answer.payload, RouteAnswer) == RouteAnswer(reason="bad_message")
    assert policy.counts.rejected == 1
    await policy.stop()


def admit_question() -> AdmitQuestion:
    return AdmitQuestion(
        request_id="r1", model="m", identity=IDENTITY, deadline_ms=int((time.time() + 10) * 1000), waiting=3
    )


def lease_question() -> LeaseQuestion:
    return LeaseQuestion(identity=IDENTITY, model="m", worker="w1", rank=0, deadline_ms=int((time.time() + 10) * 1000))


async def test_admit_and_lease_are_answered_by_functions_and_by_methods(server: Server) -> None:
    """A word, a truth, a whole answer or nothing; a subclass and decorated functions answer the same bytes."""
    bus, admission = await server.connect(), await server.connect()
    admits: list[object] = ["hold", AdmitAnswer(action="refuse", reason="night"), None, "admit"]
    leases: list[object] = [True, False, LeaseAnswer(keep=True, ttl_ms=5_000), None]

    class Both(Policy):
        def judge(self, question: AdmitQuestion) -> Any:
            assert question.waiting == 3
            return admits[self.counts.answered + self.counts.no_opinion]

        def keep(self, question: LeaseQuestion) -> Any:
            return leases[(self.counts.answered + self.counts.no_opinion) % 4]

    decorated = Policy("decorated")

    @decorated.admit
    def admit(question: AdmitQuestion) -> object:
        return admits[decorated.counts.answered + decorated.counts.no_opinion]

    @decorated.lease
    def lease(question: LeaseQuestion) -> object:
        return leases[(decorated.counts.answered + decorated.counts.no_opinion) % 4]

    for policy in (Both("methods"), decorated):
        assert policy.asks == ("admit", "lease")
        await policy.start(bus)
        answers: list[object] = []
        for question, ask_of, kind in (
            (admit_question(), "admit", AdmitAnswer),
            (lease_question(), "lease", LeaseAnswer),
        ):
            for _ in range(4):
                answer = await admission.request(subjects.policy(ask_of, policy.name), to_json(question), timeout_s=30)
                answers.append(from_json(answer.payload, kind))
        assert answers == [
            AdmitAnswer(action="hold"),
            AdmitAnswer(action="refuse", reason="night"),
            AdmitAnswer(),
            AdmitAnswer(action="admit"),
            LeaseAnswer(keep=True),
            LeaseAnswer(keep=False),
            LeaseAnswer(keep=True, ttl_ms=5_000),
            LeaseAnswer(),
        ]
        assert (policy.counts.answered, policy.counts.no_opinion) == (6, 2)
        await policy.stop()


@pytest.mark.parametrize(
    "choice", [7, "wait", AdmitAnswer(hold_ms=-1), AdmitAnswer(order_bias_s=float("nan"))], ids=str
)
async def test_what_is_no_answer_is_no_opinion_and_counted(server: Server, choice: object) -> None:
    """The mistake is the function's: admission hears no opinion, the log says what an answer may be."""
    bus, admission = await server.connect(), await server.connect()
    policy = Policy("wrong")
    policy.admit(lambda question: choice)
    await policy.start(bus)
    answer = await admission.request(subjects.policy("admit", "wrong"), to_json(admit_question()), timeout_s=30)
    assert from_json(answer.payload, AdmitAnswer) == AdmitAnswer(reason="wrong_answer")
    assert policy.counts.failed == 1
    await policy.stop()


def test_mistakes_in_a_policy_are_said_when_it_is_written() -> None:
    """Not when the first question comes: a coroutine, a wrong number of arguments, two functions, a taken name."""
    policy = Policy("mine")

    async def later(question: object) -> None: ...

    with pytest.raises(TypeError, match=r"route: later must be a plain function \(def, not async def\)"):
        policy.route(later)
    with pytest.raises(TypeError, match="must take one argument, the question"):
        policy.admit(lambda: None)
    policy.lease(lambda question: None)
    with pytest.raises(ValueError, match="lease is answered already"):
        policy.lease(lambda question: None)
    with pytest.raises(ValueError, match="must not be empty"):
        Policy("")
    with pytest.raises(TypeError, match=r"Mine\.admit replaces the decorator; name the method judge"):
        type("Mine", (Policy,), {"admit": lambda self, question: None})


async def test_the_deadline_is_kept(server: Server) -> None:
    """A question that is already late, or becomes late while it is thought about, gets no answer at all."""
    bus, admission = await server.connect(), await server.connect()
    asked: list[str] = []
    policy = Policy("slow")

    @policy.route
    def route(one: RouteQuestion) -> str:
        asked.append(one.request_id)
        end = time.monotonic() + 1.2
        while time.monotonic() < end:
            pass
        return "w1"

    await policy.start(bus)
    for deadline_s in (-0.1, 1.0):
        with pytest.raises(BusTimeoutError):
            await ask(admission, "slow", question(deadline_s), timeout_s=1.6)
    assert asked == ["r1"]
    assert policy.counts.late == 2
    await policy.stop()


async def test_kv_batches_come_undecoded(server: Server) -> None:
    """The engine's own bytes are not ours to decode."""
    bus = await server.connect()
    got: list[BusMessage] = []
    policy = Policy("watch")
    policy.on("tg.v1.kv.>")(got.append)
    await policy.start(bus)
    bus.publish(subjects.kv("w1", 0), b"\x93", {"Tg-Worker": "w1"})
    await eventually(lambda: len(got) == 1)
    assert got[0].payload == b"\x93"
    await policy.stop()


async def test_the_documented_example_runs(nats_server: NatsServer) -> None:
    """The README's: starts before the bus, answers by what it saw, stops."""
    nats_server.stop()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLE),
        env={"TIDEGATE_NATS_URL": nats_server.url, "PYTHONPATH": str(EXAMPLE.parents[1])},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    log = b""
    while b"bus_unreachable" not in log:
        log = await asyncio.wait_for(process.stderr.readline(), 60)
    await asyncio.to_thread(nats_server.start)
    while b"policy_started" not in log:
        log = await asyncio.wait_for(process.stderr.readline(), 60)
    bus = await connect(nats_server.url)
    assert await ask(bus, "tenant-home") == RouteAnswer(worker="w1", rank=0)
    for _ in range(2):
        bus.publish(subjects.decision("w2"), to_json(decision("w2")))
    assert await ask(bus, "tenant-home") == RouteAnswer(worker="w2", rank=0)
    assert (await bus.request("$SRV.PING.policy-tenant-home", b"", timeout_s=30)).payload
    process.send_signal(signal.SIGTERM)
    rest = await asyncio.wait_for(process.stderr.read(), 30)
    assert await process.wait() == 0
    assert b"policy_stopped" in rest
    assert b"Traceback" not in rest
    await bus.close()


async def test_connect_reads_the_environment(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """``connect()`` without an address: the variable that every service reads."""
    monkeypatch.setenv("TIDEGATE_NATS_URL", nats_server.url)
    bus = await connect()
    other = await connect_nats(nats_server.url, name="other")
    await bus.flush()
    await bus.close()
    await other.close()


async def test_a_hint_policy_answers_with_actions_and_says_what_it_wants(server: Server) -> None:
    """A list of actions, a whole answer, or nothing; what is none of these is no opinion. An intent is numbered."""
    admission, users = await server.connect(), await server.connect()
    action = PlannedAction(action_type="retain", worker="w1", priority=3)
    choices: list[Any] = [[action], [], None, HintAnswer(actions=(action,), reason="mine"), "retain", [7]]
    policy = Policy("caches")
    policy.hint(lambda question: choices.pop(0))
    with pytest.raises(ConnectionError, match="not started"):
        policy.intend(IDENTITY.key, "pin")
    await policy.start(users)
    deadline_ms = int((time.time() + 10) * 1000)
    asked = HintQuestion(session=IDENTITY.key, session_id="a", trigger="acting", deadline_ms=deadline_ms)
    answers = [await ask_policy(admission, "hint", "caches", asked, 5.0) for _ in range(6)]
    assert answers == [
        HintAnswer(actions=(action,)),
        HintAnswer(actions=()),
        HintAnswer(),
        HintAnswer(actions=(action,), reason="mine"),
        HintAnswer(reason="wrong_answer"),
        HintAnswer(reason="wrong_answer"),
    ]
    assert (policy.counts.answered, policy.counts.no_opinion, policy.counts.failed) == (3, 1, 2)
    heard: list[HintIntent] = []
    await admission.subscribe(
        subjects.hint_intent("caches"), lambda message: heard.append(from_json(message.payload, HintIntent))
    )
    await admission.flush()
    for worker in (None, "w2"):
        policy.intend(IDENTITY.key, "prefetch", worker=worker, reason="soon")
    await eventually(lambda: len(heard) == 2)
    assert [(each.policy, each.source, each.seq, each.worker) for each in heard] == [
        ("caches", "policy-caches", 0, None),
        ("caches", "policy-caches", 1, "w2"),
    ]
    await policy.stop()


async def test_why_a_policy_has_no_answer(server: Server) -> None:
    """Each cause by its name, and none of them raises."""
    admission, users = await server.connect(), await server.connect()
    made = {"broken": b"{", "odd": b'{"actions":[{"action_type":"explode","worker":"w1"}]}'}

    def answer(message: BusMessage) -> None:
        users.publish(message.reply, made[message.subject.rsplit(".", 1)[1]])

    for name in made:
        await users.subscribe(subjects.policy("hint", name), answer)
    await users.subscribe(subjects.policy("hint", "silent"), lambda message: None)
    await users.flush()
    asked = HintQuestion(session=IDENTITY.key, session_id="a", trigger="acting", deadline_ms=0)
    causes = {name: await ask_policy(admission, "hint", name, asked, 0.3) for name in (*made, "silent", "nobody")}
    assert causes == {"broken": "malformed", "odd": "malformed", "silent": "late", "nobody": "absent"}

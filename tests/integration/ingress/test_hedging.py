"""Requests that are sent twice to be fast, over a real bus, a real admission and real engines."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from bus import subjects
from bus.nats import connect
from bus.tasks import Tasks
from schemas.admit import AdmitCancel, AdmitReply, AdmitRequest, Grant, Granted, Refused
from schemas.base import from_msgpack
from schemas.session import SessionIdentity, SessionKey
from services.admission.config import AdmissionSettings
from services.admission.shell import AdmissionService
from services.ingress import hedging
from services.ingress.effects import AskHedge, Forward
from services.ingress.events import HedgeAnswered, HedgeDue
from services.ingress.shell.attempt import Attempt
from services.ingress.shell.hedging import SecondSending
from tests.integration.ingress.support import JSON, LONG, Door, Stage, System, answer_ok, chat, until
from web.client import HttpClient
from web.server import Request, Responder

pytestmark = pytest.mark.asyncio(loop_scope="session")

FIRST, SECOND = "worker-0", "worker-1"
PATIENT = {"admit_idle_s": 15.0}
"""An admission that the machine has no time for is not silent."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that is asked for a second sending."""
    monkeypatch.setattr(hedging, "ASKED_FOR_S", PATIENT["admit_idle_s"])


def grants(question: AdmitRequest) -> list[AdmitReply]:
    """The first sending to the first worker, the second to the other."""
    worker = SECOND if FIRST in question.excluded else FIRST
    grant = Grant(
        grant_id=f"g-{question.attempt}", request_id=question.request_id, worker=worker, rank=0,
        owner=question.ingress, epoch=1, expires_ms=0,
    )  # fmt: skip
    return [Granted(request_id=question.request_id, epoch=1, grant=grant, url="")]


async def silent(_: Request, responder: Responder) -> None:
    """An engine that never begins."""
    await responder.gone.wait()


@asynccontextmanager
async def hedging_door(stage: Stage, **settings: Any) -> AsyncIterator[Door]:
    """One that sends twice, and knows both workers: a grant at one that it has not heard of has no address."""
    async with stage.door(**{"hedge_after_ms": 30, **PATIENT, **settings}) as door:
        await until(lambda: door.service.workers == len(stage.engines))
        yield door


@asynccontextmanager
async def cancels(stage: Stage) -> AsyncIterator[list[AdmitCancel]]:
    """What admission is told not to want any more."""
    heard: list[AdmitCancel] = []
    subscription = await stage.bus.subscribe(
        f"{subjects.ROOT}.admit.cancel.*", lambda message: heard.append(from_msgpack(message.payload, AdmitCancel))
    )
    await stage.bus.flush()
    try:
        yield heard
    finally:
        await subscription.unsubscribe()


async def test_the_quick_one_answers_and_the_slow_one_is_closed(system: System) -> None:
    """Two engines, of which the first hangs before its first byte: the client gets the other's bytes, the first's
    connection is closed, there is one row, and the session's next turn goes to who answered."""
    async with system.door(hedge_after_ms=150, **PATIENT) as door:
        await until(lambda: door.service.workers == 2)
        slow = await system.engine_of("hedged", door)
        before = (await slow.counts())["disconnected"]
        await slow.misbehave(stall="head", stall_requests=1)
        answer = await door.post(chat(LONG, stream=True), x_tidegate_session_id="hedged", x_request_id="hedged-1")
        assert answer.status == 200
        assert answer.body.endswith(b"data: [DONE]\n\n")
        row = await system.rows.by_x_request_id("hedged-1")
        assert (row.outcome, row.hedged, row.attempts) == ("completed", "won", 2)
        assert row.worker is not None
        assert row.worker.worker != slow.worker
        while (await slow.counts())["disconnected"] == before:  # noqa: ASYNC110 - another process's count
            await asyncio.sleep(0.01)
        await slow.behave()
        assert door.service.in_flight == 0
        assert (await system.engine_of("hedged", door)).worker == row.worker.worker


@pytest.mark.parametrize("ends", ["first", "second", "client"])
@pytest.mark.parametrize("policy", ["kv", "commit"])
async def test_admission_books_both_and_then_none(stage: Stage, policy: str, ends: str) -> None:
    """A real admission: each sending has its booking while both engines are silent, one when one of them has begun, and
    none in the end."""
    begins, done, order = (asyncio.Event(), asyncio.Event()), asyncio.Event(), []

    async def slow(_: Request, responder: Responder) -> None:
        order.append(responder)
        begin = begins[len(order) - 1]
        waits = {asyncio.ensure_future(begin.wait()), asyncio.ensure_future(responder.gone.wait())}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if responder.gone.is_set():
            return
        responder.start(200, [(b"content-type", b"text/event-stream")])
        responder.write(b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n')
        await done.wait()
        responder.write(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
        responder.finish()

    for engine in stage.engines.values():
        engine.script = slow
    async with admission(stage, policy) as books, hedging_door(stage) as door:
        request = chat(stream=True)
        post = asyncio.create_task(door.post(request, x_request_id=f"books-{policy}-{ends}"))
        await until(lambda: len(order) == 2)
        assert books() == [1, 1]
        if ends == "client":
            post.cancel()
        else:
            begins[ends == "second"].set()
            await until(lambda: sorted(books()) == [0, 1] and any(engine.gone for engine in stage.engines.values()))
            place = next(number for number, engine in enumerate(stage.engines.values()) if engine.gone == 0)
            assert books()[place] == 1
            done.set()
        await until(lambda: books() == [0, 0])
        await asyncio.gather(post, return_exceptions=True)
        row = await stage.rows.by_x_request_id(f"books-{policy}-{ends}")
        hedged = "won" if ends == "second" else "lost"
        assert (row.outcome, row.hedged) == ("client_disconnect" if ends == "client" else "completed", hedged)


@asynccontextmanager
async def admission(stage: Stage, policy: str) -> AsyncIterator[Callable[[], list[int]]]:
    """An admission in this process, which leads; yields its open grants, worker by worker."""
    settings, registry = (
        AdmissionSettings(instance="admission-hedged", warmup_s=0.0, policy=policy),
        CollectorRegistry(),
    )
    service, tasks = AdmissionService(settings, registry), Tasks()
    bus = await connect(stage.nats.url, name="admission-hedged", timeout_s=30)

    def books() -> list[int]:
        values = [registry.get_sample_value("tidegate_open_grants", {"worker": w, "rank": "0"}) for w in stage.engines]
        return [int(value or 0) for value in values]

    await service.start(bus, tasks)
    try:
        await until(lambda: service.not_ready() is None and registry.get_sample_value("tidegate_leader") == 1)
        await until(lambda: registry.get_sample_value("tidegate_workers") == len(stage.engines))
        yield books
    finally:
        await service.stop(5.0)
        assert not tasks.failed.done(), tasks.failed.result()
        await tasks.stop()
        await bus.close()


async def test_the_first_answers_after_all(stage: Stage) -> None:
    """It is heard, the second is closed, and its booking is given back."""
    begun = asyncio.Event()

    async def slow(request: Request, responder: Responder) -> None:
        await begun.wait()
        await answer_ok(request, responder)

    stage.engines[FIRST].script, stage.engines[SECOND].script = slow, silent
    async with (
        cancels(stage) as cancelled,
        stage.leader(grants) as asked,
        hedging_door(stage) as door,
    ):
        post = asyncio.create_task(door.post(chat(), x_request_id="first-1"))
        await until(lambda: bool(stage.engines[SECOND].seen))
        begun.set()
        answer = await post
        assert answer.status == 200
        assert json.loads(answer.body)["usage"]["prompt_tokens"] == 3
        await until(lambda: bool(cancelled) and stage.engines[SECOND].gone == 1)
        assert [(one.hedge, one.reason) for one in cancelled] == [(True, "hedge_over")]
        assert [(one.attempt, one.hedge, one.excluded) for one in asked] == [(0, False, ()), (1, True, (FIRST,))]
        row = await stage.rows.by_x_request_id("first-1")
        assert (row.outcome, row.hedged, row.attempts) == ("completed", "lost", 1)
        assert row.worker is not None
        assert row.worker.worker == FIRST


async def test_the_first_fails_while_the_second_is_silent(stage: Stage) -> None:
    """The second is waited for: its answer is the client's, and nothing is sent a third time."""
    both, begun = asyncio.Event(), asyncio.Event()

    async def dies(_: Request, responder: Responder) -> None:
        await both.wait()
        responder.send(503, JSON, b"{}")

    async def late(_: Request, responder: Responder) -> None:
        both.set()
        await begun.wait()
        responder.send(200, JSON, b'{"choices":[{"finish_reason":"stop"}]}')

    stage.engines[FIRST].script, stage.engines[SECOND].script = dies, late
    async with stage.leader(grants) as asked, hedging_door(stage) as door:
        post = asyncio.create_task(door.post(chat(), x_request_id="fails-1"))
        await until(lambda: len(asked) == 2 and both.is_set())
        begun.set()
        assert (await post).status == 200
        row = await stage.rows.by_x_request_id("fails-1")
        assert (row.hedged, row.attempts) == ("won", 2)
        assert len(asked) == 2
        assert [len(engine.seen) for engine in stage.engines.values()] == [1, 1]


@pytest.mark.parametrize("ends", ["client", "both_fail"])
async def test_both_are_let_go(stage: Stage, ends: str) -> None:
    """The client goes, or both fail: nothing is left open anywhere."""
    both = asyncio.Event()

    async def dies(_: Request, responder: Responder) -> None:
        await both.wait()
        responder.break_off(b"")

    async def tells(request: Request, responder: Responder) -> None:
        both.set()
        await (dies if ends == "both_fail" else silent)(request, responder)

    stage.engines[FIRST].script = dies if ends == "both_fail" else silent
    stage.engines[SECOND].script = tells
    async with stage.leader(grants), hedging_door(stage) as door:
        post = asyncio.create_task(door.post(chat(), x_request_id=f"gone-{ends}"))
        await both.wait()
        if ends == "client":
            post.cancel()
        await asyncio.gather(post, return_exceptions=True)
        row = await stage.rows.by_x_request_id(f"gone-{ends}")
        assert row.outcome == ("client_disconnect" if ends == "client" else "upstream_error")
        await until(lambda: door.service.in_flight == 0)
        if ends == "client":
            await until(lambda: [engine.gone for engine in stage.engines.values()] == [1, 1])


@pytest.mark.parametrize(("begins", "patience_s"), [(True, 60.0), (False, 1.0)])
async def test_a_stop_while_both_are_silent(stage: Stage, begins: bool, patience_s: float) -> None:
    """A drain waits for who begins, then both are closed and the client is answered; one row, and nothing is left."""
    both, begun = asyncio.Event(), asyncio.Event()

    async def late(request: Request, responder: Responder) -> None:
        both.set()
        waits = {asyncio.ensure_future(begun.wait()), asyncio.ensure_future(responder.gone.wait())}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if begun.is_set():
            await answer_ok(request, responder)

    stage.engines[FIRST].script, stage.engines[SECOND].script = silent, late
    client, named = HttpClient(), [*JSON, (b"x-request-id", b"stop-%d" % begins)]
    async with cancels(stage) as cancelled, stage.leader(grants):
        async with hedging_door(stage, stop_timeout_s=patience_s) as door:
            url = f"{door.url}/v1/chat/completions"
            post = asyncio.create_task(client.fetch("POST", url, named, json.dumps(chat()).encode()))
            await both.wait()

            async def begin() -> None:
                await until(lambda: door.service.not_ready() == "stopping")
                begun.set()

            beginning = asyncio.create_task(begin()) if begins else None
        answer = await post
        if beginning is not None:
            await beginning
        row = await stage.rows.by_x_request_id(f"stop-{begins:d}")
        if begins:
            assert (answer.status, row.outcome, row.hedged) == (200, "completed", "won")
        else:
            assert (answer.status, row.reason, row.hedged) == (500, "stopping", "lost")
            await until(lambda: bool(cancelled))
        await until(lambda: [engine.gone for engine in stage.engines.values()] == [1, 1 - begins])
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("hedge")]
    await client.close()


async def test_without_a_grant_nothing_is_sent_twice(stage: Stage) -> None:
    """Admission refuses the second: the first is waited for."""
    refused, begun = asyncio.Event(), asyncio.Event()

    def answer(question: AdmitRequest) -> list[AdmitReply]:
        if question.hedge:
            refused.set()
            return [Refused(request_id=question.request_id, epoch=1, reason="turns_wait")]
        return grants(question)

    async def slow(_: Request, responder: Responder) -> None:
        await begun.wait()
        responder.send(200, JSON, b'{"choices":[{"finish_reason":"stop"}]}')

    stage.engines[FIRST].script = slow
    async with cancels(stage) as cancelled, stage.leader(answer), hedging_door(stage) as door:
        post = asyncio.create_task(door.post(chat(), x_request_id="refused-1"))
        await refused.wait()
        await until(lambda: bool(cancelled))
        begun.set()
        assert (await post).status == 200
        assert stage.engines[SECOND].seen == []
        row = await stage.rows.by_x_request_id("refused-1")
        assert row.hedged is None


async def test_what_lost_holds_nothing() -> None:
    """The first may stream for an hour after the race: the second's body is gone with it."""
    key = SessionIdentity(key=SessionKey(family="request", root="r"), session_id="r")
    question = AdmitRequest(
        request_id="r", model="m", ingress="i", ingress_epoch=1, identity=key, received_ms=0, deadline_ms=0, attempt=1
    )
    hears = asyncio.Event()

    class Body:
        """Bytes cannot be watched."""

    async def ask(_: AskHedge) -> Granted | None:
        reply = grants(question)[0]
        return reply if isinstance(reply, Granted) else None

    async def hear(body: Body) -> bool:
        hears.set()
        await asyncio.Event().wait()
        return body is None

    def send(forward: Forward) -> tuple[Attempt, Awaitable[bool]]:
        body = Body()
        bodies.append(weakref.ref(body))
        return Attempt(forward, "chat_completions", event_limit=1, strip_usage=False), hear(body)

    def deliver(event: object) -> None:
        if isinstance(event, HedgeDue):
            second.take(AskHedge("admit", question))
        elif isinstance(event, HedgeAnswered):
            second.take(Forward("r", 1, SECOND, "http://e", 0, 1, None))

    bodies: list[weakref.ref[Body]] = []
    second = SecondSending("r", deliver, ask, send)
    async with asyncio.timeout(30):
        await hears.wait()
    second.close()
    await second.over()
    gc.collect()
    assert [body() for body in bodies] == [None]
    assert second.attempt is not None


async def test_it_is_off_unless_it_is_asked_for(stage: Stage) -> None:
    """A slow request is waited for."""
    begun = asyncio.Event()

    async def slow(_: Request, responder: Responder) -> None:
        await begun.wait()
        responder.send(200, JSON, b'{"choices":[{"finish_reason":"stop"}]}')

    stage.engines[FIRST].script = slow
    async with stage.leader(grants) as asked, hedging_door(stage, hedge_after_ms=0) as door:
        post = asyncio.create_task(door.post(chat()))
        await until(lambda: bool(stage.engines[FIRST].seen))
        assert [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("hedge")] == []
        begun.set()
        assert (await post).status == 200
        assert len(asked) == 1

"""Asking admission, its part played over the real bus by a test that keeps silent, holds, refuses and grants."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from bus import subjects
from bus.interface import BusMessage
from schemas.admit import AdmitCancel, AdmitReply, AdmitRequest, Grant, Granted, Held, Refused
from schemas.base import from_json, from_msgpack
from schemas.ingress import IngressState
from tests.integration.ingress.support import MODEL, Heartbeats, Stage, chat, until
from tests.support.pace import Stopwatch

pytestmark = pytest.mark.asyncio(loop_scope="session")


def grant(stage: Stage, question: AdmitRequest, worker: str, priority: int | None = None, epoch: int = 3) -> Granted:
    """A grant of ``worker`` to ``question``."""
    return Granted(
        request_id=question.request_id,
        epoch=epoch,
        grant=Grant(
            grant_id=f"g-{question.request_id}-{question.attempt}",
            request_id=question.request_id,
            worker=worker,
            rank=0,
            owner=question.ingress,
            epoch=epoch,
            expires_ms=int(time.time() * 1000) + 15_000,
        ),
        url=stage.engines[worker].url,
        predicted_cached_tokens=5,
        priority=priority,
    )


def held(question: AdmitRequest) -> Held:
    return Held(request_id=question.request_id, epoch=3, reason="no_room", place=1)


async def test_a_grant_is_followed_and_its_priority_sent(stage: Stage) -> None:
    """The granted worker gets the request, with admission's priority over the client's."""

    def answer(question: AdmitRequest) -> list[AdmitReply]:
        return [held(question), grant(stage, question, "worker-1", priority=-2)]

    async with stage.door() as door, stage.leader(answer) as asked:
        reply = await door.post(chat(priority=9), x_tidegate_session_id="g1")
        assert reply.status == 200
        row = await stage.rows.one((reply.header("x-request-id") or b"").decode())
    (request,) = stage.engines["worker-1"].seen
    assert json.loads(request.body)["priority"] == -2
    (question,) = asked
    assert (question.priority, question.ingress, question.identity.session_id) == (9, "ingress-test", "g1")
    assert (row.decision_mode, row.grant_id, row.predicted_cached_tokens) == ("policy", f"g-{question.request_id}-0", 5)
    assert row.hold_reason == "no_room"


async def test_admission_hears_what_clients_ask_of_a_scheduler(stage: Stage) -> None:
    """By header and by the peer's members; no header of them reaches the engine, no member where the settings say that
    it refuses them; what names a worker is not followed."""

    def answer(question: AdmitRequest) -> list[AdmitReply]:
        return [grant(stage, question, "worker-1")]

    headers = {
        "x_tidegate_priority": "4",
        "x_tidegate_expected_output_tokens": "70",
        "x_dynamo_worker_instance_id": "0",
    }
    hints = {"agent_hints": {"priority": 2, "osl": 300}}
    async with stage.door() as door, stage.leader(answer) as asked:
        await door.post(chat(nvext=hints), x_tidegate_session_id="h1")
        await door.post(chat(nvext=hints), x_tidegate_session_id="h2", **headers)
    async with stage.door(strip_hints=("nvext", "priority")) as door, stage.leader(answer):
        await door.post(chat(nvext=hints, priority=7), x_tidegate_session_id="h3")
    assert [(one.priority, one.expected_output_tokens) for one in asked] == [(-2, 300), (-4, 70)]
    first, second, third = stage.engines["worker-1"].seen
    assert json.loads(first.body)["nvext"] == json.loads(second.body)["nvext"] == hints
    assert json.loads(third.body).keys().isdisjoint({"nvext", "priority"})
    assert not [name for name, _ in second.headers if name.startswith((b"x-tidegate", b"x-dynamo"))]


async def test_a_priority_is_told_to_admission_as_its_engine_takes_it(stage: Stage) -> None:
    """SGLang runs higher ones first, vLLM lower ones; the bytes are the client's for both."""

    def answer(question: AdmitRequest) -> list[AdmitReply]:
        return [grant(stage, question, "worker-1")]

    beats = Heartbeats(stage.bus, {"counts-up": stage.engines["worker-1"].url}, model="counts-up")
    beats.engine = "sglang"
    async with stage.door() as door, stage.leader(answer) as asked:
        beats.say("counts-up")
        await until(lambda: door.service.workers == 3)
        for model in (MODEL, "counts-up"):
            await door.post({**chat(priority=9), "model": model}, x_tidegate_session_id=model)
        beats.say("counts-up", "left")
    assert [(one.model, one.priority) for one in asked] == [(MODEL, 9), ("counts-up", -9)]
    assert [json.loads(request.body)["priority"] for request in stage.engines["worker-1"].seen] == [9, 9]


async def test_of_two_leaders_the_newer_one_is_followed(stage: Stage) -> None:
    """A bus that was cut has two for a while: an older one's answer is not taken once a newer one was heard, however
    early it comes."""

    def answer(question: AdmitRequest) -> list[AdmitReply]:
        held_by_new = Held(request_id=question.request_id, epoch=5, reason="no_room", place=1)
        return [held_by_new, grant(stage, question, "worker-0", epoch=3), grant(stage, question, "worker-1", epoch=5)]

    async with stage.door() as door, stage.leader(answer):
        reply = await door.post(chat(), x_tidegate_session_id="two-leaders")
        assert reply.status == 200
    assert len(stage.engines["worker-1"].seen) == 1
    assert not stage.engines["worker-0"].seen


async def test_a_refusal_is_what_the_client_sees(stage: Stage) -> None:
    """429 with Retry-After and the reason, as admission says; one row with outcome `refused`; no engine is asked."""

    def answer(question: AdmitRequest) -> list[AdmitReply]:
        return [Refused(request_id=question.request_id, epoch=3, reason="queue_full", status=429, retry_after_s=7)]

    async with stage.door() as door, stage.leader(answer):
        reply = await door.post(chat(), x_request_id="refused-1")
        assert (reply.status, reply.header("retry-after")) == (429, b"7")
        assert reply.header("x-tidegate-reason") == b"queue_full"
        row = await stage.rows.by_x_request_id("refused-1")
        assert reply.header("x-request-id") == row.request_id.encode()
    assert (row.outcome, row.reason, row.status) == ("refused", "queue_full", 429)
    assert not any(engine.seen for engine in stage.engines.values())


async def test_nobody_answers_and_fallback_is_off(stage: Stage) -> None:
    """C9: with the fallback switched off, no leader means 503 with Retry-After."""
    async with stage.door(fallback=False) as door:
        reply = await door.post(chat())
    assert (reply.status, reply.header("retry-after")) == (503, b"1")
    assert json.loads(reply.body)["error"]["code"] == "admission_unavailable"


async def test_fallback_sends_a_session_to_the_same_worker(stage: Stage) -> None:
    """Without a leader a session keeps its worker; many sessions use both workers; rows say `fallback`."""
    async with stage.door() as door:
        workers: dict[str, set[str]] = {}
        for turn in range(3):
            for number in range(8):
                reply = await door.post(chat(f"turn {turn}"), x_tidegate_session_id=f"f-{number}")
                row = await stage.rows.one((reply.header("x-request-id") or b"").decode())
                assert row.decision_mode == "fallback"
                assert row.worker is not None
                workers.setdefault(f"f-{number}", set()).add(row.worker.worker)
    assert {len(used) for used in workers.values()} == {1}
    assert len(set.union(*workers.values())) == 2


async def test_a_silent_leader_is_given_up_after_the_idle_time(stage: Stage) -> None:
    """A leader that takes the question and says nothing costs `admit_idle_s`, then the request is placed by hash."""
    async with stage.door(admit_idle_s=0.2) as door, stage.leader(lambda question: []) as asked:
        since = Stopwatch()
        reply = await door.post(chat())
        assert reply.status == 200
        assert since.took_s >= 0.2
        await since.within(2.0)
        assert len(asked) == 1


async def test_a_held_request_whose_keep_alive_stops_is_asked_again(stage: Stage) -> None:
    """A leader that dies while it holds: the same question goes out once more and the next leader's grant is taken."""
    answers = 0

    def answer(question: AdmitRequest) -> list[AdmitReply]:
        nonlocal answers
        answers += 1
        return [held(question)] if answers == 1 else [grant(stage, question, "worker-0")]

    async with stage.door(admit_idle_s=1.0) as door, stage.leader(answer) as asked:
        reply = await door.post(chat())
        row = await stage.rows.one((reply.header("x-request-id") or b"").decode())
    assert (reply.status, row.decision_mode) == (200, "policy")
    assert len(asked) == 2
    assert asked[0] == asked[1]


async def test_a_request_that_is_held_too_long_is_refused(stage: Stage) -> None:
    """A leader that only holds: 429 at the deadline, and admission is told to forget the turn."""
    cancelled: asyncio.Queue[AdmitCancel] = asyncio.Queue()

    def on_cancel(message: BusMessage) -> None:
        cancelled.put_nowait(from_msgpack(message.payload, AdmitCancel))

    subscription = await stage.bus.subscribe(f"{subjects.ROOT}.admit.cancel.*", on_cancel)
    async with (
        stage.door(admit_idle_s=1.0, admit_deadline_s=1.1) as door,
        stage.leader(lambda question: [held(question)]),
    ):
        reply = await door.post(chat())
        assert (reply.status, reply.header("retry-after")) == (429, b"1")
        assert json.loads(reply.body)["error"]["code"] == "hold_timeout"
        assert (await asyncio.wait_for(cancelled.get(), 30)).reason == "hold_timeout"
    await subscription.unsubscribe()


async def test_a_client_that_leaves_while_held_is_forgotten(stage: Stage) -> None:
    """D3: the held turn is cancelled by name, the client's row says `client_disconnect`, nothing stays in flight."""
    cancelled: asyncio.Queue[AdmitCancel] = asyncio.Queue()

    def on_cancel(message: BusMessage) -> None:
        cancelled.put_nowait(from_msgpack(message.payload, AdmitCancel))

    subscription = await stage.bus.subscribe(f"{subjects.ROOT}.admit.cancel.*", on_cancel)
    async with stage.door() as door, stage.leader(lambda question: [held(question)]) as asked:
        post = asyncio.create_task(door.post(chat(), x_request_id="held-1"))
        await until(lambda: bool(asked))
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
        cancel = await asyncio.wait_for(cancelled.get(), 30)
        assert (cancel.request_id, cancel.reason) == (asked[0].request_id, "client_disconnect")
        row = await stage.rows.by_x_request_id("held-1")
        assert (row.outcome, row.worker) == ("client_disconnect", None)
        assert door.service.in_flight == 0
    assert not any(engine.seen for engine in stage.engines.values())
    await subscription.unsubscribe()


async def test_an_answer_that_cannot_be_read_is_no_decision(stage: Stage) -> None:
    """Junk from whoever answers on the subject costs the decision, not the request."""

    def on_question(message: BusMessage) -> None:
        stage.bus.publish(message.reply, b"junk")

    subscription = await stage.bus.subscribe(f"{subjects.ROOT}.admit.*", on_question)
    async with stage.door() as door:
        assert (await door.post(chat())).status == 200
    await subscription.unsubscribe()


async def test_ingress_state_names_who_is_in_flight_and_says_when_it_is_the_last(stage: Stage) -> None:
    """Once a second: epoch, requests, grants; the last fact of a clean stop says so and is empty."""
    states: list[IngressState] = []

    def on_state(message: BusMessage) -> None:
        states.append(from_json(message.payload, IngressState))

    subscription = await stage.bus.subscribe(f"{subjects.ROOT}.ingress.state.*", on_state)
    async with (
        stage.door(instance="ingress-states") as door,
        stage.leader(lambda question: [held(question)]) as asked,
    ):
        post = asyncio.create_task(door.post(chat(), x_tidegate_session_id="state-1"))
        await until(lambda: bool(asked))
        await until(lambda: any(state.in_flight for state in states))
        (entry,) = next(state for state in states if state.in_flight).in_flight
        assert (entry.request_id, entry.identity.session_id) == (asked[0].request_id, "state-1")
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
    await until(lambda: any(state.final for state in states))
    mine = [state for state in states if state.ingress == "ingress-states"]
    assert (mine[-1].final, mine[-1].in_flight) == (True, ())
    assert len({state.epoch for state in mine}) == 1
    assert [state.seq for state in mine] == list(range(mine[0].seq, mine[0].seq + len(mine)))
    await subscription.unsubscribe()

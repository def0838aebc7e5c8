"""Hints as a process over a real nats-server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bus import subjects
from bus.interface import BusMessage
from bus.nats import NatsBus
from schemas.base import from_json, to_json
from schemas.hint import HintCommand
from schemas.index import SessionQuery, SessionResidency
from schemas.session import SessionKey
from tests.integration.hints.scripted import KEY, WORKER, Scripted, answers, leads, metrics
from tests.support.processes import HelperProcess, eventually, python_process, settings_arguments
from tidegate import HintQuestion, PlannedAction, Policy


async def test_commands_reach_the_worker_results_are_counted_and_a_restart_leads_again(
    url: str, bus: NatsBus, tmp_path: Path
) -> None:
    """Acting: retain. Closed: dereference. kill -9 and restart under the same name: at once, with new ids."""
    scripted = Scripted(bus, answers("accepted"))
    await scripted.start()
    arguments = settings_arguments({"nats_url": url, "instance": "hints-1"})
    for run in ("before", "after"):
        async with python_process("services.hints", *arguments, directory=tmp_path, name=run) as process:
            await leads(process)
            scripted.worker()
            scripted.session("acting")
            bus.publish(subjects.session("acting", KEY.text()), b"{not json")
            scripted.session("closed")
            sent = 2 if run == "before" else 4
            await eventually(lambda sent=sent: len(scripted.commands) == sent)  # type: ignore[misc]
            await process.wait_said("bad_message")
            await process.kill()
    assert scripted.actions == ["retain", "dereference"] * 2
    assert {each.session for each in scripted.commands} == {KEY}
    assert len({each.envelope.message_id for each in scripted.commands}) == 4
    assert scripted.commands[2].epoch > scripted.commands[0].epoch


async def test_a_lease_is_pinned_and_an_indexer_tells_what_may_go_down(url: str, bus: NatsBus, tmp_path: Path) -> None:
    """The index is asked after the turn; what the session shares with others stays on the device when it is demoted."""
    scripted = Scripted(bus, answers("accepted"))
    await scripted.start()

    def on_question(message: BusMessage) -> None:
        asked = from_json(message.payload, SessionQuery).session
        answer = SessionResidency(session=asked, depth=60, block_size=16, shared_blocks=40, unique_blocks=20)
        bus.publish(message.reply, to_json(answer))

    await bus.subscribe(subjects.INDEX_SESSION, on_question)
    arguments = settings_arguments({"nats_url": url, "instance": "hints-1"})

    async def is_answered(process: HelperProcess) -> bool:
        """Whether every question found its answer, once none is open; else it came late: the machine stood still."""
        await eventually(lambda: metrics(process)["tidegate_queue_depth", "session_questions"] == 0)
        return metrics(process)["tidegate_hint_session_questions_unanswered_total",] == 0

    for number in range(10):
        key = SessionKey(family="dynamo", root=f"s{number}")
        commands, actions = len(scripted.commands), len(scripted.actions)
        async with python_process("services.hints", *arguments, directory=tmp_path, name=f"hints-{number}") as process:
            await leads(process)
            scripted.worker()
            scripted.session("acting", key)
            scripted.session("leased", key, leased_s=30.0)
            await eventually(lambda since=actions: scripted.actions[since:] == ["retain", "pin"])  # type: ignore[misc]
            assert scripted.payload(actions + 1)["tokens"] == 1000
            assert 15_000 <= scripted.payload(actions + 1)["ttl_ms"] <= 30_000
            if not await is_answered(process):
                continue
            scripted.session("revoked", key)
            await eventually(lambda since=actions: len(scripted.actions) == since + 4)  # type: ignore[misc]
            assert scripted.actions[actions:] == ["retain", "pin", "dereference", "demote"]
            assert scripted.payload(actions + 2)["reason"] == "unpinned"
            assert scripted.payload(actions + 3)["to"] == "host"
            assert scripted.payload(actions + 3)["target"]["first"] == 40
            assert len(scripted.commands) == commands + 3, "two actions of one moment share an envelope"
            break
    else:
        pytest.fail("no question was answered in time, ten times")


async def test_a_users_policy_answers_and_says_what_it_wants(url: str, bus: NatsBus, tmp_path: Path) -> None:
    """It gets the planner's own actions, its answer stands instead; unasked only within what it may."""
    scripted = Scripted(bus, answers("accepted"))
    await scripted.start()
    policy = Policy("mine")
    questions: list[HintQuestion] = []

    @policy.hint
    def hint(question: HintQuestion) -> list[PlannedAction]:
        questions.append(question)
        return [PlannedAction(action_type="retain", worker=WORKER, priority=99, ttl_ms=1_000)]

    await policy.start(bus)
    stranger = Policy("stranger")
    await stranger.start(bus)
    policies = json.dumps([{"name": "mine", "deadline_ms": 1000}])
    arguments = settings_arguments({"nats_url": url, "instance": "hints-1", "policies": policies})
    async with python_process("services.hints", *arguments, directory=tmp_path, name="hints") as process:
        await leads(process)
        scripted.worker()
        scripted.session("acting")
        await eventually(lambda: scripted.actions == ["retain"])
        assert (questions[0].trigger, questions[0].context_tokens) == ("acting", 1000)
        assert [each.action_type for each in questions[0].builtin] == ["retain"]
        assert scripted.payload(0)["priority"] == 99
        stranger.intend(KEY, "dereference")
        policy.intend(KEY, "demote")
        await eventually(lambda: scripted.actions == ["retain", "demote"])
        page = metrics(process)
        assert page["tidegate_policy_hint_intents_total", "taken", "mine"] == 1
        assert page["tidegate_policy_hint_intents_total", "unknown_policy", ""] == 1
        assert page["tidegate_policy_questions_total", "hint", "used", "mine"] == 1
    await policy.stop()
    await stranger.stop()


async def test_a_cache_that_supports_nothing_is_left_alone(url: str, bus: NatsBus, tmp_path: Path) -> None:
    """One question a kind, then silence: what cannot be done costs nothing."""
    scripted = Scripted(bus, answers("unsupported"))
    await scripted.start()
    arguments = settings_arguments({"nats_url": url, "instance": "hints-1"})
    async with python_process("services.hints", *arguments, directory=tmp_path, name="hints") as process:
        await leads(process)
        scripted.worker()
        scripted.session("acting")
        await eventually(lambda: scripted.actions == ["retain"])
        await eventually(
            lambda: ("tidegate_hint_results_total", "retain", "simulated", "unsupported") in metrics(process)
        )
        for number in range(5):
            scripted.session("acting", SessionKey(family="dynamo", root=f"s{number}"))
        refused = ("tidegate_hints_not_sent_total", "retain", "unsupported")
        await eventually(lambda: metrics(process).get(refused) == 5)
        assert scripted.actions == ["retain"]


async def test_a_result_counts_on_its_own_workers_subject_only(url: str, bus: NatsBus, tmp_path: Path) -> None:
    """Who may answer for one worker may not answer for another."""
    lost = Scripted(bus, answers_nothing)
    await lost.start()
    arguments = settings_arguments({"nats_url": url, "instance": "hints-1"})
    async with python_process("services.hints", *arguments, directory=tmp_path, name="hints") as process:
        await leads(process)
        lost.worker()
        lost.session("acting")
        await eventually(lambda: lost.actions == ["retain"])
        results = await answers("rejected")(lost.commands[0])
        assert results is not None
        forged = lost.result(lost.commands[0], results)
        bus.publish(subjects.hint_result("w2"), to_json(forged))
        await process.wait_said("subject_of_another")
        assert metrics(process)["tidegate_retained_sessions", WORKER] == 1
        bus.publish(subjects.hint_result(WORKER), to_json(forged))
        await eventually(lambda: ("tidegate_hint_results_total", "retain", "simulated", "rejected") in metrics(process))


async def answers_nothing(command: HintCommand) -> None:
    """Every command is lost."""

"""Hints as a process over a real nats-server."""

from __future__ import annotations

import time
from pathlib import Path

from bus import subjects
from bus.facts import FactNumbers
from bus.interface import BusMessage
from bus.nats import NatsBus
from schemas.base import from_json, to_json
from schemas.hint import ActionResult, HintCommand, HintResult
from schemas.session import SessionFact, SessionKey
from tests.support.processes import eventually, python_process, settings_arguments

KEY = SessionKey(family="dynamo", root="s with.odd*id")


def fact(numbers: FactNumbers, state: str) -> bytes:
    return to_json(
        SessionFact(
            **numbers.stamp(f"session.{state}", time.time()),
            session=KEY,
            session_id=KEY.root,
            state=state,  # type: ignore[arg-type]
            worker="w/1",
            rank=0,
        )
    )


async def test_commands_reach_the_worker_results_are_counted_and_a_restart_leads_again(
    url: str, bus: NatsBus, tmp_path: Path
) -> None:
    """Acting: retain. Closed: dereference. kill -9 and restart under the same name: at once, with new ids."""
    commands: list[HintCommand] = []
    numbers = FactNumbers("bridge-w1", 1)

    def on_hint(message: BusMessage) -> None:
        command = from_json(message.payload, HintCommand)
        commands.append(command)
        results = tuple(
            ActionResult(action_id=each.action_id, action_type=each.action_type, outcome="unsupported")
            for each in command.envelope.actions
        )
        answer = HintResult(
            **numbers.stamp("hint.result", time.time()),
            worker="w/1",
            rank=0,
            session=command.session,
            message_id=command.envelope.message_id,
            results=results,
        )
        bus.publish(subjects.hint_result("w/1"), to_json(answer))

    await bus.subscribe(subjects.hint("w/1"), on_hint)
    arguments = settings_arguments({"nats_url": url, "instance": "hints-1"})
    sessions = FactNumbers("admission-1", 1)
    for run in ("before", "after"):
        async with python_process("services.hints", *arguments, directory=tmp_path, name=run) as process:
            await process.wait_said("leadership key=hints epoch=")
            bus.publish(subjects.session("acting", KEY.text()), fact(sessions, "acting"))
            bus.publish(subjects.session("acting", KEY.text()), b"{not json")
            bus.publish(subjects.session("closed", KEY.text()), fact(sessions, "closed"))
            sent = 2 if run == "before" else 4
            await eventually(lambda sent=sent: len(commands) == sent)  # type: ignore[misc]
            await process.wait_said("bad_message")
            await process.kill()
    assert [each.envelope.actions[0].action_type for each in commands] == ["retain", "dereference"] * 2
    assert {each.session for each in commands} == {KEY}
    assert len({each.envelope.message_id for each in commands}) == 4
    assert commands[2].epoch > commands[0].epoch

"""Hints at the bridge: every action gets an answer, and no engine of today can act on one."""

from __future__ import annotations

import json
from typing import Any

from schemas.base import to_json
from schemas.hint import HintAction, HintCommand, HintEnvelope
from schemas.session import SessionKey
from services.bridge.hints import MAX_ACTIONS, judge

SESSION = SessionKey(family="dynamo", root="s1")


def command(*actions: HintAction, worker: str = "w", rank: int = 0, version: str = "0.1") -> HintCommand:
    return HintCommand(
        source="hints-1",
        epoch=1,
        seq=0,
        at_ms=0,
        worker=worker,
        rank=rank,
        session=SESSION,
        session_id="s1",
        envelope=HintEnvelope(message_id="m1", actions=actions, protocol_version=version),
    )


def raw(**changes: Any) -> bytes:
    told = json.loads(to_json(command(HintAction(action_id="a", action_type="retain"))))
    told["envelope"].update(changes)
    return json.dumps(told).encode()


def outcomes(payload: bytes) -> list[tuple[str, str, str | None]]:
    return [(r.action_id, r.outcome, r.reason) for r in judge(payload, "w", 1).results]


def test_well_formed_actions_are_unsupported() -> None:
    """Each action is answered by name, with the engine as the reason."""
    payload = to_json(
        command(HintAction(action_id="a", action_type="retain"), HintAction(action_id="b", action_type="dereference"))
    )
    answer = judge(payload, "w", 1)
    assert (answer.message_id, answer.session, answer.error) == ("m1", SESSION, None)
    assert [(r.action_id, r.action_type, r.outcome, r.reason) for r in answer.results] == [
        ("a", "retain", "unsupported", "engine_has_no_hint_interface"),
        ("b", "dereference", "unsupported", "engine_has_no_hint_interface"),
    ]


def test_malformed_envelopes_are_rejected() -> None:
    """Wrong worker, rank, protocol or size: every action is rejected with that reason."""
    action = HintAction(action_id="a", action_type="pin")
    assert outcomes(to_json(command(action, worker="other"))) == [("a", "rejected", "wrong_worker")]
    assert outcomes(to_json(command(action, rank=1))) == [("a", "rejected", "unknown_rank")]
    assert outcomes(to_json(command(action, version="9"))) == [("a", "rejected", "protocol_version")]
    many = [HintAction(action_id=str(n), action_type="pin") for n in range(MAX_ACTIONS + 1)]
    assert set(outcomes(to_json(command(*many)))) == {
        (str(n), "rejected", "too_many_actions") for n in range(MAX_ACTIONS)
    }


def test_malformed_actions_do_not_spoil_the_others() -> None:
    """An unreadable action is named in the error; the rest is answered."""
    payload = raw(
        actions=[
            {"action_id": "a", "action_type": "retain"},
            {"action_id": "b", "action_type": "explode"},
            {"action_id": "a", "action_type": "retain"},
            {"action_id": "", "action_type": "pin"},
            {"action_id": "c", "action_type": "pin", "action_version": "2.0"},
        ]
    )
    assert outcomes(payload) == [
        ("a", "unsupported", "engine_has_no_hint_interface"),
        ("a", "rejected", "repeated_action_id"),
        ("", "rejected", "no_action_id"),
        ("c", "rejected", "action_version"),
    ]
    assert "action 1" in (judge(payload, "w", 1).error or "")


def test_unreadable_command_is_answered_with_an_error() -> None:
    """The sender of junk learns that it was junk."""
    answer = judge(b"{", "w", 1)
    assert (answer.message_id, answer.results) == ("", ())
    assert "not a valid" in (answer.error or "")

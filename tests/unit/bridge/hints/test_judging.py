"""What is wrong with an action is said of this action, and before any engine hears of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.hint import MAX_TTL_MS, HintAction
from services.bridge.adapters.actions import CallAnswer, Done, EngineFacts
from services.bridge.adapters.judging import KNOWN_TYPES, MAX_ACTIONS, MAX_COMMAND_BYTES, MAX_PROBLEMS
from services.bridge.adapters.lowering import lower
from tests.unit.bridge.hints.commands import NOW_MS, SESSION, TAKES, action, command, judged, payload, raw


def verdicts(message: bytes, closed: tuple[str, ...] = ()) -> dict[str, str | None]:
    """Why each action is not carried out (by its id), ``None`` where it may be."""
    found = judged(message, closed)
    reasons = {place: done.reason for place, done in found.done.items()}
    assert all(done.outcome == "rejected" for done in found.done.values())
    assert sorted([*reasons, *(each.place for each in found.asked)]) == sorted(found.heads)
    return {found.heads[place][0]: reasons.get(place) for place in found.heads}


def test_envelopes_that_are_not_for_this_engine_are_rejected_whole() -> None:
    """Wrong worker, rank, protocol or size: every action is rejected with that reason."""
    assert verdicts(command(action(), worker="other")) == {"a": "wrong_worker"}
    assert verdicts(command(action(), rank=1)) == {"a": "unknown_rank"}
    assert verdicts(command(action(), version="9")) == {"a": "protocol_version"}
    many = verdicts(command(*(action(str(n)) for n in range(4_000))))
    assert many == {str(n): "too_many_actions" for n in range(MAX_ACTIONS)}


def test_malformed_actions_do_not_spoil_the_others() -> None:
    """An unreadable action is named in the error; the rest is judged by itself."""
    message = raw(
        actions=[
            {"action_id": "a", "action_type": "retain", "payload": payload()},
            {"action_id": "b", "action_type": 7},
            "no object",
            {"action_id": "long" * 100, "action_type": "pin"},
            {"action_id": "", "action_type": "pin"},
            {"action_id": "c", "action_type": "pin", "payload": {"target": {"session_id": "s1"}}},
            {"action_id": "d", "action_type": "pin", "payload": {**payload(), "ttl_ms": -1}},
            {"action_id": "e", "action_type": "pin", "payload": payload(ttl_ms=1)},
        ]
    )
    assert verdicts(message) == {
        "a": None, "": "no_action_id", "c": "bad_payload", "d": "bad_payload", "e": None,
    }  # fmt: skip
    error = judged(message).error or ""
    assert all(f"action {place}: " in error for place in (1, 2, 3))


def test_an_id_counts_once() -> None:
    """Whoever says it again is told so, whatever became of the first."""
    found = judged(command(action(), action(), HintAction(action_id="a", action_type="pin")))
    assert [each.place for each in found.asked] == [0]
    assert found.done == {1: Done("rejected", "repeated_action_id"), 2: Done("rejected", "repeated_action_id")}


def test_unknown_types_and_versions_are_carried() -> None:
    """Nothing of them is interpreted; the adapter says what its engine makes of them."""
    actions = [
        {"action_id": "a", "action_type": "kv.fetch", "payload": {"mode": "copy"}},
        {"action_id": "b", "action_type": "pin", "action_version": "2.0", "payload": {"until": "tomorrow"}},
    ]
    found = judged(raw(actions=actions))
    assert [(each.action_type, each.action_version, each.read) for each in found.asked] == [
        ("kv.fetch", "1.0", None),
        ("pin", "2.0", None),
    ]
    assert json.loads(found.asked[0].payload) == {"mode": "copy"}


def test_what_is_late_is_rejected() -> None:
    """By its expiry, and by the end of its session; letting go is what an end is told with, and may come after it."""
    actions = (
        action("old", expires_ms=NOW_MS),
        action("pin", "pin", ttl_ms=1),
        action("go", "dereference", reason="closed"),
    )
    assert verdicts(command(*actions)) == {"old": "expired", "pin": None, "go": None}
    assert verdicts(command(*actions), (SESSION.text(),)) == {"old": "expired", "pin": "session_closed", "go": None}


def test_the_targets_session_counts_too() -> None:
    """A command of one session cannot keep the blocks of another that is over."""
    target = {"session_id": "s2", "session": "default/dynamo/s2/"}
    message = raw(
        actions=[{"action_id": "a", "action_type": "retain", "payload": {"target": target, "expires_ms": NOW_MS + 1}}]
    )
    assert verdicts(message, ("default/dynamo/s2/",)) == {"a": "session_closed"}


def test_a_pin_is_a_lease_and_not_for_ever() -> None:
    """What is asked for beyond the limit is taken off before the engine sees it."""
    (asked,) = judged(command(action("a", "pin", ttl_ms=MAX_TTL_MS + 1))).asked
    sent = json.loads(asked.payload)
    assert (sent["ttl_ms"], sent["expires_ms"], asked.clipped) == (MAX_TTL_MS, NOW_MS + 5_000, "ttl")
    assert asked.read is not None
    assert asked.read.ttl_ms == MAX_TTL_MS


@pytest.mark.parametrize(
    "message",
    [
        b"{",
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"worker":"w","rank":0,"session":{},"envelope":' + b'{"actions":' * 50_000,
        b'{"worker":"w","rank":1e999,"session":{},"envelope":{"message_id":"m","actions":[]}}',
        raw(message_id=""),
        raw(message_id="m" * 257),
        raw(actions={"a": 1}),
        b" " * (MAX_COMMAND_BYTES + 1),
        command(*(action(str(n)) for n in range(10_000))),
    ],
    ids=[
        "junk",
        "empty",
        "no-utf8",
        "deep",
        "deep-inside",
        "infinite",
        "no-id",
        "long-id",
        "no-list",
        "huge",
        "10,000-actions",
    ],
)
def test_unreadable_commands_are_answered_with_an_error(message: bytes) -> None:
    """The sender of junk learns that it was junk, and nothing else happens."""
    found = judged(message)
    assert (found.message_id, found.asked, found.done, found.heads) == ("", [], {}, {})
    assert found.error


@pytest.mark.parametrize("depth", [200, *range(850, 1000, 10), 50_000])
def test_nesting_is_nobodys_stack(depth: int) -> None:
    """At whatever depth reading begins to fail: the action is carried as it is, or named as unreadable."""
    nested = payload(ttl_ms=700_000) | {"x": "HERE"}
    message = raw(actions=[{"action_id": "deep", "action_type": "pin", "payload": nested}])
    message = message.replace(b'"HERE"', b"[" * depth + b"]" * depth)
    found = judged(message)
    assert (len(found.asked) == 1) != (found.error is not None or found.done == {0: Done("rejected", "bad_payload")})
    for call in lower(found.asked, TAKES, "m", 0).calls:
        assert b"[" * depth in call.body


def test_hundreds_of_bad_actions_stay_bounded() -> None:
    """Of many errors some are named, with their number."""
    found = judged(raw(actions=[{}] * 200))
    assert found.error is not None
    assert found.error.count("action ") == MAX_PROBLEMS
    assert found.error.endswith("and 192 more")
    assert len(found.error) < 2_000


FACTS = [TAKES, EngineFacts(kind="vllm", pool="p"), EngineFacts(kind="sglang", has_pin_prefix=True)]

_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_actions = st.fixed_dictionaries(
    {},
    optional={
        "action_id": st.sampled_from(["a", "b", ""]) | _anything,
        "action_type": st.sampled_from([*sorted(KNOWN_TYPES), "kv.fetch", ""]) | _anything,
        "action_version": st.sampled_from(["1.0", "1.9", "2.0", ""]) | _anything,
        "payload": st.just(payload(ttl_ms=5)) | _anything,
    },
)


@pytest.mark.long
@given(st.lists(_actions | _anything, max_size=6), st.sampled_from(FACTS))
def test_whatever_comes_every_action_that_can_be_read_has_one_outcome(actions: list[Any], facts: EngineFacts) -> None:
    """Wrong types at every place: nothing is raised, and what is not judged is lowered, once."""
    found = judged(raw(actions=actions))
    lowered = lower(found.asked, facts, "m", 0)
    places = [*found.done, *lowered.done, *(each.place for call in lowered.calls for each in call.asked)]
    assert sorted(places) == sorted(found.heads)
    assert len(found.heads) + (found.error or "").count("action ") >= len(actions) or len(actions) > 8
    for call in lowered.calls:
        assert json.loads(call.body)
        told = call.read(call, CallAnswer(200, json.dumps({"results": actions}).encode()))
        assert sorted(told) == sorted(each.place for each in call.asked)

"""Golden lowering: for each engine what becomes of one action of each type, and the bytes that it gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas.hint import HintAction
from services.bridge.adapters.actions import Call, CallAnswer, Done, EngineFacts, Lowered
from services.bridge.adapters.lowering import clipped, lower
from services.bridge.hint_page import HintPage, parse_hint_page
from tests.unit.bridge.hints.commands import ALL, NOW_MS, TAKES, action, asked, judged, one_of_each, raw


def lowered(facts: EngineFacts, *actions: HintAction) -> Lowered:
    return lower(asked(*actions) if actions else one_of_each(), facts, "m1", 1)


def told(facts: EngineFacts) -> dict[str, tuple[str, str | None]]:
    """Outcome and reason of one action of each type, at an engine that is never called."""
    found = lowered(facts)
    assert found.calls == []
    return {ALL[place]: (done.outcome, done.reason) for place, done in sorted(found.done.items())}


NO_INTERFACE = ("unsupported", "engine_has_no_hint_interface")
PRIORITY_ONLY = ("unsupported", "request_priority_only")
NEXT = ("deferred", "next_request")


def test_vllm_takes_none() -> None:
    """Its OpenAI server has no such thing: every action says so."""
    assert told(EngineFacts(kind="vllm")) == {
        "pin": NO_INTERFACE, "retain": PRIORITY_ONLY, "prefetch": NO_INTERFACE, "demote": NO_INTERFACE,
        "share": NO_INTERFACE, "dereference": NO_INTERFACE,
    }  # fmt: skip
    assert told(EngineFacts(kind="unknown")) == told(EngineFacts(kind="vllm"))


def test_vllm_with_the_continuum_plug_in_pins_by_what_requests_say() -> None:
    """A pin waits for the next request; nothing else does."""
    found = told(EngineFacts(kind="vllm", by_request=frozenset({"continuum"})))
    assert found == {**told(EngineFacts(kind="vllm")), "pin": NEXT}


def test_a_front_end_that_takes_envelopes_gets_them_with_the_next_request() -> None:
    """All but the last: a closed session has no next request."""
    facts = EngineFacts(kind="vllm", by_request=frozenset({"kv_hints"}))
    assert told(facts) == dict.fromkeys(ALL, NEXT)
    closed = lowered(facts, action("a", "dereference", reason="closed"))
    assert closed.done == {0: Done("unsupported", "no_next_request")}


def test_sglang_without_an_endpoint() -> None:
    """Pages come up with their request, and a request's priority is its own."""
    assert told(EngineFacts(kind="sglang")) == {
        "pin": ("unsupported", "no_pin_prefix"), "retain": PRIORITY_ONLY,
        "prefetch": ("unsupported", "storage_prefetch_by_request_only"), "demote": NO_INTERFACE, "share": NO_INTERFACE,
        "dereference": NO_INTERFACE,
    }  # fmt: skip


def pin_with_tokens(tokens: Any) -> Lowered:
    target = {"session_id": "s1", "token_ids": tokens}
    body = {"target": target, "expires_ms": NOW_MS + 1, "ttl_ms": 1500}
    message = raw(actions=[{"action_id": "a", "action_type": "pin", "payload": body}])
    return lower(judged(message).asked, EngineFacts(kind="sglang", has_pin_prefix=True), "m1", 0)


def test_sglang_pins_a_prefix_whose_tokens_are_said() -> None:
    """The releases that have the endpoint want token ids and whole seconds; without tokens nothing can be pinned."""
    (call,) = pin_with_tokens([1, 2, 3]).calls
    assert (call.path, call.body) == ("/hicache/pin_prefix", b'{"token_ids":[1,2,3],"ttl_seconds":2}')
    full = b'{"status":"ok","message":"pinned 3 nodes"}'
    part = b'{"status":"ok","message":"partially pinned: budget exhausted"}'
    assert call.read(call, CallAnswer(200, full)) == {0: Done("accepted", "host_tier")}
    assert call.read(call, CallAnswer(200, part)) == {0: Done("clipped", "pin_budget")}
    assert call.read(call, CallAnswer(400, b"pinning is off")) == {0: Done("rejected", "engine_refused")}
    for none in (None, [], [-1], ["x"], {"a": 1}):
        found = pin_with_tokens(none)
        assert (found.calls, found.done) == ([], {0: Done("unsupported", "tokens_unknown")})


def test_a_store_below_says_what_it_is_for() -> None:
    """Group and session ids are the puts' own; a hint does not say which objects are its session's."""
    facts = EngineFacts(kind="vllm", pool="pool-a")
    keys = ("unsupported", "store_keys_unknown")
    assert told(facts) == {
        "pin": NO_INTERFACE, "retain": ("unsupported", "put_side_only"), "prefetch": keys, "demote": keys,
        "share": keys, "dereference": NO_INTERFACE,
    }  # fmt: skip
    deferred = EngineFacts(kind="vllm", pool="pool-a", by_request=frozenset({"kv_hints"}))
    assert told(deferred) == dict.fromkeys(ALL, NEXT), "what waits for the next request is not the store's"


GOLDEN = (
    b'{"protocol_version":"0.1","message_id":"m1","actions":[{"action_id":"a","action_type":"pin",'
    b'"action_version":"1.0","payload":{"target":{"session_id":"s1","session":"default/dynamo/s1/"},'
    b'"expires_ms":1005000,"ttl_ms":600000}}]}'
)


def test_an_engine_that_takes_envelopes_gets_them_whole() -> None:
    """One call to the rank, with what the judge took off taken off, and nothing said before its answer."""
    found = lowered(TAKES, action("a", "pin", ttl_ms=700_000))
    (call,) = found.calls
    assert (found.done, call.path, call.body) == ({}, "/kv_hints?rank=1", GOLDEN)
    (all_of_them,) = lowered(TAKES).calls
    assert [each["action_id"] for each in json.loads(all_of_them.body)["actions"]] == list(ALL)


def test_what_the_engine_does_not_name_is_not_sent() -> None:
    """Unknown types, other versions, another protocol: unsupported, and the rest goes."""
    page = HintPage(frozenset({"0.1"}), (("pin", frozenset({"1.0", "2.0"})), ("kv.fetch", frozenset({"1.0"}))))
    actions = [
        {"action_id": "a", "action_type": "kv.fetch", "payload": {"mode": "copy"}},
        {"action_id": "b", "action_type": "pin", "action_version": "2.0"},
        {"action_id": "c", "action_type": "pin", "action_version": "3.0"},
        {"action_id": "d", "action_type": "teleport"},
    ]
    taken = judged(raw(actions=actions)).asked
    found = lower(taken, EngineFacts(page=page), "m1", 0)
    (call,) = found.calls
    assert [each.action_id for each in call.asked] == ["a", "b"]
    assert found.done == {2: Done("unsupported", "action_version"), 3: Done("unsupported", "action_type")}
    other = lower(taken, EngineFacts(page=HintPage(frozenset({"1.0"}), page.actions)), "m1", 0)
    assert (other.calls, set(other.done.values())) == ([], {Done("unsupported", "protocol_version")})


def call_of_two() -> Call:
    (call,) = lowered(TAKES, action("a"), action("b")).calls
    return call


def test_each_actions_outcome_is_the_engines() -> None:
    """By id; one that it does not name, or that cannot be read, was not taken."""
    call = call_of_two()
    missing = b'{"action_id":"b","outcome":"missing","reason":"unknown_session"}'
    answer = b'{"results":[%b,{"action_id":"a","outcome":"done"},7]}' % missing
    assert call.read(call, CallAnswer(200, answer)) == {
        0: Done("rejected", "not_answered"), 1: Done("missing", "unknown_session"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "done"),
    [
        (CallAnswer(problem="engine_unreachable"), Done("rejected", "engine_unreachable")),
        (CallAnswer(problem="engine_timeout"), Done("rejected", "engine_timeout")),
        (CallAnswer(404), Done("unsupported", "engine_has_no_hint_interface")),
        (CallAnswer(400), Done("rejected", "engine_refused")),
        (CallAnswer(503), Done("rejected", "engine_error")),
        (CallAnswer(200, b"\xff"), Done("rejected", "bad_answer")),
        (CallAnswer(200, b"[" * 100_000), Done("rejected", "bad_answer")),
        (CallAnswer(200, b'{"results":' + b"[" + b"1," * 2000 + b"1]}"), Done("rejected", "bad_answer")),
        (CallAnswer(200, b'{"results":{}}'), Done("rejected", "bad_answer")),
    ],
)
def test_a_call_that_fails_is_said_of_every_action(answer: CallAnswer, done: Done) -> None:
    """Nothing is accepted that nobody said was done."""
    call = call_of_two()
    assert call.read(call, answer) == {0: done, 1: done}


def test_what_was_taken_off_is_told_unless_something_worse_is() -> None:
    """An accepted pin that was too long is clipped; a missing one is missing."""
    (pin,) = asked(action("a", "pin", ttl_ms=700_000))
    assert clipped(pin, Done("accepted")) == Done("clipped", "ttl")
    assert clipped(pin, Done("missing", "x")) == Done("missing", "x")


def test_the_page_is_read_as_far_as_it_can_be() -> None:
    """As the simulated engine prints it; wrong types and what is over the bounds are left out, junk is no page."""
    page = parse_hint_page(b'{"protocol_versions":["0.1"],"actions":{"pin":["1.0"]},"tiers":["pool","host","x"]}')
    assert page == HintPage(frozenset({"0.1"}), (("pin", frozenset({"1.0"})),), ("host", "pool"))
    odd = json.dumps({"actions": {"pin": "1.0", "x" * 65: ["1.0"], **{str(n): [n] for n in range(1000)}}, "tiers": 3})
    found = parse_hint_page(odd.encode())
    assert found is not None
    assert (len(found.actions), found.tiers, found.takes("pin", "1.0")) == (63, (), False)
    for junk in (b"", b"[]", b'{"actions":[]}', b"\xff", b"[" * 100_000):
        assert parse_hint_page(junk) is None

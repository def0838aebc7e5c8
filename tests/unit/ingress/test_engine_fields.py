"""What a request tells its engine's cache: only what is switched on, only where it is taken, and nothing else moves."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from schemas.base import to_json
from schemas.hint import HintAction, HintCommand, HintEnvelope
from schemas.session import SessionKey
from schemas.worker import Engine, WorkerProfile, WorkerState
from services.ingress import events
from services.ingress.core import IngressRules
from services.ingress.effects import NO_FIELDS, EngineFields, Forward
from services.ingress.endpoints import read_request
from services.ingress.engine_fields import MAX_ACTIONS, MAX_COMMAND_BYTES, WaitingHints, last_tool
from services.ingress.shell.attempt import Splices, spliced_body
from services.ingress.splice import members
from services.ingress.workers import Workers
from tests.unit.ingress.builders import MODEL, Scene, counted, granted, received

NOW = 1000.0
SESSION = {"x-tidegate-session-id": "S"}
KEY = SessionKey(family="tidegate", root="S")


def worker(engine: Engine = "vllm", *features: str, name: str = "w1") -> WorkerState:
    profile = WorkerProfile(url=f"http://{name}", model=MODEL, block_size=4, engine=engine, features=features)
    return WorkerState(
        source=f"bridge-{name}", epoch=1, seq=0, at_ms=0, worker=name, incarnation="1", health="ready", profile=profile
    )


def tools(*names: str, results: int | None = None) -> list[dict[str, Any]]:
    """A conversation whose last answer called these tools, and the results that come back."""
    calls = [{"id": f"c{place}", "type": "function", "function": {"name": name}} for place, name in enumerate(names)]
    back = [{"role": "tool", "tool_call_id": f"c{place}", "content": "ok"} for place in range(len(names))]
    return [
        {"role": "user", "content": "do it"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *back[:results],
    ]


def fields(rules: IngressRules, state: WorkerState, headers: dict[str, str] = SESSION, **body: Any) -> EngineFields:
    """Of a request that is granted this worker."""
    scene = Scene(rules=rules)
    scene.play(events.WorkerHeard(state=state))
    effects = scene.play(received("r", headers=headers, **body), counted("r"), granted("r", "w1"))
    (forward,) = [effect for effect in effects if isinstance(effect, Forward)]
    return forward.fields


CONTINUUM = IngressRules(continuum=True)


def test_a_turn_says_whose_step_it_is() -> None:
    """The plug-in's keys (spec scheduling §1.5), booleans as numbers; the tool that the answer will call is unknown."""
    assert fields(CONTINUUM, worker(), messages=tools("pytest")).xargs == (
        ("job_id", b'"S"'),
        ("last_func_call", b'"pytest"'),
        ("is_last_step", b"0"),
    )
    final = {**SESSION, "x-tidegate-session-final": "true"}
    assert fields(CONTINUUM, worker(), final).xargs == (("job_id", b'"S"'), ("is_last_step", b"1"))


@pytest.mark.parametrize(
    ("rules", "state", "headers"),
    [
        (IngressRules(), worker(), SESSION),
        (CONTINUUM, worker("sglang"), SESSION),
        (CONTINUUM, worker("unknown"), SESSION),
        (CONTINUUM, worker(), {}),
    ],
    ids=["off", "sglang", "unknown", "nobody"],
)
def test_nothing_is_said_where_nobody_takes_it(
    rules: IngressRules, state: WorkerState, headers: dict[str, str]
) -> None:
    """Off, at another engine, and for a request without identity, which is nobody's next step."""
    assert fields(rules, state, headers) == NO_FIELDS


@pytest.mark.parametrize("feature", ["kv_hints", "request:kv_hints"])
def test_an_engine_that_takes_hints_is_told_whose_turn_it_is(feature: str) -> None:
    """A hint names its session by the id that its turns carried; others are not asked to take a member more."""
    rules = IngressRules(session_id=True)
    assert fields(rules, worker("simulated", feature)) == EngineFields("S")
    assert fields(rules, worker("simulated", feature), {}) == NO_FIELDS
    assert fields(rules, worker("simulated", "tier:host")) == NO_FIELDS
    assert fields(IngressRules(), worker("simulated", feature)) == NO_FIELDS


def test_two_tenants_sessions_are_two_to_an_engine() -> None:
    """Clients choose their ids; a hint about one tenant's session, or its last step, must not end the other's."""
    scene = Scene(rules=IngressRules(session_id=True, continuum=True))
    scene.play(events.WorkerHeard(state=worker("vllm", "kv_hints")))
    event = received("r", headers=SESSION)
    identity = event.resolved.identity
    theirs = msgspec.structs.replace(identity, key=msgspec.structs.replace(identity.key, tenant="b c"))
    event = replace(event, resolved=replace(event.resolved, identity=theirs))
    effects = scene.play(event, counted("r"), granted("r", "w1"))
    (forward,) = [effect for effect in effects if isinstance(effect, Forward)]
    assert (forward.session_id, forward.fields.session_id) == ("b%20c/S", "b%20c/S")
    assert ("job_id", b'"b%20c/S"') in forward.fields.xargs


@pytest.mark.parametrize(
    ("messages", "tool"),
    [
        (tools("bash", "read"), "read"),
        (tools("bash", "read", results=1), "bash"),
        ([{"role": "tool", "name": "grep", "content": "x"}], "grep"),
        ([{"role": "function", "name": "old", "content": "x"}], "old"),
        ([*tools("bash"), {"role": "user", "content": "next"}], None),
        ([{"role": "tool", "tool_call_id": "unknown", "content": "x"}], None),
        ([*tools("bash")[:2], {"role": "user", "content": "?"}, tools("bash")[2]], None),
        ([{"role": "assistant", "tool_calls": "x"}, {"role": "tool", "tool_call_id": "c0"}], None),
        ([{"role": "tool", "name": "x" * 300}], None),
        ([{"role": 7}], None),
        ([], None),
    ],
)
def test_the_tool_whose_result_a_request_brings(messages: list[dict[str, Any]], tool: str | None) -> None:
    """By the call that the last message answers, in the answer right before the results; never a guess."""
    request = read_request("chat_completions", json.dumps({"model": MODEL, "messages": messages}).encode())
    assert last_tool(request.prompt) == tool


def test_a_completion_brings_no_tools() -> None:
    """It has no messages."""
    request = read_request("completions", json.dumps({"model": MODEL, "prompt": "x"}).encode())
    assert last_tool(request.prompt) is None
    assert last_tool(None) is None


BODY = b'{ "model" : "m",\n"messages":[ {"role":"user","content":"h\\u00e9 \\/ 1.0e3"} ] ,"temperature":1.00 }'
FIELDS = EngineFields("S", (("job_id", b'"S"'), ("is_last_step", b"0")), b'{"actions":[]}')


def sent(body: bytes, put: EngineFields) -> bytes:
    forward = Forward("r", 0, "w1", "http://w1", 0, 1, None, "S", put)
    return spliced_body(read_request("chat_completions", body), Splices(usage=False, priority=False), forward)[0]


def test_nothing_but_the_members_moves() -> None:
    """Byte for byte: spaces, escapes and numbers are the client's."""
    assert sent(BODY, NO_FIELDS) == BODY
    put = b'"kv_hints":{"actions":[]},"vllm_xargs":{"job_id":"S","is_last_step":0},"session_id":"S"'
    assert sent(BODY, FIELDS) == BODY.replace(b"{ ", b"{" + put + b", ", 1)


@pytest.mark.parametrize("named", [(), ("nvext",), ("priority",), ("nvext", "priority")])
def test_hints_do_not_reach_engines_that_refuse_them(named: tuple[str, ...]) -> None:
    """Members for schedulers are taken out where the settings say so, and nothing else of the body; what admission
    decided and the tenant's salt are put in afterwards."""
    hints = {"nvext": b'"nvext":{"agent_hints":{"osl":9},"cache_salt":"x"},', "priority": b'"priority":4,'}
    plain = b'{"model":"m", "messages":[ ]}'
    body = plain.replace(b"{", b"{" + b"".join(hints.values()), 1)
    request = read_request("chat_completions", body)
    assert (request.priority, request.expected_output_tokens) == (4, 9)
    forward = Forward("r", 0, "w1", "http://w1", 0, 1, None)
    kept = b"".join(value for name, value in hints.items() if name not in named)
    splices = Splices(usage=False, stripped=named)
    assert spliced_body(request, splices, forward)[0] == plain.replace(b"{", b"{" + kept, 1)
    decided = Forward("r", 0, "w1", "http://w1", 0, 1, -2)
    assert json.loads(spliced_body(request, splices, decided)[0])["priority"] == -2
    salted = json.loads(spliced_body(replace(request, tenant_salt="ours"), splices, forward)[0])
    assert salted["cache_salt"] == "ours"
    assert ("nvext" in salted) == ("nvext" not in named)


@pytest.mark.parametrize("given", [b'{ "mine" : 1.50, "job_id":"forged" }', b"null", b"{}", b"7"])
def test_what_the_client_said_beside_them_stays(given: bytes) -> None:
    """A client's own ``vllm_xargs`` keep their members; those of ours are ours; what is no object is replaced."""
    body = BODY[:-1] + b',"vllm_xargs" : ' + given + b"}"
    result = sent(body, EngineFields(xargs=FIELDS.xargs))
    assert json.loads(result)["vllm_xargs"] == {
        **({"mine": 1.5} if b"mine" in given else {}), "job_id": "S", "is_last_step": 0,
    }  # fmt: skip
    rest = [body[one.start : one.end] for one in members(body) if one.name != "vllm_xargs"]
    assert [result[one.start : one.end] for one in members(result) if one.name != "vllm_xargs"] == rest
    assert (b'"mine" : 1.50' in result) == (b"mine" in given)


# Hints that wait for a request

TAKES = worker("vllm", "request:kv_hints")
HINTS = IngressRules(kv_hints=True)


def command(*ids: str, expires_s: float = 5.0, name: str = "w1", root: str = "S", size: int = 0) -> bytes:
    payload = {"target": {"session_id": root}, "expires_ms": int((NOW + expires_s) * 1000), "x": "y" * size}
    actions = tuple(HintAction(action_id=each, action_type="pin", payload=payload) for each in ids)
    key = SessionKey(family="tidegate", root=root)
    return to_json(
        HintCommand(
            source="hints-1",
            epoch=1,
            seq=0,
            at_ms=0,
            worker=name,
            rank=0,
            session=key,
            session_id=root,
            envelope=HintEnvelope(message_id=f"m-{ids[0]}" if ids else "m", actions=actions),
        )
    )


def carried(scene: Scene, request_id: str, headers: dict[str, str] = SESSION) -> list[str]:
    effects = scene.play(received(request_id, headers=headers), counted(request_id), granted(request_id, "w1"))
    (forward,) = [effect for effect in effects if isinstance(effect, Forward)]
    hints = forward.fields.kv_hints
    if hints is None:
        return []
    envelope = json.loads(hints)
    assert (envelope["protocol_version"], envelope["message_id"][:2]) == ("0.1", "m-")
    return [each["action_id"] for each in envelope["actions"]]


def test_hints_go_with_the_sessions_next_turn_once() -> None:
    """Those of this session for this worker, in their order, as they were written; those that expired do not."""
    scene = Scene(rules=HINTS)
    scene.play(events.WorkerHeard(state=TAKES))
    late = command("late", expires_s=1.0)
    for payload in (late, command("a", "b"), command("other", root="T"), command("else", name="w2"), command("c")):
        scene.play(events.HintHeard(payload=payload))
    scene.now += 2.0
    assert carried(scene, "r1") == ["a", "b", "c"]
    assert carried(scene, "r2") == []
    assert +scene.core.fields.waiting.counts == {"carried": 3, "expired": 1}


def test_engines_that_do_not_take_them_carry_none() -> None:
    """Off, or without the bridge's word, nothing is kept."""
    for rules, state in ((IngressRules(), TAKES), (HINTS, worker())):
        scene = Scene(rules=rules)
        scene.play(events.WorkerHeard(state=state), events.HintHeard(payload=command("a")))
        assert (carried(scene, "r"), len(scene.core.fields.waiting)) == ([], 0)


def test_a_side_request_tells_nothing() -> None:
    """OpenCode's title shares the session's id and not its prefix: it is no step, and hints wait for the next turn."""
    scene = Scene(rules=IngressRules(session_id=True, continuum=True, kv_hints=True))
    payload = command("a").replace(b'"tidegate"', b'"opencode"')
    scene.play(events.WorkerHeard(state=TAKES), events.HintHeard(payload=payload))
    title = [{"role": "user", "content": "Generate a title for this conversation:"}]
    headers = {"x-session-id": "S"}
    effects = scene.play(received("t", headers=headers, messages=title), counted("t"), granted("t", "w1"))
    (forward,) = [effect for effect in effects if isinstance(effect, Forward)]
    assert forward.fields == NO_FIELDS
    assert carried(scene, "r", headers) == ["a"]


def heard(state: WorkerState = TAKES) -> Workers:
    workers = Workers(5.0)
    workers.hear(state, NOW)
    return workers


def test_what_waits_is_bounded() -> None:
    """By actions of a session and by bytes of all; the oldest go, and are counted. Junk is counted."""
    waiting = WaitingHints(max_bytes=10_000)
    for number in range(MAX_ACTIONS + 10):
        waiting.heard(command(str(number)), heard(), NOW)
    assert +waiting.counts == {"dropped": 10}
    for number in range(1_000):
        waiting.heard(command("a", root=f"s{number}", size=100), heard(), NOW)
        assert waiting.size <= 10_000
    assert 10 < len(waiting) < 100
    assert waiting.take("w1", SessionKey(family="tidegate", root="s0"), NOW) is None
    assert waiting.take("w1", SessionKey(family="tidegate", root="s999"), NOW) is not None
    before = dict(waiting.counts)
    for junk in (b"{", b"[" * 100_000, command("a", size=MAX_COMMAND_BYTES), b'{"worker":"w1"}'):
        waiting.heard(junk, heard(), NOW)
    assert waiting.counts == {**before, "unreadable": 4}
    for number in range(1_000):
        waiting.take("w1", SessionKey(family="tidegate", root=f"s{number}"), NOW)
    assert (waiting.size, len(waiting)) == (0, 0)

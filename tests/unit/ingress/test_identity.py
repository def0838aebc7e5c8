"""Session identity from headers: the oracles of identity-and-traces §8.1 as amended there, and what surrounds them."""

from __future__ import annotations

import json

import pytest

from schemas.session import SessionKey
from services.ingress.endpoints import read_request
from services.ingress.errors import BadRequestError
from services.ingress.identity import BodyFacts, Resolved, read_headers, resolve, unreadable_identity

Headers = dict[str, str]

DYN = "x-dynamo-session-id"
DYN_PARENT = "x-dynamo-parent-session-id"
FINAL = "x-dynamo-session-final"
CC = "x-claude-code-session-id"
CC_AGENT = "x-claude-code-agent-id"
CC_PARENT = "x-claude-code-parent-agent-id"
CODEX_PARENT = "x-codex-parent-thread-id"
DEEPSEEK = "x-deepseek-harness-session-id"
DEEPSEEK_PARENT = "x-deepseek-harness-parent-session-id"
OURS = "x-tidegate-session-id"

ORACLES: list[tuple[str, Headers, tuple[str, str, str | None, bool | None] | None]] = [
    # name, headers, (family, session, parent, final); None: no identity
    ("H1", {DYN: "A"}, ("dynamo", "A", None, None)),
    ("H2", {DYN: " A ", DYN_PARENT: "B"}, ("dynamo", "A", "B", None)),
    ("H3", {DYN: "A", DYN_PARENT: "A"}, ("dynamo", "A", None, None)),
    ("H4", {DYN: "   ", "x-session-id": "O"}, ("opencode", "O", None, None)),
    ("H5", {DYN_PARENT: "B"}, None),
    ("H6", {FINAL: "true"}, None),
    ("H7", {CC: "S"}, ("claude_code", "S", None, None)),
    ("H8", {CC: "S", CC_AGENT: "a1"}, ("claude_code", "a1", "S", None)),
    ("H9", {CC: "S", CC_AGENT: "a2", CC_PARENT: "a1"}, ("claude_code", "a2", "a1", None)),
    ("H10", {CC: "S", CC_PARENT: "a1"}, ("claude_code", "S", None, None)),
    ("H11", {CC: "S", CC_AGENT: "S"}, ("claude_code", "S", None, None)),
    ("H12", {CC: "S", CC_AGENT: "a1", CC_PARENT: "a1"}, ("claude_code", "a1", "S", None)),
    ("H13", {CC_AGENT: "a1"}, None),
    ("H14", {"session-id": "R", "thread-id": "T"}, ("codex", "T", None, None)),
    ("H15 amended", {"session-id": "R"}, ("pi", "R", None, None)),
    ("H15 underscore", {"session_id": "R"}, ("pi", "R", None, None)),
    ("H16", {"thread-id": "T", CODEX_PARENT: "P"}, ("codex", "T", "P", None)),
    ("H17", {"x-session-id": "O", "x-parent-session-id": "P", FINAL: "1"}, ("opencode", "O", "P", True)),
    ("H18", {CC: "S", "x-session-id": "O"}, ("claude_code", "S", None, None)),
    ("H19", {DYN: "A", CC: "S", CC_AGENT: "a1"}, ("dynamo", "A", None, None)),
    ("H20", {DYN: "A", FINAL: "maybe"}, ("dynamo", "A", None, None)),
    ("H21", {DYN: "Ä", "x-session-id": "O"}, ("opencode", "O", None, None)),
    ("H23 amended", {"x-session-affinity": "X"}, ("affinity", "X", None, None)),
    # DeepSeek's harness: the peer's newer table (§1.2, row 3)
    ("deepseek", {DEEPSEEK: "D"}, ("deepseek", "D", None, None)),
    ("deepseek's child", {DEEPSEEK: "D", DEEPSEEK_PARENT: "P"}, ("deepseek", "D", "P", None)),
    ("deepseek, its own parent", {DEEPSEEK: "D", DEEPSEEK_PARENT: "D"}, ("deepseek", "D", None, None)),
    ("codex before deepseek", {"thread-id": "T", DEEPSEEK: "D"}, ("codex", "T", None, None)),
    ("deepseek before opencode", {"x-session-id": "O", DEEPSEEK: "D"}, ("deepseek", "D", None, None)),
    ("deepseek's parent alone", {DEEPSEEK_PARENT: "P"}, None),
    # ours stands before Dynamo's
    ("ours first", {DYN: "A", OURS: "T", "x-tidegate-parent-session-id": "P"}, ("tidegate", "T", "P", None)),
    ("ours final", {OURS: "T", "x-tidegate-session-final": "true", FINAL: "no"}, ("tidegate", "T", None, True)),
    ("final false", {CC: "S", FINAL: "off"}, ("claude_code", "S", None, False)),
    # Codex by x-codex-* alone, whatever the thread's header does
    ("codex, session only", {"session-id": "R", "x-codex-beta-features": "x"}, ("codex", "R", None, None)),
    ("codex, window id", {"session-id": "R", "x-codex-window-id": "T:3"}, ("codex", "T", None, None)),
    ("codex, parent alone", {CODEX_PARENT: "P"}, None),
    ("codex before opencode", {"thread-id": "T", "x-session-id": "O"}, ("codex", "T", None, None)),
    ("opencode before pi", {"session-id": "R", "x-session-id": "O"}, ("opencode", "O", None, None)),
    ("pi before affinity", {"session_id": "R", "x-session-affinity": "X"}, ("pi", "R", None, None)),
    ("parent over 256 bytes", {DYN: "A", DYN_PARENT: "p" * 257}, ("dynamo", "A", None, None)),
    ("parent of 256 bytes", {DYN: "A", DYN_PARENT: "p" * 256}, ("dynamo", "A", "p" * 256, None)),
    ("any length of id", {DYN: "a" * 4096}, ("dynamo", "a" * 4096, None, None)),
    ("a control character", {DYN: "A\x07", "x-session-id": "O"}, ("opencode", "O", None, None)),
    ("nothing", {}, None),
]


def resolved(headers: Headers | list[tuple[str, str]], facts: BodyFacts | None = None) -> Resolved:
    """The identity of a chat request with these headers."""
    pairs = headers.items() if isinstance(headers, dict) else headers
    signals = read_headers([(name.encode(), value.encode()) for name, value in pairs])
    return resolve(signals, facts or BodyFacts(), "chat_completions", tenant="acme", request_id="req-1")


@pytest.mark.parametrize(("name", "headers", "expected"), ORACLES, ids=[oracle[0] for oracle in ORACLES])
def test_oracle(name: str, headers: Headers, expected: tuple[str, str, str | None, bool | None] | None) -> None:
    """Each header set means what the oracle says (H1-H23 as amended; user-cases B5)."""
    identity = resolved(headers).identity
    if expected is None:
        assert identity.key == SessionKey(tenant="acme", family="request", root="req-1")
        assert (identity.session_id, identity.parent_session_id, identity.final) == ("req-1", None, None)
        return
    shown = (identity.key.family, identity.session_id, identity.parent_session_id, identity.final)
    assert shown == expected
    assert identity.key.tenant == "acme"
    assert not identity.weak


@pytest.mark.parametrize(("name", "headers", "expected"), ORACLES, ids=[oracle[0] for oracle in ORACLES])
def test_names_match_in_any_case(name: str, headers: Headers, expected: object) -> None:
    """Header names are case-insensitive."""
    shouted = resolved({key.upper(): value for key, value in headers.items()})
    assert shouted == resolved(headers)


def test_the_first_value_counts_even_when_it_is_blank() -> None:
    """Only the first value of a name is read; a blank one is absent, whatever comes after it."""
    assert resolved([(DYN, "A"), (DYN, "B")]).identity.session_id == "A"
    assert resolved([(DYN, " "), (DYN, "B"), ("x-session-id", "O")]).identity.session_id == "O"


def test_identity_that_cannot_be_read_is_counted() -> None:
    """A session header outside printable ASCII is absent, and its number is known; blank ones were never sent."""
    headers = [
        (b"X-Tidegate-Session-Id", "ünï".encode()),
        (b"x-session-id", b" "),
        (b"thread-id", b"T"),
        (b"accept", b"\xff"),
    ]
    assert unreadable_identity(headers, read_headers(headers)) == 1


def test_peer_extension_in_the_body_is_refused() -> None:
    """H22: ``nvext.agent_context`` is an unknown field of nvext, a 400, and says so."""
    body = json.dumps({"model": "m", "messages": [], "nvext": {"agent_context": {"session_id": "A"}}}).encode()
    with pytest.raises(BadRequestError, match=r"invalid nvext: .*agent_context") as caught:
        read_request("chat_completions", body)
    assert (caught.value.status, caught.value.reason) == (400, "invalid_nvext")


def test_sub_agents_of_claude_code_share_the_root_and_not_the_key() -> None:
    """Key = (family, session, agent or empty); the parent's key is an agent of the same session (harness.md §6.1)."""
    root = resolved({CC: "S"}).identity
    child = resolved({CC: "S", CC_AGENT: "a1"}).identity
    grandchild = resolved({CC: "S", CC_AGENT: "a2", CC_PARENT: "a1"}).identity
    assert [one.key.root for one in (root, child, grandchild)] == ["S", "S", "S"]
    assert [one.key.agent for one in (root, child, grandchild)] == ["", "a1", "a2"]
    assert (child.parent, grandchild.parent) == (root.key, child.key)


def test_codex_threads_hang_below_their_session() -> None:
    """Codex: root = session-id, agent = thread-id where it differs; the parent's key follows (harness.md §3)."""
    root = resolved({"session-id": "R", "thread-id": "R"}).identity
    child = resolved({"session-id": "R", "thread-id": "T", CODEX_PARENT: "R"}).identity
    grandchild = resolved({"session-id": "R", "thread-id": "U", CODEX_PARENT: "T"}).identity
    assert (root.key.root, root.key.agent, root.parent) == ("R", "", None)
    assert (child.key.root, child.key.agent, child.parent) == ("R", "T", root.key)
    assert grandchild.parent == child.key


def test_codex_metadata_gives_the_turn_and_the_thread() -> None:
    """``x-codex-turn-metadata`` names the turn, and the thread where the plain header was stripped."""
    metadata = json.dumps({"session_id": "R", "thread_id": "T", "turn_id": "t7", "request_kind": "turn"})
    identity = resolved({"x-codex-turn-metadata": metadata}).identity
    assert (identity.key.root, identity.key.agent, identity.turn_id) == ("R", "T", "t7")
    broken = resolved({"thread-id": "T", "x-codex-turn-metadata": "{not json"}).identity
    assert (broken.session_id, broken.turn_id) == ("T", None)


def body_facts(endpoint: str, **members: object) -> BodyFacts:
    """Facts of a small body with these members."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "input": "hi", **members}
    return read_request(endpoint, json.dumps(body).encode()).facts  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "root", "agent"),
    [
        (body_facts("responses", prompt_cache_key="K"), "K", ""),
        (body_facts("messages", metadata={"user_id": '{"device_id":"d","session_id":"S"}'}), "S", ""),
        (body_facts("messages", metadata={"user_id": "user_1_account_2_session_S"}), "S", ""),
        (
            body_facts("responses", prompt_cache_key="R", client_metadata={"session_id": "R", "thread_id": "T"}),
            "R",
            "T",
        ),
    ],
    ids=["prompt_cache_key", "user_id as JSON", "user_id as text", "client_metadata"],
)
def test_weak_identity_from_the_body(facts: BodyFacts, root: str, agent: str) -> None:
    """Body fields identify only where no header does, and are marked weak."""
    weak = resolved({FINAL: "true"}, facts).identity
    assert (weak.key.family, weak.key.root, weak.key.agent, weak.weak, weak.final) == ("body", root, agent, True, None)
    strong = resolved({DYN: "A"}, facts).identity
    assert (strong.key.family, strong.weak) == ("dynamo", False)


@pytest.mark.parametrize(
    "members",
    [
        {"prompt_cache_key": 7},
        {"prompt_cache_key": "  "},
        {"metadata": {"user_id": "somebody"}},
        {"metadata": {"user_id": "{broken"}},
        {"metadata": {"user_id": 5}},
        {"metadata": "text"},
        {"client_metadata": {"thread_id": ["T"]}},
        {"user": "alice"},
    ],
    ids=str,
)
def test_odd_body_fields_are_no_identity_and_no_error(members: dict[str, object]) -> None:
    """A weak field of another shape never makes a request bad; ``user`` names a person, not a session."""
    assert resolved({}, body_facts("chat_completions", **members)).identity.key.family == "request"


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("1", True), ("no", False), ("perhaps", False)])
def test_background_is_what_the_sender_says(value: str, expected: bool) -> None:
    """Of any session, whatever its family; and of a request without one."""
    assert resolved({DYN: "A", "x-tidegate-background": value}).identity.background == expected
    assert resolved({"x-tidegate-background": value}).identity.background == expected


def test_final_turns_are_final_and_side_requests_stay_side_requests() -> None:
    """A turn that ends its session is of kind ``final``; counting tokens is counting tokens."""
    assert resolved({DYN: "A", FINAL: "true"}).kind == "final"
    signals = read_headers([(DYN.encode(), b"A"), (FINAL.encode(), b"true")])
    counted = resolve(signals, BodyFacts(), "count_tokens", request_id="r")
    assert (counted.kind, counted.identity.final) == ("count_tokens", True)


def test_tool_less_requests_of_unknown_clients_are_turns() -> None:
    """Aider sends no tools at all: no tells, so no side request, even with structured output or a title's words."""
    facts = BodyFacts(one_shot=True, title_asked=True, output_format="json_schema")
    assert resolved({}, facts).kind == "turn"
    assert resolved({DYN: "A"}, facts).kind == "turn"


def test_side_requests_keep_their_kind_under_a_users_own_session_header() -> None:
    """ANTHROPIC_CUSTOM_HEADERS may add our header to Claude Code: identity is ours, the title stays a title."""
    facts = BodyFacts(one_shot=True, output_format="json_schema")
    found = resolved({OURS: "T", CC: "S"}, facts)
    assert (found.identity.key.family, found.kind) == ("tidegate", "title")


def test_codex_compaction_needs_a_thread() -> None:
    """``request_kind`` counts beside any identity, provided that the thread is named (identity-and-traces §1.4)."""
    metadata = json.dumps({"request_kind": "compaction"})
    assert resolved({DYN: "A", "thread-id": "T", "x-codex-turn-metadata": metadata}).kind == "compaction"
    assert resolved({DYN: "A", "x-codex-turn-metadata": metadata}).kind == "turn"

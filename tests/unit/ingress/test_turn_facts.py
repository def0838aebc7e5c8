"""What harnesses say of a turn beside its session: forks, windows, compactions (spec: harness.md §3, traces §1.4)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas.trace import Compaction, TurnFacts
from services.ingress.endpoints import read_request
from services.ingress.identity import MAX_WORD, Resolved, read_headers, resolve
from tests.support.harness import CODEX
from tests.unit.ingress.test_harness_table import RECORDED, found

WHY = {"trigger": "auto", "reason": "context_limit", "implementation": "local", "phase": "mid_turn", "strategy": "x"}
COMPACTS = {"thread_id": "T", "request_kind": "compaction", "window_number": 1}


def asked(metadata: object, *, by: str = "header", headers: dict[str, str] | None = None) -> Resolved:
    """A Responses request with this turn metadata in a header, or in the body."""
    text = metadata if isinstance(metadata, str) else json.dumps(metadata)
    given = dict(headers or {})
    body: dict[str, Any] = {"model": "m", "input": "hi"}
    if by == "header":
        given["x-codex-turn-metadata"] = text
    else:
        body["client_metadata"] = {"session_id": "R", "thread_id": "T", "x-codex-turn-metadata": text}
    request = read_request("responses", json.dumps(body).encode())
    signals = read_headers([(name.encode(), value.encode()) for name, value in given.items()])
    return resolve(signals, request.facts, "responses", request_id="r")


def test_a_recorded_fork_says_where_it_comes_from() -> None:
    """Codex is the only one that does: another session of the same recording, up to an item of it."""
    rows = [found(row, "r") for row in RECORDED[CODEX, "exec-subagent-resume-fork"]]
    sessions = {row.identity.session_id for row in rows}
    forks = [row for row in rows if row.turn is not None and row.turn.forked_from_session_id]
    assert forks
    for fork in forks:
        assert fork.turn is not None
        assert fork.turn.forked_from_session_id in sessions - {fork.identity.session_id}
        assert fork.turn.forked_from_ordinal == 62


def test_recorded_sub_agents_name_the_turn_that_began_them() -> None:
    """A child's turn names a turn of its parent; the root turn is the user's, of the whole tree."""
    rows = [found(row, "r") for row in RECORDED[CODEX, "exec-nested-subagents"]]
    turns = {(row.identity.session_id, row.identity.turn_id) for row in rows}
    roots = {row.turn.root_turn_id for row in rows if row.turn is not None}
    assert len(roots) == 1
    children = [row for row in rows if row.identity.parent_session_id]
    assert children
    for child in children:
        assert child.turn is not None
        assert (child.identity.parent_session_id, child.turn.parent_turn_id) in turns
    assert {row.turn.agent_name for row in rows if row.turn} == {"/root"}


@pytest.mark.parametrize("by", ["header", "body"])
def test_a_compaction_says_why(by: str) -> None:
    """In the harness's words, wherever Codex put its metadata; the window it makes is counted (§1.4)."""
    headers = {"thread-id": "T"} if by == "header" else None
    resolved = asked({**COMPACTS, "compaction": WHY}, by=by, headers=headers)
    assert (resolved.kind, resolved.compaction) == ("compaction", Compaction(**WHY))
    assert resolved.turn == TurnFacts(window_number=1)


COMPACTIONS = [
    # name, metadata, headers, kind and compaction
    ("without an object", COMPACTS, {"thread-id": "T"}, ("compaction", Compaction())),
    ("no object but a text", {**COMPACTS, "compaction": "x"}, {"thread-id": "T"}, ("compaction", Compaction())),
    ("strange members", {**COMPACTS, "compaction": {"trigger": 3, "phase": " "}}, {"thread-id": "T"},
     ("compaction", Compaction())),
    ("under Dynamo's session", COMPACTS, {"thread-id": "T", "x-dynamo-session-id": "D"}, ("compaction", Compaction())),
    ("without the thread's header", {"request_kind": "compaction"}, {"x-dynamo-session-id": "D"}, ("turn", None)),
    ("a turn with the object", {"compaction": WHY}, {"thread-id": "T"}, ("turn", None)),
    ("no JSON", "{", {"thread-id": "T"}, ("turn", None)),
    ("DeepSeek", {}, {"x-deepseek-harness-compact": "1", "x-session-id": "O"}, ("compaction", Compaction())),
    ("DeepSeek, not exactly 1", {}, {"x-deepseek-harness-compact": "true", "x-session-id": "O"}, ("turn", None)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "metadata", "headers", "expected"), COMPACTIONS, ids=[case[0].replace(" ", "-") for case in COMPACTIONS]
)
def test_compactions(name: str, metadata: object, headers: dict[str, str], expected: tuple[str, object]) -> None:
    """Only who says so, and to whom it can be put down; an unreadable reason is an empty one (§1.4)."""
    resolved = asked(metadata, headers=headers)
    assert (resolved.kind, resolved.compaction) == expected


def test_one_strange_member_loses_itself_alone() -> None:
    """A harness that changes a member keeps its identity and the others; what is long is cut, for rows are small."""
    metadata = {"thread_id": "T", "turn_id": "t", "agent_name": 7, "window_number": -1, "root_turn_id": "r" * 5000}
    resolved = asked(metadata, headers={"x-codex-window-id": "T:0"})
    assert (resolved.identity.session_id, resolved.identity.turn_id) == ("T", "t")
    assert resolved.turn == TurnFacts(root_turn_id="r" * MAX_WORD)
    assert asked({"window_number": True}).turn is None
    assert asked({}).turn is None


def test_ids_in_metadata_are_read_as_those_of_headers() -> None:
    """Escapes of JSON may hide what no header may hold: it counts as absent."""
    for bad in ("\x1b[2J", "a\nb", "\u00e4", "   "):
        resolved = asked({"session_id": bad, "thread_id": bad, "turn_id": bad})
        assert (resolved.identity.key.family, resolved.identity.turn_id) == ("request", None)
    assert asked({"thread_id": " T ", "turn_id": "t"}).identity.session_id == "T"

"""Every recorded request of every harness: whose it is, whose child, and what it is to its session.

The table (`tests.support.harness`) says it per scenario, in order of arrival. The recordings are in
tests/fixtures/harness (content-free).
"""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from schemas.session import SessionKey
from services.ingress.endpoints import endpoint_of, read_request
from services.ingress.identity import Resolved, read_headers, resolve
from tests.support.harness import CODEX, HARNESSES, WHO, Row, expectations, first_of, recorded

RECORDED = recorded()


def found(row: Row, request_id: str) -> Resolved:
    """What the ingress makes of one recorded request."""
    endpoint = endpoint_of(row["path"])
    assert endpoint is not None
    request = read_request(endpoint, json.dumps(row["body"]).encode())
    signals = read_headers([(name.encode(), value.encode()) for name, value in row["headers"]])
    return resolve(signals, request.facts, endpoint, request_id=request_id)


def test_the_table_covers_every_recording() -> None:
    """All 48 scenarios and 326 requests are in the table, none twice, none forgotten."""
    table = {(harness, scenario) for harness, scenarios in WHO.items() for scenario in scenarios}
    assert table == set(RECORDED)
    assert sum(map(len, RECORDED.values())) == 326
    counts = {key: len(list(expectations(WHO[key[0]][key[1]]))) for key in RECORDED}
    assert counts == {key: len(rows) for key, rows in RECORDED.items()}


@pytest.mark.parametrize("scenario", RECORDED, ids="/".join)
def test_every_recorded_request_is_recognised(scenario: tuple[str, str]) -> None:
    """Session, agent, parent, kind and weakness of each request are what harness.md says."""
    harness = HARNESSES.get(scenario[0])
    keys: dict[tuple[str, ...], SessionKey] = {}
    ids: dict[tuple[str, ...], str] = {}
    for number, (row, expected) in enumerate(
        zip(RECORDED[scenario], expectations(WHO[scenario[0]][scenario[1]]), strict=True)
    ):
        request_id = f"req-{number}"
        resolved = found(row, request_id)
        identity = resolved.identity
        assert resolved.kind == expected.kind, number
        if not expected.path:
            assert identity.key == SessionKey(family="request", root=request_id)
            assert (identity.session_id, identity.parent, identity.weak) == (request_id, None, False)
            continue
        assert harness is not None
        assert identity.key.family == harness.family
        assert identity.weak == expected.weak
        assert identity.session_id == first_of(row, harness.own)
        assert identity.key.root == first_of(row, harness.session)
        # one agent, one key: resumed sessions, retries and side requests included
        assert keys.setdefault(expected.path, identity.key) == identity.key
        assert ids.setdefault(expected.path, identity.session_id) == identity.session_id
        if len(expected.path) > 1:
            assert identity.parent == keys[expected.path[:-1]]
            assert identity.parent_session_id == ids[expected.path[:-1]]
        else:
            assert (identity.parent, identity.parent_session_id) == (None, None)
    # distinct agents, and forks, never share a key
    assert len(set(keys.values())) == len(keys)


def test_no_two_agents_of_all_recordings_share_a_key() -> None:
    """Keys and their texts are distinct across all scenarios, identity-less requests included."""
    keys: dict[SessionKey, tuple[object, ...]] = {}
    for scenario, rows in RECORDED.items():
        expected = expectations(WHO[scenario[0]][scenario[1]])
        for number, (row, entry) in enumerate(zip(rows, expected, strict=True)):
            agent: tuple[object, ...] = (scenario, entry.path or number)
            key = found(row, f"{scenario[0]}-{scenario[1]}-{number}").identity.key
            assert keys.setdefault(key, agent) == agent
    assert len({key.text() for key in keys}) == len(keys)


def test_side_requests_share_the_key_of_their_session() -> None:
    """Titles, compactions and token counts belong to their session but are no turns of it (harness.md §6.2)."""
    kinds: dict[str, set[str]] = defaultdict(set)
    sides = 0
    for scenario, rows in RECORDED.items():
        for number, row in enumerate(rows):
            resolved = found(row, f"{scenario}-{number}")
            kinds[resolved.identity.key.text()].add(resolved.kind)
            sides += resolved.kind != "turn"
    assert sides == 2 + 3 + 24 + 25 + 10 + 1
    assert all("turn" in seen for seen in kinds.values())


def test_codex_turns_are_named() -> None:
    """Codex names its turns: one id for all steps of a turn, another for the next one (harness.md §3)."""
    turns = [found(row, "r").identity.turn_id for row in RECORDED[CODEX, "exec-turn-state-header"]]
    assert None not in turns
    assert turns[0] == turns[1] != turns[2] == turns[3]


def test_what_made_a_harness_send_a_turn_is_known_of_every_recording() -> None:
    """A user's message or a tool's result, though a system's message may stand after it (Claude Code)."""
    triggers = {
        (scenario[0], trigger)
        for scenario, rows in RECORDED.items()
        for number, row in enumerate(rows)
        if (trigger := found(row, f"r{number}").input_trigger) not in ("user_message", "tool_result")
    }
    assert triggers == set()

"""Every recorded request of every harness: whose it is, whose child, and what it is to its session.

The table says it per scenario, in order of arrival, in a small notation written from harness.md and not from the code:

- ``A``: the root agent of a session; ``B`` another session of the same scenario (a fork, a new one after /clear);
- ``A>a``: a sub-agent whose direct parent is ``A``; ``A>a>b``: its own sub-agent;
- ``-``: no identity at all, a session of its own for each request; ``~A``: weak identity, from the body;
- ``A:title``: a side request; ``A*4``: four times.

The recordings are in tests/fixtures/harness (content-free).
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from schemas.session import SessionKey
from services.ingress.endpoints import endpoint_of, read_request
from services.ingress.identity import Resolved, read_headers, resolve

FIXTURE = Path(__file__).parents[2] / "fixtures" / "harness" / "requests.jsonl.gz"

CLAUDE, CODEX, OPENCODE = "claude-code-2.1.332", "codex-0.171.0", "opencode-1.18.33"
AGENTS, LANGGRAPH = "openai-agents-0.24.0", "langgraph-1.2.24"
AIDER, MINI, PI, QWEN = "aider-0.86.2", "mini-swe-agent-2.4.6", "pi-1.6.0", "qwen-code-0.24.4"

WHO: dict[str, dict[str, str]] = {
    CLAUDE: {
        "fault-429-retry-after": "A*4",
        "fault-503-retry-after": "A*4",
        "fault-529-no-retry-after": "A*4",
        "fault-529-persistent": "A*7",
        "fault-529-retry-after": "A*3",
        "fault-dropped-stream": "A*3",
        "fault-sse-error-event": "A*4",
        # the background child runs beside its parent; /compact asks twice; /context counts
        "print-background-subagent-noattribution-compact-context": (
            "A*2 A>a A A>a A*3 A:compaction*2 A*2 A:count_tokens*24"
        ),
        "print-compact": "A*2 A:compaction A*2",
        "print-context-count-tokens-404": "A*2 A:count_tokens*25",
        # the parent waits for each child; --continue and --resume keep the session, --fork-session does not
        "print-foreground-nested-subagents-continue-resume-fork": "A*2 A>a*2 A>a>b*2 A>a A*5 B*2",
        "print-noattribution-second-session": "A*2",
        "sse-comment": "A*2",
        "sse-ping": "A*2",
        # a title per new session, beside the first main request; /clear starts another session
        "tui-title-request-clear": "A A:title A*2 A>a*2 A*3 B:title B*2",
    },
    CODEX: {
        "exec-nested-subagents": "A*3 A>a*3 A>a>b*2 A>a A",
        "exec-subagent-resume-fork": "A*3 A>a*2 A*5 B*2",
        "exec-turn-state-header": "A*4",
        "fault-429-retry-after": "A*4",
        "fault-503-persistent": "A*30",
        "fault-503-retry-after": "A*4",
        "fault-529-no-retry-after": "A*4",
        "fault-dropped-stream": "A*3",
        "fault-response-failed-overloaded": "A",
        "fault-response-failed-rate-limit": "A*4",
        "sse-ping": "A*2",
    },
    OPENCODE: {
        # the title comes first in every new session; compaction is tool-less too
        "chat-compaction": "A:title A A:compaction A*3",
        "chat-subagent-continue": "A:title A*2 A>b*2 A*3",
        "fault-429-retry-after": "A:title A*4",
        "fault-503-persistent": "A:title A*5",
        "fault-503-retry-after": "A:title A*4",
        "fault-529-no-retry-after": "A:title A*4",
        "fault-dropped-stream": "A:title A*3",
        "fault-sse-error-chunk": "A:title A*4",
        "responses-subagent-continue": "A:title A*2 A>b*2 A*3",
        "sse-comment": "A:title A*2",
    },
    PI: {
        "anthropic-continue": "-*4",
        "chat-affinity-enabled": "A*4",
        "chat-continue": "-*4",
        "responses-continue": "A*4",
    },
    QWEN: {
        "chat-subagent-continue": "-*8",
        # the cache key is the same for root and sub-agent: weak, and merged
        "responses-subagent-continue": "~A*8",
    },
    AIDER: {"two-runs-restore-history": "-*2"},
    MINI: {"run": "-*4"},
    AGENTS: {"chat-agent-as-tool": "-*6", "responses-agent-as-tool": "-*6"},
    LANGGRAPH: {"chat-subgraph": "-*7", "responses-subgraph": "-*7"},
}


class Harness(NamedTuple):
    """What harness.md §1 says of one harness. ``own``: where an agent's own id is, the first present one counts;
    ``session``: where the id of the whole tree is; an id starting with ``body.`` is a body member."""

    family: str
    own: tuple[str, ...]
    session: tuple[str, ...]


HARNESSES = {
    CLAUDE: Harness(
        "claude_code", ("x-claude-code-agent-id", "X-Claude-Code-Session-Id"), ("X-Claude-Code-Session-Id",)
    ),
    CODEX: Harness("codex", ("thread-id",), ("session-id",)),
    OPENCODE: Harness("opencode", ("x-session-id",), ("x-session-id",)),
    PI: Harness("pi", ("session-id", "session_id"), ("session-id", "session_id")),
    QWEN: Harness("body", ("body.prompt_cache_key",), ("body.prompt_cache_key",)),
}


class Expected(NamedTuple):
    """One entry of the table: ``path`` from the root agent down, empty for no identity."""

    path: tuple[str, ...]
    kind: str
    weak: bool


def expectations(text: str) -> Iterator[Expected]:
    """The notation, request by request."""
    for entry in text.split():
        entry, _, times = entry.partition("*")
        who, _, kind = entry.partition(":")
        path = () if who == "-" else tuple(who.lstrip("~").split(">"))
        for _ in range(int(times or 1)):
            yield Expected(path, kind or "turn", who.startswith("~"))


Row = dict[str, Any]


def recorded() -> dict[tuple[str, str], list[Row]]:
    """The recordings by (harness, scenario), in order of arrival."""
    scenarios: dict[tuple[str, str], list[Row]] = defaultdict(list)
    with gzip.open(FIXTURE, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            scenarios[row["harness"], row["scenario"]].append(row)
    return dict(scenarios)


RECORDED = recorded()


def found(row: Row, request_id: str) -> Resolved:
    """What the ingress makes of one recorded request."""
    endpoint = endpoint_of(row["path"])
    assert endpoint is not None
    request = read_request(endpoint, json.dumps(row["body"]).encode())
    signals = read_headers([(name.encode(), value.encode()) for name, value in row["headers"]])
    return resolve(signals, request.facts, endpoint, request_id=request_id)


def first_of(row: Row, places: tuple[str, ...]) -> str:
    """The value at the first of ``places`` that the request has, spelled as it was on the wire."""
    headers = dict(row["headers"])
    for place in places:
        value = row["body"].get(place.removeprefix("body.")) if place.startswith("body.") else headers.get(place)
        if value:
            return str(value)
    raise AssertionError(f"none of {places} in {row}")


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

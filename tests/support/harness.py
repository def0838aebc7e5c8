"""What real harnesses sent, recorded (tests/fixtures/harness), and who each request is, by hand.

The table says it per scenario, in order of arrival, in a small notation written from harness.md and not from the code:

- ``A``: the root agent of a session; ``B`` another session of the same scenario (a fork, a new one after /clear);
- ``A>a``: a sub-agent whose direct parent is ``A``; ``A>a>b``: its own sub-agent;
- ``-``: no identity at all, a session of its own for each request; ``~A``: weak identity, from the body;
- ``A:title``: a side request; ``A*4``: four times.
"""

from __future__ import annotations

import gzip
import json
import lzma
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FIXTURES = Path(__file__).parents[1] / "fixtures" / "harness"

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
    with gzip.open(FIXTURES / "requests.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            scenarios[row["harness"], row["scenario"]].append(row)
    return dict(scenarios)


class Whole(NamedTuple):
    """One request as it can be sent again."""

    headers: list[list[str]]
    body: dict[str, Any]


def whole() -> Iterator[Whole]:
    """All of them, in the order of `recorded`'s fixture; long texts are filler."""
    with lzma.open(FIXTURES / "whole.jsonl.xz", "rt", encoding="utf-8") as lines:
        for line in lines:
            yield Whole(**json.loads(line))


def first_of(row: Row, places: tuple[str, ...]) -> str:
    """The value at the first of ``places`` that the request has, spelled as it was on the wire."""
    headers = dict(row["headers"])
    for place in places:
        value = row["body"].get(place.removeprefix("body.")) if place.startswith("body.") else headers.get(place)
        if value:
            return str(value)
    raise AssertionError(f"none of {places} in {row}")

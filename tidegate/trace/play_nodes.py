"""Requests as a player sees them, whatever format a trace came in (`tidegate.trace.plays` reads them all)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from schemas.session import MOVES_SESSION
from tidegate.trace.dependencies import Dependency
from tidegate.trace.errors import Problem

Format = Literal["rows", "agentic-mooncake", "mooncake"]

SURE_TOKENS = 16
"""So much of an answer, or more, has to be missing in a cache before that tells anything: what is found is whole
blocks."""
LOOKED_AT = 4
"""Requests of a session that come after one, and may go on where it ended: titles are between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What became of a request when it was recorded. Times in Unix ms and ms; ``None``: the row does not say."""

    start_ms: float
    end_ms: float
    ttft_ms: float | None = None
    avg_itl_ms: float | None = None
    cached_tokens: int | None = None
    hold_ms: float | None = None
    worker: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayNode:
    """A request as a player sees it. It goes when everything that it waits for has happened, each after its own delay,
    and not before ``not_before_ms`` after the beginning of the trace.

    ``session`` is never absent (see `is_single`). ``output_tokens`` is at least 1. ``sequence_hashes``: one for each
    block of the prompt, the partial one at its end included; equal ones mean equal prefixes, over all plays.
    ``content_hashes``: of the first ``content_tokens`` of prompt and answer, as far as that is known: see `contents`.
    ``tool``: the first one that the answer asked for.
    """

    request_id: str
    session: str
    play: str
    input_tokens: int
    output_tokens: int
    sequence_hashes: tuple[int, ...]
    content_hashes: tuple[int, ...]
    content_tokens: int
    parent: str | None = None
    model: str | None = None
    kind: str | None = None
    tool: str | None = None
    not_before_ms: float = 0.0
    dependencies: tuple[Dependency, ...] = ()
    recorded: Recorded | None = None

    @property
    def is_single(self) -> bool:
        """It named no session, and is one by itself."""
        return self.session == f"request:{self.request_id}"

    @property
    def is_aside(self) -> bool:
        """It is no turn of its session, but something beside it: a title, a compaction."""
        return self.kind is not None and self.kind not in MOVES_SESSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Plays:
    """Nodes in the order of their beginning; all have blocks of ``block_size`` tokens. ``left_out``: requests that
    cannot be played, by reason. ``damaged``: where a file could not be read to its end. ``workers``, ``kv_tokens``: of
    the fleet that was recorded (the largest worker), 0 where the trace does not say."""

    nodes: tuple[PlayNode, ...]
    block_size: int
    format: Format
    left_out: Counter[str] = field(default_factory=Counter)
    damaged: tuple[Problem, ...] = ()
    workers: int = 0
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What `contents` has to know of a request. Times in ms; ``completion``: hashes of prompt and answer, if told."""

    request_id: str
    session: str
    start_ms: float
    end_ms: float
    hashes: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    completion: tuple[int, ...] = ()
    cached_tokens: int | None = None


Content = tuple[tuple[int, ...], int]


def contents(turns: Sequence[Turn], block: int) -> dict[str, Content]:
    """By request: hashes of what its prompt and answer hold, and of how many tokens that is known. ``turns`` in the
    order of their beginning.

    The tokens of an answer are seldom in a trace. Where a later request of the session begins with all whole blocks of
    the prompt, and is long enough, the answer is what follows them there; if the engine then found less than that
    although it found the prompt, only as much as it found. Else ``completion``; else the prompt alone.
    """
    sessions: dict[str, list[Turn]] = {}
    for turn in turns:
        sessions.setdefault(turn.session, []).append(turn)
    known: dict[str, Content] = {}
    for session in sessions.values():
        for place in range(len(session) - 1, -1, -1):
            turn, later = session[place], session[place + 1 : place + 1 + LOOKED_AT]
            after = next((each for each in later if _goes_on(turn, each, block)), None)
            known[turn.request_id] = _content(turn, after, known, block)
    return known


def _goes_on(turn: Turn, after: Turn, block: int) -> bool:
    whole, tokens = turn.input_tokens // block, turn.input_tokens + turn.output_tokens
    if not whole or after.start_ms < turn.end_ms or after.input_tokens < tokens:
        return False
    beginning = turn.completion[: tokens // block] or turn.hashes[:whole]
    return after.hashes[: len(beginning)] == beginning


def _content(turn: Turn, after: Turn | None, known: dict[str, Content], block: int) -> Content:
    length, tokens = turn.input_tokens, turn.input_tokens + turn.output_tokens
    if after is None:
        # Fewer hashes than tokens, where not all of the answer's ids were told.
        told = min(tokens, len(turn.completion) * block)
        return (turn.completion, told) if told > length else (turn.hashes, length)
    found = after.cached_tokens
    if found is not None and length - SURE_TOKENS <= found < tokens - SURE_TOKENS:
        tokens = max(length, found)
    return known[after.request_id][0][: -(-tokens // block)], tokens

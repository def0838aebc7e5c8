"""Mooncake traces for readers that add the lines of a session up: AIPerf, and the peer's ``mooncake-delta``.

A session's first line is its whole prompt; a later one only what is new in it, behind the prompt before and its answer,
which such readers put there themselves, as the engine gave it. Source: spec identity-and-traces §3.1 (mooncake-delta),
§3.4 (mooncake_trace).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tidegate.trace.replayable import HashIds, Playable, prompt
from tidegate.trace.rows import Request


@dataclass(frozen=True, slots=True)
class _Conversation:
    """What a reader has put together of a session so far. ``name``: the session's, numbered where it began anew."""

    name: str
    last: Request
    beginnings: int = 1


def mooncake_deltas(source: Playable) -> Iterator[dict[str, Any]]:
    """In the order of their beginning; times in ms after the first.

    A prompt that does not go on from the one before (a compaction, a prompt cut short, a request that overlaps another
    of its session) begins a conversation of its own, ``<session>#2``, at its own time. What is new has ids of its own:
    prompts share what first lines share.
    """
    fresh = _Fresh()
    zero_ms = min(request.start_ms for request in source.trace.requests)
    conversations: dict[str, _Conversation] = {}
    for request in source.trace.requests:
        length, output = prompt(request).input_length, max(1, request.metrics.output_tokens or 0)
        line: dict[str, Any] = {"request_id": request.request_id}
        before = None if request.session is None else conversations.get(request.session)
        new = None if before is None else _new_tokens(before.last, request, source.block_size)
        if before is not None and new is not None:
            conversation = _Conversation(before.name, request, before.beginnings)
            line["delay"] = round(request.start_ms - before.last.end_ms, 3)
            line["input_length"], line["output_length"] = new, output
            line["hash_ids"] = fresh.ids(-(-new // source.block_size))
        else:
            beginnings = 1 if before is None else before.beginnings + 1
            name = request.session or request.request_id
            conversation = _Conversation(name if beginnings == 1 else f"{name}#{beginnings}", request, beginnings)
            line["timestamp"] = round(request.start_ms - zero_ms, 3)
            line["input_length"], line["output_length"] = length, output
            line["hash_ids"] = fresh.of(request)
        line["session_id"] = conversation.name
        if request.session is not None:
            conversations[request.session] = conversation
        yield line


def _new_tokens(before: Request, request: Request, block_size: int) -> int | None:
    """Tokens behind ``before``'s prompt and answer; ``None`` where ``request`` does not go on from them.

    The blocks that both have in full must be equal. Whether the answer is what follows is not asked: rows without the
    answer's hashes cannot tell.
    """
    earlier, later = prompt(before), prompt(request)
    whole = earlier.input_length // block_size
    if request.start_ms < before.end_ms:
        return None
    if earlier.input_sequence_hashes[:whole] != later.input_sequence_hashes[:whole]:
        return None
    new = later.input_length - earlier.input_length - (before.metrics.output_tokens or 0)
    return new if new > 0 else None


class _Fresh(HashIds):
    """Ids by hash, and ids that nothing else has."""

    def ids(self, count: int) -> list[int]:
        """``count`` of the latter."""
        first = len(self._ids)
        for number in range(first, first + count):
            self._ids[-1 - number] = number  # a key that is no hash
        return list(range(first, first + count))

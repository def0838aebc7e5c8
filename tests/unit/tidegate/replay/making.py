"""Nodes of plays for tests."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.trace.dependencies import Dependency, Trigger
from tidegate.trace.play_nodes import PlayNode, Recorded

BLOCK = 16


def node(
    name: str,
    hashes: Sequence[int] = (1,),
    *,
    tokens: int | None = None,
    output: int = 8,
    session: str = "s",
    play: str = "p",
    not_before_ms: float = 0.0,
    waits: Sequence[tuple[str, Trigger, float]] = (),
    recorded: tuple[float, float, int | None] | None = None,
    content: tuple[Sequence[int], int] | None = None,
) -> PlayNode:
    """``tokens``: of the prompt (default: all of its blocks are whole). ``content``: hashes of prompt and answer, and
    of how many tokens. ``recorded``: start, end, cached tokens."""
    length = len(hashes) * BLOCK if tokens is None else tokens
    content_hashes, content_tokens = (hashes, length) if content is None else content
    return PlayNode(
        request_id=name,
        session=session,
        parent=None,
        play=play,
        model="m",
        input_tokens=length,
        output_tokens=output,
        sequence_hashes=tuple(hashes),
        content_hashes=tuple(content_hashes),
        content_tokens=content_tokens,
        not_before_ms=not_before_ms,
        dependencies=tuple(Dependency(other, trigger, "sequence", delay) for other, trigger, delay in waits),
        recorded=None
        if recorded is None
        else Recorded(
            start_ms=recorded[0], end_ms=recorded[1], ttft_ms=None, avg_itl_ms=None, cached_tokens=recorded[2]
        ),
    )

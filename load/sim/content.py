"""What KV blocks hold, without tokens: a chain is a line of blocks that may begin as another chain does.

A session's conversation only grows, so block ``i`` of it always holds the same; sessions that share a system prompt,
a sub-agent that begins with its parent's context, and prompts of a trace with common prefixes fork off a chain.
"""

from __future__ import annotations

from collections.abc import Sequence

ENDLESS = 1 << 60
"""The end, in blocks, of a chain's own part."""


class Chain:
    """Blocks ``fork``, ``fork + 1``, ... are its own; those before are its parent's. Compared by identity.

    ``path``: (chain, first block, end) from the root to itself; the parts lie back to back from block 0.
    """

    __slots__ = ("fork", "parent", "path")

    def __init__(self, parent: Chain | None = None, fork: int = 0) -> None:
        if fork < 0 or (parent is None and fork):
            raise ValueError("a chain forks off a parent at a block that is not negative")
        self.parent = parent
        self.fork = fork
        inherited = [] if parent is None else [part for part in parent.path if part[1] < fork]
        clipped = [(chain, first, min(end, fork)) for chain, first, end in inherited]
        self.path: tuple[tuple[Chain, int, int], ...] = (*clipped, (self, fork, ENDLESS))


class Contents:
    """Hash ids of a trace to chains: prefixes in common are parts of one chain. ``trace_block``: tokens of one id, a
    multiple of ``block_size``."""

    def __init__(self, trace_block: int, block_size: int) -> None:
        self._size = block_size
        self._ratio = trace_block // block_size
        self._ids: dict[Chain, list[int]] = {}
        self._forks: dict[tuple[Chain | None, int, int], Chain] = {}

    def chain(self, ids: Sequence[int], prompt: int, known_tokens: int | None = None) -> tuple[Chain, int]:
        """The chain of one prompt and its output, and how many tokens of the prompt no request before had.

        ``ids`` are of the first ``known_tokens`` of both (default: of the prompt); what follows is like nothing else.
        """
        chain: Chain | None = None
        own: list[int] = []
        start = known = 0
        fresh = False
        for index, identity in enumerate(ids):
            place = index - start
            if chain is not None and place < len(own) and own[place] == identity:
                known += not fresh
                continue
            key = (chain, index, identity)
            if chain is not None and place == len(own):
                own.append(identity)
                fresh = True
                continue
            child = self._forks.get(key)
            if child is None:
                child = self._forks[key] = Chain(chain, index * self._ratio)
                self._ids[child] = []
                fresh = True
            chain, own, start = child, self._ids[child], index
            if fresh:
                own.append(identity)
            else:
                known += 1
        cached = min(known * self._ratio, (prompt - 1) // self._size) * self._size
        length = prompt if known_tokens is None else known_tokens
        return Chain(chain, length // self._size), max(1, prompt - cached)

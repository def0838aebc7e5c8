"""What KV blocks hold, without tokens: a chain is a line of blocks that may begin as another chain does.

A session's conversation only grows, so block ``i`` of it always holds the same; sessions that share a system prompt,
a sub-agent that begins with its parent's context, and prompts of a trace with common prefixes fork off a chain.
"""

from __future__ import annotations

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

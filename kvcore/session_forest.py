"""The prefixes of many sessions as one forest: a path-compressed radix tree of chain hashes for each pool of workers.

A node is a run of blocks that every session beyond it has in common; it ends where sessions end or part. So a node that
is nobody's end has at least two children, and what is found below a node is found in time of what is found. Chain
hashes name their whole prefix: a block is in one place of its tree, and the deepest known block of a chain is found by
bisection.

Hashes are u64 little-endian back to back, as everywhere; positions and lengths are in blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from kvcore.hashing import chain_view

K = TypeVar("K")
"""What names a session."""

HASH_BYTES = 8


class Node(Generic[K]):
    """A run of blocks from position ``start``. ``ends``: the sessions whose prefix ends with it."""

    __slots__ = ("children", "ends", "hashes", "parent", "start")

    def __init__(self, parent: Node[K] | None, start: int, hashes: bytes) -> None:
        self.parent = parent
        self.start = start
        self.hashes = hashes
        self.children: dict[int, Node[K]] | None = None
        self.ends: dict[K, Branch[K]] | None = None

    @property
    def end(self) -> int:
        """Position after its last block: the depth of what ends here."""
        return self.start + len(self.hashes) // HASH_BYTES

    @property
    def first(self) -> int:
        """Its first chain hash."""
        return int.from_bytes(self.hashes[:HASH_BYTES], "little")

    @property
    def last(self) -> int:
        """Its last chain hash."""
        return int.from_bytes(self.hashes[-HASH_BYTES:], "little")


class Branch(Generic[K]):
    """One session's place in a tree. ``node``: where its prefix ends; ``None`` before it had one with blocks.

    ``prompt``: depth of its last prompt, and the chain hash at its end; an answer may be known beyond it. ``growth``:
    blocks from one prompt to the next, an exponential mean; ``None`` before the second prompt.
    """

    __slots__ = ("growth", "node", "parent", "prompt", "session", "tree")

    def __init__(self, session: K) -> None:
        self.session = session
        self.tree: Tree[K] | None = None
        self.node: Node[K] | None = None
        self.parent: K | None = None
        self.prompt: tuple[int, int] | None = None
        self.growth: float | None = None

    @property
    def depth(self) -> int:
        """Blocks of its prefix."""
        return self.node.end if self.node is not None else 0


class Tree(Generic[K]):
    """The prefixes of one pool. ``growth``: of its sessions, see `Branch`. ``contradictions``: chains that name a known
    block behind another prefix than the known one, or a block twice (no hash function of ours does so: somebody made
    them up); they are not taken in."""

    def __init__(self, pool: Hashable) -> None:
        self.pool = pool
        self.root: Node[K] = Node(None, 0, b"")
        self.places: dict[int, Node[K]] = {}
        self.growth: float | None = None
        self.contradictions = 0

    def __len__(self) -> int:
        """Distinct blocks."""
        return len(self.places)

    # Reading

    def locate(self, chain: bytes) -> tuple[Node[K], int]:
        """The node of the deepest known block of ``chain``, and how many blocks of it are known (0: the root).

        A hash stands for its whole prefix: that what leads to the block is the same is looked at only by `move`, and
        here no more than its position is.
        """
        hashes = chain_view(chain)
        known = self._reach(hashes)
        if not known:
            return self.root, 0
        node = self.places[hashes[known - 1]]
        start = node.start
        return (node, known) if start < known <= start + len(node.hashes) // HASH_BYTES else (self.root, 0)

    def _reach(self, hashes: Sequence[int]) -> int:
        places = self.places
        low, high = 0, len(hashes)
        if high and hashes[high - 1] in places:
            return high
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in places:
                low = middle + 1
            else:
                high = middle
        return low

    def _is_path(self, node: Node[K], chain: bytes, known: int) -> bool:
        """Whether the first ``known`` blocks of ``chain`` are what leads into ``node``."""
        if not node.hashes.startswith(chain[node.start * HASH_BYTES : known * HASH_BYTES]):
            return False
        above = node.parent
        while above is not None:
            if not chain.startswith(above.hashes, above.start * HASH_BYTES):
                return False
            above = above.parent
        return True

    def below(self, node: Node[K]) -> Iterator[Branch[K]]:
        """Every session that has this node's blocks: those that end with it, then those beyond, nearest levels
        first."""
        level = [node]
        while level:
            beyond: list[Node[K]] = []
            for each in level:
                if each.ends:
                    yield from each.ends.values()
                if each.children:
                    beyond += each.children.values()
            level = beyond

    def sharing(self, branch: Branch[K]) -> Iterator[Branch[K]]:
        """Sessions that have some of this one's prefix, those with the most of it first."""
        node, seen = branch.node, None
        while node is not None and node is not self.root:
            if node.ends:
                yield from (other for other in node.ends.values() if other is not branch)
            for child in (node.children or {}).values():
                if child is not seen:
                    yield from self.below(child)
            node, seen = node.parent, node

    def chain(self, node: Node[K] | None) -> bytes:
        """The whole prefix that ends with ``node``."""
        runs: list[bytes] = []
        while node is not None:
            runs.append(node.hashes)
            node = node.parent
        return b"".join(reversed(runs))

    # Writing

    def move(self, branch: Branch[K], chain: bytes) -> bool:
        """Let ``branch`` end with ``chain`` (of at least one block); whether it was taken in."""
        hashes = chain_view(chain)
        node, known = self.locate(chain)
        rest = hashes[known:]
        if self._contradicts(node, known, chain, hashes):
            self.contradictions += 1
            return False
        old = branch.node
        if node is old and known == node.end and not node.children and len(node.ends or ()) == 1:
            if len(rest):  # it goes on where it was, alone
                node.hashes += chain[known * HASH_BYTES :]
                self.places.update(dict.fromkeys(rest, node))
            return True
        if known < node.end:
            node = self._split(node, known - node.start)
            old = branch.node
        if len(rest):
            leaf: Node[K] = Node(node, known, chain[known * HASH_BYTES :])
            self._adopt(node, leaf)
            self.places.update(dict.fromkeys(rest, leaf))
            node = leaf
        if old is not node:
            node.ends = node.ends or {}
            node.ends[branch.session] = branch
            branch.node = node
            self._end(old, branch)
        return True

    def _contradicts(self, node: Node[K], known: int, chain: bytes, hashes: Sequence[int]) -> bool:
        rest = set(hashes[known:])
        return (
            len(rest) != len(hashes) - known
            or not self.places.keys().isdisjoint(rest)
            or not self._is_path(node, chain, known)
            or (not known and self._reach(hashes) > 0)
        )

    def leave(self, branch: Branch[K]) -> None:
        """Take ``branch`` out; blocks that nobody else has are forgotten."""
        node, branch.node = branch.node, None
        self._end(node, branch)

    def _end(self, node: Node[K] | None, branch: Branch[K]) -> None:
        """``branch`` does not end with ``node`` any more."""
        if node is None or node.ends is None:
            return
        del node.ends[branch.session]
        while node is not self.root and not node.ends and not node.children:
            for block in chain_view(node.hashes):
                del self.places[block]
            parent = node.parent
            assert parent is not None
            assert parent.children is not None
            del parent.children[node.first]
            node = parent
        if node is not self.root and not node.ends and node.children is not None and len(node.children) == 1:
            self._join(node, next(iter(node.children.values())))

    def _adopt(self, node: Node[K], child: Node[K]) -> None:
        if node.children is None:
            node.children = {}
        node.children[child.first] = child
        child.parent = node

    def _split(self, node: Node[K], at: int) -> Node[K]:
        """Cut ``node`` after its first ``at`` blocks; the upper part. The shorter part is the one that is rewritten."""
        cut = at * HASH_BYTES
        upper_hashes, lower_hashes = node.hashes[:cut], node.hashes[cut:]
        parent = node.parent
        assert parent is not None
        if len(upper_hashes) <= len(lower_hashes):
            upper: Node[K] = Node(parent, node.start, upper_hashes)
            self._adopt(parent, upper)
            node.start, node.hashes = node.start + at, lower_hashes
            self._adopt(upper, node)
            self.places.update(dict.fromkeys(chain_view(upper_hashes), upper))
            return upper
        lower: Node[K] = Node(node, node.start + at, lower_hashes)
        self._take_over(lower, node)
        node.hashes, node.children, node.ends = upper_hashes, None, None
        self._adopt(node, lower)
        self.places.update(dict.fromkeys(chain_view(lower_hashes), lower))
        return node

    def _join(self, node: Node[K], child: Node[K]) -> None:
        """Make one of ``node``, where nobody ends or parts any more, and its only child."""
        parent, hashes = node.parent, node.hashes + child.hashes
        assert parent is not None
        if len(node.hashes) <= len(child.hashes):
            self.places.update(dict.fromkeys(chain_view(node.hashes), child))
            child.start, child.hashes = node.start, hashes
            self._adopt(parent, child)
        else:
            self.places.update(dict.fromkeys(chain_view(child.hashes), node))
            node.hashes = hashes
            self._take_over(node, child)

    def _take_over(self, node: Node[K], former: Node[K]) -> None:
        """What ends with or goes on from ``former`` does so from ``node``."""
        node.children, node.ends = former.children, former.ends
        for child in (node.children or {}).values():
            child.parent = node
        for branch in (node.ends or {}).values():
            branch.node = node

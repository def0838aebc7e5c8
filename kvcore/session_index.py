"""Which session has which prefix: blocks to sessions, sessions to blocks, and who was forked from whom.

A hint, not residency: what is known here outlives the blocks in the engines' caches. Fed with every prompt that is
known to be a session's newest (`SessionIndex.place`); a prompt that does not continue the one before takes its place
(a rewritten or compacted history), and what nobody has any more is forgotten. Chains of different pools (model, block
size, unit, salt rule: whatever the caller's key says) never meet. Spec: thunderagent-and-hints §5.2.

Bounded by sessions and by distinct blocks; the session that was placed or touched longest ago goes first. One block
costs about 90 bytes, one session about 1 KB beside its names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic

from kvcore.errors import HashesError
from kvcore.session_forest import HASH_BYTES, Branch, K, Tree

NEW_GROWTH = 0.5
"""Weight of the newest step in a session's mean growth."""
POOL_GROWTH = 0.02
"""Weight of the newest step in a pool's mean growth, for sessions that have made none."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds: sessions, and distinct blocks of all of them (one session may have more, alone)."""

    max_sessions: int = 16_384
    max_blocks: int = 2_000_000


@dataclass(frozen=True, slots=True)
class SessionPrefix(Generic[K]):
    """What is known of one session, in blocks of its pool.

    ``frontier``: the last chain hash of its prefix (its answer's, where that is known), ``None`` without one.
    ``unique``: blocks at the end of it that no other session has. ``expected``: how long its next prompt is likely to
    be: as long as the last one, grown by what it grows by (what sessions of its pool grow by, before its second
    prompt); ``None`` while nothing is known.
    """

    session: K
    pool: Hashable | None
    depth: int
    frontier: int | None
    unique: int
    parent: K | None
    expected: int | None

    @property
    def shared(self) -> int:
        """Blocks at the beginning that others have too."""
        return self.depth - self.unique


@dataclass(frozen=True, slots=True)
class SessionStats:
    """Sessions, distinct blocks and pools; since the start: sessions ``evicted`` for the bounds, chains that were not
    taken in because they contradict what is known."""

    sessions: int
    blocks: int
    pools: int
    evicted: int
    contradictions: int


class SessionIndex(Generic[K]):
    """Bounded map of sessions and their prefixes. Session names are any hashable values."""

    def __init__(self, limits: SessionLimits | None = None) -> None:
        self.limits = limits or SessionLimits()
        self._branches: OrderedDict[K, Branch[K]] = OrderedDict()
        self._trees: dict[Hashable, Tree[K]] = {}
        self._forked: dict[K, dict[K, None]] = {}
        self._blocks = 0
        self._evicted = 0
        self._contradictions = 0

    def __len__(self) -> int:
        return len(self._branches)

    def __contains__(self, session: object) -> bool:
        return session in self._branches

    # Writing

    def place(self, session: K, pool: Hashable, chain: bytes, parent: K | None = None) -> list[K]:
        """``chain`` (u64 little-endian; empty: it has no blocks, and its place stays) is the session's newest prompt;
        ``parent``: from whom it was forked, where that is said. The sessions that had to go for it.

        Raises `HashesError` for bytes that are no whole hashes."""
        if len(chain) % HASH_BYTES:
            raise HashesError(f"a chain is whole u64 hashes, not {len(chain)} bytes")
        branch = self._branches.get(session)
        if branch is None:
            branch = self._branches[session] = Branch(session)
        else:
            self._branches.move_to_end(session)
        if parent is not None and parent != session:
            self._fork(branch, parent)
        if chain:
            self._move(branch, pool, chain)
        return self._evict()

    def oldest(self) -> K | None:
        """The session that goes next."""
        return next(iter(self._branches), None)

    def touch(self, session: K) -> None:
        """It was seen: the last to go. Unknown: no-op."""
        if session in self._branches:
            self._branches.move_to_end(session)

    def forget(self, session: K) -> None:
        """It is over. Unknown: no-op."""
        branch = self._branches.pop(session, None)
        if branch is None:
            return
        self._leave(branch)
        self._unfork(branch)

    def extend(self, session: K, pool: Hashable, chain: bytes) -> bool:
        """What an engine has stored of it beyond its last prompt (its answer): ``chain`` is its prefix and more. Any
        other one says nothing (an older turn, or other tokens than we know), and nobody has to go for one; whether it
        was taken in."""
        branch = self._branches.get(session)
        tree = self._trees.get(pool)
        if branch is None or branch.node is None or tree is None or branch.tree is not tree:
            return False
        depth = branch.depth
        if len(chain) % HASH_BYTES or len(chain) <= depth * HASH_BYTES or _hash_at(chain, depth) != branch.node.last:
            return False
        if self._blocks + len(chain) // HASH_BYTES - depth > self.limits.max_blocks:
            return False
        return self._take_in(branch, tree, chain)

    def _move(self, branch: Branch[K], pool: Hashable, chain: bytes) -> None:
        tree = self._trees.get(pool)
        if tree is None:
            tree = self._trees[pool] = Tree(pool)
        if branch.tree is not tree:
            self._leave(branch)
            branch.tree, branch.growth, branch.prompt = tree, None, None
        if not self._take_in(branch, tree, chain):
            return
        before, after = branch.prompt, len(chain) // HASH_BYTES
        branch.prompt = (after, _hash_at(chain, after))
        if before is not None and after > before[0] and _hash_at(chain, before[0]) == before[1]:
            step = float(after - before[0])
            branch.growth = step if branch.growth is None else branch.growth + NEW_GROWTH * (step - branch.growth)
            tree.growth = step if tree.growth is None else tree.growth + POOL_GROWTH * (step - tree.growth)

    def _take_in(self, branch: Branch[K], tree: Tree[K], chain: bytes) -> bool:
        before = len(tree)
        taken = tree.move(branch, chain)
        self._contradictions += not taken
        self._blocks += len(tree) - before
        if branch.node is None:
            branch.tree = None
            self._drop_if_empty(tree)
        return taken

    def _leave(self, branch: Branch[K]) -> None:
        tree, branch.tree = branch.tree, None
        if tree is None:
            return
        before = len(tree)
        tree.leave(branch)
        self._blocks += len(tree) - before
        self._drop_if_empty(tree)

    def _drop_if_empty(self, tree: Tree[K]) -> None:
        if not len(tree):
            del self._trees[tree.pool]

    def _fork(self, branch: Branch[K], parent: K) -> None:
        if branch.parent != parent:
            self._unfork(branch)
            branch.parent = parent
            self._forked.setdefault(parent, {})[branch.session] = None

    def _unfork(self, branch: Branch[K]) -> None:
        if branch.parent is None:
            return
        siblings = self._forked[branch.parent]
        del siblings[branch.session]
        if not siblings:
            del self._forked[branch.parent]
        branch.parent = None

    def _evict(self) -> list[K]:
        gone: list[K] = []
        limits = self.limits
        while len(self._branches) > limits.max_sessions or (
            self._blocks > limits.max_blocks and len(self._branches) > 1
        ):
            session = next(iter(self._branches))
            self.forget(session)
            gone.append(session)
        self._evicted += len(gone)
        return gone

    # Reading

    def get(self, session: K) -> SessionPrefix[K] | None:
        """What is known of it, without touching its place in line."""
        branch = self._branches.get(session)
        if branch is None:
            return None
        node, tree = branch.node, branch.tree
        depth = branch.depth
        alone = node is not None and not node.children and len(node.ends or ()) == 1
        growth = branch.growth if branch.growth is not None or tree is None else tree.growth
        return SessionPrefix(
            session=session,
            pool=tree.pool if tree is not None else None,
            depth=depth,
            frontier=node.last if node is not None else None,
            unique=node.end - node.start if node is not None and alone else 0,
            parent=branch.parent,
            expected=max(depth, round(branch.prompt[0] + growth)) if branch.prompt and growth is not None else None,
        )

    def chain(self, session: K) -> bytes:
        """Its whole prefix; empty for one that is not known or has none."""
        branch = self._branches.get(session)
        return branch.tree.chain(branch.node) if branch is not None and branch.tree is not None else b""

    def having(self, block: int) -> Iterator[K]:
        """Sessions whose prefix has this block, in any pool; those that end soonest after it first."""
        for tree in self._trees.values():
            node = tree.places.get(block)
            if node is not None:
                yield from (branch.session for branch in tree.below(node))

    def sharing(self, session: K) -> Iterator[K]:
        """Other sessions that have some of its prefix, those with the most of it first."""
        branch = self._branches.get(session)
        if branch is not None and branch.tree is not None:
            yield from (other.session for other in branch.tree.sharing(branch))

    def forked(self, session: K) -> Iterator[K]:
        """Known sessions that were forked from it, or name it as their parent; the oldest first."""
        return iter(tuple(self._forked.get(session, ())))

    def ends_on(self, pool: Hashable, chain: bytes, most: int | None = None) -> tuple[int, list[tuple[int, list[K]]]]:
        """How many blocks of ``chain`` are known, and the sessions whose prefix ends on that way, deepest first: depth
        and names, at most ``most`` of each depth."""
        tree = self._trees.get(pool)
        if tree is None:
            return 0, []
        node, known = tree.locate(chain)
        ends: list[tuple[int, list[K]]] = []
        at = node if known == node.end else node.parent
        while at is not None:
            if at.ends:
                ends.append((at.end, list(islice(at.ends, most))))
            at = at.parent
        return known, ends

    def beyond(self, pool: Hashable, chain: bytes, most: int) -> list[K]:
        """Of the sessions that have all that is known of ``chain``, at most ``most``; none where nothing is known."""
        tree = self._trees.get(pool)
        node, known = tree.locate(chain) if tree is not None else (None, 0)
        if tree is None or node is None or not known:
            return []
        return [branch.session for branch in islice(tree.below(node), most)]

    def stats(self) -> SessionStats:
        """Counts for metrics."""
        return SessionStats(len(self._branches), self._blocks, len(self._trees), self._evicted, self._contradictions)


def _hash_at(chain: bytes, depth: int) -> int:
    """The hash of the first ``depth`` blocks (at least one)."""
    return int.from_bytes(chain[(depth - 1) * HASH_BYTES : depth * HASH_BYTES], "little")

"""The block pool: paged KV blocks with reference counts, a prefix cache and one least-recently-used free queue.

A freed block keeps its hash and can be hit again until it is handed out for something else; freeing a sequence puts
its tail first, so that tails are evicted before heads. A freed block without a hash is handed out before all others
(vLLM 0.32 does so, 0.23 did not; seen in captured evictions). Block 0 is the null block and never used, as in vLLM:
a pool of N blocks holds N - 1. Several blocks may hold the same hash (vLLM does not de-duplicate physical copies).
Hints give hashes a level: free blocks of a lower one are handed out before those of a higher one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from load.engine.free_queue import BLANK, USUAL, FreeQueue


class BlockPool:
    """Blocks are numbers 1..``num_blocks``-1; hashes are opaque bytes."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (one is the null block), not {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._copies: dict[bytes, list[int]] = {}
        self._free: FreeQueue[int] = FreeQueue(range(1, num_blocks))
        self._levels: dict[bytes, int] = {}

    @property
    def usable(self) -> int:
        return self.num_blocks - 1

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody references, cached ones included."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        return self.usable - len(self._free)

    def references(self, block: int) -> int:
        return self._refs[block]

    def find(self, digest: bytes) -> int | None:
        """A block that holds ``digest`` (the oldest copy), or ``None``."""
        copies = self._copies.get(digest)
        return copies[0] if copies else None

    def unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` lie in the free queue (touching them takes them out of it)."""
        return sum(1 for block in blocks if self._refs[block] == 0)

    def touch(self, blocks: Iterable[int]) -> None:
        """Reference cached ``blocks`` once more each."""
        for block in blocks:
            if self._refs[block] == 0:
                self._free.discard(block)
                digest = self._hashes[block]
                if digest is not None and self._levels.get(digest, USUAL) < USUAL:
                    del self._levels[digest]  # it was to go early, and is wanted after all
            self._refs[block] += 1

    def allocate(self, count: int) -> tuple[list[int], list[bytes]]:
        """``count`` blocks, least recently used first, each referenced once; and the hashes evicted with them."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked of a pool that has {len(self._free)}")
        blocks: list[int] = []
        evicted: list[bytes] = []
        for _ in range(count):
            block = self._free.pop()
            digest = self._hashes[block]
            if digest is not None:
                self._forget(block, digest)
                evicted.append(digest)
            self._refs[block] = 1
            blocks.append(block)
        return blocks, evicted

    def register(self, block: int, digest: bytes) -> None:
        """``block`` now holds the KV of ``digest`` and can be hit."""
        self._hashes[block] = digest
        self._copies.setdefault(digest, []).append(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference each of ``blocks``, given in the order of the sequence: the tail is freed first."""
        for block in reversed(list(blocks)):
            references = self._refs[block] - 1
            if references < 0:
                raise ValueError(f"block {block} is released more often than referenced")
            self._refs[block] = references
            if references == 0:
                digest = self._hashes[block]
                if digest is None:
                    self._free.push(block, BLANK, first=True)
                else:
                    self._free.push(block, self._levels.get(digest, USUAL))

    def set_level(self, digest: bytes, level: int) -> None:
        """How long copies of ``digest`` stay when they are free, against others; `USUAL` takes it back."""
        if level == USUAL:
            self._levels.pop(digest, None)
        elif level > USUAL or digest in self._copies:
            self._levels[digest] = level
        for block in self._copies.get(digest, ()):
            if self._refs[block] == 0:
                self._free.push(block, level)

    def drop(self, digest: bytes) -> int:
        """Forget the copies of ``digest`` that nobody references; how many."""
        unused = [block for block in self._copies.get(digest, ()) if self._refs[block] == 0]
        for block in unused:
            self._forget(block, digest)
            self._free.push(block, BLANK, first=True)
        return len(unused)

    def reset(self) -> bool:
        """Forget every hash. Refused (``False``) while any block is referenced."""
        if self.used_blocks:
            return False
        for copies in self._copies.values():
            for block in copies:
                self._hashes[block] = None
        self._copies.clear()
        self._levels.clear()
        return True

    def resident(self) -> Iterator[tuple[bytes, int]]:
        """Every hash that can be hit, with its number of copies."""
        for digest, copies in self._copies.items():
            yield digest, len(copies)

    def _forget(self, block: int, digest: bytes) -> None:
        self._hashes[block] = None
        copies = self._copies[digest]
        copies.remove(block)
        if not copies:
            del self._copies[digest]
            if self._levels.get(digest, USUAL) < USUAL:
                del self._levels[digest]

"""Which engine hash a block has: from our chain hash to the engine's own, as last told.

Pools whose keys are made of the engine's block hashes (vLLM's Mooncake connector, LMCache) can be asked for only with
these, and they cannot be computed: they depend on the engine's hash seed and algorithm. So they are learned from the
engines' stored events, whoever sends them, and outlive the blocks. A pool is shared by engines that hash alike; engines
that hash otherwise overwrite each other here, and what a pool is then asked for it does not have.

Memory is bounded, in two generations: when the younger one is full, the older one goes, so that at least the half that
was stored last stays. (spec: index-and-routing §5.2)
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

_ENGINE = Struct("<Q")
_PAGE = Struct(">8xQ")
_UNKNOWN = bytes(8)
UNKNOWN_PAGE = b"\xff" * 16
"""Of a block whose engine hash is not known. No key has it: pages that an engine's hash names begin with zeros."""


class EngineLinks:
    """At most ``limit`` links (an odd number: one more)."""

    __slots__ = ("_half", "_old", "_young", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._half = (limit + 1) // 2
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def store(self, own: int, engine: int) -> None:
        """The block with chain hash ``own`` is ``engine`` to the engine."""
        young = self._young
        if len(young) >= self._half and own not in young:
            self._old, self._young = young, {}
            young = self._young
        young[own] = engine

    def engine_hashes(self, chain: Sequence[int]) -> bytes:
        """Engine hash of every block, u64 little-endian back to back; 0 where it is not known."""
        young, old, pack = self._young.get, self._old.get, _ENGINE.pack
        parts: list[bytes] = []
        for own in chain:
            engine = young(own)
            if engine is None:
                engine = old(own)
            parts.append(_UNKNOWN if engine is None else pack(engine))
        return b"".join(parts)

    def __len__(self) -> int:
        """Links that are kept; one that was stored again may count twice."""
        return len(self._young) + len(self._old)


def engine_pages(engine_hashes: bytes) -> bytes:
    """Pages of a pool (`kvcore.pool_index`, 16 bytes each) from engine hashes as `EngineLinks.engine_hashes` packs
    them: eight zero bytes, then the hash big-endian, which is how the engine writes the end of its digest. A block of
    which the hash is not known (0) becomes a page that is in no pool: anybody can put a key that ends with zeros."""
    pack = _PAGE.pack
    return b"".join([pack(engine) if engine else UNKNOWN_PAGE for (engine,) in _ENGINE.iter_unpack(engine_hashes)])

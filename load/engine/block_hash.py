"""The engine's own block hashes: a SHA-256 chain over token ids and typed extra keys, as vLLM keys its prefix cache.

They are the engine's business alone: another seed gives other hashes for the same tokens, as another vLLM process may.
Routers map them to hashes of their own from the token ids that the events carry (spec: engine-events §2.3).
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What keeps equal tokens apart: adapter (every block) and cache salt (block 0; later ones by the chain)."""

    lora_name: str | None = None
    cache_salt: str | None = None

    def published(self, index: int) -> list[str] | None:
        """The extra keys of block ``index`` as a KV event lists them: untagged, adapter first; ``None`` when none."""
        keys = [] if self.lora_name is None else [self.lora_name]
        if index == 0 and self.cache_salt is not None:
            keys.append(self.cache_salt)
        return keys or None

    def hashed(self, index: int) -> bytes:
        """The extra keys of block ``index`` as hashed: tagged and length-framed, so that no two lists collide."""
        parts = []
        if self.lora_name is not None:
            parts.append(_framed(b"lora", self.lora_name))
        if index == 0 and self.cache_salt is not None:
            parts.append(_framed(b"salt", self.cache_salt))
        return b"".join(parts)


def _framed(tag: bytes, text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return tag + len(raw).to_bytes(4, "big") + raw


class ChainHasher:
    """Chained 32-byte digests: ``sha256(parent || tokens as u32 little-endian || extra keys)``."""

    def __init__(self, block_size: int, seed: str = "") -> None:
        self.block_size = block_size
        self._root = hashlib.sha256(b"sim-none-hash\0" + seed.encode()).digest()

    def extend(self, digests: list[bytes], tokens: array[int], extra: ExtraKeys) -> None:
        """Append to ``digests`` those of the full blocks of ``tokens`` that it does not have yet."""
        size = self.block_size
        parent = digests[-1] if digests else self._root
        for index in range(len(digests), len(tokens) // size):
            block = tokens[index * size : (index + 1) * size].tobytes()
            parent = hashlib.sha256(parent + block + extra.hashed(index)).digest()
            digests.append(parent)

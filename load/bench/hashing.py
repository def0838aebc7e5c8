"""Chain hashing of a long prompt, against one plain xxhash call per hash without our packing (the floor in Python)."""

from __future__ import annotations

import random
from struct import Struct

from xxhash import xxh3_64_intdigest

from kvcore import hashing
from load.bench.measure import interleaved

TOKENS = 131_072
BLOCK_SIZE = 16


def _floor(tokens: bytes) -> int:
    pair = Struct("<QQ").pack
    stride = BLOCK_SIZE * 4
    parent = 0
    for start in range(0, len(tokens), stride):
        parent = xxh3_64_intdigest(pair(parent, xxh3_64_intdigest(tokens[start : start + stride], 1337)), 1337)
    return parent


def run() -> dict[str, object]:
    """Microseconds for 131,072 tokens in blocks of 16, and the part that a resent prompt costs (one new block)."""
    tokens = random.Random(1).randbytes(TOKENS * 4)
    chain = hashing.unpack_chain(hashing.chain_hashes(tokens, BLOCK_SIZE))
    seconds = interleaved(
        {
            "floor": lambda: _floor(tokens),
            "chain": lambda: hashing.chain_hashes(tokens, BLOCK_SIZE),
            "tail": lambda: hashing.chain_hashes(tokens[-BLOCK_SIZE * 4 :], BLOCK_SIZE, parent=chain[-2]),
        }
    )
    return {
        "bench": "hash",
        "tokens": TOKENS,
        "block_size": BLOCK_SIZE,
        "chain_us": round(seconds["chain"] * 1e6, 1),
        "floor_us": round(seconds["floor"] * 1e6, 1),
        "ratio_to_floor": round(seconds["chain"] / seconds["floor"], 2),
        "resent_tail_us": round(seconds["tail"] * 1e6, 2),
    }

"""Chain hashing of a long prompt in both twins, against the floor in Python and the peer.

``chain_<block size>_us``: 131,072 tokens, packed u32 in, packed chain hashes out. ``resent_tail_us``: one block more on
a known chain. ``python_floor_us``: one plain xxhash call per hash in Python, without our packing.
``peer_chain_<size>_us``: the peer's function; it takes a list of integers and gives local hashes, which it does not
chain.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import Any

from xxhash import xxh3_64_intdigest

from kvcore.hashing import chain_of, pack_chain, unpack_chain, unpack_tokens
from load.bench import peer
from load.bench.measure import interleaved, without_collector
from load.bench.options import Options
from load.bench.twins import PYTHON, all_twins

TOKENS = 131_072
BLOCK_SIZES = (16, 64)
_TAILS = 100


def _floor(tokens: bytes, block_size: int) -> int:
    pair = Struct("<QQ").pack
    stride = block_size * 4
    parent = 0
    for start in range(0, len(tokens), stride):
        parent = xxh3_64_intdigest(pair(parent, xxh3_64_intdigest(tokens[start : start + stride], 1337)), 1337)
    return parent


def _tails(chain_hashes: Any, tail: bytes, parent: int) -> None:
    for _ in range(_TAILS):
        chain_hashes(tail, 16, parent=parent)


def run(options: Options) -> dict[str, object]:
    """Microseconds; see the module."""
    count = TOKENS // 64 if options.quick else TOKENS
    tokens = random.Random(1).randbytes(count * 4)
    parent = unpack_chain(PYTHON.chain_hashes(tokens, 16))[-2]
    variants: dict[str, Callable[[], object]] = {"python_floor_us": partial(_floor, tokens, 16)}
    mismatches = 0
    twins = all_twins()
    for twin in twins:
        prefix = "" if twin is twins[0] else "python_"
        for size in BLOCK_SIZES:
            variants[f"{prefix}chain_{size}_us"] = partial(twin.chain_hashes, tokens, size)
            mismatches += twin.chain_hashes(tokens, size) != PYTHON.chain_hashes(tokens, size)
        tail = tokens[-16 * 4 :]
        variants[f"{prefix}resent_tail_us"] = partial(_tails, twin.chain_hashes, tail, parent)
        mismatches += twin.chain_hashes(tail, 16, parent=parent) != PYTHON.chain_hashes(tokens, 16)[-8:]
    dynamo = peer.package()
    if dynamo is not None:
        ids = unpack_tokens(tokens)
        for size in BLOCK_SIZES:
            variants[f"peer_chain_{size}_us"] = partial(dynamo.compute_block_hash_for_seq, ids, size)
            theirs = pack_chain(chain_of(dynamo.compute_block_hash_for_seq(ids, size)))
            mismatches += theirs != PYTHON.chain_hashes(tokens, size)
    with without_collector():
        seconds = interleaved(variants, options.runs)
    figures: dict[str, float | None] = {f"peer_chain_{size}_us": None for size in BLOCK_SIZES}
    for name, spent in seconds.items():
        figures[name] = round(spent * 1e6 / (_TAILS if name.endswith("tail_us") else 1), 2)
    if len(twins) == 1:  # pure Python is the chosen one
        figures |= {f"python_{key}": value for key, value in figures.items() if key.startswith(("chain_", "resent_"))}
    return {
        "bench": "hash",
        "kvcore": twins[0].name,
        "quick": options.quick,
        "tokens": count,
        **figures,
        "ratio_to_python_floor": round(seconds["chain_16_us"] / seconds["python_floor_us"], 3),
        "mismatches": mismatches,
    }

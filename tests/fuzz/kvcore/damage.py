"""Damage to bytes and to decoded MessagePack."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from tests.unit.kvcore import captured

PAYLOADS = tuple(
    bytes(row["payload"])
    for row in (*captured.rows("payloads.jsonl"), *captured.rows("streams.jsonl"))
    if row["payload"]
)
"""Every captured payload, those that are no batch included."""

_HEADS = """
c0 c1 c2 c3 00 7f ff e0 80 8f de0001 df00000001 dfffffffff 90 9f dc0001 ddffffffff a0 bf d901 daffff dbffffffff
c400 c5ffff c6ffffffff cc00 cdffff ceffffffff cfffffffffffffffff d080 d18000 d280000000 d38000000000000000
ca7fc00000 cb7ff0000000000000 cb7ff8000000000000 d4ff00 d7ff0000000000000000 c70cff c80000ff c9ffffffff01
"""
HEADS = tuple(bytes.fromhex(head) for head in _HEADS.split())
"""The beginnings of MessagePack values, the largest claims among them."""

SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 127, 128, 255, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63),
    0.0, -0.0, 1.5, float("inf"), "", "a", "GPU", "cpu", "DISK", "CPU_TIER2", "TAPE", "EXTERNAL", "full_attention",
    "mla_attention", "sliding_window", "mamba", "BlockStored", "BlockRemoved", "AllBlocksCleared", "type",
    "block_hashes", "\u65e5\u672c", "a" * 64, "g" * 64, b"", b"x", b"12345678", b"y" * 32, [], {}, [None], [1, 2],
    [["img", 0]], {"type": "BlockStored"},
)  # fmt: skip


def damaged_bytes(rng: Random, payload: bytes) -> bytes:
    """A few bytes changed, added, taken away, doubled, or the end cut off."""
    data = bytearray(payload)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((0, 1, 1, 2, 4, 8, 30)))
        match rng.randrange(8):
            case 0:
                data[at:end] = b""
            case 1:
                data[at:end] = rng.randbytes(end - at)
            case 2:
                data[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
            case 3:
                data[at:end] = rng.choice(HEADS)
            case 4:
                data[at:at] = rng.choice(HEADS)
            case 5:
                data[at:at] = data[at:end]
            case 6:
                other = rng.choice(PAYLOADS)
                start = rng.randrange(len(other))
                data[at:end] = other[start : start + rng.choice((1, 4, 16, 64))]
            case _:
                if at < len(data):
                    data[at] ^= 1 << rng.randrange(8)
    if rng.randrange(8) == 0:
        del data[rng.randrange(len(data) + 1) :]
    return bytes(data)


def damaged_value(rng: Random, value: Any, depth: int = 0) -> Any:
    """One place of a decoded value replaced, doubled, moved or taken away."""
    if depth and rng.randrange(6) == 0:
        return rng.choice(SCALARS)
    if isinstance(value, list) and value:
        copy = list(value)
        at = rng.randrange(len(copy))
        match rng.randrange(8):
            case 0:
                del copy[at]
            case 1:
                copy.insert(at, rng.choice(SCALARS))
            case 2:
                copy.insert(at, copy[at])
            case 3:
                other = rng.randrange(len(copy))
                copy[at], copy[other] = copy[other], copy[at]
            case _:
                copy[at] = damaged_value(rng, copy[at], depth + 1)
        return copy
    if isinstance(value, dict) and value:
        fields = dict(value)
        key = rng.choice(sorted(fields, key=repr))
        match rng.randrange(6):
            case 0:
                del fields[key]
            case 1:
                fields[rng.choice(("type", "medium", "group_idx", "future", "extra_keys"))] = rng.choice(SCALARS)
            case _:
                fields[key] = damaged_value(rng, fields[key], depth + 1)
        return fields
    return rng.choice(SCALARS) if depth else value


def damaged_payload(rng: Random) -> bytes:
    """A captured payload, changed as a value, as bytes, or both."""
    payload = rng.choice(PAYLOADS)
    if rng.randrange(2):
        try:
            value = msgspec.msgpack.decode(payload, strict=False)
        except (msgspec.MsgspecError, ValueError):
            return damaged_bytes(rng, payload)
        for _ in range(rng.choice((1, 1, 2, 4))):
            value = damaged_value(rng, value)
        payload = msgspec.msgpack.encode(value)
        if rng.randrange(4):
            return payload
    return damaged_bytes(rng, payload)

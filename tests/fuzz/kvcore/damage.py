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
    """A captured payload, changed as a value (mostly within its events) or as bytes."""
    payload = rng.choice(PAYLOADS)
    if rng.randrange(4) == 0:
        return damaged_bytes(rng, payload)
    try:
        value = msgspec.msgpack.decode(payload, strict=False)
    except (msgspec.MsgspecError, ValueError):
        return damaged_bytes(rng, payload)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        events = value[1] if isinstance(value, list) and len(value) > 1 else None
        if isinstance(events, list) and events and rng.randrange(10):
            at = rng.randrange(len(events))
            events[at] = damaged_value(rng, events[at], 0 if rng.randrange(20) else 1)
        else:
            value = damaged_value(rng, value)
    payload = msgspec.msgpack.encode(value)
    return damaged_bytes(rng, payload) if rng.randrange(10) == 0 else payload


_WAITING: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hashes", ([], [-1], [2**64 - 1] * 3, [0, 1])),
    ("tokens", (b"", b"abc", b"x" * 16, bytes(48))),
    ("parent", (None, -1, 2**64 - 1, 0)),
    ("block_size", (0, -1, 2**40, 4)),
    ("eagle", (True, False)),
    ("misaligned", (True, False)),
    ("tier", (0, 3, 4, -1)),
    ("mm", ({0: [-1]}, {-1: [1]}, {2**40: [2**64 - 1]}, {0: [1, 2]})),
    ("adapter", ("", "x", None)),
    ("group", (-1, 2**64 - 1, None)),
)
"""What may stand in an event that waits, and what may not."""


def damaged_dump(rng: Random, dump: bytes) -> bytes:
    """A dump with bytes of its columns changed, columns exchanged or cut, or any damage at all."""
    if rng.randrange(3) == 0:
        return damaged_bytes(rng, dump)
    value = msgspec.msgpack.decode(dump)
    groups = [group for rank in value[1] for group in rank["groups"].values()]
    if not groups or rng.randrange(10) == 0:
        return msgspec.msgpack.encode(damaged_value(rng, value))
    for _ in range(rng.choice((1, 1, 2, 4))):
        group = rng.choice(groups)
        name = rng.choice((*sorted(group), "waiting", "waiting"))
        column = group[name]
        if isinstance(column, bytes) and column and rng.randrange(8):
            changed = bytearray(column)
            at = rng.randrange(len(changed))
            if rng.randrange(2):
                changed[at] = rng.randrange(256)
            else:
                other = rng.randrange(len(changed)) // 8 * 8
                changed[at // 8 * 8 : at // 8 * 8 + 8] = changed[other : other + 8]
            group[name] = bytes(changed)
        elif isinstance(column, list) and column and isinstance(event := rng.choice(column), dict):
            field, values = rng.choice(_WAITING)
            event[field] = rng.choice(values)
        else:
            group[name] = rng.choice((damaged_value(rng, column, 1), rng.choice(groups)[name]))
    return msgspec.msgpack.encode(value)

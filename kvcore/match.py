"""Matching a chain against presence masks: how far each bit reaches, and how much of that lies in which tier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, groupby
from typing import TypeVar

T = TypeVar("T")

Reach = list[tuple[int, int]]
"""(mask, blocks): these bits reach exactly so far."""

_FLAGS = bytes.maketrans(b"01", b"\0\1")


def bits(mask: int) -> Iterator[int]:
    """Positions of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def select(items: Sequence[T], mask: int) -> Iterator[T]:
    """The items whose place has its bit set: like `bits`, but at C speed, for masks with many."""
    return compress(items, f"{mask:b}"[::-1].encode().translate(_FLAGS))


def reach_without_holes(presence: Mapping[int, int], chain: Sequence[int], mask: int) -> Reach:
    """Reach of bits that are present at position 0 and whose presence along any chain is a prefix.

    Divide and conquer: a few lookups per distinct reach instead of one per block.
    """
    reach: Reach = []
    last = len(chain) - 1
    whole = presence.get(chain[last], 0) & mask
    if whole:
        reach.append((whole, last + 1))
        mask &= ~whole
    pending = [(0, last, mask)] if mask else []
    while pending:
        low, high, mask = pending.pop()  # present at low, absent at high
        while high - low > 1:
            middle = (low + high) >> 1
            there = presence.get(chain[middle], 0) & mask
            if there == mask:
                low = middle
            elif there:
                pending.append((middle, high, there))
                mask &= ~there
                high = middle
            else:
                high = middle
        reach.append((mask, high))
    return reach


def reach_exact(presence: Mapping[int, int], chain: Sequence[int], mask: int) -> Reach:
    """Reach of any bits that are present at position 0, one lookup per block."""
    reach: Reach = []
    for position, own in enumerate(chain):
        there = presence.get(own, 0) & mask
        if there != mask:
            reach.append((mask & ~there, position))
            mask = there
            if not mask:
                return reach
    reach.append((mask, len(chain)))
    return reach


def blocks_per_bit(table: Mapping[int, int], chain: Sequence[int], reaches: Mapping[int, int]) -> dict[int, int]:
    """How many of its first ``reaches[bit]`` positions ``table`` holds, per bit; bits without any are left out."""
    wanted = 0
    for bit in reaches:
        wanted |= 1 << bit
    counts: dict[int, int] = {}
    position = 0
    masks = map(table.get, chain[: max(reaches.values(), default=0)])
    for mask, run in groupby(masks):
        start, position = position, position + sum(1 for _ in run)
        for bit in bits((mask or 0) & wanted):
            blocks = min(position, reaches[bit]) - start
            if blocks > 0:
                counts[bit] = counts.get(bit, 0) + blocks
    return counts

"""Batches in parts: put together in order, thrown away and counted otherwise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.parts import MAX_OPEN_BYTES, MAX_PARTS, PartsAssembler
from schemas.kv import KvHeaders


def part(seq: int, number: int, parts: int, incarnation: str = "1.0", rank: int = 0) -> KvHeaders:
    return KvHeaders(worker="w", rank=rank, incarnation=incarnation, seq=seq, part=number, parts=parts)


def test_a_whole_batch_passes_through() -> None:
    """One part of one is the batch itself, the very object."""
    payload = b"batch"
    assert PartsAssembler().add(part(0, 0, 1), payload, 0.0) is payload


def test_parts_are_joined_in_order() -> None:
    """The batch comes out with its last part; two ranks do not disturb each other."""
    parts = PartsAssembler()
    assert parts.add(part(4, 0, 3), b"a", 0.0) is None
    assert parts.add(part(4, 0, 2, rank=1), b"x", 0.0) is None
    assert parts.add(part(4, 1, 3), b"b", 0.0) is None
    assert parts.add(part(4, 1, 2, rank=1), b"y", 0.0) == b"xy"
    assert parts.add(part(4, 2, 3), b"c", 0.0) == b"abc"
    assert parts.discarded == 0


def test_a_missing_part_discards_the_batch_once() -> None:
    """A hole, a change of sequence or incarnation, a whole batch in between: one batch lost, one counted."""
    for follower in (part(4, 2, 3), part(5, 0, 1), part(5, 0, 2), part(4, 1, 3, "2.0"), part(4, 1, 2)):
        parts = PartsAssembler()
        parts.add(part(4, 0, 3), b"a", 0.0)
        parts.add(follower, b"z", 0.0)
        assert parts.discarded == 1


def test_a_lost_start_is_counted_once() -> None:
    """Without part 0 the rest is nothing, and counts as one batch."""
    parts = PartsAssembler()
    assert parts.add(part(4, 1, 3), b"b", 0.0) is None
    assert parts.add(part(4, 2, 3), b"c", 0.0) is None
    assert parts.discarded == 1


def test_absurd_numbers_of_parts_are_refused() -> None:
    """A broken sender cannot make the indexer collect for ever."""
    parts = PartsAssembler()
    assert parts.add(part(4, 0, MAX_PARTS + 1), b"a", 0.0) is None
    assert parts.discarded == 1


def test_forgotten_worker_leaves_nothing() -> None:
    """After `forget` a late part finds no start."""
    parts = PartsAssembler()
    parts.add(part(4, 0, 2), b"a", 0.0)
    parts.forget("w")
    assert parts.add(part(4, 1, 2), b"b", 0.0) is None


@given(
    batches=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    lost=st.sets(st.integers(0, 31), max_size=6),
)
def test_what_comes_out_was_sent_whole(batches: list[int], lost: set[int]) -> None:
    """Whatever messages are lost, only complete batches come out, each as it was sent."""
    parts = PartsAssembler()
    place = 0
    out = []
    expected = []
    for seq, count in enumerate(batches):
        whole = True
        for number in range(count):
            if place in lost:
                whole = False
            elif (joined := parts.add(part(seq, number, count), bytes([seq, number]), 0.0)) is not None:
                out.append(joined)
            place += 1
        if whole:
            expected.append(b"".join(bytes([seq, number]) for number in range(count)))
    assert out == expected


@pytest.mark.long
def test_batches_that_are_never_completed_are_bounded() -> None:
    """Whoever starts batches and never ends them fills a bound; the oldest of them makes room."""
    parts = PartsAssembler()
    size = MAX_OPEN_BYTES // 8
    piece = bytes(size)
    for rank in range(20):
        assert parts.add(part(0, 0, 2, rank=rank), piece, 0.0) is None
        assert parts.open_bytes <= MAX_OPEN_BYTES
    assert parts.discarded == 13
    assert parts.add(part(0, 1, 2, rank=0), b"late", 0.0) is None
    assert parts.add(part(0, 1, 2, rank=19), b"end", 0.0) == piece + b"end"
    parts.forget("w")
    assert parts.open_bytes == 0


def test_a_batch_without_a_next_part_is_thrown_away_in_time() -> None:
    """Its bytes are not kept until somebody needs the room; one that goes on is kept."""
    parts = PartsAssembler()
    parts.add(part(0, 0, 3, rank=0), b"a", 0.0)
    parts.add(part(0, 0, 3, rank=1), b"a", 0.0)
    parts.add(part(0, 1, 3, rank=1), b"b", 8.0)
    parts.expire(5.0)
    assert parts.discarded == 1
    assert parts.add(part(0, 2, 3, rank=1), b"c", 9.0) == b"abc"
    assert parts.open_bytes == 0

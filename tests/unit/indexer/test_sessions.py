"""The session table: frontiers, parents, bounds."""

from __future__ import annotations

from schemas.session import SessionKey
from services.indexer.sessions import SessionTable

A, B, C = (SessionKey(family="dynamo", root=name) for name in "abc")


def chain(*hashes: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in hashes)


def test_frontier_is_the_last_block_asked_for() -> None:
    """The last question about a session sets its frontier and depth."""
    table = SessionTable(10, 1000)
    table.asked(A, "m", 16, chain(1, 2))
    table.asked(A, "m", 16, chain(1, 2, 0xFFFFFFFFFFFFFFFF))
    known = table.get(A)
    assert known is not None
    assert (known.frontier, known.depth, table.chain_bytes) == ("ffffffffffffffff", 3, 24)


def test_decisions_give_worker_and_parent() -> None:
    """A session known only from a decision has a worker and a parent, and no frontier."""
    table = SessionTable(10, 1000)
    table.placed(B, A, "m", "w1", 0)
    known = table.get(B)
    assert known is not None
    assert (known.frontier, known.parent, known.worker, known.rank) == (None, A, "w1", 0)
    table.placed(B, None, "m", "w2", 1)
    assert (known.parent, known.worker, known.rank) == (A, "w2", 1)


def test_block_to_sessions() -> None:
    """A shared block is found in every chain that has it, and only at block boundaries."""
    table = SessionTable(10, 1000)
    table.asked(A, "m", 16, chain(1, 2, 3))
    table.asked(B, "m", 16, chain(1, 2, 4))
    assert list(table.holding(2)) == [A, B]
    assert list(table.holding(4)) == [B]
    # 1 << 56 occurs in the bytes of chain(1, 2, ..) only across a block boundary.
    assert list(table.holding(1 << 56)) == []
    straddling = int.from_bytes(chain(1, 2)[1:9], "little")
    assert list(table.holding(straddling)) == []


def test_bounds_drop_the_least_recently_seen() -> None:
    """Neither the number of sessions nor the bytes of their chains grow beyond the bound."""
    table = SessionTable(2, 1000)
    table.asked(A, "m", 16, chain(1))
    table.asked(B, "m", 16, chain(2))
    table.asked(A, "m", 16, chain(1, 3))
    table.asked(C, "m", 16, chain(4))
    assert table.get(B) is None
    assert (len(table), table.evicted, table.chain_bytes) == (2, 1, 24)
    small = SessionTable(10, 16)
    small.asked(A, "m", 16, chain(1))
    small.asked(B, "m", 16, chain(1, 2))
    assert small.get(A) is None
    assert small.chain_bytes == 16

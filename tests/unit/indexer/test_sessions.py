"""The session table: frontiers, parents, bounds."""

from __future__ import annotations

from schemas.index import ChainUnit
from schemas.placed import Placed
from schemas.session import SessionKey
from services.indexer.sessions import SessionTable

A, B, C = (SessionKey(family="dynamo", root=name) for name in "abc")
NAMED = len("default" + "a" + "m" + "w")
"""What a session weighs besides its chain."""


def chain(*hashes: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in hashes)


def place(
    table: SessionTable,
    session: SessionKey | None,
    blocks: bytes = b"",
    parent: SessionKey | None = None,
    worker: str = "w",
    rank: int = 0,
    unit: ChainUnit = "tokens",
) -> None:
    table.placed(
        Placed(
            source="admission-1",
            epoch=1,
            seq=0,
            at_ms=0,
            request_id="r",
            model="m",
            worker=worker,
            rank=rank,
            session=session,
            parent=parent,
            unit=unit,
            block_size=16,
            chain=blocks,
        )
    )


def test_frontier_is_the_last_block_placed() -> None:
    """The last turn with a chain sets frontier and depth; a later one without, or with half a hash, does not."""
    table = SessionTable(10, 1000)
    place(table, A, chain(1, 2))
    place(table, A, chain(1, 2, 0xFFFFFFFFFFFFFFFF), unit="text")
    place(table, A)
    place(table, A, b"123")
    known = table.get(A)
    assert known is not None
    assert (known.frontier, known.depth, known.unit, table.bytes) == ("ffffffffffffffff", 3, "text", NAMED + 24)


def test_side_requests_are_nobodys() -> None:
    """What does not move a session names none, and leaves no trace."""
    table = SessionTable(10, 1000)
    place(table, None, chain(1))
    assert (len(table), table.bytes) == (0, 0)


def test_worker_and_parent() -> None:
    """A session whose turns had no chain has a worker and a parent, and no frontier; a parent once named stays."""
    table = SessionTable(10, 1000)
    place(table, B, parent=A, worker="w1")
    known = table.get(B)
    assert known is not None
    assert (known.frontier, known.parent, known.worker, known.rank) == (None, A, "w1", 0)
    place(table, B, worker="w2", rank=1)
    assert (known.parent, known.worker, known.rank) == (A, "w2", 1)


def test_block_to_sessions() -> None:
    """A shared block is found in every chain that has it, and only at block boundaries."""
    table = SessionTable(10, 1000)
    place(table, A, chain(1, 2, 3))
    place(table, B, chain(1, 2, 4))
    assert list(table.holding(2)) == [A, B]
    assert list(table.holding(4)) == [B]
    # 1 << 56 occurs in the bytes of chain(1, 2, ..) only across a block boundary.
    assert list(table.holding(1 << 56)) == []
    straddling = int.from_bytes(chain(1, 2)[1:9], "little")
    assert list(table.holding(straddling)) == []


def test_bounds_drop_the_least_recently_seen() -> None:
    """Neither the number of sessions nor the bytes of their chains grow beyond the bound."""
    table = SessionTable(2, 1000)
    place(table, A, chain(1))
    place(table, B, chain(2))
    place(table, A, chain(1, 3))
    place(table, C, chain(4))
    assert table.get(B) is None
    assert (len(table), table.evicted, table.bytes) == (2, 1, 2 * NAMED + 24)
    small = SessionTable(10, 2 * NAMED + 16)
    place(small, A, chain(1))
    place(small, B, chain(1, 2))
    assert small.get(A) is None
    assert small.bytes == NAMED + 16


def test_long_names_count() -> None:
    """Ids are the client's, and a header may have thousands of characters: they are in the bound, a parent's too."""
    table = SessionTable(1000, 100_000)
    for number in range(100):
        place(table, SessionKey(root=f"{number:05}" * 2_000), parent=SessionKey(root=f"{number:05}" * 2_000))
    assert len(table) == 4
    assert table.bytes <= 100_000
    for number in range(20):
        place(table, SessionKey(root=str(number)), parent=A if number % 2 else None)
        place(table, SessionKey(root=str(number)), chain(*range(number)), worker="another")
    assert table.bytes == sum(known.size for known in table._sessions.values())

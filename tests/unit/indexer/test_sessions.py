"""What an indexer knows of sessions: frontiers, parents, bounds. The index itself: tests/unit/kvcore."""

from __future__ import annotations

from schemas.index import ChainUnit
from schemas.placed import Placed
from schemas.session import SessionKey
from services.indexer.sessions import ChainPool, Named, SessionTable

A, B, C = (SessionKey(family="dynamo", root=name) for name in "abc")
NAMED = len("default" + "a")
"""What a session's name weighs."""


def chain(*hashes: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in hashes)


def place(
    table: SessionTable,
    session: SessionKey | None,
    blocks: bytes = b"",
    parent: SessionKey | None = None,
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
            worker="w",
            rank=0,
            session=session,
            parent=parent,
            unit=unit,
            block_size=16,
            chain=blocks,
        )
    )


def test_frontier_is_the_last_block_placed() -> None:
    """The last turn with a chain sets frontier and depth; a later one without, or with half a hash, does not."""
    table = SessionTable(10, 1000, 1000)
    place(table, A, chain(1, 2))
    place(table, A, chain(1, 2, 0xFFFFFFFFFFFFFFFF), unit="text")
    place(table, A)
    place(table, A, b"123")
    known = table.get(A)
    assert known is not None
    prefix, pool = known
    assert (prefix.frontier, prefix.depth, pool) == (0xFFFFFFFFFFFFFFFF, 3, ChainPool("m", 16, "text"))


def test_side_requests_are_nobodys() -> None:
    """What does not move a session names none, and leaves no trace."""
    table = SessionTable(10, 1000, 1000)
    place(table, None, chain(1))
    assert (len(table), table.bytes) == (0, 0)


def test_parents_stay() -> None:
    """A session whose turns had no chain has a parent and no frontier; a parent once named stays, and knows it."""
    table = SessionTable(10, 1000, 1000)
    place(table, B, parent=A)
    place(table, B)
    known = table.get(B)
    assert known is not None
    prefix, pool = known
    assert (prefix.frontier, prefix.parent, pool) == (None, A, ChainPool())
    assert list(table.index.forked(A)) == [B]


def test_bounds_drop_the_least_recently_seen() -> None:
    """Neither the number of sessions nor their distinct blocks grow beyond the bound; an end is seen too."""
    table = SessionTable(2, 1000, 1000)
    place(table, A, chain(1))
    place(table, B, chain(2))
    table.ended(A)
    place(table, C, chain(4))
    assert table.get(B) is None
    assert (len(table), table.evicted, table.bytes) == (2, 1, 2 * NAMED)
    small = SessionTable(10, 3, 1000)
    place(small, A, chain(1, 2))
    place(small, B, chain(1, 3))
    assert (len(small), small.index.stats().blocks) == (2, 3)
    place(small, C, chain(5))
    assert small.get(A) is None
    assert (small.index.stats().blocks, small.bytes) == (3, 2 * NAMED)


def test_long_names_count() -> None:
    """Ids are the client's, and a header may have thousands of characters: they are in the bound, a parent's too."""
    table = SessionTable(1000, 1000, 100_000)
    for number in range(100):
        place(table, SessionKey(root=f"{number:05}" * 2_000), parent=SessionKey(root=f"{number:05}" * 2_000))
    assert len(table) == 4
    assert table.bytes <= 100_000
    assert table.evicted == 96


def test_what_is_not_named_is_said() -> None:
    """An answer of bounded size says when there is more."""
    assert Named.of(iter([A, B, C]), 2) == Named((A, B), True)
    assert Named.of(iter([A, B]), 2) == Named((A, B), False)


def test_other_tenants_are_not_named() -> None:
    """Who has the same blocks is nobody else's business; and of very many others, not all are looked at."""
    other = SessionKey(tenant="other", root="o")
    assert Named.of(iter([other, A, other, B]), 2, "default") == Named((A, B), False)
    assert Named.of(iter([other] * 30), 2, "default") == Named((), True)


def test_an_engines_id_is_one_sessions_or_nobodys() -> None:
    """Two families' sessions of one id are told apart by nothing that an engine says, also when a third comes after one
    has gone; another tenant's id is another one."""
    table = SessionTable(2, 1000, 1000)
    ours, same, more = (SessionKey(family=family, root="a") for family in ("dynamo", "codex", "pi"))
    theirs = SessionKey(family="dynamo", root="a", tenant="b")
    place(table, ours)
    place(table, theirs)
    assert (table.named("a"), table.named("b/a")) == (ours, theirs)
    place(table, SessionKey(family="dynamo", root="b/a"))
    assert (table.named("b/a"), table.named("default/b/a")) == (theirs, SessionKey(family="dynamo", root="b/a"))
    place(table, ours)
    place(table, same)
    assert table.named("a") is None
    place(table, more)
    assert (len(table), table.named("a")) == (2, None)
    place(table, B)
    place(table, C)
    place(table, ours)
    assert table.named("a") == ours

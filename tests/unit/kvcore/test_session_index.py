"""The session-prefix index against a naive model: one list of blocks a session, and every answer by looking at all."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcore.errors import HashesError
from kvcore.hashing import chain_of, pack_chain, unpack_chain
from kvcore.session_index import SessionIndex, SessionLimits

POOLS = ("p", "q")
SESSIONS = tuple("abcdef")
MAX_SESSIONS, MAX_BLOCKS = 5, 20


def chain(*locals_: int) -> bytes:
    """The chain over these local hashes."""
    return pack_chain(chain_of(list(locals_), None))


@dataclass
class Naive:
    """Sessions in the order in which they were placed, each with its pool and its whole chain."""

    sessions: dict[str, tuple[Hashable | None, tuple[int, ...]]] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)
    evicted: int = 0

    def place(self, session: str, pool: str, blocks: tuple[int, ...], parent: str | None) -> None:
        old = self.sessions.pop(session, (None, ()))
        self.sessions[session] = (pool, blocks) if blocks else old
        if parent is not None and parent != session:
            self.parents[session] = parent
        while len(self.sessions) > MAX_SESSIONS or (self.blocks > MAX_BLOCKS and len(self.sessions) > 1):
            self.forget(next(iter(self.sessions)))
            self.evicted += 1

    def forget(self, session: str) -> None:
        self.sessions.pop(session, None)
        self.parents.pop(session, None)

    @property
    def blocks(self) -> int:
        return len({(pool, block) for pool, blocks in self.sessions.values() for block in blocks})

    def having(self, block: int) -> set[str]:
        return {name for name, (_, blocks) in self.sessions.items() if block in blocks}

    def common(self, one: str, other: str) -> int:
        pool, blocks = self.sessions[one]
        other_pool, others = self.sessions[other]
        if pool != other_pool:
            return 0
        return sum(mine == theirs for mine, theirs in zip(blocks, others, strict=False))

    def unique(self, session: str) -> int:
        shared = max((self.common(session, other) for other in self.sessions if other != session), default=0)
        return len(self.sessions[session][1]) - shared


class IndexMachine(RuleBasedStateMachine):
    """Placing, forking, rewriting and forgetting in any order; after each step everything is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.index: SessionIndex[str] = SessionIndex(SessionLimits(MAX_SESSIONS, MAX_BLOCKS))
        self.naive = Naive()

    @rule(
        session=st.sampled_from(SESSIONS),
        pool=st.sampled_from(POOLS),
        blocks=st.lists(st.integers(0, 2), max_size=9),
        parent=st.none() | st.sampled_from(SESSIONS),
    )
    def place(self, session: str, pool: str, blocks: list[int], parent: str | None) -> None:
        packed = chain(*blocks)
        before = set(self.naive.sessions) | {session}
        self.naive.place(session, pool, unpack_chain(packed), parent)
        gone = self.index.place(session, pool, packed, parent)
        assert set(gone) == before - set(self.naive.sessions)

    @rule(session=st.sampled_from(SESSIONS), other=st.sampled_from(SESSIONS), more=st.lists(st.integers(0, 2)))
    def go_on_from(self, session: str, other: str, more: list[int]) -> None:
        """A next turn (of itself) or a fork (of another)."""
        known = self.naive.sessions.get(other)
        if known is None or not known[1]:
            return
        blocks = chain_of([99, *more], known[1][-1])
        packed = pack_chain([*known[1], *blocks])
        self.naive.place(session, str(known[0]), unpack_chain(packed), None)
        self.index.place(session, str(known[0]), packed)

    @rule(session=st.sampled_from(SESSIONS), answer=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def answer(self, session: str, answer: list[int]) -> None:
        """An engine stored what it answered; for that nobody has to go."""
        pool, blocks = self.naive.sessions.get(session, (None, ()))
        if not blocks:
            return
        longer = (*blocks, *chain_of(answer, blocks[-1]))
        fits = self.naive.blocks + len(answer) <= MAX_BLOCKS
        assert self.index.extend(session, pool, pack_chain(longer)) == fits
        if fits:
            self.naive.sessions[session] = (pool, longer)
        assert not self.index.extend(session, pool, pack_chain(blocks))
        assert not self.index.extend(session, "another pool", pack_chain((*longer, 1)))

    @rule(session=st.sampled_from(SESSIONS))
    def forget(self, session: str) -> None:
        self.naive.forget(session)
        self.index.forget(session)

    @invariant()
    def all_answers_agree(self) -> None:
        stats = self.index.stats()
        assert (stats.sessions, stats.blocks, stats.evicted) == (
            len(self.naive.sessions), self.naive.blocks, self.naive.evicted
        )  # fmt: skip
        assert stats.contradictions == 0
        for name, (pool, blocks) in self.naive.sessions.items():
            found = self.index.get(name)
            assert found is not None
            assert (found.depth, found.frontier) == (len(blocks), blocks[-1] if blocks else None)
            assert found.pool == (pool if blocks else None)
            assert found.unique == self.naive.unique(name)
            assert found.parent == self.naive.parents.get(name)
            assert self.index.chain(name) == pack_chain(blocks)
            assert set(self.index.forked(name)) == {
                child for child, parent in self.naive.parents.items() if parent == name
            }
            sharing = [self.naive.common(name, other) for other in self.index.sharing(name)]
            assert sharing == sorted(sharing, reverse=True)
            assert len(sharing) == sum(self.naive.common(name, other) > 0 for other in self.naive.sessions) - bool(
                blocks
            )
            for block in blocks:
                assert set(self.index.having(block)) == self.naive.having(block)

    @invariant()
    def ends_agree(self) -> None:
        for name, (pool, blocks) in self.naive.sessions.items():
            if not blocks:
                continue
            asked = pack_chain([*blocks, *chain_of([7], blocks[-1])])
            known, ends = self.index.ends_on(pool, asked)
            assert known == len(blocks)
            expected: dict[int, set[str]] = {}
            for other, (other_pool, others) in self.naive.sessions.items():
                if other_pool == pool and others and others == blocks[: len(others)]:
                    expected.setdefault(len(others), set()).add(other)
            assert [(depth, set(names)) for depth, names in ends] == sorted(expected.items(), reverse=True)
            beyond = set(self.index.beyond(pool, asked, 100))
            assert beyond == {other for other in self.naive.sessions if self.naive.common(name, other) == len(blocks)}


IndexMachine.TestCase.settings = settings(stateful_step_count=25)
TestIndexMachine = pytest.mark.long(IndexMachine.TestCase)


def test_pools_never_meet() -> None:
    """The same hashes in two pools are two things: who shares, and what is known of a chain, is said per pool."""
    index: SessionIndex[str] = SessionIndex()
    index.place("a", ("m", 16), chain(1, 2))
    index.place("b", ("m", 32), chain(1, 2))
    assert list(index.sharing("a")) == []
    assert index.stats().blocks == 4
    assert index.ends_on(("m", 64), chain(1, 2)) == (0, [])
    for name in ("x", "y", "z"):
        index.place(name, ("m", 64), chain(1, 2))
    assert index.ends_on(("m", 64), chain(1, 2, 3), 2) == (2, [(2, ["x", "y"])])


def test_an_expected_prompt_grows_as_the_last_ones_did() -> None:
    """Two steps of 2 and 4 blocks: the newest counts half. A session with one prompt goes by its pool's steps; a
    rewritten history teaches nothing."""
    index: SessionIndex[str] = SessionIndex()
    index.place("a", "p", chain(1, 2))
    first = index.get("a")
    assert first is not None
    assert first.expected is None
    index.place("a", "p", chain(1, 2, 3, 4))
    index.place("a", "p", chain(1, 2, 3, 4, 5, 6, 7, 8))
    index.place("b", "p", chain(9))
    grown, new = index.get("a"), index.get("b")
    assert grown is not None
    assert new is not None
    assert (grown.expected, new.expected) == (8 + 3, 1 + 2)
    index.place("a", "p", chain(1, 5))
    rewritten = index.get("a")
    assert rewritten is not None
    assert rewritten.expected == 2 + 3


def test_a_chain_that_contradicts_what_is_known_changes_nothing() -> None:
    """A block behind another prefix, a block twice: no hash function makes such chains. Counted; the rest stands."""
    index: SessionIndex[str] = SessionIndex()
    index.place("a", "p", chain(1, 2, 3))
    one, two, three = unpack_chain(chain(1, 2, 3))
    for number, made_up in enumerate(([two], [77, two], [one, three], [one, 77, 77], [77, 78, two, three]), start=1):
        index.place("b", "p", pack_chain(made_up))
        assert index.stats().contradictions == number
        assert index.chain("b") == b""
    assert index.chain("a") == chain(1, 2, 3)
    assert list(index.having(two)) == ["a"]
    index.forget("b")
    index.forget("a")
    assert index.stats().blocks == 0


def test_half_a_hash_is_refused() -> None:
    with pytest.raises(HashesError, match="whole u64"):
        SessionIndex[str]().place("a", "p", b"1234567")


@pytest.mark.long
@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=12))
def test_when_all_have_gone_nothing_is_left(histories: list[list[int]]) -> None:
    """Bounded memory: what nobody has any more is forgotten, whatever the order."""
    index: SessionIndex[int] = SessionIndex()
    for session, blocks in enumerate(histories):
        index.place(session, "p", chain(*blocks), parent=session - 1)
    for session in range(len(histories)):
        index.forget(session)
    stats = index.stats()
    assert (stats.sessions, stats.blocks, stats.pools) == (0, 0, 0)
    assert list(index.forked(0)) == []

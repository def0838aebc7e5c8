"""The bridge's own index, dumped while the engine goes on: one consistent cut, nothing lost, bounded waiting."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import dump as kvcore_dump
from kvcore.events import Batch, decode_batch
from kvcore.index import IndexLimits, PrefixIndex
from kvcore.residency import ApplyResult
from services.bridge.own_index import OwnIndex

BLOCK = 4

# (rank, block): store; (rank, -block - 1): remove; (rank, None): clear the rank
Change = tuple[int, int | None]
changes = st.lists(st.tuples(st.integers(0, 1), st.one_of(st.integers(-12, 11), st.none())), max_size=40)


def batch_of(number: int) -> Batch:
    if number < 0:
        event: list[object] = ["BlockRemoved", [-number]]
    else:
        event = ["BlockStored", [number + 1], None, [number * BLOCK + place for place in range(BLOCK)], BLOCK]
    return decode_batch(msgspec.msgpack.encode([1.0, [event], 0]))


class Engine:
    """Tells an own index and a plain one the same; ``seq``: how many changes were told."""

    def __init__(self, waiting_limit: int = 1000) -> None:
        self.seq = 0
        self.results: list[ApplyResult] = []
        self.own = OwnIndex("w", IndexLimits(), waiting_limit, lambda _, result: self.results.append(result))
        self.plain = PrefixIndex()

    def tell(self, change: Change) -> None:
        self.seq += 1
        rank, number = change
        if number is None:
            self.own.clear(rank)
            self.plain.clear_rank("w", rank)
        else:
            self.own.apply(rank, batch_of(number))
            self.plain.apply("w", rank, batch_of(number))


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one block (which the pure-Python twin can be told) and two batches, so that small dumps take many."""
    monkeypatch.setattr("services.bridge.own_index.PrefixIndex", PrefixIndex)
    monkeypatch.setattr(kvcore_dump, "SLICE_BLOCKS", 1)
    monkeypatch.setattr("services.bridge.own_index.APPLIED_AT_ONCE", 2)


@pytest.mark.long
@given(before=changes, live=changes, pace=st.integers(0, 4), limit=st.sampled_from([1, 3, 1000]))
def test_a_dump_is_one_cut(before: list[Change], live: list[Change], pace: int, limit: int) -> None:
    """A dump with live batches between its steps is the dump of the index at its marks, or is given up because too
    many waited; afterwards the index is as if it had never been dumped."""
    engine = Engine(limit)
    for change in before:
        engine.tell(change)
    steps = engine.own.dump(lambda: engine.seq)
    news = iter(live)
    contents = {engine.seq: engine.plain.content()}
    try:
        while True:
            next(steps)
            for change in [change for _, change in zip(range(pace), news, strict=False)]:
                engine.tell(change)
                contents[engine.seq] = engine.plain.content()
                assert engine.own.waiting <= limit
    except StopIteration as end:
        made = end.value
    if made is None:
        assert (engine.own.given_up, limit < 1000) == (1, True)
    else:
        restored = PrefixIndex()
        restored.load(made[0])
        expected = contents[made[1]]
        assert {rank: held for rank, held in restored.content().items() if held} == {
            rank: held for rank, held in expected.items() if held
        }
    assert engine.own.waiting == 0
    assert engine.own.index.content() == engine.plain.content()


def test_changes_wait_while_a_dump_is_made() -> None:
    """They are applied at its end, and what they did is told then; a cleared rank's own need not be applied at all."""
    engine = Engine()
    for number in range(4):
        engine.tell((0, number))
    steps = engine.own.dump(lambda: engine.seq)
    next(steps)
    for number in range(4, 7):
        engine.tell((0, number))
    engine.tell((1, 0))
    assert (engine.own.waiting, len(engine.results)) == (4, 4)
    engine.tell((0, None))
    assert engine.own.waiting == 2
    for _ in steps:
        pass
    assert (engine.own.waiting, len(engine.results)) == (0, 5)
    assert engine.own.index.content() == engine.plain.content()


def test_other_ranks_end_a_dump() -> None:
    """The engine restarted with other sources: what was half dumped belongs to nobody, and nothing of it waits."""
    engine = Engine()
    for number in range(4):
        engine.tell((0, number))
    steps = engine.own.dump(lambda: engine.seq)
    next(steps)
    engine.tell((0, 4))
    engine.own.forget()
    assert kvcore_dump.at_once(steps) is None
    assert (engine.own.waiting, engine.own.index.ranks(), engine.own.given_up) == (0, [], 1)
    engine.own.apply(0, batch_of(9))
    assert engine.own.index.resident("w", 0) == 1


def test_a_dump_that_nobody_waits_for_any_more() -> None:
    """Closed halfway: what waited is applied with the changes that follow, in order."""
    engine = Engine(waiting_limit=2)
    for number in range(4):
        engine.tell((0, number))
    steps = engine.own.dump(lambda: engine.seq)
    next(steps)
    engine.tell((0, 4))
    steps.close()
    engine.tell((0, -5))
    for _ in engine.own.dump(lambda: engine.seq):
        pass
    assert engine.own.index.content() == engine.plain.content()

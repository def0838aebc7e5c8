"""Parity of predicted and reported cached tokens, and sources that fall silent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.hashing import pack_chain
from replica.parity import MAX_ON_THEIR_WAY, Expectations, Expected, ParityRules, SourceParity, shared_blocks


def problem(parity: SourceParity) -> str | None:
    return parity.problem


def judged(parity: SourceParity, times: int, predicted: int, reported: int | None) -> None:
    """So many requests end, one between two heartbeats, until all of them count."""
    beats(parity, 1)
    for _ in range(times):
        parity.ended(predicted, reported)
        beats(parity, 1)
    beats(parity, 1)


def beats(parity: SourceParity, times: int) -> None:
    """Heartbeats a second apart, each with news."""
    for _ in range(times):
        second = int(max(0.0, parity.heard_at)) + 1
        parity.beat(second, float(second))


RULES = ParityRules(window=16, min_requests=4, silent_requests=5)


def test_a_wrong_prediction_alarms_and_heals() -> None:
    """User case A14: predicted 400, reported 0, persistently, raises the alarm; agreement ends it."""
    parity = SourceParity(RULES)
    judged(parity, 3, 400, 0)
    assert problem(parity) is None
    judged(parity, 1, 400, 0)
    assert problem(parity) == "parity"
    parity.event()
    judged(parity, 13, 400, 400)
    assert problem(parity) == "parity"
    judged(parity, 2, 400, 400)
    assert problem(parity) is None


def test_more_reported_than_predicted_alarms_too() -> None:
    """An index that has lost blocks is as wrong as one that invents them."""
    parity = SourceParity(RULES)
    judged(parity, 4, 0, 900)
    assert problem(parity) == "parity"


def test_small_differences_are_no_alarm() -> None:
    """A block more or less a request is the engine's rounding (the last block is always recomputed)."""
    parity = SourceParity(RULES)
    judged(parity, 20, 32, 16)
    assert problem(parity) is None


def test_requests_without_numbers_say_nothing_about_parity() -> None:
    """An engine that reports no cached tokens is not compared."""
    parity = SourceParity(RULES)
    judged(parity, 20, 4000, None)
    assert problem(parity) is None


def test_what_ends_counts_with_the_second_heartbeat_after_it() -> None:
    """The first may have left a bridge that died since; those that come in a burst are one."""
    parity = SourceParity(RULES)
    beats(parity, 1)
    for _ in range(8):
        parity.ended(0, 400)
    beats(parity, 1)
    for _ in range(9):
        parity.beat(2, 2.1)
    assert problem(parity) is None
    beats(parity, 1)
    assert problem(parity) == "parity"


@pytest.mark.parametrize("how", ["hole", "silence", "clock set back"])
def test_what_ended_while_nothing_was_told_does_not_count(how: str) -> None:
    """A hole that was found, or heartbeats that stayed away: the index was not whole, which is no disagreement."""
    parity = SourceParity(RULES)
    parity.beat(99, 99.0)
    parity.beat(100, 100.0)
    for _ in range(8):
        parity.ended(0, 400)
    after = {"hole": 101.0, "silence": 103.1, "clock set back": 40.0}[how]
    if how == "hole":
        parity.interrupted()
    for more in range(4):
        parity.beat(101 + more, after + more)
    assert problem(parity) is None


def test_silence_while_blocks_should_be_stored() -> None:
    """Requests with new full blocks, and a bridge that has forwarded nothing since, mean that events are off."""
    parity = SourceParity(RULES)
    parity.beat(3, 0.0)
    for _ in range(9):
        parity.stores(15, 16)
    for second in range(1, 4):
        parity.beat(3, float(second))
    assert problem(parity) is None
    for _ in range(5):
        parity.stores(100, 16)
    parity.beat(3, 4.0)
    assert problem(parity) is None
    parity.beat(3, 5.0)
    assert problem(parity) == "no_events"
    parity.event()
    assert problem(parity) is None


def test_events_that_are_still_on_their_way_are_no_silence() -> None:
    """A bridge that has forwarded batches is not silent although none has arrived; heartbeats in a burst are one."""
    parity = SourceParity(RULES)
    for second in range(10):
        parity.beat(second, float(second))
        for _ in range(5):
            parity.stores(100, 16)
        assert problem(parity) is None
    for _ in range(10):
        parity.beat(9, 9.1)
    assert problem(parity) is None
    for second in (10, 11):
        parity.beat(9, float(second))
    assert problem(parity) == "no_events"
    parity.beat(10, 12.0)
    assert problem(parity) is None


def test_a_restart_forgets() -> None:
    """A new incarnation is judged by its own requests."""
    parity = SourceParity(RULES)
    judged(parity, 6, 400, 0)
    parity.ended(400, 0)
    parity.restarted()
    assert problem(parity) is None
    judged(parity, 3, 400, 0)
    assert problem(parity) is None


@given(st.lists(st.integers(1, 3), max_size=12), st.lists(st.integers(1, 3), max_size=12), st.integers(0, 12))
def test_shared_blocks_are_counted_from_the_start(one: list[int], other: list[int], known: int) -> None:
    """As a naive count, and never below what is known already. Hashes stand for what is before them."""
    both = [[hash(tuple(blocks[: end + 1])) & (1 << 64) - 1 for end in range(len(blocks))] for blocks in (one, other)]
    naive = 0
    while naive < min(len(one), len(other)) and one[naive] == other[naive]:
        naive += 1
    known = min(known, naive)
    assert shared_blocks(pack_chain(both[0]), pack_chain(both[1]), known) == naive
    assert shared_blocks(pack_chain(both[0]), pack_chain(both[1]), naive + 3) == naive + 3


@pytest.mark.parametrize(
    ("reported", "judged_as"), [(0, 160), (160, 160), (200, 200), (320, 320), (400, 320), (100_000, 320)]
)
def test_whatever_its_siblings_may_have_computed_is_agreement(reported: int, judged_as: int) -> None:
    """The index said 10 blocks, siblings on their way share 20: reports from 160 to 320 tokens are right."""
    assert Expected("w", 0, 10, 20, 16).cached_tokens(1000, reported) == judged_as


def test_the_last_token_is_always_computed() -> None:
    """A prompt that is cached to its end loses its last block; without a block size there is no division."""
    assert Expected("w", 0, 10, 10, 16).cached_tokens(160, 0) == 144
    assert Expected("w", 0, 10, 10, 16).cached_tokens(161, 0) == 160
    assert Expected("w", 0, 10, 10, 0).cached_tokens(160, 50) == 0


def test_requests_on_their_way() -> None:
    """What a new one has in common with those before it that have not ended; bounded; a restart forgets them."""
    parity = SourceParity(RULES)
    assert parity.placed("a", pack_chain([1, 2, 3])) == 0
    assert parity.placed("b", pack_chain([1, 2, 4])) == 2
    parity.over("a")
    parity.over("never")
    assert parity.placed("c", pack_chain([1, 2, 3])) == 2
    assert parity.placed("d", pack_chain([7])) == 0
    for number in range(100):
        parity.placed(str(number), pack_chain([9]))
    assert len(parity.on_their_way) == MAX_ON_THEIR_WAY
    parity.restarted()
    assert parity.placed("e", pack_chain([9])) == 0


def test_expectations_are_bounded() -> None:
    """The oldest are forgotten, and then not judged."""
    expectations = Expectations(most=2)
    for name in "abc":
        expectations.placed(name, Expected("w", 0, 1, 1, 16))
    assert len(expectations) == 2
    assert expectations.over("a") is None
    assert expectations.over("b") is not None
    assert expectations.over("c") is not None
    assert len(expectations) == 0

"""Sorted containers against plain lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.admission.scheduling.ordered import OrderedKeys, OrderedSums

RANKS = st.integers(0, 40).map(float)
CHANGES = st.lists(st.tuples(st.booleans(), RANKS, st.integers(0, 1000)), max_size=400)


@given(CHANGES, st.integers(-1, 41))
def test_sums_are_those_of_all_entries(changes: list[tuple[bool, float, int]], rank: int) -> None:
    sums = OrderedSums()
    plain: dict[tuple[float, int], int] = {}
    for number, (is_added, at, value) in enumerate(changes):
        if is_added or not plain:
            sums.add((at, number), value)
            plain[at, number] = value
        else:
            key = min(plain, key=lambda key: abs(key[0] - at))
            sums.remove(key)
            del plain[key]
        assert sums.total == sum(plain.values())
        assert len(sums) == len(plain)
        assert sums.through(rank) == sum(value for key, value in plain.items() if key[0] <= rank)


@given(CHANGES)
def test_keys_stay_in_order(changes: list[tuple[bool, float, int]]) -> None:
    keys = OrderedKeys()
    plain: set[tuple[float, int]] = set()
    for number, (is_added, at, _) in enumerate(changes):
        if is_added or not plain:
            keys.add((at, number))
            plain.add((at, number))
        else:
            key = min(plain)
            assert keys.at(0) == key
            keys.remove(key)
            plain.remove(key)
        assert list(keys) == sorted(plain)


def test_what_is_not_there_cannot_be_removed() -> None:
    sums, keys = OrderedSums(), OrderedKeys()
    for _ in range(2):
        with pytest.raises(KeyError):
            sums.remove((1.0, 1))
        with pytest.raises(KeyError):
            keys.remove((1.0, 1))
        sums.add((1.0, 2), 5)
        keys.add((1.0, 2))
        sums.remove((1.0, 2))
        keys.remove((1.0, 2))
        sums.add((0.0, 0), 5)
        keys.add((0.0, 0))
        sums.remove((0.0, 0))
        keys.remove((0.0, 0))

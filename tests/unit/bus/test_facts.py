"""Numbers on facts: a source counts per family, a receiver finds what is missing."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.facts import FactNumbers, GapCounter, subject_family
from schemas.base import Fact


def fact(epoch: int, seq: int, source: str = "ingress-1") -> Fact:
    return Fact(source=source, epoch=epoch, seq=seq, at_ms=0)


@pytest.mark.parametrize(
    ("subject", "family"),
    [
        ("tg.v1.worker.state.w1", "worker.state"),
        ("tg.v1.request.end.model", "request.end"),
        ("tg.v1.session.opened.x", "session.opened"),
        ("tg.v1.index.source.w1.0", "index.source"),
        ("tg.v1.decision.w1", "decision"),
        ("tg.v1.hint.w1", "hint"),
        ("tg.v1.hint.result.w1", "hint.result"),
        ("tg.v1.hint.result", "hint"),
        ("tg.v1.kv.w1.0", "kv"),
    ],
)
def test_family(subject: str, family: str) -> None:
    """What one receiver subscribes to as a whole; a worker may be called ``result``."""
    assert subject_family(subject) == family


def test_numbers_start_at_zero_per_family() -> None:
    """Each family of a source counts by itself; times become Unix ms."""
    numbers = FactNumbers("ingress-1", 7)
    assert numbers.stamp("a", 1.5) == {"source": "ingress-1", "epoch": 7, "seq": 0, "at_ms": 1500}
    assert [numbers.stamp("a", 0)["seq"], numbers.stamp("b", 0)["seq"], numbers.stamp("a", 0)["seq"]] == [1, 0, 2]
    assert Fact(**numbers.stamp("a", 2.0)).seq == 3


def test_a_receiver_sees_gaps_repeats_and_restarts() -> None:
    """Joining late misses nothing; a gap counts once; old numbers are stale; a new epoch starts from zero."""
    gaps = GapCounter()
    seen = [gaps.see("a", fact(1, seq)) for seq in (5, 6, 9, 9, 7)]
    assert seen == [0, 0, 2, 0, 0]
    assert (gaps.missed["a"], gaps.stale["a"]) == (2, 2)
    assert gaps.see("a", fact(2, 0)) == 0
    assert gaps.see("a", fact(1, 10)) == 0
    assert gaps.see("a", fact(3, 4)) == 4
    assert gaps.see("b", fact(1, 3)) == 0
    assert gaps.see("a", fact(1, 3, "ingress-2")) == 0
    assert (gaps.missed["a"], gaps.stale["a"]) == (6, 3)


def test_the_number_of_sources_is_bounded() -> None:
    """The one heard longest ago is forgotten, and would join late again."""
    gaps = GapCounter(sources=2)
    for source in ("a", "b"):
        gaps.see("f", fact(1, 0, source))
    gaps.see("f", fact(1, 1, "a"))
    gaps.see("f", fact(1, 0, "c"))
    assert gaps.see("f", fact(1, 9, "b")) == 0
    assert gaps.see("f", fact(1, 9, "c")) == 8


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_missed_and_seen_add_up(lengths: list[int], random: object) -> None:
    """Whatever is lost on the way, what arrived and what was counted as missed make up what was sent since joining."""
    sent = [fact(epoch, seq) for epoch, length in enumerate(lengths) for seq in range(length)]
    arrived = [one for one in sent if random.random() < 0.6]  # type: ignore[attr-defined]
    gaps = GapCounter()
    for one in arrived:
        gaps.see("f", one)
    if arrived:
        first, last = sent.index(arrived[0]), sent.index(arrived[-1])
        # The tail of an epoch that ended unseen cannot be known.
        unknowable = 0
        for before, after in pairwise(arrived):
            if before.epoch != after.epoch:
                between = sent[sent.index(before) + 1 : sent.index(after)]
                unknowable += sum(one.epoch != after.epoch for one in between)
        assert len(arrived) + gaps.missed["f"] + unknowable == last - first + 1
        assert gaps.stale["f"] == 0

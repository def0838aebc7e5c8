"""Of two leaders the newer one counts."""

from __future__ import annotations

from services.ingress.leaders import REMEMBERED_S, Leaders


def test_the_newest_leader_that_was_heard_counts() -> None:
    """A deposed one's answers do not, however often it gives them, while the newer one is heard."""
    leaders = Leaders()
    assert leaders.counts(7, 0.0)
    assert leaders.counts(9, 1.0)
    assert not leaders.counts(7, 1.1)
    assert leaders.counts(9, 4.0)
    assert not leaders.counts(7, 1.0 + REMEMBERED_S)
    assert leaders.counts(9, 7.0)


def test_epochs_that_begin_anew_count_in_time() -> None:
    """The bus lost its store: nobody will ever have the old epoch again."""
    leaders = Leaders()
    assert leaders.counts(900, 0.0)
    assert not leaders.counts(1, 1.0)
    assert leaders.counts(1, REMEMBERED_S)
    assert leaders.counts(1, REMEMBERED_S + 0.1)

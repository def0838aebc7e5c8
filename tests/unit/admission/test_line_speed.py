"""When a refused client is told to come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.admission.line_speed import HALF_LIFE_S, LineSpeeds
from tests.unit.admission.build import ask, driven, end, held, in_flight, refused


def speeds(every_s: float, count: int) -> LineSpeeds:
    """A line that moves by one every so many seconds."""
    line = LineSpeeds(1, 60)
    for number in range(count):
        line.granted("m", number * every_s)
    return line


@pytest.mark.parametrize("every_s", [0.1, 0.5, 2.0])
def test_a_line_takes_as_long_as_it_moves(every_s: float) -> None:
    told = speeds(every_s, round(120 / every_s)).retry_after_s("m", 20)
    assert told == pytest.approx(max(1, 20 * every_s), rel=0.15, abs=1)


def test_without_a_grant_nobody_knows_and_a_line_that_stands_takes_longest() -> None:
    assert LineSpeeds(2, 60).retry_after_s("m", 1000) == 2
    line = speeds(0.1, 100)
    line.now = 10.0 + 40 * HALF_LIFE_S
    assert line.retry_after_s("m", 5) == 60


def test_many_who_are_refused_together_do_not_come_back_together() -> None:
    line = speeds(1.0, 100)
    told = [line.retry_after_s("m", 5) for _ in range(30)]
    assert told == sorted(told)
    assert len(set(told)) >= 20
    for number in range(100, 250):
        line.granted("m", float(number))
    assert line.retry_after_s("m", 5) <= 7  # and they are forgotten


def test_lines_of_other_models_do_not_count() -> None:
    line = speeds(0.1, 100)
    line.granted("slow", 0.0)
    line.now = 10.0
    assert (line.retry_after_s("m", 5), line.retry_after_s("slow", 50)) == (1, 60)


@given(st.lists(st.tuples(st.booleans(), st.floats(-5, 1e6), st.integers(0, 10**9)), max_size=30))
def test_it_is_never_more_or_less_than_it_may_be(steps: list[tuple[bool, float, int]]) -> None:
    """Whatever clocks do."""
    line = LineSpeeds(3, 45)
    for grants, now, waiting in steps:
        if grants:
            line.granted("m", now)
        else:
            line.now = now
            assert 3 <= line.retry_after_s("m", waiting) <= 45


def test_a_refused_turn_reads_how_long_the_line_will_take() -> None:
    """One turn ends every 4 s, two wait: a third comes back in about 8 to 12 s, not in 1."""
    core = driven(max_grants_per_rank=1, hold_queue_limit=2, hold_deadline_s=1000)
    core.workers("a")
    core.ask(ask("r0", "s0"))
    for number in range(1, 20):
        assert held(core.ask(ask(f"r{number}", f"s{number}")))
        for _ in range(4):
            core.state(in_flight(f"r{number - 1}", f"s{number - 1}", worker="a"))
            core.wait(1.0)
        core.end(end(f"r{number - 1}", f"s{number - 1}"))
    for number in range(20, 22):
        assert held(core.ask(ask(f"r{number}", f"s{number}")))
    full = refused(core.ask(ask("full", "full")))
    assert full.reason == "hold_queue_full"
    assert full.retry_after_s is not None
    assert 6 <= full.retry_after_s <= 14

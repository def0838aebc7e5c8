"""When a child that ended is started again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.process_group import START_S
from bus.restarts import GiveUp, History, Restart, RestartRules, Silence, became_ready, exited, started

RULES = RestartRules(first_delay_s=0.5, factor=2.0, max_delay_s=3.0, steady_s=10.0, max_exits=5)


def test_delays_grow_up_to_their_bound_then_it_is_a_crash_loop() -> None:
    """Half a second, doubled each time, at most three; the fifth exit in a row is the last."""
    history, delays, now = became_ready(History()), [], 100.0
    for _ in range(4):
        history = started(history, now)
        history, verdict = exited(history, 1, now + 1, RULES)
        assert isinstance(verdict, Restart)
        delays.append(verdict.delay_s)
    history, verdict = exited(started(history, now), -9, now + 1, RULES)
    assert delays == [0.5, 1.0, 2.0, 3.0]
    assert isinstance(verdict, GiveUp)
    assert verdict.reason == "crash_loop"
    assert history.restarts == 4


def test_one_that_is_never_given_up_may_fail_for_ever() -> None:
    """The delay stays at its bound, however many exits there were: its number does not grow beyond what there is."""
    history = History(started_at=0.0, was_ready=True, exits=5000)
    _, verdict = exited(history, 1, 1.0, RestartRules(max_exits=2**31))
    assert verdict == Restart(5.0)


def test_a_steady_run_is_forgiven() -> None:
    """A child that ran long enough starts afresh, however often it failed before."""
    history = History(started_at=0.0, was_ready=True, exits=4)
    history, verdict = exited(history, -9, 10.0, RULES)
    assert verdict == Restart(0.5)
    assert history.exits == 1


def test_a_wrong_setting_is_not_tried_again() -> None:
    """Exit code 2 means that restarting does not help, unless the same settings have worked before."""
    _, verdict = exited(started(History(), 0.0), 2, 0.5, RULES)
    assert isinstance(verdict, GiveUp)
    assert verdict.reason == "wrong_setting"
    _, verdict = exited(started(became_ready(History()), 0.0), 2, 0.5, RULES)
    assert verdict == Restart(0.5)


@pytest.mark.parametrize("length_s", [0.5, START_S])
def test_one_that_was_never_ready_gets_fewer_tries(length_s: float) -> None:
    """Whoever waits for a system to come up should not wait for a crash loop to end; nor is a start that hung until it
    was killed a steady run."""
    history, exits = History(), 0
    for _ in range(RULES.max_exits):
        history, verdict = exited(started(history, 0.0), 1, length_s, RULES)
        exits += 1
        if isinstance(verdict, GiveUp):
            break
    assert exits == RULES.first_exits


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from([0, 1, -9, -15])), max_size=40))
def test_it_gives_up_exactly_after_so_many_short_runs_in_a_row(runs: list[tuple[float, int]]) -> None:
    """Against the naive count of short runs since the last steady one."""
    history, now, short = became_ready(History()), 0.0, 0
    for length_s, code in runs:
        history = started(history, now)
        short = 1 if now + length_s - now >= RULES.steady_s else short + 1
        history, verdict = exited(history, code, now + length_s, RULES)
        assert isinstance(verdict, GiveUp) == (short >= RULES.max_exits)
        if isinstance(verdict, GiveUp):
            return
        assert RULES.first_delay_s <= verdict.delay_s <= RULES.max_delay_s
        now += length_s + verdict.delay_s


def test_silence_is_long_and_looked_at_often_before_a_child_hangs() -> None:
    """An answer begins it anew; a watcher that slept for an hour does not take that hour for silence."""
    silence = Silence(30.0)
    assert not any(silence.looked(False, float(now)) for now in range(0, 30, 3))
    assert not silence.looked(True, 30.0)
    assert not any(silence.looked(False, float(now)) for now in range(31, 61, 3))
    assert silence.looked(False, 61.0)
    asleep = Silence(30.0)
    assert [asleep.looked(False, 3600.0 * look) for look in range(1, 6)] == [False, False, False, False, True]

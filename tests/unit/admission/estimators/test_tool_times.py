"""Which history answers for a tool, and the bounds of all of them (spec scheduling §1.3, §5.4, §5.5)."""

from __future__ import annotations

import math

import pytest

from services.admission.estimators.ecdf import Ecdf
from services.admission.estimators.errors import BadSampleError, BadStateError
from services.admission.estimators.tool_times import USER_TURN, ToolState, ToolTimes, ToolTimesState


def record(times: ToolTimes, tool: str, seconds: float, calls: int) -> None:
    for _ in range(calls):
        times.record(tool, seconds)


def source(times: ToolTimes, tool: str) -> str:
    return times.durations(tool).source


def test_both_thresholds_are_inclusive() -> None:
    """Spec scheduling §1.3: cold start where |S| <= K, the pooled history where |S[f]| <= K."""
    times = ToolTimes(threshold=3)
    record(times, "bash", 1.0, 3)
    assert (source(times, "bash"), source(times, "new")) == ("cold_start", "cold_start")
    record(times, "grep", 5.0, 1)
    assert (source(times, "bash"), source(times, "grep"), source(times, "new")) == ("pooled",) * 3
    record(times, "bash", 1.0, 1)
    assert (source(times, "bash"), source(times, "grep")) == ("tool", "pooled")
    assert times.durations("bash").durations.quantile(1) == 1
    assert times.durations("grep").durations.quantile(1) == 5


def test_pooled_is_per_call_not_per_tool() -> None:
    """A tool that is called often weighs more (spec scheduling §1.3)."""
    times = ToolTimes(threshold=2)
    record(times, "often", 1.0, 9)
    record(times, "seldom", 100.0, 1)
    assert times.durations("other").durations.chance_within(1, 0) == 0.9


def test_a_person_is_no_tool() -> None:
    """Spec scheduling §5.5: pauses of minutes neither lengthen the pooled history nor are predicted from it."""
    times = ToolTimes(threshold=2)
    record(times, USER_TURN, 300.0, 3)
    assert (source(times, USER_TURN), source(times, "bash")) == ("tool", "cold_start")
    record(times, "bash", 1.0, 3)
    assert times.durations("new").durations.quantile(1) == 1
    alone = ToolTimes(threshold=2)
    record(alone, "bash", 1.0, 3)
    assert source(alone, USER_TURN) == "cold_start"


def test_a_short_history_answers_with_its_last_call() -> None:
    """Below 32 samples a distribution is never stale: the test vectors hold for real traffic too."""
    times = ToolTimes(threshold=1)
    for seconds in (1.0, 2.0, 3.0, 4.0):
        times.record("bash", seconds)
        if seconds > 1:
            assert times.durations("bash").durations.quantile(1) == seconds


def test_a_long_history_waits_for_its_refresh() -> None:
    """No decision pays for thousands of samples: `refresh` does, one history a call, or a quarter of new samples."""
    times = ToolTimes(threshold=1)
    record(times, "bash", 1.0, 1000)
    assert (times.durations("bash").durations.quantile(1), times.durations("new").durations.quantile(1)) == (1, 1)
    record(times, "bash", 9.0, 40)
    assert times.durations("bash").durations.quantile(1) == 1
    assert [times.refresh() for _ in range(3)] == [True, True, False]
    assert times.durations("bash").durations.quantile(1) == 9
    assert times.durations("new").durations.quantile(1) == 9
    record(times, "bash", 99.0, 400)
    assert times.durations("bash").durations.quantile(1) == 99


def test_history_is_bounded_by_its_last_calls() -> None:
    """Spec scheduling §5.4: a cap per tool; a regime shift is forgotten."""
    times = ToolTimes(threshold=1, history=10)
    record(times, "bash", 1.0, 10)
    record(times, "bash", 2.0, 10)
    assert (times.samples, times.durations("bash").durations.chance_within(1, 0)) == (10, 0)


def test_invented_tools_are_bounded_in_number_length_and_samples() -> None:
    """Names come from clients: the least recently used one makes room, long and unwritable ones are cut and cleaned."""
    times = ToolTimes(threshold=1, history=10, max_tools=3, max_samples=25)
    for at in range(50):
        record(times, f"tool{at}", 1.0, 2)
    assert (len(times), times.samples, times.evictions) == (3, 6, 47)
    for at in range(3):
        record(times, f"busy{at}", 1.0, 12)
    assert (len(times), times.samples) == (2, 20)
    record(times, "x" * 10_000_000 + "1", 1.0, 1)
    record(times, "x" * 10_000_000 + "2", 1.0, 1)
    record(times, "\ud800", 1.0, 1)
    assert {tool.name for tool in times.to_state().tools} == {"busy2", "x" * 128, "?"}


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1e-9])
def test_a_duration_that_is_none_is_refused(seconds: float) -> None:
    """And leaves no trace, not even the tool's name."""
    times = ToolTimes()
    with pytest.raises(BadSampleError):
        times.record("bash", seconds)
    assert (len(times), times.samples) == (0, 0)


def test_state_survives_a_restart() -> None:
    """Same histories, in the same order of use and of calls."""
    times = ToolTimes(threshold=2, history=8)
    for at in range(20):
        times.record(("bash", "grep", USER_TURN)[at % 3], at)
    again = ToolTimes(threshold=2, history=8)
    again.record("old", 1.0)
    again.restore(times.to_state())
    assert (again.to_state(), again.samples) == (times.to_state(), times.samples)
    asked = again.durations("bash").durations
    assert isinstance(asked, Ecdf)
    assert len(asked) == 7


def test_less_room_than_was_stored_keeps_the_most_recent() -> None:
    """After the bounds were made smaller: the latest samples of the latest used tools."""
    times = ToolTimes(history=8)
    for at in range(40):
        times.record(f"tool{at % 4}", at)
    less = ToolTimes(history=4, max_tools=3, max_samples=9)
    less.restore(times.to_state())
    assert [(tool.name, tool.durations) for tool in less.to_state().tools] == [
        ("tool2", (26, 30, 34, 38)),
        ("tool3", (27, 31, 35, 39)),
    ]
    assert less.samples == 8


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (ToolTimesState(version=7), "foreign_version"),
        (ToolTimesState(pooled=(math.nan,)), "bad_value"),
        (ToolTimesState(tools=(ToolState(name="a", durations=(-1.0,)),)), "bad_value"),
        (ToolTimesState(tools=(ToolState(name="a"), ToolState(name="a"))), "bad_value"),
        (ToolTimesState(tools=(ToolState(name="a" * 129),)), "bad_value"),
        (ToolTimesState(pooled=(1.0,) * 70_000), "too_large"),
    ],
)
def test_a_foreign_state_changes_nothing(state: ToolTimesState, reason: str) -> None:
    """Refused with its reason, and what was known stays."""
    times = ToolTimes()
    record(times, "bash", 1.0, 3)
    before = times.to_state()
    with pytest.raises(BadStateError) as caught:
        times.restore(state)
    assert (caught.value.reason, times.to_state()) == (reason, before)

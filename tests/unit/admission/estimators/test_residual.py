"""Mean residuals against the vectors of spec policy §4 and a naive estimator in whole fractions."""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.admission.estimators.ecdf import Ecdf
from services.admission.estimators.errors import BadSampleError, BadStateError
from services.admission.estimators.residual import (
    ProductLimit,
    ResidualEstimator,
    ResidualState,
    predicted_final_context,
)

TOTALS = st.lists(st.integers(0, 30), min_size=1, max_size=30)
ATTAINED = st.lists(st.integers(0, 40), max_size=30)


def redistributed(completed: list[int], censored: list[int]) -> dict[int, Fraction]:
    """The same masses by Efron's rule: each censored sample hands its mass to all behind it, in equal parts; the last
    ones' goes to twice the largest total. Events stand before censored samples of the same value."""
    order = sorted([(value, 0) for value in completed] + [(value, 1) for value in censored])
    weights = [Fraction(1, len(order))] * len(order)
    masses: dict[int, Fraction] = {}
    for at, (value, is_censored) in enumerate(order):
        if not is_censored:
            masses[value] = masses.get(value, Fraction()) + weights[at]
        elif at + 1 < len(order) and any(not later for _, later in order[at + 1 :]):
            share = weights[at] / (len(order) - at - 1)
            weights[at + 1 :] = [weight + share for weight in weights[at + 1 :]]
        else:
            beyond = 2 * max(completed)
            masses[beyond] = masses.get(beyond, Fraction()) + weights[at]
    return masses


def naive_residual(masses: dict[int, Fraction], attained: int) -> Fraction:
    """The formula of the spec, term by term."""
    later = {total: mass for total, mass in masses.items() if total > attained}
    if not later:
        return Fraction(attained)
    return sum(((total - attained) * mass for total, mass in later.items()), Fraction()) / sum(later.values())


@pytest.mark.parametrize(
    ("completed", "in_flight", "masses", "residuals"),
    [
        ([2, 4, 8, 16], [], {2: 0.25, 4: 0.25, 8: 0.25, 16: 0.25}, {0: 7.5, 2: 22 / 3, 4: 8, 8: 8, 20: 20}),
        ([4, 6, 10], [5, 8], {4: 0.2, 6: 4 / 15, 10: 8 / 15}, {0: 116 / 15, 5: 11 / 3, 6: 4, 8: 2}),
        ([4, 6], [9], {4: 1 / 3, 6: 1 / 3, 12: 1 / 3}, {0: 22 / 3, 5: 4, 7: 5}),
        ([1, 1, 1, 97], [], {1: 0.75, 97: 0.25}, {0: 25, 1: 96}),
    ],
)
def test_vectors_of_the_spec(
    completed: list[float], in_flight: list[float], masses: dict[float, float], residuals: dict[float, float]
) -> None:
    """Spec policy §4, vectors 1-4: masses and mean residuals."""
    found = ProductLimit.fit(completed, in_flight)
    assert dict(zip(found.totals, found.masses, strict=True)) == pytest.approx(masses)
    assert {attained: found.mean_residual(attained) for attained in residuals} == pytest.approx(residuals)


@pytest.mark.parametrize(
    ("totals", "attained", "time"), [([2, 4, 8, 16], 0, 7.0), ([1, 1, 1, 97], 0, 4 / 3), ([1, 1, 1, 97], 1, 96)]
)
def test_gittins_times_of_the_spec(totals: list[float], attained: float, time: float) -> None:
    """Spec policy §4, vectors 1 and 4: the Gittins time is the reciprocal of the best rate of an uncensored sample."""
    assert 1 / Ecdf(totals).return_rate(attained) == pytest.approx(time)


def test_the_deadline_of_the_spec() -> None:
    """Spec policy §4, vector 4: a = 100, S = 80, V of vector 2 at w = 5: D = 393.33."""
    assert 100 + 80 * ProductLimit.fit([4, 6, 10], [5, 8]).mean_residual(5) == pytest.approx(393.3333, abs=1e-3)


@pytest.mark.parametrize(("context", "charged"), [(0, 50_000), (30_000, 60_000), (50_000, 70_000), (70_000, 80_000)])
def test_predicted_contexts_of_the_spec(context: float, charged: float) -> None:
    """Spec policy §4, vector 5: final contexts {20k, 40k, 60k, 80k}."""
    residual = ProductLimit.fit([20_000, 40_000, 60_000, 80_000]).mean_residual(context)
    assert predicted_final_context(context, residual, growth=2000, capacity=412_000) == pytest.approx(charged)


@pytest.mark.parametrize(
    ("context", "residual", "capacity", "charged"),
    [
        (90_000, 90_000, 412_000, 180_000),
        (300_000, 300_000, 412_000, 412_000),
        (0, None, 400_000, 50_000),
        (60_000, None, 400_000, 62_000),
        (399_000, None, 400_000, 400_000),
        (0, None, 4_000_000, 131_072),
        (150_000, None, 4_000_000, 152_000),
    ],
)
def test_predicted_context_beyond_support_and_without_prediction(
    context: float, residual: float | None, capacity: float, charged: float
) -> None:
    """Spec policy §4: min(C, 2c) beyond the support; max(c+g, C/8) without prediction; never more than C. Of a very
    large seat no eighth is asked for who never had a turn."""
    assert predicted_final_context(context, residual, growth=2000, capacity=capacity) == charged


@given(TOTALS, ATTAINED, st.integers(0, 70))
def test_equals_the_naive_estimator(completed: list[int], censored: list[int], attained: int) -> None:
    """Masses and mean residuals equal those of redistribution to the right, in fractions; split censored lists too."""
    masses = redistributed(completed, censored)
    found = ProductLimit.fit(sorted(completed), sorted(censored[::2]), sorted(censored[1::2]))
    assert dict(zip(found.totals, found.masses, strict=True)) == pytest.approx(
        {total: float(mass) for total, mass in masses.items()}
    )
    assert found.mean_residual(attained) == pytest.approx(float(naive_residual(masses, attained)), abs=1e-9)


@given(
    st.lists(st.floats(0, 1e9), min_size=1, max_size=50), st.lists(st.floats(0, 1e9), max_size=50), st.floats(0, 3e9)
)
def test_masses_are_a_distribution_and_residuals_are_sane(
    completed: list[float], censored: list[float], attained: float
) -> None:
    """Masses add up to 1, totals ascend, and what is left never reaches beyond the support."""
    found = ProductLimit.fit(sorted(completed), sorted(censored))
    assert math.fsum(found.masses) == pytest.approx(1.0)
    assert list(found.totals) == sorted(set(found.totals))
    residual = found.mean_residual(attained)
    inside = bisect_right(found.totals, attained) < len(found.totals)
    assert 0 <= residual <= (found.totals[-1] - attained) * (1 + 1e-9) + 1e-3 if inside else residual == attained


def grown(*, min_completions: int = 5, window: int = 256) -> ResidualEstimator:
    return ResidualEstimator(min_completions=min_completions, window=window)


def complete(estimator: ResidualEstimator, total: float) -> None:
    estimator.enter()
    estimator.advance(0, total)
    estimator.complete(total)


def test_no_prediction_before_enough_completions() -> None:
    """Spec policy §4: a class speaks from its 20th (context: 5th) completion on."""
    estimator = grown(min_completions=3)
    for total in (10, 20):
        complete(estimator, total)
    assert (estimator.is_ready, estimator.mean_residual(0)) == (False, None)
    complete(estimator, 30)
    assert estimator.is_ready
    assert estimator.mean_residual(0) == pytest.approx(20)


def test_is_renewed_every_five_completions() -> None:
    """Spec policy §4: a refresh every 5 completions suffices, and no more are made."""
    estimator = grown(min_completions=1)
    complete(estimator, 10)
    for _ in range(4):
        complete(estimator, 20)
        assert estimator.mean_residual(0) == 10
    complete(estimator, 20)
    assert estimator.mean_residual(0) == pytest.approx((10 + 5 * 20) / 6)


def test_those_in_flight_count_as_censored_by_what_they_attained() -> None:
    """Vector 2 by events: {4, 6, 10} complete while two others are at 5 and 8."""
    estimator = grown(min_completions=3)
    estimator.enter()
    estimator.advance(0, 5)
    estimator.enter(8)
    for total in (4, 6, 10):
        complete(estimator, total)
    estimator.refresh()
    assert estimator.in_flight == 2
    assert estimator.mean_residual(5) == pytest.approx(11 / 3)
    estimator.leave(5)
    estimator.leave(8)
    estimator.refresh()
    assert estimator.mean_residual(0) == pytest.approx(20 / 3)


def test_an_abandoned_program_stays_censored_until_a_window_of_others_completed() -> None:
    """Spec policy §4, Fallbacks: abort or idle: kept as censored; but no longer than the completions beside it."""
    estimator = grown(min_completions=1, window=4)
    complete(estimator, 10)
    estimator.enter()
    estimator.advance(0, 12)
    estimator.abandon(12)
    estimator.refresh()
    assert estimator.in_flight == 0
    assert estimator.mean_residual(0) == pytest.approx(15.0)
    for _ in range(5):
        complete(estimator, 10)
    estimator.refresh()
    assert estimator.mean_residual(0) == 10


def test_only_the_window_counts() -> None:
    """A regime shift is forgotten after a window of completions; memory does not grow."""
    estimator = grown(min_completions=1, window=4)
    for total in (1, 1, 1, 1, 9, 9, 9, 9):
        complete(estimator, total)
    estimator.refresh()
    assert (estimator.completions, estimator.mean_residual(0)) == (4, 9)


@pytest.mark.parametrize(("value", "reason"), [(math.nan, "not_a_number"), (-1, "negative"), (math.inf, "too_large")])
def test_a_sample_that_makes_no_sense_changes_nothing(value: float, reason: str) -> None:
    """Each wrong number has its reason, and what was known stays."""
    estimator = grown(min_completions=1)
    complete(estimator, 4)
    estimator.enter(3)
    before = estimator.to_state()
    with pytest.raises(BadSampleError) as caught:
        estimator.advance(3, value)
    assert (caught.value.reason, estimator.in_flight, estimator.to_state()) == (reason, 1, before)
    with pytest.raises(BadSampleError):
        estimator.mean_residual(value)
    with pytest.raises(KeyError):
        estimator.complete(7)


def test_a_completion_that_was_none_is_taken_out() -> None:
    """Its own, whatever others equal it; once it has left the window there is nothing to take, and nobody else's is."""
    estimator = grown(min_completions=1, window=4)
    for _ in range(7):
        estimator.enter(5)
    numbers = [estimator.complete(5) for _ in range(3)]
    estimator.withdraw(numbers[1])
    estimator.withdraw(numbers[1])
    assert estimator.to_state().completed == (5, 5)
    for _ in range(4):
        estimator.complete(5)
    estimator.withdraw(numbers[0])
    estimator.withdraw(numbers[2])
    assert (estimator.completions, estimator.in_flight) == (4, 0)
    again = ResidualEstimator.from_state(estimator.to_state(), min_completions=1, window=4)
    again.enter(9)
    number = again.complete(9)
    assert again.to_state().completed == (5, 5, 5, 9)
    again.withdraw(number)
    assert again.to_state().completed == (5, 5, 5)


def test_what_is_replaced_renews_the_estimate_less_often() -> None:
    """An eighth of the window, no less than five; a new total in between counts as ever."""
    estimator = grown()
    for _ in range(80):
        complete(estimator, 7)
    numbers, refreshes = list(range(1, 81)), estimator.refreshes
    for number in numbers[:9]:
        estimator.enter(9)
        estimator.replace(number, 9)
    assert (estimator.refreshes, estimator.completions) == (refreshes, 80)
    estimator.enter(9)
    estimator.replace(numbers[9], 9)
    assert estimator.refreshes == refreshes + 1
    assert estimator.mean_residual(8) == 1
    for _ in range(5):
        complete(estimator, 20)
    assert estimator.refreshes == refreshes + 2
    estimator.enter(9)
    estimator.replace(-1, 9)
    assert estimator.completions == 86


def test_state_survives_a_restart() -> None:
    """What was completed and abandoned predicts the same after a restart, ages included."""
    estimator = grown(window=8)
    for total in range(1, 12):
        complete(estimator, total)
        estimator.enter(total)
        estimator.abandon(total)
    estimator.refresh()
    again = ResidualEstimator.from_state(estimator.to_state(), min_completions=5, window=8)
    assert again.to_state() == estimator.to_state()
    assert again.mean_residual(3) == estimator.mean_residual(3)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (ResidualState(version=2), "foreign_version"),
        (ResidualState(completed=(1.0, math.nan)), "bad_value"),
        (ResidualState(completed=(-1.0,)), "bad_value"),
        (ResidualState(completed=(0.0,) * 70_000), "too_large"),
        (ResidualState(abandoned=((0, math.inf),)), "bad_value"),
        (ResidualState(abandoned=((-1, 1.0),)), "bad_value"),
        (ResidualState(abandoned=((1, 1.0), (2, 1.0))), "bad_value"),
    ],
)
def test_a_foreign_state_is_refused(state: ResidualState, reason: str) -> None:
    """Each with its reason."""
    with pytest.raises(BadStateError) as caught:
        ResidualEstimator.from_state(state, min_completions=5)
    assert caught.value.reason == reason


def test_a_smaller_window_takes_the_latest_of_a_state() -> None:
    """After the window was made smaller, the oldest samples stay behind."""
    again = ResidualEstimator.from_state(ResidualState(completed=(1, 2, 3, 4)), min_completions=1, window=2)
    assert again.to_state().completed == (3, 4)

"""Tool durations against the vectors of spec scheduling §1.4, §1.8 and policy §4, and against naive fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.admission.estimators.ecdf import Durations, Ecdf, Exponential
from services.admission.estimators.errors import BadSampleError
from services.admission.estimators.tool_times import lease_index, return_rate_at

VECTOR = [0.1] * 50 + [0.5] * 30 + [2.0] * 15 + [30.0] * 5
DURATIONS = st.lists(st.integers(0, 40), min_size=1, max_size=60)
TIMES = st.integers(0, 45) | st.fractions(0, 45, max_denominator=8)
PRICES = st.fractions(Fraction(1, 50), 50, max_denominator=50)


class Naive:
    """The formulas, sample by sample."""

    def __init__(self, durations: list[int]) -> None:
        self.durations = durations

    def chance(self, horizon: Fraction, elapsed: Fraction) -> Fraction:
        later = [d for d in self.durations if d > elapsed]
        return Fraction(sum(d <= horizon for d in later), len(later)) if later else Fraction(0)

    def held(self, horizon: Fraction, elapsed: Fraction) -> Fraction:
        later = [d for d in self.durations if d > elapsed]
        if not later or horizon <= elapsed:
            return Fraction(0)
        return sum((min(Fraction(d), horizon) - elapsed for d in later), Fraction()) / len(later)

    def rate(self, elapsed: Fraction) -> Fraction:
        later = [Fraction(d) for d in set(self.durations) if d > elapsed]
        return max((self.chance(s, elapsed) / self.held(s, elapsed) for s in later), default=Fraction(0))


@pytest.mark.parametrize(("tau", "utility"), [(0, 0), (0.1, 2.4), (0.5, 3.5), (2, 2.75), (30, -25)])
def test_utilities_of_the_spec(tau: float, utility: float) -> None:
    """Spec scheduling §1.4: U(tau) = P(tau)*5 - tau."""
    assert Ecdf(VECTOR).chance_within(tau, 0) * 5 - tau == pytest.approx(utility)


def test_the_best_ttl_of_the_spec() -> None:
    """Spec scheduling §1.4: tau* = 0.5; §1.8: 2 where occupancy counts, with U(.5) = 3.7, U(2) = 4.15, U(30) = 3."""
    durations = Ecdf(VECTOR)
    assert durations.best_ttl(5) == 0.5
    utilities = [durations.chance_within(tau, 0) * 5 - durations.mean_held(tau, 0) for tau in (0.5, 2, 30)]
    assert utilities == pytest.approx([3.7, 4.15, 3.0])
    assert durations.best_ttl_by_occupancy(5) == 2


@pytest.mark.parametrize(
    ("elapsed", "index", "keep"),
    [(0, 2.3425e-4, True), (1, 3.514e-5, True), (2.5, 1.704e-6, False), (5, 1.874e-6, False), (25, 9.37e-6, True)],
)
def test_lease_indices_of_the_spec(elapsed: float, index: float, keep: bool) -> None:
    """Spec policy §4, vector 6: c = 40,000, R = 1.874 s, C = 412k: keep where I is no less than 1/C."""
    found = lease_index(Ecdf(VECTOR).return_rate(elapsed), 1.874, 40_000)
    assert found == pytest.approx(index, rel=1e-3)
    assert (found >= 1 / 412_000) == keep


def test_the_times_at_which_the_vector_changes_its_mind() -> None:
    """Vector 6 as a timetable: kept until the 2 s mark, revocable until the 30 s call is near, gone after it."""
    durations = Ecdf(VECTOR)
    floor = return_rate_at(1 / 412_000, 1.874, 40_000)
    assert durations.falls_below(floor, 0) == 2
    again = durations.rises_to(floor, 2)
    assert again == pytest.approx(30 - 1 / floor)
    assert durations.falls_below(floor, again + 1e-6) == 30
    assert durations.rises_to(floor, 30) == math.inf
    assert durations.falls_below(floor, 30) == 30


@pytest.mark.parametrize("benefit", [0, 1, 2])
def test_equal_utilities_choose_the_shorter_ttl(benefit: float) -> None:
    """Spec scheduling §1.4: keep strictly better. At benefit 2 the times 0, 1 and 2 are equal."""
    assert Ecdf([1, 2]).best_ttl(benefit) == 0
    assert Ecdf([1, 2]).best_ttl(2.5) == 2


@pytest.mark.long
@given(DURATIONS, TIMES, TIMES)
def test_conditional_chance_and_holding_equal_the_naive_ones(
    durations: list[int], horizon: Fraction, elapsed: Fraction
) -> None:
    """Pr(X<=s | X>x) and E[min(X,s)-x | X>x], at samples and between them."""
    ecdf, naive = Ecdf(sorted(durations)), Naive(durations)
    h, x = float(horizon), float(elapsed)
    assert ecdf.chance_within(h, x) == pytest.approx(float(naive.chance(horizon, elapsed)))
    assert ecdf.mean_held(h, x) == pytest.approx(float(naive.held(horizon, elapsed)))


@given(DURATIONS, TIMES)
def test_the_return_rate_equals_the_naive_one(durations: list[int], elapsed: Fraction) -> None:
    """The hull finds the best horizon of all."""
    assert Ecdf(sorted(durations)).return_rate(float(elapsed)) == pytest.approx(float(Naive(durations).rate(elapsed)))


@pytest.mark.long
@given(DURATIONS, PRICES)
def test_the_best_ttl_equals_a_scan(durations: list[int], benefit: Fraction) -> None:
    """Its utility is the scan's; where exact fractions leave no doubt, so is the time."""
    found = Ecdf(sorted(durations)).best_ttl(float(benefit))
    utilities = {
        tau: Fraction(sum(d <= tau for d in durations), len(durations)) * benefit - tau for tau in {0, *durations}
    }
    best = max(utilities.values())
    assert float(utilities[int(found)]) == pytest.approx(float(best), abs=1e-9)
    clear = [tau for tau, utility in utilities.items() if best - utility < Fraction(1, 10**6)]
    if len(clear) == 1:
        assert found == clear[0]


@pytest.mark.long
@given(DURATIONS, PRICES, PRICES, TIMES)
def test_the_best_ttl_by_occupancy_equals_a_scan(
    durations: list[int], benefit: Fraction, price: Fraction, elapsed: Fraction
) -> None:
    """Over all times later than now, and against holding no longer."""
    naive = Naive(durations)
    found = Ecdf(sorted(durations)).best_ttl_by_occupancy(float(benefit), float(price), float(elapsed))
    best = max(
        [Fraction(0)]
        + [
            naive.chance(Fraction(tau), elapsed) * benefit - price * naive.held(Fraction(tau), elapsed)
            for tau in durations
            if tau > elapsed
        ]
    )
    exact = elapsed if found == float(elapsed) else Fraction(found)
    reached = naive.chance(exact, elapsed) * benefit - price * naive.held(exact, elapsed)
    assert float(reached) == pytest.approx(float(best), abs=1e-9)


@pytest.mark.long
@given(DURATIONS, TIMES, PRICES)
def test_the_time_to_fall_below_is_the_first_one(durations: list[int], elapsed: Fraction, rate: Fraction) -> None:
    """Until then the naive rate is no less at every duration and between them; from then on it is."""
    ecdf, naive = Ecdf(sorted(durations)), Naive(durations)
    x, threshold = float(elapsed), float(rate)
    falls = ecdf.falls_below(threshold, x)
    assert falls == x or falls in durations
    assert ecdf.return_rate(falls) < threshold
    for time in [elapsed, *map(Fraction, durations), *(Fraction(2 * d + 1, 2) for d in durations)]:
        if x <= float(time) < falls:
            assert float(naive.rate(time)) >= threshold * (1 - 1e-9)


@given(DURATIONS, TIMES, PRICES)
def test_the_time_to_rise_is_the_first_one(durations: list[int], elapsed: Fraction, rate: Fraction) -> None:
    """A little later the rate is reached, a little earlier it is not; never after the last duration."""
    ecdf, naive = Ecdf(sorted(durations)), Naive(durations)
    x, threshold = float(elapsed), float(rate)
    rises = ecdf.rises_to(threshold, x)
    if math.isinf(rises):
        assert elapsed >= max(durations)
        return
    later = [d for d in durations if d > elapsed]
    assert x <= rises < min(later)
    assert float(naive.rate(Fraction(rises))) >= threshold * (1 - 1e-9)
    if rises > x:
        earlier = max(x, rises - 1e-6)
        assert float(naive.rate(Fraction(earlier))) < threshold * (1 + 1e-9)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(1e-9, 1e6))
def test_following_the_changes_comes_to_an_end(durations: list[float], rate: float) -> None:
    """A scheduler that asks anew at each time it was told never stands still: at most two changes a duration."""
    ecdf = Ecdf(sorted(durations))
    elapsed, changes = 0.0, 0
    while not math.isinf(elapsed):
        changes += 1
        assert changes <= 4 * len(durations) + 4
        is_kept = ecdf.return_rate(elapsed) >= rate
        elapsed = ecdf.falls_below(rate, elapsed) if is_kept else ecdf.rises_to(rate, elapsed)


def test_many_durations_fall_in_blocks() -> None:
    """A history of several search blocks: a falling hazard, and one fast cluster late in it."""
    durations = sorted([1.01**k for k in range(900)] + [3000.0 + k / 100 for k in range(300)])
    ecdf = Ecdf(durations)
    for elapsed in (0.0, 1.5, 50.0, 2000.0, 3001.0):
        for rate in (1e-4, 1e-3, 0.01, 0.1, 1.0):
            falls = ecdf.falls_below(rate, elapsed)
            expected = (
                elapsed
                if ecdf.return_rate(elapsed) < rate
                else next(d for d in durations if d > elapsed and ecdf.return_rate(d) < rate)
            )
            assert falls == expected


@pytest.mark.parametrize(
    ("share", "time"), [(0.0, 0.1), (0.5, 0.1), (0.51, 0.5), (0.8, 0.5), (0.95, 2.0), (0.99, 30.0), (1.0, 30.0)]
)
def test_quantiles_are_nearest_ranks(share: float, time: float) -> None:
    """The cap of a lease is such a quantile (spec scheduling §5.2)."""
    assert Ecdf(VECTOR).quantile(share) == time


@given(st.lists(st.floats(0, 2.0**50), min_size=1, max_size=40), st.floats(0, 2.0**50), st.floats(1e-12, 1e12))
def test_no_durations_break_it(durations: list[float], elapsed: float, rate: float) -> None:
    """Durations as far apart as numbers can be, or as near: every answer is a number, none an error."""
    ecdf = Ecdf(sorted(durations))
    assert ecdf.return_rate(elapsed) >= 0
    assert ecdf.falls_below(rate, elapsed) >= elapsed
    assert ecdf.rises_to(rate, elapsed) >= elapsed
    assert ecdf.best_ttl(rate) >= 0
    assert ecdf.best_ttl_by_occupancy(rate, 1.0, elapsed) >= elapsed
    assert 0 <= ecdf.chance_within(2 * elapsed / 3, elapsed / 3) <= 1


def test_the_cold_start_of_the_spec() -> None:
    """Spec scheduling §1.3 and §5.4: ln(B), clipped to [0, 2] s; the preview's constant 2 s is ln(7.39 s)."""
    cold = Exponential()
    assert [cold.best_ttl(b) for b in (0, 0.5, 1, math.e, 7.39, 100)] == pytest.approx([0, 0, 0, 1, 2, 2], abs=1e-3)
    assert Exponential(mean=3, limit=60).best_ttl(9) == pytest.approx(3 * math.log(3))
    assert (cold.best_ttl_by_occupancy(1.5), cold.best_ttl_by_occupancy(1.5, 2, 0.5)) == (2, 0.5)


def test_a_cold_start_is_believed_for_a_while_only() -> None:
    """Memoryless, so that a lease would never end: what runs for longer than 2 s has shown it wrong."""
    cold = Exponential()
    assert [cold.return_rate(x) for x in (0, 1.99, 2, 300)] == [1, 1, 0, 0]
    assert (cold.falls_below(0.5, 1), cold.falls_below(0.5, 5), cold.falls_below(1.5, 1)) == (2, 5, 1)
    assert (cold.rises_to(0.5, 1), cold.rises_to(0.5, 3)) == (1, math.inf)
    assert cold.mean_held(2, 0) == pytest.approx(1 - math.exp(-2))
    assert cold.chance_within(1, 3) == 0
    assert cold.quantile(0.99) == pytest.approx(math.log(100))


@pytest.mark.parametrize("durations", [Ecdf([1.0, 2.0]), Exponential()])
@pytest.mark.parametrize("time", [math.nan, -0.1, math.inf])
def test_a_time_that_is_none_is_refused(durations: Durations, time: float) -> None:
    """A clock that went backwards must not become a decision."""
    for ask in (durations.return_rate, durations.best_ttl, lambda t: durations.chance_within(1, t)):
        with pytest.raises(BadSampleError):
            ask(time)


def test_an_index_of_nothing_is_nothing() -> None:
    """A program without context holds no KV; one that costs nothing to compute is worth no lease at any rate."""
    assert lease_index(5.0, 1.0, 0) == 0
    assert return_rate_at(1e-6, 0.0, 1000) == math.inf

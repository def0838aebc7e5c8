"""The reload curve and its fit (spec scheduling §1.3, §4.2, §5.2)."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.admission.estimators.errors import BadSampleError, BadStateError, BadSweepError
from services.admission.estimators.reload_cost import (
    H100_8B,
    H100_70B,
    ReloadCost,
    ReloadCostState,
    fit,
    from_state,
    to_state,
)

SWEEP = (1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000)


@pytest.mark.parametrize(
    ("cost", "seconds"),
    [
        (H100_8B, {10_000: 0.31, 20_000: 0.73, 40_000: 1.87, 70_000: 4.4}),
        (H100_70B, {10_000: 0.76, 20_000: 1.66, 40_000: 3.8, 70_000: 8.1}),
    ],
)
def test_defaults_of_the_spec(cost: ReloadCost, seconds: dict[int, float]) -> None:
    """Spec scheduling §4.2: PR(n) of both models, to the digits given."""
    assert {n: cost.seconds(n) for n in seconds} == pytest.approx(seconds, rel=0.02)


def test_surviving_tokens_make_it_marginal() -> None:
    """Spec scheduling §1.3: a2*(n^2-s^2) + a1*(n-s) + a0*[n>s]; nothing where all survives."""
    cost = ReloadCost(quadratic=2, linear=3, constant=5)
    assert cost.seconds(10, 4) == 2 * (100 - 16) + 3 * 6 + 5
    assert (cost.seconds(10, 10), cost.seconds(10, 12), cost.seconds(0)) == (0, 0, 0)
    with pytest.raises(BadSampleError):
        cost.seconds(math.nan)


@given(
    st.floats(1e-11, 1e-8),
    st.floats(1e-6, 1e-3),
    st.floats(1e-3, 1.0),
    st.sampled_from([SWEEP, SWEEP[:4], (500, 900_000, 1_000_000)]),
)
def test_a_clean_sweep_gives_back_its_curve(a2: float, a1: float, a0: float, sweep: tuple[int, ...]) -> None:
    """Well conditioned by its scaling: contexts of a million, coefficients of 1e-11."""
    found = fit([(n, a2 * n * n + a1 * n + a0) for n in sweep])
    for n in (*sweep, 30_000):
        if sweep[0] <= n <= sweep[-1]:
            assert found.cost.seconds(n) == pytest.approx(a2 * n * n + a1 * n + a0, rel=1e-5)
    assert found.worst < 1e-5


def test_a_noisy_sweep_gives_the_curve_within_its_noise() -> None:
    """3 % of noise, three runs a context: the curve is within that, and says how far off it is."""
    noise = Random(5)
    found = fit([(n, H100_8B.seconds(n) * noise.gauss(1, 0.03) + 0.015) for n in SWEEP for _ in range(3)])
    assert [found.cost.seconds(n) for n in SWEEP[3:]] == pytest.approx(
        [H100_8B.seconds(n) + 0.015 for n in SWEEP[3:]], rel=0.05
    )
    assert 0 < found.error_s < 0.5
    assert found.worst < 0.6


@pytest.mark.parametrize(
    ("curve", "dropped"),
    [
        ((1e-9, -2e-6, 0.05), ("linear",)),
        ((-1e-11, 3e-5, 0.05), ("quadratic",)),
        ((1e-9, 3e-5, -0.02), ("constant",)),
    ],
)
def test_negative_coefficients_are_dropped_and_named(
    curve: tuple[float, float, float], dropped: tuple[str, ...]
) -> None:
    """A curve that falls somewhere would pay for evicting: what comes out negative is 0, the rest is fitted anew."""
    a2, a1, a0 = curve
    found = fit([(n, a2 * n * n + a1 * n + a0) for n in SWEEP])
    assert found.dropped == dropped
    assert min(found.cost.quadratic, found.cost.linear, found.cost.constant) >= 0


@given(st.lists(st.tuples(st.integers(1, 100_000), st.floats(1e-3, 100)), min_size=3, max_size=12))
def test_any_fit_is_no_worse_than_its_neighbours(sweep: list[tuple[int, float]]) -> None:
    """It is a least-squares fit: no small step to other allowed coefficients misses less."""
    try:
        found = fit(sweep)
    except BadSweepError as error:
        reason = error.reason
    else:
        reason = ""
    if reason:
        assert reason in {"too_few_contexts", "no_cost"}
        return

    def misses(a2: float, a1: float, a0: float) -> float:
        return math.fsum((a2 * n * n + a1 * n + a0 - seconds) ** 2 for n, seconds in sweep)

    best = (found.cost.quadratic, found.cost.linear, found.cost.constant)
    most, longest = max(n for n, _ in sweep), max(seconds for _, seconds in sweep)
    scale = (longest / most**2, longest / most, longest)
    for at in range(3):
        for step in (-1e-3, 1e-3):
            other = [max(0.0, value + step * scale[at] * (at == i)) for i, value in enumerate(best)]
            assert misses(*other) >= misses(*best) * (1 - 1e-7) - 1e-9
    assert found.error_s == pytest.approx(math.sqrt(misses(*best) / len(sweep)), rel=1e-4, abs=1e-6)


def test_a_relative_fit_is_not_swamped_by_the_longest_context() -> None:
    """Two per cent of noise at 128k tokens is hundreds of milliseconds; at 1000 tokens it must not show."""
    for noise in (0.98, 1.02):
        sweep = [(n, (H100_8B.seconds(n) + 0.01) * (noise if n == SWEEP[-1] else 1.0)) for n in SWEEP]
        found = fit(sweep, relative=True)
        assert found.cost.seconds(1000) == pytest.approx(H100_8B.seconds(1000) + 0.01, rel=0.02)
        plain = fit(sweep)
        assert found.worst < 0.03 < plain.worst
        assert found.error_s == pytest.approx(
            math.sqrt(math.fsum((found.cost.seconds(n) - s) ** 2 for n, s in sweep) / len(sweep))
        )


@pytest.mark.parametrize(
    ("sweep", "reason"),
    [
        ([], "too_few_contexts"),
        ([(1000, 1.0), (1000, 1.1), (2000, 2.0)], "too_few_contexts"),
        ([(1000, 1.0), (2000, math.nan), (3000, 1.0)], "bad_measurement"),
        ([(1000, 1.0), (2000, -1.0), (3000, 1.0)], "bad_measurement"),
        ([(0, 1.0), (2000, 1.0), (3000, 1.0)], "bad_measurement"),
        ([(1000, 3.0), (2000, 2.0), (3000, 1.0)], "no_cost"),
    ],
)
def test_a_sweep_that_gives_no_curve_is_refused(sweep: list[tuple[float, float]], reason: str) -> None:
    """Each with its reason: a calibration that failed must not become a cost."""
    with pytest.raises(BadSweepError) as caught:
        fit(sweep)
    assert caught.value.reason == reason


def test_state_comes_back_and_a_foreign_one_is_refused() -> None:
    """Written, read, equal; another version or a wrong coefficient has its reason."""
    assert from_state(to_state(H100_70B)) == H100_70B
    for state, reason in [
        (ReloadCostState(version=9), "foreign_version"),
        (ReloadCostState(linear=-1.0), "bad_value"),
        (ReloadCostState(quadratic=math.nan), "bad_value"),
    ]:
        with pytest.raises(BadStateError) as caught:
            from_state(state)
        assert caught.value.reason == reason

"""kappa by spec policy §4."""

from __future__ import annotations

import pytest

from services.admission.scheduling.steering import COUNTS_WANTED, Steering, SteeringParameters

SOURCE = SteeringParameters(start=1.2, down=0.02, up=0.01)
"""The numbers of the source, with which its clauses can be checked."""


def run(steering: Steering, turns: int, *, cached: int | None, new: int = 1000, held: bool = True) -> list[float]:
    """A turn of 10,000 prompt tokens a second; kappa after each."""
    values = []
    for second in range(turns):
        steering.turn_finished(10_000, cached, new, warm=True)
        steering.step(float(second), held)
        values.append(steering.steered)
    return values


def test_starts_at_its_prior_and_does_nothing_without_time() -> None:
    steering = Steering(parameters=SOURCE)
    assert steering.value == 1.2
    assert not steering.step(0.0, True)
    assert not steering.step(4.9, True)
    assert steering.value == 1.2


def test_recomputing_lowers_it_and_only_to_its_bound() -> None:
    values = run(Steering(parameters=SOURCE), 200, cached=5_000)
    assert values[4:11] == [1.2, 1.18, 1.18, 1.18, 1.18, 1.18, 1.16]
    assert values[-1] == 0.8


def test_little_recomputing_raises_it_while_new_programs_wait() -> None:
    assert run(Steering(parameters=SOURCE), 600, cached=9_000)[-1] == 2.0
    assert run(Steering(parameters=SOURCE), 600, cached=9_000, held=False)[-1] == 1.2


def test_between_the_bounds_it_stays() -> None:
    assert run(Steering(parameters=SOURCE), 60, cached=8_910)[-1] == 1.2  # 9 % computed twice


def test_a_long_silence_is_one_step() -> None:
    steering = Steering(parameters=SOURCE)
    steering.step(0.0, True)
    steering.turn_finished(10_000, 0, 1000, warm=False)
    assert steering.step(500.0, True)
    assert round(steering.steered, 9) == 1.18
    assert not steering.step(504.0, True)


def test_missing_counts_fix_it_until_there_are_enough_again() -> None:
    steering = Steering(parameters=SOURCE)
    run(steering, 1, cached=None)
    assert steering.value == 1.3
    run(steering, COUNTS_WANTED - 1, cached=9_000)
    assert steering.value == 1.3
    run(steering, 1, cached=9_000)
    assert steering.value == steering.steered


def test_counts_that_are_always_zero_fix_it() -> None:
    """An engine that reports no cached tokens says 0 for returns that must have found some."""
    steering = Steering(parameters=SOURCE)
    run(steering, COUNTS_WANTED, cached=0)
    assert steering.value == 1.3
    run(steering, 1, cached=10)
    assert steering.value == steering.steered


def test_its_own_steps_are_small() -> None:
    """kappa moves by less than a program can change what is computed twice."""
    values = run(Steering(), 200, cached=5_000)
    assert values[4] == 1.3
    assert round(values[5], 9) == 1.294
    assert run(Steering(), 200, cached=9_000)[-1] == pytest.approx(1.3 + 39 * 0.003)


@pytest.mark.parametrize("wrong", [{"start": 3.0}, {"least": 0.0}, {"little": 0.2}, {"up": -0.1}])
def test_parameters_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="steering"):
        SteeringParameters(**wrong)


def test_a_host_tier_fixes_it() -> None:
    assert Steering(host_tier=True).value == 2.0

"""Everything that can go wrong in an estimator, and the checks that say so.

EstimatorError
├── BadSampleError  a sample or query that is no finite number in range (the caller's fault, or its peer's)
├── BadStateError   a stored state that cannot be taken over (the store's fault, or another version's)
└── BadSweepError   a calibration whose measurements give no reload curve (the measurement's fault)
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_SAMPLE = 2.0**50
"""No sample is larger (seconds or tokens): sums over full windows stay exact enough, and finite."""


class EstimatorError(Exception):
    """Root of this package's errors. ``reason`` is stable: metric label, log field."""

    reason = "estimator_error"


class BadSampleError(EstimatorError):
    """``value`` is no sample of ``quantity``. ``reason``: ``not_a_number``, ``negative``, ``too_large``."""

    def __init__(self, quantity: str, value: float, reason: str) -> None:
        super().__init__(f"{quantity} cannot be {value!r}")
        self.quantity = quantity
        self.value = value
        self.reason = reason


class BadStateError(EstimatorError):
    """The stored state of ``part`` is refused.

    ``reason``: ``foreign_version``, ``foreign_pool``, ``bad_value``, ``too_large``, ``undecodable``.
    """

    def __init__(self, part: str, reason: str, text: str) -> None:
        super().__init__(f"stored state of {part}: {text}")
        self.part = part
        self.reason = reason


class BadSweepError(EstimatorError):
    """A context sweep gives no curve. ``reason``: ``too_few_contexts``, ``bad_measurement``, ``no_cost``."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def sample(quantity: str, value: float) -> float:
    """``value`` as a float in [0, `MAX_SAMPLE`]. Raises `BadSampleError`."""
    if 0 <= value <= MAX_SAMPLE:
        return float(value)
    if value < 0:
        raise BadSampleError(quantity, value, "negative")
    if value > MAX_SAMPLE:
        raise BadSampleError(quantity, value, "too_large")
    raise BadSampleError(quantity, value, "not_a_number")


def stored_version(part: str, version: int, known: int) -> None:
    """Raises `BadStateError` unless the state was written in the version we know."""
    if version != known:
        raise BadStateError(part, "foreign_version", f"version {version}, not {known}")


def stored_samples(part: str, values: Sequence[float], most: int) -> list[float]:
    """``values`` if each is a sample and they are at most ``most``. Raises `BadStateError`."""
    if len(values) > most:
        raise BadStateError(part, "too_large", f"{len(values)} samples, at most {most}")
    try:
        return [sample(part, value) for value in values]
    except (BadSampleError, TypeError) as error:
        raise BadStateError(part, "bad_value", str(error)) from error

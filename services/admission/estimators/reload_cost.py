"""PR: seconds to compute (or load) a context anew, and its fit to a sweep of contexts (spec scheduling §1.3, §5.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import msgspec

from services.admission.estimators.errors import MAX_SAMPLE, BadStateError, BadSweepError, sample, stored_version

STATE_VERSION = 1
MIN_CONTEXTS = 3
TERMS = ("quadratic", "linear", "constant")


class ReloadCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``quadratic``*n^2 + ``linear``*n + ``constant`` seconds for n tokens. Raises `ValueError`."""

    quadratic: float
    linear: float
    constant: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"reload cost: {name} must be a finite number, not negative")

    def seconds(self, context: float, surviving: float = 0.0) -> float:
        """R: seconds to compute ``context`` tokens of which the first ``surviving`` stay resident anyway.

        Source: spec scheduling §1.3: ``a2*(n^2-s^2) + a1*(n-s) + a0*[n>s]``. Raises `BadSampleError`.
        """
        if not 0 <= surviving <= context <= MAX_SAMPLE:
            context, surviving = sample("context", context), sample("surviving tokens", surviving)
        missing = context - surviving
        if missing <= 0:
            return 0.0
        return missing * (self.quadratic * (context + surviving) + self.linear) + self.constant


H100_8B = ReloadCost(quadratic=5.2e-10, linear=2.6e-5)
H100_70B = ReloadCost(quadratic=6.55e-10, linear=6.97e-5)
"""Llama-3.1-8B on one H100, 70B on four without communication (spec scheduling §4.2: PR(n), b and p/2)."""


class ReloadCostState(msgspec.Struct, frozen=True, kw_only=True):
    """A stored curve: coefficients as in `ReloadCost`."""

    version: int = STATE_VERSION
    quadratic: float = 0.0
    linear: float = 0.0
    constant: float = 0.0


def to_state(cost: ReloadCost) -> ReloadCostState:
    """A curve to write down."""
    return ReloadCostState(quadratic=cost.quadratic, linear=cost.linear, constant=cost.constant)


def from_state(state: ReloadCostState) -> ReloadCost:
    """The curve that was written. Raises `BadStateError`."""
    stored_version("reload cost", state.version, STATE_VERSION)
    try:
        return ReloadCost(quadratic=state.quadratic, linear=state.linear, constant=state.constant)
    except (ValueError, TypeError) as error:
        raise BadStateError("reload cost", "bad_value", str(error)) from error


class ReloadFit(msgspec.Struct, frozen=True, kw_only=True):
    """A curve fitted to measurements.

    ``dropped``: coefficients that came out negative, and are 0 instead (names of `ReloadCost`); ``error_s``: root mean
    square of what the curve misses, in seconds; ``worst``: the largest miss as a share of its measurement.
    """

    cost: ReloadCost
    dropped: tuple[str, ...]
    error_s: float
    worst: float


def fit(sweep: Sequence[tuple[float, float]], *, relative: bool = False) -> ReloadFit:
    """The least-squares curve without negative coefficients, of (context tokens, seconds) measured.

    ``relative``: what is least is the sum of squared misses as shares of their measurements, so that a per cent of
    noise in the longest context does not swamp the short ones.
    Among all choices of coefficients that are 0, the best fit whose others are positive: with three of them that is
    the exact non-negative least squares. Raises `BadSweepError`. Source: spec scheduling §1.3 (``a2*n^2 + a1*n + a0``).
    """
    for tokens, seconds in sweep:
        if not (0 < tokens <= MAX_SAMPLE and 0 < seconds <= MAX_SAMPLE):
            raise BadSweepError("bad_measurement", f"{tokens!r} tokens in {seconds!r} s is no measurement")
    contexts = len({tokens for tokens, _ in sweep})
    if contexts < MIN_CONTEXTS:
        raise BadSweepError("too_few_contexts", f"a curve needs {MIN_CONTEXTS} different contexts, not {contexts}")
    # Scaled to the largest context and the longest time all columns have entries up to 1: well conditioned.
    most, longest = max(tokens for tokens, _ in sweep), max(seconds for _, seconds in sweep)
    weights = [longest / seconds if relative else 1.0 for _, seconds in sweep]
    rows = [
        ((tokens / most) ** 2 * weight, tokens / most * weight, weight)
        for (tokens, _), weight in zip(sweep, weights, strict=True)
    ]
    values = [seconds / longest * weight for (_, seconds), weight in zip(sweep, weights, strict=True)]
    best, error = [0.0, 0.0, 0.0], math.fsum(value * value for value in values)
    kept: tuple[int, ...] = ()
    for size in (3, 2, 1):
        for terms in combinations(range(3), size):
            found = _least_squares(rows, values, terms)
            if found is None or min(found[term] for term in terms) <= 0:
                continue
            misses = _squared_misses(rows, values, found)
            if misses < error:
                best, error, kept = found, misses, terms
    if kept in ((), (2,)):
        raise BadSweepError("no_cost", "the time does not grow with the context")
    cost = ReloadCost(
        quadratic=best[0] * longest / most**2, linear=best[1] * longest / most, constant=best[2] * longest
    )
    return ReloadFit(
        cost=cost,
        dropped=tuple(TERMS[term] for term in range(3) if term not in kept),
        error_s=math.sqrt(math.fsum((cost.seconds(n) - s) ** 2 for n, s in sweep) / len(sweep)),
        worst=max(abs(cost.seconds(tokens) - seconds) / seconds for tokens, seconds in sweep),
    )


def _squared_misses(rows: Sequence[tuple[float, ...]], values: Sequence[float], coefficients: Sequence[float]) -> float:
    return math.fsum(
        (sum(c * x for c, x in zip(coefficients, row, strict=True)) - value) ** 2
        for row, value in zip(rows, values, strict=True)
    )


def _least_squares(
    rows: Sequence[tuple[float, ...]], values: Sequence[float], terms: tuple[int, ...]
) -> list[float] | None:
    """All three coefficients, 0 but for ``terms``, by the normal equations; None where they are singular."""
    system = [
        [
            *(math.fsum(row[i] * row[j] for row in rows) for j in terms),
            math.fsum(row[i] * v for row, v in zip(rows, values, strict=True)),
        ]
        for i in terms
    ]
    size = len(terms)
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(system[r][column]))
        if abs(system[pivot][column]) < 1e-12:
            return None
        system[column], system[pivot] = system[pivot], system[column]
        for r in range(size):
            if r != column:
                factor = system[r][column] / system[column][column]
                system[r] = [a - factor * b for a, b in zip(system[r], system[column], strict=True)]
    found = [0.0, 0.0, 0.0]
    for at, term in enumerate(terms):
        found[term] = system[at][size] / system[at][at]
    return found

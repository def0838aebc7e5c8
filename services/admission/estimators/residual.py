"""Mean residual life by the product-limit (Kaplan-Meier) estimator: how much of a total is still to come.

Used for a program's work (GPU seconds) and for its final context (tokens). Programs that still run are censored: their
totals are only known to be no less than what they attained. Source: spec policy §4.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import msgspec

from services.admission.estimators.errors import MAX_SAMPLE, BadStateError, sample, stored_samples, stored_version
from services.admission.estimators.windows import SortedMultiset, SortedWindow

WINDOW = 256
REFRESH_EVERY = 5
REPLACED_SHARE = 1 / 8
"""The estimate is renewed when so much of the window was replaced: that changes it less than as many new totals."""
MIN_COMPLETIONS_WORK = 20
MIN_COMPLETIONS_CONTEXT = 5

MOST_UNSEEN = 1 << 17
"""Tokens that a program is charged for at most because nothing is known: the whole context of most models that are
served, whatever the capacity."""

STATE_VERSION = 1
MAX_STORED = 1 << 16


class ProductLimit:
    """A distribution of totals, estimated from complete and censored ones: masses at the distinct complete totals, and
    what is left over at twice the largest of them."""

    __slots__ = ("_tail_mass", "_tail_moment", "masses", "totals")

    def __init__(self, totals: Sequence[float], masses: Sequence[float]) -> None:
        self.totals = totals
        self.masses = masses
        tail_mass, tail_moment = [0.0], [0.0]
        for total, mass in zip(reversed(totals), reversed(masses), strict=True):
            tail_mass.append(tail_mass[-1] + mass)
            tail_moment.append(tail_moment[-1] + mass * total)
        self._tail_mass = tail_mass[::-1]
        self._tail_moment = tail_moment[::-1]

    @classmethod
    def fit(cls, completed: Sequence[float], *censored: Sequence[float]) -> ProductLimit:
        """`of_counts`, from totals and attained parts, each sequence ascending. O(completed * log censored)."""
        distinct = list(dict.fromkeys(completed))
        parts = [len(part) - bisect_left(part, total) for part in censored for total in distinct]
        return cls.of_counts(completed, [sum(parts[at :: len(distinct)]) for at in range(len(distinct))])

    @classmethod
    def of_counts(cls, completed: Sequence[float], censored_from: Sequence[int]) -> ProductLimit:
        """From totals, ascending; ``censored_from``: for each distinct one, how many attained parts are no smaller.

        Source: spec policy §4. At a total x the mass is S * d/n: S what survived so far, d the totals that equal x, n
        all that are no smaller than x (a censored one that equals x is still at risk: event before censor).
        """
        totals: list[float] = []
        masses: list[float] = []
        survival = 1.0
        at = 0
        for more in censored_from:
            total = completed[at]
            after = bisect_right(completed, total, at)
            events = after - at
            at_risk = len(completed) - at + more
            mass = survival if events == at_risk else survival * events / at_risk
            totals.append(total)
            masses.append(mass)
            survival = survival - mass if events < at_risk else 0.0
            at = after
        if totals and survival > 0:
            beyond = 2 * totals[-1]
            if beyond > totals[-1]:
                totals.append(beyond)
                masses.append(survival)
            else:  # all totals are zero, and so is twice the largest
                masses[-1] += survival
        return cls(totals, masses)

    def mean_residual(self, attained: float) -> float:
        """MR(a): the mean of what is left of totals larger than ``attained``; beyond the support ``attained`` itself.

        Source: spec policy §4. O(log totals). Raises `BadSampleError`.
        """
        if not 0 <= attained <= MAX_SAMPLE:
            attained = sample("attained", attained)
        at = bisect_right(self.totals, attained)
        if at == len(self.totals):
            return float(attained)
        left = self._tail_moment[at] / self._tail_mass[at] - attained
        return left if left > 0.0 else 0.0


class ResidualState(msgspec.Struct, frozen=True, kw_only=True):
    """What `ResidualEstimator` writes. ``completed``: oldest first. ``abandoned``: (completions since, attained)."""

    version: int = STATE_VERSION
    completed: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_STORED)] = ()
    abandoned: Annotated[tuple[tuple[int, float], ...], msgspec.Meta(max_length=MAX_STORED)] = ()


class ResidualEstimator:
    """The mean residual of one quantity in one class, over its last ``window`` completed totals.

    Programs that run are told with `enter`, `advance` and one of `complete`, `abandon`, `leave`; an abandoned one stays
    censored until ``window`` others completed after it. The estimate is renewed every ``refresh_every`` completions,
    those that `replace` an earlier one less often.
    In memory: the two windows, and one number per program that entered and did not leave.
    """

    def __init__(
        self, *, min_completions: int, window: int = WINDOW, refresh_every: int = REFRESH_EVERY, quantity: str = "total"
    ) -> None:
        self._min_completions = min_completions
        self._refresh_every = refresh_every
        self._quantity = quantity
        self._completed = SortedWindow(window)
        self._numbers: deque[int] = deque(maxlen=window)  # of the completions in the window
        self._in_flight = SortedMultiset()
        self._abandoned: deque[tuple[int, float]] = deque(maxlen=window)
        self._completions = 0
        self._since_refresh = 0
        self._replaced = 0
        self._fit: ProductLimit | None = None
        self.refreshes = 0
        """How often the estimate was made: while it stays, so do all answers."""

    @property
    def completions(self) -> int:
        """Completed totals in the window."""
        return len(self._completed)

    @property
    def in_flight(self) -> int:
        """Programs that run."""
        return len(self._in_flight)

    @property
    def is_ready(self) -> bool:
        """Whether enough programs completed for a prediction."""
        return len(self._completed) >= self._min_completions

    @property
    def estimate(self) -> ProductLimit | None:
        """What answers until the next refresh, another object after it; None: too few completions."""
        return self._fit

    def enter(self, attained: float = 0.0) -> None:
        """A program of the class runs, and attained so much. Raises `BadSampleError`."""
        self._in_flight.add(sample(self._quantity, attained))

    def advance(self, before: float, after: float) -> None:
        """It attained ``after``. Raises `BadSampleError`; `KeyError` where none in flight had attained ``before``."""
        after = sample(self._quantity, after)
        self._in_flight.remove(before)
        self._in_flight.add(after)

    def complete(self, attained: float) -> int:
        """It ended, and what it attained is its total. Returns the number of this completion. Raises `KeyError` as
        `advance`."""
        self._in_flight.remove(attained)
        self._completed.add(float(attained))
        self._completions += 1
        self._numbers.append(self._completions)
        self._since_refresh += 1
        if self._since_refresh >= self._refresh_every or self._fit is None:
            self.refresh()
        return self._completions

    def replace(self, number: int, attained: float) -> int:
        """`complete`, in place of the completion of that number, which was none, if it is in the window still."""
        self.withdraw(number)
        self._replaced += 1
        self._since_refresh -= 1
        number = self.complete(attained)
        if self._replaced >= max(self._refresh_every, REPLACED_SHARE * len(self._completed)):
            self.refresh()
        return number

    def withdraw(self, number: int) -> None:
        """The completion of that number was none. One that is not in the window (any more) is nothing."""
        at = bisect_left(self._numbers, number)
        if at < len(self._numbers) and self._numbers[at] == number:
            del self._numbers[at]
            self._completed.remove_at(at)

    def abandon(self, attained: float) -> None:
        """It was aborted or fell idle: its total is not known, only that it was no less. Raises `KeyError`."""
        self._in_flight.remove(attained)
        self._abandoned.append((self._completions, attained))

    def leave(self, attained: float) -> None:
        """It is not to be counted any more. Raises `KeyError` as `advance`."""
        self._in_flight.remove(attained)

    def refresh(self) -> None:
        """Estimate anew from what is known now; O(window)."""
        self._since_refresh = self._replaced = 0
        if not self.is_ready:
            return
        oldest = self._completions - self._completed.size
        while self._abandoned and self._abandoned[0][0] < oldest:
            self._abandoned.popleft()
        completed, abandoned = self._completed.ascending, sorted(value for _, value in self._abandoned)
        distinct = list(dict.fromkeys(completed))
        counts = self._in_flight.counts_from(distinct)
        if abandoned:
            counts = [
                count + len(abandoned) - bisect_left(abandoned, total)
                for count, total in zip(counts, distinct, strict=True)
            ]
        self._fit = ProductLimit.of_counts(completed, counts)
        self.refreshes += 1

    def mean_residual(self, attained: float) -> float | None:
        """MR(attained), in the unit of the totals; None: too few completions. Raises `BadSampleError`."""
        return None if self._fit is None else self._fit.mean_residual(attained)

    def to_state(self) -> ResidualState:
        """What to write down; programs in flight are not in it."""
        return ResidualState(
            completed=self._completed.ordered(),
            abandoned=tuple((self._completions - mark, value) for mark, value in self._abandoned),
        )

    @classmethod
    def from_state(
        cls,
        state: ResidualState,
        *,
        min_completions: int,
        window: int = WINDOW,
        refresh_every: int = REFRESH_EVERY,
        quantity: str = "total",
    ) -> ResidualEstimator:
        """An estimator that knows what was written; the latest, where its window is smaller. Raises `BadStateError`."""
        stored_version(quantity, state.version, STATE_VERSION)
        completed = stored_samples(quantity, state.completed, MAX_STORED)
        attained = stored_samples(quantity, [value for _, value in state.abandoned], MAX_STORED)
        ages = [age for age, _ in state.abandoned]
        if any(older < younger for older, younger in pairwise(ages)) or any(not 0 <= age <= MAX_STORED for age in ages):
            raise BadStateError(quantity, "bad_value", "ages of abandoned programs are no ages, oldest first")
        made = cls(min_completions=min_completions, window=window, refresh_every=refresh_every, quantity=quantity)
        made._completed = SortedWindow(window, completed)
        made._numbers.extend(range(-len(completed), 0))
        made._abandoned.extend((-age, value) for age, value in zip(ages, attained, strict=True))
        made.refresh()
        return made


def predicted_final_context(context: float, mean_residual: float | None, *, growth: float, capacity: float) -> float:
    """Pk: the context that a program is charged for, in tokens, at most ``capacity``.

    ``mean_residual``: MR_ctx(context), for a new program MR_ctx(0); None where there is no prediction: then what it has
    and one turn's ``growth``, and no less than an eighth of the capacity, or `MOST_UNSEEN`.

    Source: spec policy §4 (``Pk_p``); `MOST_UNSEEN` is ours.
    """
    if mean_residual is None:
        return min(capacity, max(context + growth, min(capacity / 8, MOST_UNSEEN)))
    return min(capacity, context + max(0.0, mean_residual))

"""Distributions of tool durations: the empirical one, and the exponential of a cold start.

Both answer the same questions, of a tool that has run for ``elapsed`` seconds: with which chance it returns within a
horizon, how long its KV would be held until then, which time to live is best, and at which rate it returns at best.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from services.admission.estimators.errors import sample
from services.admission.estimators.hull import SuffixHulls

BLOCK = 32
"""Points per block of the search for the next low rate: about the root of a full history."""


class Durations(Protocol):
    """What is known of a tool's duration X, in seconds. All of it raises `BadSampleError` for a time that is none."""

    def chance_within(self, horizon: float, elapsed: float) -> float:
        """Pr(X <= horizon | X > elapsed); 0 where it should have returned already."""

    def mean_held(self, horizon: float, elapsed: float) -> float:
        """E[min(X, horizon) - elapsed | X > elapsed], in seconds; 0 where it should have returned already."""

    def best_ttl(self, benefit: float) -> float:
        """tau*: argmax of P(tau)*benefit - tau, the shorter of equal ones (spec scheduling §1.4). All in seconds."""

    def best_ttl_by_occupancy(self, benefit: float, price: float = 1.0, elapsed: float = 0.0) -> float:
        """argmax of Pr(X<=tau | X>elapsed)*benefit - price*E[min(X,tau)-elapsed | X>elapsed], counted from the start of
        the tool; ``elapsed`` where no tau is worth it (spec scheduling §1.8, §5.2)."""

    def return_rate(self, elapsed: float) -> float:
        """sup over s of Pr(X<=s | X>elapsed) / E[min(X,s)-elapsed | X>elapsed], per second; 0 where it should have
        returned already. The lease index is this times R/c (spec policy §4, scheduling §5.2); its reciprocal is a
        Gittins time."""

    def falls_below(self, rate: float, elapsed: float) -> float:
        """The first time from ``elapsed`` on at which `return_rate` is below ``rate``; infinite if never."""

    def rises_to(self, rate: float, elapsed: float) -> float:
        """The first time from ``elapsed`` on at which `return_rate` is no less than ``rate``; infinite if never.

        Where rounding leaves no time between, it may be the next duration, at which the rate has fallen again: whoever
        asks anew at the time answered comes forward all the same."""

    def standing(self, rate: float, elapsed: float) -> tuple[float, bool, float]:
        """`return_rate`; whether it is no less than ``rate``; and when that changes (`falls_below`, `rises_to`)."""

    def quantile(self, share: float) -> float:
        """The time within which ``share`` of the calls return, in seconds."""


class Ecdf:
    """The step-function distribution of recorded durations (spec scheduling §1.3), immutable. O(n) to make, O(log n) to
    ask.

    ``durations``: ascending, at least one, none negative. Points are 0 and the distinct durations; for each the calls
    that returned by then, and the time held by all calls until then, sum of min(X, s).
    """

    def __init__(self, durations: Sequence[float]) -> None:
        self._total = total = len(durations)
        times, returned, held = [0.0], [0], [0.0]
        for duration in durations:
            held_by_all = held[-1] + (duration - times[-1]) * (total - returned[-1])
            if held_by_all > held[-1]:  # else it is the same duration, as far as a float can tell
                held.append(held_by_all)
                times.append(duration)
                returned.append(returned[-1])
            returned[-1] += 1
        self._times, self._returned, self._held = times, returned, held
        self._by_held = SuffixHulls(held, returned)
        slopes = self._by_held.slopes
        self._lowest = [min(slopes[at : at + BLOCK]) for at in range(0, len(slopes), BLOCK)]

    @cached_property
    def _by_time(self) -> SuffixHulls:
        return SuffixHulls(self._times, self._returned)

    def __len__(self) -> int:
        return self._total

    def _point(self, time: float) -> int:
        return bisect_right(self._times, time) - 1

    def _held_until(self, time: float) -> float:
        at = self._point(time)
        return self._held[at] + (time - self._times[at]) * (self._total - self._returned[at])

    def chance_within(self, horizon: float, elapsed: float) -> float:
        horizon, elapsed = sample("horizon", horizon), sample("elapsed", elapsed)
        before = self._returned[self._point(elapsed)]
        left = self._total - before
        return max(0, self._returned[self._point(horizon)] - before) / left if left else 0.0

    def mean_held(self, horizon: float, elapsed: float) -> float:
        horizon, elapsed = sample("horizon", horizon), sample("elapsed", elapsed)
        left = self._total - self._returned[self._point(elapsed)]
        if not left or horizon <= elapsed:
            return 0.0
        return (self._held_until(horizon) - self._held_until(elapsed)) / left

    def best_ttl(self, benefit: float) -> float:
        benefit = sample("benefit", benefit)
        return self._times[self._by_time.best(0, self._total / benefit)] if benefit else 0.0

    def best_ttl_by_occupancy(self, benefit: float, price: float = 1.0, elapsed: float = 0.0) -> float:
        benefit, price, elapsed = sample("benefit", benefit), sample("price", price), sample("elapsed", elapsed)
        at = self._point(elapsed)
        if not benefit or self._returned[at] == self._total:
            return elapsed
        best = self._by_held.best(at + 1, price / benefit)
        # Among later points it is the best; whether it beats holding no longer is another question.
        gained = (self._returned[best] - self._returned[at]) * benefit
        paid = (self._held[best] - self._held_until(elapsed)) * price
        return self._times[best] if gained > paid else elapsed

    def return_rate(self, elapsed: float) -> float:
        elapsed = sample("elapsed", elapsed)
        return self._rate(self._point(elapsed), elapsed)

    def _rate(self, at: int, elapsed: float) -> float:
        """`return_rate`; ``at``: the last point that is not after ``elapsed``."""
        returned, after = self._returned[at], self._times[at]
        if returned == self._total:
            return 0.0
        if elapsed == after:
            return self._by_held.slopes[at]
        distance = (self._times[at + 1] - elapsed) * (self._total - returned)
        return self._by_held.steepest(at + 1, distance, returned)

    def standing(self, rate: float, elapsed: float) -> tuple[float, bool, float]:
        elapsed = sample("elapsed", elapsed)
        at = bisect_right(self._times, elapsed) - 1
        now = self._rate(at, elapsed)
        if now < rate:
            return now, False, self._rises_to(rate, elapsed, at)
        return now, True, math.inf if rate <= 0 else self._times[self._next_below(rate, at + 1)]

    def falls_below(self, rate: float, elapsed: float) -> float:
        # Between two durations the rate only rises: less time to hold, the same chance. It falls at durations alone.
        if rate <= 0:
            return math.inf
        if self.return_rate(elapsed) < rate:
            return elapsed
        return self._times[self._next_below(rate, self._point(elapsed) + 1)]

    def _next_below(self, rate: float, first: int) -> int:
        """The first point from ``first`` on whose rate is below ``rate``; the last one's is 0."""
        slopes = self._by_held.slopes
        end = (first // BLOCK + 1) * BLOCK
        for slope in slopes[first:end]:
            if slope < rate:
                return first
            first += 1
        for lowest in self._lowest[first // BLOCK :]:
            if lowest < rate:
                break
            first += BLOCK
        while slopes[first] >= rate:
            first += 1
        return first

    def rises_to(self, rate: float, elapsed: float) -> float:
        elapsed = sample("elapsed", elapsed)
        return elapsed if rate <= 0 else self._rises_to(rate, elapsed, self._point(elapsed))

    def _rises_to(self, rate: float, elapsed: float, at: int) -> float:
        left = self._total - self._returned[at]
        if not left or math.isinf(rate):
            return math.inf
        # The rate at y reaches it when some later point j has (N_j - N) / rate >= (t - y)*left + H_j - H_t, t the next
        # duration; the best j is the one that the price ``rate`` chooses.
        best = self._by_held.best(at + 1, rate)
        room = (self._returned[best] - self._returned[at]) / rate - (self._held[best] - self._held[at + 1])
        rises, after = max(elapsed, self._times[at + 1] - max(0.0, room) / left), self._times[at + 1]
        step = math.ulp(after)
        while rises < after and self._rate(at, rises) < rate:  # rounded down: an asker would come back too early
            rises, step = rises + step, 2 * step
        return min(rises, after)

    def quantile(self, share: float) -> float:
        rank = max(1, math.ceil(share * self._total - 1e-9))
        return self._times[min(bisect_left(self._returned, rank), len(self._times) - 1)]


class Exponential:
    """A tool of which too little is known: exponential with ``mean`` seconds, believed for ``limit`` seconds.

    Memoryless: its return rate does not fall, so that alone a lease would last for ever. What has run for longer than
    ``limit`` has shown the assumption wrong; its rate counts as 0.

    Source: spec scheduling §1.3 (T_default, closed form mu*ln(B/mu)) and §5.4 (clipped to [0, 2] s).
    """

    def __init__(self, mean: float = 1.0, limit: float = 2.0) -> None:
        self._mean = mean
        self._limit = limit

    def chance_within(self, horizon: float, elapsed: float) -> float:
        horizon, elapsed = sample("horizon", horizon), sample("elapsed", elapsed)
        return -math.expm1(min(0.0, elapsed - horizon) / self._mean)

    def mean_held(self, horizon: float, elapsed: float) -> float:
        return self._mean * self.chance_within(horizon, elapsed)

    def best_ttl(self, benefit: float) -> float:
        benefit = sample("benefit", benefit)
        if benefit <= self._mean:
            return 0.0
        return min(self._limit, self._mean * math.log(benefit / self._mean))

    def best_ttl_by_occupancy(self, benefit: float, price: float = 1.0, elapsed: float = 0.0) -> float:
        # Bang-bang (spec scheduling §1.8): hold if and only if price * mean < benefit.
        benefit, price, elapsed = sample("benefit", benefit), sample("price", price), sample("elapsed", elapsed)
        return max(elapsed, self._limit) if price * self._mean < benefit else elapsed

    def return_rate(self, elapsed: float) -> float:
        return 1 / self._mean if sample("elapsed", elapsed) < self._limit else 0.0

    def falls_below(self, rate: float, elapsed: float) -> float:
        if rate <= 0:
            return math.inf
        return elapsed if self.return_rate(elapsed) < rate else self._limit

    def rises_to(self, rate: float, elapsed: float) -> float:
        return elapsed if self.return_rate(elapsed) >= rate else math.inf

    def standing(self, rate: float, elapsed: float) -> tuple[float, bool, float]:
        now = self.return_rate(elapsed)
        if now < rate:
            return now, False, math.inf
        return now, True, math.inf if rate <= 0 else self._limit

    def quantile(self, share: float) -> float:
        return -self._mean * math.log1p(-share) if share < 1 else math.inf

"""The upper concave hull of every suffix of a row of points: steepest slopes and best trade-offs in O(log n).

For points ordered by x, the next vertex after a point on the hull of the points from there on is where the slope from
that point is largest. One pass from the right finds it for all; the edges of one suffix's hull form a chain of falling
slopes, walked with jump pointers (two per point, as in Myers' random access stack).
"""

from __future__ import annotations

from collections.abc import Sequence


class SuffixHulls:
    """Hulls of the suffixes of points (``xs[i]``, ``ys[i]``), ``xs`` strictly ascending, at least one point.

    ``slopes[i]``: the largest slope from point i to a later one; 0 for the last, whatever ``ys`` does.
    """

    __slots__ = ("_jump", "_next", "_xs", "_ys", "slopes")

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        last = len(xs) - 1
        self._xs = xs
        self._ys = ys
        self._next = following = [last] * (last + 1)
        self._jump = jump = [last] * (last + 1)
        self.slopes = slopes = [0.0] * (last + 1)
        depth = [0] * (last + 1)
        for at in range(last - 1, -1, -1):
            to = at + 1
            slope = (ys[to] - ys[at]) / (xs[to] - xs[at])
            while to != last and slopes[to] >= slope:
                to = following[to]
                slope = (ys[to] - ys[at]) / (xs[to] - xs[at])
            following[at], slopes[at], depth[at] = to, slope, depth[to] + 1
            far = jump[to]
            jump[at] = jump[far] if depth[to] - depth[far] == depth[far] - depth[jump[far]] else to

    def steepest(self, first: int, distance: float, y: float) -> float:
        """The largest slope to a point from ``first`` on, seen from a point at height ``y`` that lies ``distance``
        (more than 0) before point ``first``."""
        xs, ys, slopes, base = self._xs, self._ys, self.slopes, self._xs[first]
        at, last = first, len(xs) - 1
        seen = (ys[at] - y) / (distance + (xs[at] - base))
        while at != last and slopes[at] > seen:
            far = self._jump[at]
            if far != last:
                seen = (ys[far] - y) / (distance + (xs[far] - base))
                if slopes[far] > seen:
                    at = far
                    continue
            at = self._next[at]
            seen = (ys[at] - y) / (distance + (xs[at] - base))
        return seen

    def best(self, first: int, price: float) -> int:
        """The point from ``first`` on where y - price*x is largest; the first of equal ones."""
        slopes, last = self.slopes, len(self._xs) - 1
        at = first
        while at != last and slopes[at] > price:
            far = self._jump[at]
            at = far if far != last and slopes[far] > price else self._next[at]
        return at

"""Percentiles of what is reported: always a value that occurred."""

from __future__ import annotations

import math
from collections.abc import Sequence


def nearest_rank(ordered: Sequence[float], percent: float) -> float:
    """The smallest of ``ordered`` (ascending, not empty) that at least ``percent`` % of them do not exceed."""
    return ordered[max(1, math.ceil(percent * len(ordered) / 100)) - 1]

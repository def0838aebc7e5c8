"""Timing: variants interleaved run by run, medians of several runs, percentiles by nearest rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

RUNS = 5


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile of ``values`` (not empty), ``percent`` in 0..100."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(percent / 100 * len(ordered) + 0.5) - 1))]


def interleaved(variants: Mapping[str, Callable[[], object]], runs: int = RUNS) -> dict[str, float]:
    """Median seconds of each variant; one call of each per run, so that a slow minute hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(runs):
        for name, call in variants.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}

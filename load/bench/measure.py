"""Timing: variants interleaved run by run, medians of several runs, percentiles by nearest rank; resident memory."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from load.nearest_rank import nearest_rank

RUNS = 5


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile of ``values`` (not empty), ``percent`` in 0..100."""
    return nearest_rank(sorted(values), percent)


def interleaved(variants: Mapping[str, Callable[[], object]], runs: int = RUNS) -> dict[str, float]:
    """Median seconds of each variant; one call of each per run, so that a slow minute hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(runs):
        for name, call in variants.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def each_us(call: Callable[[object], object], arguments: Sequence[object]) -> list[float]:
    """Microseconds of each call, the clock's own time (some 0.05) included. What it returns is dropped inside the
    measured time, as a caller's would be."""
    clock = time.perf_counter_ns
    spent: list[float] = []
    for argument in arguments:
        start = clock()
        call(argument)
        spent.append((clock() - start) / 1000)
    return spent


@contextmanager
def without_collector() -> Iterator[None]:
    """The cyclic garbage collector off inside, after a full collection."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def resident_bytes() -> int:
    """Resident memory of this process, after giving back what the allocator keeps (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

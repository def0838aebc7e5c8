"""A policy's order as the engines' priority field takes it."""

from __future__ import annotations

HALF = 1 << 30


def engine_priority(priority: int, *, high_first: bool) -> int:
    """``priority`` (lower runs earlier) as its engine sorts: ``high_first``, as SGLang, or the lower one first, as vLLM
    and all others. Engines keep it in 32 bits: the result is in [-2^30, 2^30].

    What does not fit goes around, in the same way for every leader: orders by Unix seconds (`commit`) keep their sense
    until 2072; those by Unix milliseconds (`thunderagent`) lose it once in 25 days, for what waits at that moment.
    """
    value = (priority + HALF) % (2 * HALF) - HALF
    return -value if high_first else value

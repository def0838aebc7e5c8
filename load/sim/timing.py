"""How long iterations take, in whole picoseconds, and how long a run of pure decodes takes at once.

`LinearTiming` has the constants of `load.engine.timing` (spec: scheduling §4.2) and a closed form for a run.
`PeerTiming` has the polynomials of a peer's simulator (spec: scheduling §4.2 "Other simulators"; peers §3 probe).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol

from load.engine.timing import PROFILES, Profile
from load.sim.clock import PS_PER_MS


@dataclass(slots=True)
class Work:
    """One iteration.

    ``prefill``: tokens that are not plain decodes; ``double_pairs``: twice their ``sum(q * (ctx + q/2))``. ``decodes``
    with the sum of their contexts. Prompt chunks by themselves: how many, the sums of the positions where they begin
    and end (what is computed anew after a preemption beyond the prompt is no prompt chunk). ``late``: requests that
    catch up with their output in more than one token, and their lengths.
    """

    prefill: int = 0
    double_pairs: int = 0
    decodes: int = 0
    context: int = 0
    chunks: int = 0
    chunk_starts: int = 0
    chunk_ends: int = 0
    late: int = 0
    late_context: int = 0


class DecodeRun(Protocol):
    """Iterations of nothing but decodes, all of the same requests."""

    def time(self, steps: int) -> int:
        """Picoseconds of the first ``steps`` iterations."""

    def steps_until(self, time_ps: int, most: int) -> int:
        """The fewest iterations, at least one and at most ``most``, that take ``time_ps`` or longer."""


class Timing(Protocol):
    """Time of iterations. ``kv_tokens``: KV capacity of a rank that they hold for; ``kv_bytes``: of one token, on each
    GPU. ``longest_run``: iterations that a run may have (a bound of work, not of behaviour)."""

    kv_tokens: int
    kv_bytes: int
    longest_run: int

    def step(self, work: Work) -> int:
        """Picoseconds of one iteration."""

    def decode_run(self, decodes: int, context: int, steps: int) -> DecodeRun:
        """A run of up to ``steps`` iterations that begins with contexts of ``context`` tokens together."""


@dataclass(frozen=True, slots=True)
class LinearRun:
    """``steps * first + slope * steps * (steps - 1) / 2``: contexts grow by one token a step and request."""

    first: int
    slope: int

    def time(self, steps: int) -> int:
        return steps * self.first + self.slope * (steps * (steps - 1) // 2)

    def steps_until(self, time_ps: int, most: int) -> int:
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self.time(middle) >= time_ps:
                high = middle
            else:
                low = middle + 1
        return low


class LinearTiming:
    """``max(floor, a + b*Q) + p*sum(q*(ctx + q/2)) + k*sum(decode ctx) + host`` (spec: scheduling §4.2)."""

    longest_run = 1 << 40

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.kv_tokens = profile.kv_tokens
        self.kv_bytes = profile.kv_bytes
        self._floor = round(profile.floor_ms * PS_PER_MS)
        self._base = round(profile.base_ms * PS_PER_MS)
        self._per_token = round(profile.per_token_ms * PS_PER_MS)
        self._per_half_pair = round(profile.per_pair_ms * PS_PER_MS / 2)
        self._per_context_token = round(profile.per_context_token_ms * PS_PER_MS)
        self._host = round(profile.host_ms * PS_PER_MS)

    def step(self, work: Work) -> int:
        body = max(self._floor, self._base + self._per_token * (work.prefill + work.decodes))
        attention = self._per_half_pair * work.double_pairs + self._per_context_token * work.context
        return body + attention + self._host

    def decode_run(self, decodes: int, context: int, steps: int) -> LinearRun:
        first = self.step(Work(decodes=decodes, context=context))
        return LinearRun(first, self._per_context_token * decodes)


class SummedRun:
    """A run whose steps have no closed sum: added up one by one, in plain numbers."""

    __slots__ = ("_ends",)

    def __init__(self, ends: list[int]) -> None:
        self._ends = ends

    def time(self, steps: int) -> int:
        return self._ends[steps - 1]

    def steps_until(self, time_ps: int, most: int) -> int:
        return min(bisect_left(self._ends, time_ps, 0, most - 1) + 1, most)


class PeerTiming:
    """``prefill(n) + decode(u)`` of one iteration: n new prompt tokens; u active KV over all KV, both in tokens.

    Prefill ``4.209989e-7 n^2 + 1.518344e-2 n + 16.50142`` ms where n > 0; decode ``-25.74 u^2 + 54.01 u + 5.74`` ms, at
    least 1 ms, where anything decodes. The time of a chunk does not depend on what is before it. Seen in the peer's
    per-request reports: n is the number of chunks times the difference of their mean end and mean start, each rounded
    down; u sums the lengths of the decoding requests, shared prefixes as often as they are shared, and is at most 1;
    what is computed again beyond a prompt takes no prefill time.
    """

    longest_run = 256
    kv_bytes = 128 * 1024

    def __init__(self, kv_tokens: int) -> None:
        self.kv_tokens = kv_tokens

    def step(self, work: Work) -> int:
        time_ps = 0
        if work.chunks:
            tokens = work.chunks * (work.chunk_ends // work.chunks - work.chunk_starts // work.chunks)
            time_ps += round((4.209989e-7 * tokens * tokens + 1.518344e-2 * tokens + 16.50142) * PS_PER_MS)
        if work.decodes or work.late:
            time_ps += self._decode(work.context + work.decodes + work.late_context)
        return time_ps

    def _decode(self, length: int) -> int:
        used = min(1.0, length / self.kv_tokens)
        return max(PS_PER_MS, round((-25.74 * used * used + 54.01 * used + 5.74) * PS_PER_MS))

    def decode_run(self, decodes: int, context: int, steps: int) -> SummedRun:
        ends = []
        end = 0
        for step in range(1, steps + 1):
            end += self._decode(context + step * decodes)
            ends.append(end)
        return SummedRun(ends)


TIMINGS = {name: LinearTiming(profile) for name, profile in PROFILES.items()}
"""Timing by the name of its profile."""

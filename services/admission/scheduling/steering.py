"""kappa: by how much the commitments of a seat may exceed its capacity, steered by what is computed twice.

Predicted final contexts are reached one after another and not all at once, so that a seat may promise more than it
has. Where that goes too far, returning programs find their KV evicted, and compute it again. Source: spec policy §4
(KAPPA).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

PERIOD_S = 5.0
KEPT = 0.9
WITHOUT_COUNTS = 1.3
WITH_HOST_TIER = 2.0

COUNTS_WANTED = 20
"""After a turn without a cached-token count so many with one are wanted before counts are believed again; as many warm
returns in a row of which nothing at all was cached show that the counts mean nothing."""


class SteeringParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``start``, ``least``, ``most``: of kappa. ``down``: a step where more than ``too_much`` is computed again, ``up``
    where less than ``little`` is and a new program waits.

    The source steps by .02 and .01. A program lives for as long as ten steps take, so that kappa runs ahead of what it
    causes; steps a third as large, from a start nearer to where it goes, follow it.

    Raises `ValueError`.
    """

    start: float = 1.3
    least: float = 0.8
    most: float = 2.0
    down: float = 0.006
    up: float = 0.003
    too_much: float = 0.12
    little: float = 0.06

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.start <= self.most:
            raise ValueError("steering: 0 < least <= start <= most")
        if not 0 <= self.little <= self.too_much:
            raise ValueError("steering: 0 <= little <= too_much")
        if not (self.down >= 0 and self.up >= 0):
            raise ValueError("steering: down and up must not be negative")


STEERING = SteeringParameters()


@dataclass(slots=True)
class Steering:
    """One seat's kappa. ``host_tier``: what is evicted is loaded again, not computed."""

    host_tier: bool = False
    parameters: SteeringParameters = STEERING
    steered: float = field(init=False)
    _prefilled: float = 0.0
    _new: float = 0.0
    _period_prefilled: int = 0
    _period_new: int = 0
    _next: float | None = None
    _missing: int = 0
    _empty_returns: int = 0

    def __post_init__(self) -> None:
        self.steered = self.parameters.start

    @property
    def value(self) -> float:
        """kappa as used."""
        if self.host_tier:
            return WITH_HOST_TIER
        return self.steered if self.counts_are_good else WITHOUT_COUNTS

    @property
    def counts_are_good(self) -> bool:
        """Whether the engine's cached-token counts are there, and tell something."""
        return self._missing == 0 and self._empty_returns < COUNTS_WANTED

    @property
    def recomputed(self) -> float:
        """rho: tokens computed beyond the new ones, per new one."""
        return self._prefilled / self._new - 1 if self._new > 0 else 0.0

    def turn_finished(self, prompt_tokens: int, cached_tokens: int | None, new_tokens: int, *, warm: bool) -> None:
        """``new_tokens``: of the prompt, those that the program had not had before. ``warm``: it had a lease."""
        if cached_tokens is None:
            self._missing = COUNTS_WANTED
            return
        self._missing = max(0, self._missing - 1)
        if cached_tokens > 0:
            self._empty_returns = 0
        elif warm and new_tokens < prompt_tokens:
            self._empty_returns += 1
        self._period_prefilled += max(0, prompt_tokens - cached_tokens)
        self._period_new += new_tokens

    def step(self, now: float, new_program_held: bool) -> bool:
        """Steers once when a period is over. Returns whether it changed."""
        if self._next is None:
            self._next = now + PERIOD_S
        if now < self._next:
            return False
        self._next = now + PERIOD_S
        self._prefilled = KEPT * self._prefilled + self._period_prefilled
        self._new = KEPT * self._new + self._period_new
        self._period_prefilled = self._period_new = 0
        before, by = self.steered, self.parameters
        if self.recomputed > by.too_much:
            self.steered = max(by.least, before - by.down)
        elif self.recomputed < by.little and new_program_held:
            self.steered = min(by.most, before + by.up)
        return self.steered != before

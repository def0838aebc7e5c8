"""``[[admission.policies]]``: which users' policies on the bus are asked what, in which order, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

AdmissionAsk = Literal["route", "admit", "lease"]
"""What admission asks; the hint planner has policies of its own."""

MAX_DEADLINE_MS = 1000
"""While questions about it are open an ask hears nothing, and an ingress takes 2 s of silence for a dead leader."""

MAX_NAME = 128
"""Characters of a policy's name, which stands in reasons, metrics and messages to clients."""

MAX_WEIGHT = 1_000_000
"""So that what it adds to a cost is a number that can be said again."""

DECIDES_BLOCKS = 1e9
"""By so much a rank becomes cheaper, in blocks, whose policy decides: more than any cost."""


class UserPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One policy. ``name``: as its process says it. ``asks``: what it is asked. ``order``: lower first; of two that
    hold or refuse a turn, or have a word on a lease, the first counts. ``weight``: of a route answer, in multiples of
    the prompt's blocks that the named worker is made cheaper by (``decides``: whatever the cost); of an order bias, a
    factor (``decides``: 1). ``deadline_ms``: later answers are not waited for.
    """

    name: str
    asks: tuple[AdmissionAsk, ...] = ("route",)
    order: int = 0
    weight: float | Literal["decides"] = "decides"
    deadline_ms: int = 50

    def __post_init__(self) -> None:
        """Raises `ValueError` with one sentence."""
        if not self.name or len(self.name) > MAX_NAME or not self.name.isprintable():
            raise ValueError(f"name must be 1 to {MAX_NAME} printable characters")
        if not self.asks or len(set(self.asks)) < len(self.asks):
            raise ValueError(f"{self.name}: asks must name route, admit or lease, each once")
        if not isinstance(self.weight, str) and not 0 < self.weight <= MAX_WEIGHT:
            raise ValueError(f'{self.name}: weight must be "decides" or a number above 0, at most {MAX_WEIGHT}')
        if not 0 < self.deadline_ms <= MAX_DEADLINE_MS:
            raise ValueError(f"{self.name}: deadline_ms must be from 1 to {MAX_DEADLINE_MS}")

    def blocks(self, prompt_blocks: int) -> float:
        """By how much the worker that it names becomes cheaper, in blocks."""
        return DECIDES_BLOCKS if isinstance(self.weight, str) else self.weight * prompt_blocks

    @property
    def factor(self) -> float:
        """Of its order bias."""
        return 1.0 if isinstance(self.weight, str) else self.weight


def slowest_ms(policies: Sequence[UserPolicy]) -> int:
    """What the questions about one turn may take, in ms: they are asked at the same time."""
    return max((policy.deadline_ms for policy in policies if set(policy.asks) - {"lease"}), default=0)


def check_policies(policies: Sequence[UserPolicy], builtin: str) -> None:
    """Rules between policies, and with the ``builtin`` one. Raises `ValueError` with one sentence."""
    names = [policy.name for policy in policies]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"policies: {twice} is there twice; one entry with all its asks is enough")
    for policy in policies:
        if "lease" in policy.asks and builtin == "kv":
            raise ValueError(f'policies: {policy.name}: asks lease, but policy "kv" leases nothing (commit does)')

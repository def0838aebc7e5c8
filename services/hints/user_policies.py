"""``[[hints.policies]]``: which users' policies are asked what the caches should be told, or may say so unasked."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

MAX_DEADLINE_MS = 1000
"""An action that waits longer for a policy comes too late for most tools."""

MAX_NAME = 128
"""Characters of a policy's name, which stands in metrics and logs."""


class HintPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One policy. ``name``: as its process says it. ``asked``: it is asked on ``tg.v1.policy.hint.<name>``; in any case
    it may publish on ``tg.v1.hint.intent.<name>``. ``order``: lower first; the first answer with an opinion counts.
    ``deadline_ms``: later answers are not waited for.
    """

    name: str
    asked: bool = True
    order: int = 0
    deadline_ms: int = 50

    def __post_init__(self) -> None:
        """Raises `ValueError` with one sentence."""
        if not self.name or len(self.name) > MAX_NAME or not self.name.isprintable():
            raise ValueError(f"name must be 1 to {MAX_NAME} printable characters")
        if not 0 < self.deadline_ms <= MAX_DEADLINE_MS:
            raise ValueError(f"{self.name}: deadline_ms must be from 1 to {MAX_DEADLINE_MS}")


def check_policies(policies: Sequence[HintPolicy]) -> None:
    """Rules between policies. Raises `ValueError` with one sentence."""
    names = [policy.name for policy in policies]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"policies: {twice} is there twice")

"""Settings of the hints service: ``[hints]``, ``TIDEGATE_HINTS_<KEY>``, ``--set``."""

from __future__ import annotations

from bus.settings import CommonSettings


class HintsSettings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What caches are asked for, and how much of it.

    ``retain_ttl_s``: how long a session's prefix is worth keeping after its turn; ``retain_priority``: order of
    eviction (higher stays longer). ``max_retained_per_worker``: sessions retained on one worker at a time; more are not
    asked for. ``result_deadline_s``: after it an envelope counts as unanswered. ``max_sessions``: remembered at most.
    ``lease_s`` and ``renew_s``: of the leader's key.
    """

    retain_ttl_s: float = 120.0
    retain_priority: int = 50
    max_retained_per_worker: int = 1024
    result_deadline_s: float = 5.0
    max_sessions: int = 65_536
    lease_s: float = 2.0
    renew_s: float = 0.5

    def __post_init__(self) -> None:
        """Rules between keys. Raises `ValueError` with one sentence."""
        for key in ("retain_ttl_s", "max_retained_per_worker", "result_deadline_s", "max_sessions", "renew_s"):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be greater than 0")
        if self.lease_s < 3 * self.renew_s:
            raise ValueError("lease_s must be at least 3 times renew_s")

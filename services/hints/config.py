"""Settings of the hints service: ``[hints]``, ``TIDEGATE_HINTS_<KEY>``, ``--set``."""

from __future__ import annotations

from bus.settings import CommonSettings
from schemas.hint import MAX_TTL_MS
from services.hints.user_policies import HintPolicy, check_policies


class HintsSettings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What caches are asked for, and how much of it.

    Keeping: ``retain_ttl_s`` and ``retain_priority``: how long, and with which rank in the order of eviction (higher
    stays longer, 0 is anybody's), a prefix is retained after its turn; ``max_retained_per_worker`` sessions at a time.
    ``pin_share``: how much of a rank's KV may be pinned in all. ``pin_ttl_s``: of one pin; it is renewed while its
    lease lasts, so that pins end soon when nobody renews them.

    Moving (only where a worker has lower tiers or a shared pool): ``demote_after_s`` a tool runs before its session's
    KV goes to a lower tier, if ``demote_usage`` of the rank's KV is in use or requests wait there; ``demote_ttl_s`` it
    is kept there; ``prefetch_lead_s`` before a predicted return it is brought back; ``prefetch_s_per_mtoken``: about
    how long that takes for a million tokens. ``share_min_tokens`` of a parent's prefix that a child's worker must lack.

    ``supersede_share``: a prompt shorter than this share of its session's last one has been rewritten.

    Bounds: ``actions_per_s`` and ``actions_burst`` of one worker; ``result_deadline_s``: after it an action counts as
    unanswered, and must not be carried out any more; ``unsupported_s`` a worker is not asked again for what it cannot
    do; ``max_sessions`` and ``max_workers`` remembered; ``ask_sessions``: ask an indexer what is known of a session's
    prefix, ``max_questions`` open at once.

    Users' policies: ``policies`` (see `services.hints.user_policies.HintPolicy`), each with ``policy_questions`` open
    at most; of one: ``policy_pin_share`` of what may be pinned, ``policy_actions_per_s``, ``policy_actions_burst``.

    ``lease_s`` and ``renew_s``: of the leader's key.
    """

    retain_ttl_s: float = 120.0
    retain_priority: int = 4
    max_retained_per_worker: int = 1024
    pin_share: float = 0.5
    pin_ttl_s: float = 60.0
    demote_after_s: float = 10.0
    demote_usage: float = 0.5
    demote_ttl_s: float = 600.0
    prefetch_lead_s: float = 1.0
    prefetch_s_per_mtoken: float = 10.0
    share_min_tokens: int = 2048
    supersede_share: float = 0.7
    actions_per_s: float = 200.0
    actions_burst: int = 400
    result_deadline_s: float = 5.0
    unsupported_s: float = 300.0
    max_sessions: int = 65_536
    max_workers: int = 4096
    ask_sessions: bool = True
    max_questions: int = 256
    policies: tuple[HintPolicy, ...] = ()
    policy_questions: int = 256
    policy_pin_share: float = 0.25
    policy_actions_per_s: float = 20.0
    policy_actions_burst: int = 100
    lease_s: float = 2.0
    renew_s: float = 0.5

    def __post_init__(self) -> None:
        """Rules between keys. Raises `ValueError` with one sentence."""
        for key in (
            "retain_ttl_s",
            "max_retained_per_worker",
            "pin_ttl_s",
            "demote_after_s",
            "demote_ttl_s",
            "actions_per_s",
            "actions_burst",
            "result_deadline_s",
            "max_sessions",
            "max_workers",
            "max_questions",
            "policy_questions",
            "policy_actions_per_s",
            "policy_actions_burst",
            "renew_s",
        ):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be greater than 0")
        for key in ("prefetch_lead_s", "prefetch_s_per_mtoken", "share_min_tokens", "unsupported_s"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} must not be negative")
        for key in ("pin_share", "policy_pin_share", "supersede_share", "demote_usage"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"{key} must be from 0 to 1")
        for key in ("retain_ttl_s", "pin_ttl_s", "demote_ttl_s"):
            if getattr(self, key) * 1000 > MAX_TTL_MS:
                raise ValueError(f"{key} must be at most {MAX_TTL_MS // 1000}")
        if self.lease_s < 3 * self.renew_s:
            raise ValueError("lease_s must be at least 3 times renew_s")
        check_policies(self.policies)

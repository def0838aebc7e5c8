"""Settings of an indexer (section ``indexer``)."""

from __future__ import annotations

from bus.errors import SettingsError
from bus.settings import CommonSettings
from replica.config import ReplicaSettings

_REPLICA = ReplicaSettings()


class IndexerSettings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One indexer: a complete index of every worker, so any number may run side by side.

    ``sessions``, ``session_blocks`` (distinct blocks of their prefixes, about 90 bytes each) and ``session_bytes`` (of
    their names) bound what is known of sessions; the first two also, once more, what is known of those that are
    recognised by their content. All others are its replica's, see
    `replica.config.ReplicaSettings`.
    """

    max_blocks: int = _REPLICA.max_blocks
    worker_lost_s: float = _REPLICA.worker_lost_s
    hold_limit: int = _REPLICA.hold_limit
    snapshot_timeout_s: float = _REPLICA.snapshot_timeout_s
    snapshot_retry_s: float = _REPLICA.snapshot_retry_s
    snapshot_retry_max_s: float = _REPLICA.snapshot_retry_max_s
    snapshots_at_once: int = _REPLICA.snapshots_at_once
    parity_window: int = _REPLICA.parity_window
    parity_min_requests: int = _REPLICA.parity_min_requests
    parity_alarm_ratio: float = _REPLICA.parity_alarm_ratio
    parity_floor_tokens: int = _REPLICA.parity_floor_tokens
    silent_requests: int = _REPLICA.silent_requests
    approximate_ttl_s: float = _REPLICA.approximate_ttl_s
    approximate_blocks: int = _REPLICA.approximate_blocks
    approximate_max_blocks: int = _REPLICA.approximate_max_blocks
    pools: int = _REPLICA.pools
    pool_pages: int = _REPLICA.pool_pages
    pool_stale_s: float = _REPLICA.pool_stale_s
    pool_alarm_keys: int = _REPLICA.pool_alarm_keys
    engine_links: int = _REPLICA.engine_links
    sessions: int = 16_384
    session_blocks: int = 2_000_000
    session_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        """Rules between keys. Raises `SettingsError`."""
        self.replica()
        for name in ("sessions", "session_blocks", "session_bytes"):
            if getattr(self, name) <= 0:
                raise SettingsError(name, "must be positive")

    def replica(self) -> ReplicaSettings:
        """The settings of its replica: the keys of the same names. Raises `SettingsError`."""
        return ReplicaSettings(**{name: getattr(self, name) for name in ReplicaSettings.__struct_fields__})

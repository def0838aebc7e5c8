"""Settings of a replica: a table of its own, or (at the indexer) keys among others."""

from __future__ import annotations

import msgspec

from bus.errors import SettingsError


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replica: a complete index of every worker, so any number may run side by side.

    ``max_blocks``: bound of the index over all sources, in (source, tier, block) entries. ``worker_lost_s``: silence
    after which a worker is removed. ``hold_limit``: batches kept per source while its hole is being filled.
    ``snapshot_*``: the question to a bridge, its deadline (a bridge dumps a million blocks in 1 to 2 s, and has up to
    4 million by default) and the pauses between tries. ``parity_*`` and ``silent_requests``: see `replica.parity`.

    ``pools`` that workers read are followed at most, each with at most ``pool_pages`` pages in its index. One that was
    not reconciled with its master's own list for ``pool_stale_s`` is not trusted in full. ``pool_alarm_keys``: so many
    keys must have arrived before it is an alarm that nobody finds any. ``engine_links``: blocks whose engine hash is
    kept once a worker's pool is keyed by those.

    ``approximate_*``: of what was sent where. ``ttl_s``: how long a sent block counts. ``blocks``: what one rank can
    hold, where its worker does not say. ``max_blocks``: of all ranks, for tokens and for text each (130 bytes a block).
    """

    max_blocks: int = 8_000_000
    worker_lost_s: float = 5.0
    hold_limit: int = 16_384
    snapshot_timeout_s: float = 15.0
    snapshot_retry_s: float = 0.2
    snapshot_retry_max_s: float = 5.0
    snapshots_at_once: int = 4
    parity_window: int = 32
    parity_min_requests: int = 8
    parity_alarm_ratio: float = 0.25
    parity_floor_tokens: int = 32
    silent_requests: int = 16
    approximate_ttl_s: float = 300.0
    approximate_blocks: int = 65_536
    approximate_max_blocks: int = 1_000_000
    pools: int = 16
    pool_pages: int = 20_000_000
    pool_stale_s: float = 180.0
    pool_alarm_keys: int = 1000
    engine_links: int = 1_000_000

    def __post_init__(self) -> None:
        """Cross-field rules. Raises `SettingsError`."""
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise SettingsError(name, "must be positive")
        if self.snapshot_retry_max_s < self.snapshot_retry_s:
            raise SettingsError("snapshot_retry_max_s", "must not be below snapshot_retry_s")
        if self.parity_min_requests > self.parity_window:
            raise SettingsError("parity_min_requests", "must not exceed parity_window")
        if not 0 < self.parity_alarm_ratio <= 1:
            raise SettingsError("parity_alarm_ratio", "must be above 0 and at most 1")


_POSITIVE = (
    "max_blocks",
    "worker_lost_s",
    "hold_limit",
    "snapshot_timeout_s",
    "snapshot_retry_s",
    "snapshots_at_once",
    "parity_window",
    "parity_min_requests",
    "silent_requests",
    "approximate_ttl_s",
    "approximate_blocks",
    "approximate_max_blocks",
    "pools",
    "pool_pages",
    "pool_stale_s",
    "pool_alarm_keys",
    "engine_links",
)

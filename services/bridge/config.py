"""Settings of one bridge (section ``bridge``): which engine it stands for, and how patient it is."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

from bus.errors import SettingsError
from bus.settings import CommonSettings
from schemas.kv import MAX_RANKS
from services.bridge.endpoints import RankSource, from_settings, host_of
from services.bridge.errors import BadEndpointError

RESERVED_WORKER = "snapshot"
"""``tg.v1.kv.snapshot.<worker>`` also matches ``tg.v1.kv.*.*``, so no worker may have this name."""


class BridgeSettings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One bridge, one engine.

    ``worker``: its id on the bus (empty: host and port of ``engine_url``). ``kv_events``: the engine's PUB endpoints,
    one per rank, or one base for ``ranks`` ranks (port base + rank); empty: ask the engine. ``kv_replay``: its ROUTER
    endpoints, likewise. ``kv_events_bind``: the engine connects to us, so we bind ``kv_events``. ``block_size``:
    tokens a block is expected to have; ``None``: what the engine declares. ``identify_timeout_s``: how long batches
    wait, after the socket was lost, for the page that says which process sends them. ``probe_after_s``: silence
    after which the replay socket is asked for a lost tail. ``checkpoint_interval_s`` and ``checkpoint_batches``: how
    old the index in the object store may become that a restarted bridge begins with: well within the engine's replay
    buffer, which has 10,000 batches by default. ``hold_limit``: batches that wait for a hole before them to be filled,
    or for a dump of the index to end. Times in seconds, limits in batches.
    """

    engine_url: str = ""
    worker: str = ""
    engine_api_key: str = ""
    engine: Literal["auto", "vllm", "sglang", "simulated"] = "auto"
    kv_events: tuple[str, ...] = ()
    kv_replay: tuple[str, ...] = ()
    kv_events_bind: bool = False
    kv_topic: str = ""
    ranks: int = 0
    block_size: int | None = None
    scrape_interval_s: float = 1.0
    scrape_timeout_s: float = 2.0
    heartbeat_interval_s: float = 1.0
    unhealthy_after: int = 3
    ready_after: int = 2
    replay_timeout_s: float = 5.0
    replay_attempts: int = 2
    replay_retry_s: float = 1.0
    probe_after_s: float = 10.0
    identify_timeout_s: float = 5.0
    checkpoint_interval_s: float = 30.0
    checkpoint_batches: int = 2_000
    handover_limit: int = 16_384
    hold_limit: int = 16_384
    max_blocks: int = 4_000_000

    def __post_init__(self) -> None:
        """Cross-field rules. Raises `SettingsError`."""
        url = urlsplit(self.engine_url)
        if url.scheme != "http" or not url.hostname:
            raise SettingsError("engine_url", f"must be the http URL of an engine, not {self.engine_url!r}")
        if self.worker_id == RESERVED_WORKER:
            raise SettingsError("worker", f"{RESERVED_WORKER!r} is reserved")
        if self.block_size is not None and self.block_size <= 0:
            raise SettingsError("block_size", "must be positive")
        if self.ranks < 0:
            raise SettingsError("ranks", "must not be negative")
        if max(self.ranks, len(self.kv_events)) > MAX_RANKS:
            raise SettingsError("ranks", f"must not exceed {MAX_RANKS}")
        if self.kv_replay and not self.kv_events:
            raise SettingsError("kv_replay", "needs kv_events beside it")
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise SettingsError(name, "must be positive")
        try:
            self.sources()
        except BadEndpointError as error:
            raise SettingsError("kv_events", str(error)) from error

    @property
    def worker_id(self) -> str:
        """``worker``, or host and port of the engine: ``127.0.0.1:8000`` becomes ``127-0-0-1-8000``."""
        if self.worker:
            return self.worker
        return re.sub(r"[^A-Za-z0-9]+", "-", urlsplit(self.engine_url).netloc.rpartition("@")[2]).strip("-")

    def sources(self) -> tuple[RankSource, ...]:
        """The event sources that the settings name; empty: to be discovered. Raises `BadEndpointError`."""
        return from_settings(
            self.kv_events,
            self.kv_replay,
            ranks=self.ranks,
            host=host_of(self.engine_url),
            bind=self.kv_events_bind,
            topic=self.kv_topic,
        )


_POSITIVE = (
    "scrape_interval_s",
    "scrape_timeout_s",
    "heartbeat_interval_s",
    "unhealthy_after",
    "ready_after",
    "replay_timeout_s",
    "replay_attempts",
    "replay_retry_s",
    "probe_after_s",
    "identify_timeout_s",
    "checkpoint_interval_s",
    "checkpoint_batches",
    "handover_limit",
    "hold_limit",
    "max_blocks",
)

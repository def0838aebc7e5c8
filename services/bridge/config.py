"""Settings of one bridge (section ``bridge``): which engine or shared pool it stands for, and how patient it is."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

from bus.errors import SettingsError
from bus.settings import CommonSettings
from schemas.kv import MAX_RANKS
from schemas.pool import SharedLayout
from services.bridge.endpoints import RankSource, as_seen_from_here, from_settings, host_of
from services.bridge.errors import BadEndpointError
from services.bridge.layout import SharedRules

RESERVED_WORKER = "snapshot"
"""``tg.v1.kv.snapshot.<worker>`` also matches ``tg.v1.kv.*.*``, so no worker may have this name."""


RESERVED_POOLS = frozenset({"reset", "state", "snapshot"})
"""``tg.v1.pool.<pool>`` with these names would read like the beginning of another subject."""

MAX_PARALLEL = 1024


class BridgeSettings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One bridge, one engine; or, with ``pool``, one shared pool.

    ``worker``: its id on the bus (empty: host and port of ``engine_url``). ``kv_events``: the engine's PUB endpoints,
    one per rank, or one base for ``ranks`` ranks (port base + rank); empty: ask the engine. ``kv_replay``: its ROUTER
    endpoints, likewise. ``kv_events_bind``: the engine connects to us, so we bind ``kv_events``. ``block_size``:
    tokens a block is expected to have; ``None``: what the engine declares. ``engine_tls_ca``: the authority (PEM) of
    an engine at ``https://``; empty: the system's. ``identify_timeout_s``: how long batches wait, after the socket
    was lost, for the page that says which process sends them. ``probe_after_s``: silence after which the replay
    socket is asked for a lost tail. ``checkpoint_interval_s`` and ``checkpoint_batches``: how old the index in the
    object store may become that a restarted bridge begins with: well within the engine's replay buffer, which has
    10,000 batches by default. ``hold_limit``: batches that wait for a hole before them to be filled, or for a dump of
    the index to end. Times in seconds, limits in batches.

    ``request_hints``: what the front door puts into this engine's requests, so that a hint may wait for the next one:
    ``continuum`` (its ``splice_continuum``; the engine has the plug-in) and ``kv_hints`` (its ``splice_kv_hints``; the
    engine's front end takes that field). ``hint_timeout_s``: in which a hint must be carried out, waiting included;
    ``hint_lanes``: calls at once; ``hint_calls``: calls that run or wait; over it hints are rejected
    (``bridge_busy``). ``hint_sessions``: closed sessions that are remembered.

    ``shared_pool``: the pool on the bus that this engine stores its pages in and reads them from (empty: none), and
    how they lie there: ``shared_layout`` says all of it; without it the engine is asked, and what it does not tell
    comes from here: ``shared_tag`` (SGLang's ``extra_backend_tag``, vLLM's ``cache_prefix``), ``shared_tp`` and
    ``shared_pp``, its tensor- and pipeline-parallel sizes (0: as the engine says, else 1).

    ``pool``: the pool's name on the bus; then ``pool_url`` is its master's HTTP side (metrics port) and ``pool_events``
    the endpoint of its KV events. ``pool_reconcile_s``: a key list is fetched at the latest after this time;
    ``pool_reconcile_min_s``: never sooner after the last one; ``pool_list_timeout_s``: how long one may take.
    ``pool_poll_s``: how often status, metrics and segments are asked. ``pool_buffer_bytes``: batches that are kept
    while a list is fetched, or wait for a comparison to end. ``pool_max_pages``: of the bridge's own index.
    """

    engine_url: str = ""
    worker: str = ""
    engine_api_key: str = ""
    engine_tls_ca: str = ""
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
    request_hints: tuple[Literal["continuum", "kv_hints"], ...] = ()
    hint_timeout_s: float = 2.0
    hint_lanes: int = 4
    hint_calls: int = 256
    hint_sessions: int = 65_536
    shared_pool: str = ""
    shared_layout: SharedLayout | None = None
    shared_tag: str = ""
    shared_tp: int = 0
    shared_pp: int = 0
    pool: str = ""
    pool_url: str = ""
    pool_events: str = ""
    pool_reconcile_s: float = 60.0
    pool_reconcile_min_s: float = 2.0
    pool_list_timeout_s: float = 120.0
    pool_poll_s: float = 1.0
    pool_buffer_bytes: int = 256 * 1024 * 1024
    pool_max_pages: int = 20_000_000

    def __post_init__(self) -> None:
        """Cross-field rules. Raises `SettingsError`."""
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise SettingsError(name, "must be positive")
        if self.pool:
            self._check_pool()
        else:
            self._check_engine()

    def _check_pool(self) -> None:
        if self.engine_url:
            raise SettingsError("engine_url", "a bridge stands for an engine or for a pool, not for both")
        if self.pool in RESERVED_POOLS:
            raise SettingsError("pool", f"{self.pool!r} is reserved")
        if not _is_url(self.pool_url, "http"):
            raise SettingsError("pool_url", f"must be the http URL of the pool's master, not {self.pool_url!r}")
        try:
            as_seen_from_here(self.pool_events, host_of(self.pool_url))
        except BadEndpointError as error:
            raise SettingsError("pool_events", str(error)) from error

    def _check_engine(self) -> None:
        if not _is_url(self.engine_url, "http", "https"):
            raise SettingsError("engine_url", f"must be the http or https URL of an engine, not {self.engine_url!r}")
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
        for name in ("shared_tp", "shared_pp"):
            if not 0 <= getattr(self, name) <= MAX_PARALLEL:
                raise SettingsError(name, f"must be between 0 and {MAX_PARALLEL}")
        if self.shared_layout is not None and self.shared_layout.pool != self.shared_pool:
            raise SettingsError("shared_layout", f"must name shared_pool ({self.shared_pool!r}) as its pool")
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

    def pool_source(self) -> RankSource:
        """Where the pool's master publishes. Raises `BadEndpointError`."""
        return RankSource(0, as_seen_from_here(self.pool_events, host_of(self.pool_url)))

    def shared_rules(self) -> SharedRules:
        """How the engine's pages lie in a shared pool, as far as the settings say."""
        return SharedRules(self.shared_pool, self.shared_layout, self.shared_tag, self.shared_tp, self.shared_pp)

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


def _is_url(url: str, *schemes: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in schemes and bool(parts.hostname)


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
    "hint_timeout_s",
    "hint_lanes",
    "hint_calls",
    "hint_sessions",
    "pool_reconcile_s",
    "pool_reconcile_min_s",
    "pool_list_timeout_s",
    "pool_poll_s",
    "pool_buffer_bytes",
    "pool_max_pages",
)

"""Settings of the simulated shared pool (section ``pool``)."""

from __future__ import annotations

import msgspec

from bus.settings import CommonSettings
from load.pool.events import EventContext
from load.pool.misbehave import PoolMisbehaviour
from load.pool.store import StoreLimits


class PoolSettings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A simulated shared pool: what a Mooncake master speaks, over HTTP and ZeroMQ, without storing a byte.

    ``http_port`` is the master's metrics and admin port (0 picks one). ``kv_events`` off: as a master that was built
    without them. ``backend_id``, ``model_name``, ``dp_rank``: what every event is stamped with; ``legacy_compat`` adds
    the older names of its fields. ``capacity_bytes``: of the master's own memory segment; clients mount more.
    ``max_objects``: in all. ``offload``: every object is copied to disk at once. ``client_ttl_s`` without a ping hides
    a client's objects, ``client_suspicion_s`` more and they are gone. ``key_lease_s``: what a read grants.
    ``misbehave``: see `load.pool.misbehave`.
    """

    kv_events: bool = True
    kv_events_endpoint: str = "tcp://127.0.0.1:0"
    backend_id: str = "pool-a"
    model_name: str = ""
    dp_rank: int = 0
    legacy_compat: bool = True
    capacity_bytes: int = 1 << 40
    max_objects: int = 5_000_000
    offload: bool = False
    client_ttl_s: float = 10.0
    client_suspicion_s: float = 20.0
    key_lease_s: float = 10.0
    misbehave: PoolMisbehaviour = msgspec.field(default_factory=PoolMisbehaviour)

    def __post_init__(self) -> None:
        if self.http_port < 0:
            raise ValueError("http_port must not be negative: the master's answers are what it is for")
        for name in ("capacity_bytes", "max_objects"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("client_ttl_s", "client_suspicion_s", "key_lease_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")

    @property
    def limits(self) -> StoreLimits:
        return StoreLimits(
            capacity_bytes=self.capacity_bytes,
            max_objects=self.max_objects,
            client_ttl_s=self.client_ttl_s,
            client_suspicion_s=self.client_suspicion_s,
            lease_s=self.key_lease_s,
            offload=self.offload,
        )

    @property
    def context(self) -> EventContext:
        return EventContext(
            backend_id=self.backend_id,
            model_name=self.model_name or None,
            dp_rank=self.dp_rank,
            legacy_compat=self.legacy_compat,
        )

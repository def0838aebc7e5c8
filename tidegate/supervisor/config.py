"""Settings of `tidegate up` and `tidegate demo` (section ``up``; environment ``TIDEGATE_UP_<KEY>``); options win."""

from __future__ import annotations

from bus.settings import CommonSettings


class UpSettings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole system on one machine.

    ``port``: of the front door; ``host``: where it and everything else listens. ``engines``: simulated engines to start
    when ``engine`` names no real ones, as ``http://HOST:PORT[=EVENTS[,replay=ENDPOINT]...]``. ``model``: what the
    simulated engines serve. ``pool``: they share a simulated pool of KV pages (a Mooncake master). ``nats_url`` set
    anywhere means: use that bus, start none. ``secure``: our own bus has users, and every process its own, with
    no permission that it does not need. ``log_bytes``: a child's log is turned over at this size, one older file
    is kept. ``ingress_workers``: processes of the front door; ``tls_cert``, ``tls_key``: its certificate and key.
    ``hung_s``: a child whose health page does not answer for so long is killed and started again; 0: never.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    engines: int = 2
    engine: tuple[str, ...] = ()
    model: str = "sim-8b"
    pool: bool = False
    secure: bool = False
    workdir: str = ".tidegate"
    ready_timeout_s: float = 60.0
    log_bytes: int = 16_777_216
    ingress_workers: int | None = None
    tls_cert: str = ""
    tls_key: str = ""
    hung_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ValueError("port must be between 0 (any) and 65535")
        if not self.engine and self.engines < 1:
            raise ValueError("engines must be at least 1, unless engine names real ones")
        if self.pool and self.engine:
            raise ValueError(
                "pool is simulated, for simulated engines; docs/operations.md says how to connect a real one"
            )
        if self.ready_timeout_s <= 0:
            raise ValueError("ready_timeout_s must be positive")
        if self.ingress_workers is not None and self.ingress_workers < 1:
            raise ValueError("ingress_workers must be at least 1")
        if self.tls_key and not self.tls_cert:
            raise ValueError("tls_key needs tls_cert")
        if self.hung_s < 0:
            raise ValueError("hung_s must not be negative")
        if self.log_bytes < 65_536:
            raise ValueError("log_bytes must be at least 65536")

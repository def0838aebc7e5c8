"""The three pages of every process: ``/healthz``, ``/readyz``, ``/metrics``; and how late its event loop runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bus.interface import Bus
from web.headers import Headers
from web.server import HttpServer, Request, Responder, ServerLimits

TEXT: Headers = [(b"content-type", b"text/plain; charset=utf-8")]


def metrics_answer(registry: CollectorRegistry) -> tuple[int, Headers, bytes]:
    """The page of all that ``registry`` knows."""
    return 200, [(b"content-type", CONTENT_TYPE_LATEST.encode())], generate_latest(registry)


class HealthServer:
    """Serves the pages. ``not_ready`` gives the reason that ``/readyz`` shows, or ``None``."""

    def __init__(self, not_ready: Callable[[], str | None], registry: CollectorRegistry = REGISTRY) -> None:
        self._not_ready = not_ready
        self._registry = registry
        self._server = HttpServer(self._answer, ServerLimits(body_bytes=65_536, connections=256))

    @property
    def port(self) -> int:
        return self._server.port

    async def start(self, host: str, port: int) -> None:
        """Raises `OSError` when the address is taken."""
        await self._server.start(host, port)

    async def close(self) -> None:
        await self._server.close(drain_s=0.5)

    async def _answer(self, request: Request, responder: Responder) -> None:
        if request.method not in ("GET", "HEAD"):
            responder.send(405, [*TEXT, (b"allow", b"GET, HEAD")], b"only GET\n")
        elif request.path == "/healthz":
            responder.send(200, TEXT, b"ok\n")
        elif request.path == "/readyz":
            reason = self._not_ready()
            responder.send(200 if reason is None else 503, TEXT, f"{reason or 'ready'}\n".encode())
        elif request.path == "/metrics":
            responder.send(*metrics_answer(self._registry))
        else:
            responder.send(404, TEXT, b"there are /healthz, /readyz and /metrics\n")


class LoopLag:
    """How late timers fire, seconds: the worst of the last ten looks, four a second."""

    INTERVAL_S = 0.25

    def __init__(self) -> None:
        self._late: deque[float] = deque([0.0], maxlen=10)

    @property
    def worst_s(self) -> float:
        return max(self._late)

    async def watch(self) -> None:
        """Look for ever; ends by being cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self.INTERVAL_S
            await asyncio.sleep(self.INTERVAL_S)
            self._late.append(max(0.0, loop.time() - due))


class ProcessCollector(Collector):
    """The bus connection's counters and the loop's lag, read when scraped. ``kvcore``: the twin in use, if any."""

    def __init__(self, bus: Callable[[], Bus | None], lag: LoopLag, kvcore: str | None = None) -> None:
        self._bus = bus
        self._lag = lag
        self._kvcore = kvcore

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "tidegate_loop_lag_seconds", "How late the event loop runs its timers.", value=self._lag.worst_s
        )
        if self._kvcore is not None:
            twin = GaugeMetricFamily(
                "tidegate_kvcore_info", "Which twin of kvcore works here.", labels=["implementation"]
            )
            twin.add_metric([self._kvcore], 1.0)
            yield twin
        bus = self._bus()
        connected = bus is not None and bus.connected
        yield GaugeMetricFamily("tidegate_bus_connected", "1 while the bus is connected.", value=float(connected))
        if bus is None:
            return
        stats = bus.stats()
        for name, text, value in (
            ("published", "Messages handed to the bus.", stats.published),
            ("delivered", "Messages given to handlers.", stats.delivered),
            ("reconnects", "Times the connection was lost and found again.", stats.reconnects),
            ("handler_failures", "Messages whose handler raised.", stats.handler_failed),
            ("refused", "Publishes and subscriptions that the server did not permit.", stats.refused),
        ):
            yield CounterMetricFamily(f"tidegate_bus_{name}", text, value=value)
        dropped = CounterMetricFamily("tidegate_bus_dropped", "Messages lost, by reason.", labels=["reason"])
        dropped.add_metric(["slow_consumer"], stats.dropped_slow_consumer)
        dropped.add_metric(["publish_failed"], stats.publish_failed)
        yield dropped

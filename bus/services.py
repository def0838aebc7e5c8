"""The NATS services API (ADR-32) on top of `Bus.subscribe`: endpoints, and ``$SRV.PING|INFO|STATS`` about them.

Shared by both implementations, so that they answer alike. nats-py's own ``nats.micro`` is not used: it cannot serve an
endpoint outside a queue group, needs a coroutine per message, and warns about a deprecated clock on Python 3.12.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from bus.errors import BusError
from bus.interface import BusMessage, Endpoint, Handler, Subscription
from bus.log import EventLog

log = EventLog(__name__)

PREFIX = "$SRV"
ERROR_HEADER = "Nats-Service-Error"
ERROR_CODE_HEADER = "Nats-Service-Error-Code"

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_VERSION = re.compile(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")


class Subscriber(Protocol):
    """The part of a bus that serving needs."""

    def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None, *, linger_s: float = 0.0
    ) -> None: ...

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", pending_limit: int = 65_536
    ) -> Subscription: ...

    async def flush(self, timeout_s: float = 2.0) -> None: ...


class _Endpoint:
    """One endpoint and what it has answered."""

    def __init__(self, bus: Subscriber, endpoint: Endpoint) -> None:
        self._bus = bus
        self._endpoint = endpoint
        self._requests = 0
        self._errors = 0
        self._last_error = ""
        self._busy_ns = 0

    def answer(self, message: BusMessage) -> None:
        started = time.perf_counter_ns()
        self._requests += 1
        try:
            self._endpoint.answer(message)
        except Exception as error:
            self._errors += 1
            self._last_error = repr(error)
            self._say(message.reply, error)
            raise
        finally:
            self._busy_ns += time.perf_counter_ns() - started

    def _say(self, reply: str, error: Exception) -> None:
        """Tell the asker, who would otherwise wait for its deadline."""
        if reply:
            problem = error.reason if isinstance(error, BusError) else type(error).__name__
            self._bus.publish(reply, b"", {ERROR_HEADER: problem, ERROR_CODE_HEADER: "500"})

    def info(self) -> dict[str, Any]:
        endpoint = self._endpoint
        return {"name": endpoint.name, "subject": endpoint.subject, "queue_group": endpoint.queue, "metadata": {}}

    def stats(self) -> dict[str, Any]:
        endpoint = self._endpoint
        return {
            "name": endpoint.name,
            "subject": endpoint.subject,
            "queue_group": endpoint.queue,
            "num_requests": self._requests,
            "num_errors": self._errors,
            "last_error": self._last_error,
            "processing_time": self._busy_ns,
            "average_processing_time": self._busy_ns // self._requests if self._requests else 0,
            "data": None,
        }


class ServedService:
    """See `bus.interface.ServedEndpoints`."""

    def __init__(self, bus: Subscriber, served: list[str], identity: dict[str, Any], description: str) -> None:
        self._bus = bus
        self._served = served
        self._identity = identity
        self._description = description
        self._started = datetime.now(UTC)
        self._subscriptions: list[Subscription] = []
        self._endpoints: list[_Endpoint] = []

    async def start(self, endpoints: list[Endpoint]) -> None:
        name, instance = self._identity["name"], self._identity["id"]
        for endpoint in endpoints:
            serving = _Endpoint(self._bus, endpoint)
            self._endpoints.append(serving)
            self._subscriptions.append(
                await self._bus.subscribe(endpoint.subject, serving.answer, queue=endpoint.queue)
            )
        for verb, handler in (("PING", self._ping), ("INFO", self._info), ("STATS", self._stats)):
            for subject in (f"{PREFIX}.{verb}", f"{PREFIX}.{verb}.{name}", f"{PREFIX}.{verb}.{name}.{instance}"):
                self._subscriptions.append(await self._bus.subscribe(subject, handler))
        self._served.append(name)

    async def stop(self) -> None:
        if self._subscriptions:
            self._served.remove(self._identity["name"])
        while self._subscriptions:
            await self._subscriptions.pop().unsubscribe()
        try:
            # Whoever asks from now on hears that nobody answers.
            await self._bus.flush()
        except BusError as error:
            log.info("stopped_serving_without_flush", service=self._identity["name"], reason=error.reason)

    def _answer(self, message: BusMessage, kind: str, more: dict[str, Any]) -> None:
        if message.reply:
            body = {"type": f"io.nats.micro.v1.{kind}_response", **self._identity, **more}
            self._bus.publish(message.reply, msgspec.json.encode(body))

    def _ping(self, message: BusMessage) -> None:
        self._answer(message, "ping", {})

    def _info(self, message: BusMessage) -> None:
        endpoints = [endpoint.info() for endpoint in self._endpoints]
        self._answer(message, "info", {"description": self._description, "endpoints": endpoints})

    def _stats(self, message: BusMessage) -> None:
        endpoints = [endpoint.stats() for endpoint in self._endpoints]
        started = self._started.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self._answer(message, "stats", {"started": started, "endpoints": endpoints})


async def serve_endpoints(
    bus: Subscriber,
    served: list[str],
    name: str,
    version: str,
    description: str,
    endpoints: list[Endpoint],
    metadata: Mapping[str, str],
) -> ServedService:
    """See `bus.interface.Bus.serve`. ``served`` is the connection's list of names. Raises `ValueError`."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"a service's name has letters, digits, - and _ only: {name!r}")
    if not _VERSION.fullmatch(version):
        raise ValueError(f"a service's version is semantic (1.2.3): {version!r}")
    identity = {"name": name, "id": secrets.token_hex(11), "version": version, "metadata": dict(metadata)}
    service = ServedService(bus, served, identity, description)
    try:
        await service.start(endpoints)
    except BaseException:
        await service.stop()
        raise
    return service

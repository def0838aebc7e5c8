"""The pool's HTTP face: a Mooncake master's admin endpoints, and ``/sim/*`` for clients and tests.

Shapes of the answers: spec pool-events §2, §4, and Mooncake's documentation of its HTTP service.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote
from uuid import NAMESPACE_OID, uuid5

import msgspec
import zmq

from bus.errors import SettingsError
from load.pool.bodies import ClientBody, EvictBody, KeysBody, MountBody, PutBody, RemoveBody
from load.pool.config import PoolSettings
from load.pool.misbehave import PoolMisbehaviour
from load.pool.publisher import PoolPublisher
from load.pool.store import PoolStore
from web.server import Headers, HttpServer, Request, Responder

JSON: Headers = [(b"content-type", b"application/json; charset=utf-8")]
TEXT: Headers = [(b"content-type", b"text/plain; version=0.0.4")]
LONGEST_TICK_S = 1.0
Route = Callable[[Request], Any]
T = TypeVar("T")


class BadRequestError(Exception):
    """The client's fault: answered with ``status`` and a sentence."""

    reason = "bad_request"

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class PoolServer:
    """One master process: its store, its publisher and its routes. `start`, then serve; `run` is its one task."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.flags = msgspec.structs.replace(settings.misbehave)
        self.store = PoolStore(settings.limits)
        self.stopping = asyncio.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.publisher = PoolPublisher(
            self._context, settings.kv_events_endpoint, settings.context, self.flags, enabled=settings.kv_events
        )
        self._admin: dict[str, Route] = {
            "/health": lambda _: {"status": "ok"},
            "/role": lambda _: "leader",
            "/kv_events/status": self._status,
            "/get_all_keys": self._all_keys,
            "/batch_query_keys": self._batch_query,
            "/query_key": self._query_key,
            "/get_all_segments": self._segments,
            "/get_segments_detail": self._segments_detail,
            "/metrics": self._metrics,
        }
        self._client: dict[str, Route] = {
            "/sim/mount": self._mount,
            "/sim/ping": self._ping,
            "/sim/unmount": self._unmount,
            "/sim/put": self._put,
            "/sim/exist": self._exist,
            "/sim/probe": self._probe,
            "/sim/get": self._get,
            "/sim/remove": self._remove,
            "/sim/offload": self._offload,
            "/sim/evict": self._evict,
        }
        self.http = HttpServer(self.handle)

    def start(self) -> None:
        """Bind the event socket. Raises `SettingsError` when its address cannot be had."""
        try:
            self.publisher.open()
        except zmq.ZMQError as error:
            raise SettingsError("kv_events_endpoint", f"{self.publisher.endpoint}: {error.strerror}") from error

    def stop(self) -> None:
        self.stopping.set()
        self.publisher.close()
        self._context.term()

    async def run(self) -> None:
        """Silent clients are noticed also while nobody asks; ends by being cancelled."""
        settings = self.settings
        period = min(LONGEST_TICK_S, max(0.05, min(settings.client_ttl_s, settings.client_suspicion_s) / 4))
        while True:
            await asyncio.sleep(period)
            self.store.tick(time.monotonic())

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer one request; whatever happened to objects is published first, as a master does."""
        try:
            answer = await self._answer(request, responder)
        except BadRequestError as error:
            body = msgspec.json.encode({"success": False, "error": str(error)})
            responder.send(error.status, JSON, body)
            return
        if isinstance(answer, str):
            responder.send(200, TEXT, answer.encode())
        else:
            responder.send(200, JSON, msgspec.json.encode(answer))

    async def _answer(self, request: Request, responder: Responder) -> Any:
        path = request.path
        if path == "/sim/misbehave":
            return await self._misbehave(request)
        admin = request.method == "GET" and path in self._admin
        if admin and self.flags.take("hang_requests", path):
            await self._hang(responder)
        if admin and self.flags.take("error_requests", path):
            raise BadRequestError("the pool was told to fail", self.flags.error_status)
        route = self._admin.get(path) if request.method == "GET" else self._client.get(path)
        if route is None:
            raise BadRequestError(f"no such endpoint: {request.method} {path}", 404)
        self.store.tick(time.monotonic())
        answer = route(request)
        self._tell()
        return answer

    def _tell(self) -> None:
        events = self.store.take_events()
        if self.flags.silent_removals:
            events = [event for event in events if event.event_type == "stored"]
        if events:
            self.publisher.publish(events, time.time())

    async def _hang(self, responder: Responder) -> None:
        """Do nothing for ``hang_s`` (0: for ever), but not longer than the client or the pool lives."""
        loop = asyncio.get_running_loop()
        waits = {loop.create_task(responder.gone.wait()), loop.create_task(self.stopping.wait())}
        try:
            await asyncio.wait(waits, timeout=self.flags.hang_s or None, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    # A master's admin endpoints

    def _status(self, request: Request) -> dict[str, Any]:
        publisher = self.publisher
        return {
            "enabled": publisher.enabled,
            "published_batches": publisher.published_batches,
            "published_events": publisher.published_events,
            "dropped_events": 0,
            "skipped_keyless_events": 0,
        }

    def _all_keys(self, request: Request) -> str:
        return "".join(f"{key}\n" for key in self.store.readable_keys())

    def _batch_query(self, request: Request) -> dict[str, Any]:
        raw = dict(part.partition("=")[::2] for part in request.query.split("&")).get("keys", "")
        if not raw:
            raise BadRequestError("No keys provided. Use ?keys=key1,key2,...")
        return {"success": True, "data": {key: self._replicas(key) for key in map(unquote, raw.split(","))}}

    def _query_key(self, request: Request) -> str:
        """As the master's: it grants a lease, which a router must not cause."""
        key = parse_qs(request.query).get("key", [""])[0]
        if self.store.touch([key], time.monotonic()) == [-1]:
            raise BadRequestError("OBJECT_NOT_FOUND", 404)
        return "".join(f"{value['transport_endpoint_']}\n" for value in self._replicas(key)["values"])

    def _replicas(self, key: str) -> dict[str, Any]:
        entry = self.store.visible(key)
        if entry is None:
            return {"ok": False, "error": "OBJECT_NOT_FOUND"}
        endpoint = "pool-segment" if entry.client is None else self.store.clients[entry.client].segment
        replica = {
            "size_": entry.size_bytes,
            "buffer_address_": 0,
            "protocol_": "tcp",
            "transport_endpoint_": endpoint,
        }
        page: dict[str, Any] = {"ok": True, "values": [replica] if "cpu" in entry.media else []}
        if "disk" in entry.media:
            page["local_disk_values"] = [
                {"client_id": "master", "object_size": entry.size_bytes, "transport_endpoint": endpoint}
            ]
        return page

    def _segments(self, request: Request) -> str:
        return "".join(f"{segment}\n" for segment, *_ in self.store.segments())

    def _segments_detail(self, request: Request) -> dict[str, Any]:
        segments = [
            {
                "segment_name": segment,
                "segment_id": str(uuid5(NAMESPACE_OID, segment)),
                "client_id": str(uuid5(NAMESPACE_OID, client)),
                "base_address": "0x0",
                "size_bytes": capacity,
                "te_endpoint": segment,
                "protocol": "tcp",
                "status": "OK",
                "allocator_used_bytes": used,
                "allocator_capacity_bytes": capacity,
                "allocator_usage_percent": round(100 * used / capacity, 2),
            }
            for segment, client, capacity, used, _ in self.store.segments()
        ]
        return {"total_segments": len(segments), "segments": segments}

    def _metrics(self, request: Request) -> str:
        store = self.store
        values = {
            "master_evicted_key_count_mem": ("counter", store.evicted_memory),
            "master_key_count": ("gauge", len(store)),
            "master_allocated_bytes": ("gauge", store.used_bytes),
            "master_total_capacity_bytes": ("gauge", store.capacity_bytes),
            "master_active_clients": ("gauge", len(store.clients)),
            "master_client_liveness_suspected_clients": (
                "gauge",
                sum(client.suspected for client in store.clients.values()),
            ),
            "master_client_liveness_suspected_transitions_total": ("counter", store.suspicions),
            "master_client_liveness_recoveries_total": ("counter", store.recoveries),
            "master_client_liveness_offline_transitions_total": ("counter", store.lost_clients),
        }
        return "".join(f"# TYPE {name} {kind}\n{name} {value}\n" for name, (kind, value) in values.items())

    # What clients do

    def _mount(self, request: Request) -> dict[str, Any]:
        body = _read(request, MountBody)
        segment = body.segment or f"{body.client}:0"
        self.store.mount(body.client, segment, body.capacity_bytes, time.monotonic())
        return {"ok": True}

    def _ping(self, request: Request) -> dict[str, Any]:
        return {"known": self.store.ping(_read(request, ClientBody).client, time.monotonic())}

    def _unmount(self, request: Request) -> dict[str, Any]:
        return {"known": self.store.unmount(_read(request, ClientBody).client)}

    def _put(self, request: Request) -> dict[str, Any]:
        body = _read(request, PutBody)
        results = self.store.put(
            body.keys,
            body.size_bytes,
            time.monotonic(),
            client=body.client,
            tenant=body.tenant,
            group_ids=body.group_ids,
            session_ids=body.session_ids,
            upsert=body.upsert,
        )
        return {"results": results}

    def _exist(self, request: Request) -> dict[str, Any]:
        return {"results": [int(size >= 0) for size in self._touch(request, lease=True)]}

    def _probe(self, request: Request) -> dict[str, Any]:
        return {"results": [int(size >= 0) for size in self._touch(request, lease=False)]}

    def _get(self, request: Request) -> dict[str, Any]:
        return {"results": self._touch(request, lease=True)}

    def _touch(self, request: Request, *, lease: bool) -> list[int]:
        body = _read(request, KeysBody)
        return self.store.touch(body.keys, time.monotonic(), body.tenant, lease=lease)

    def _remove(self, request: Request) -> dict[str, Any]:
        body, now = _read(request, RemoveBody), time.monotonic()
        if body.all:
            return {"removed": self.store.remove_all(body.tenant)}
        if body.regex is None:
            return {"removed": self.store.remove(body.keys, now, body.tenant, force=body.force)}
        try:
            return {"removed": self.store.remove_by_regex(body.regex, now, body.tenant)}
        except re.error as error:
            raise BadRequestError(f"regex: {error}") from error

    def _offload(self, request: Request) -> dict[str, Any]:
        body = _read(request, KeysBody)
        return {"copied": self.store.offload(body.keys, body.tenant)}

    def _evict(self, request: Request) -> dict[str, Any]:
        body = _read(request, EvictBody)
        return {"evicted": self.store.evict(body.keys, body.count, body.tenant)}

    async def _misbehave(self, request: Request) -> PoolMisbehaviour:
        """Flags of `PoolMisbehaviour`, and three acts: ``behave``, ``restart``, ``kill_client``."""
        if request.method == "GET":
            return self.flags
        changes = _read(request, dict[str, Any])
        behave, restart = bool(changes.pop("behave", False)), bool(changes.pop("restart", False))
        victim = changes.pop("kill_client", None)
        base = msgspec.structs.asdict(PoolMisbehaviour()) if behave else {}
        try:
            self.flags.change({**base, **changes})
        except ValueError as error:
            raise BadRequestError(str(error)) from error
        if victim is not None:
            if victim not in self.store.clients:
                raise BadRequestError(f"no client {victim!r}", 404)
            self.store.clients[victim].killed = True
        if restart:
            self.store = PoolStore(self.settings.limits)
            await self.publisher.restart()
        return self.flags


def _read(request: Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(request.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"body: {error}") from error

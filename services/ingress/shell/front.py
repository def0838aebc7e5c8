"""The HTTP routes of the front door."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from http import HTTPStatus

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from services.ingress.config import IngressSettings
from services.ingress.core import IngressCore
from services.ingress.decoding import SMALL_BYTES, encoding_of, unpacked
from services.ingress.endpoints import ClientRequest, Endpoint, endpoint_of, read_request
from services.ingress.errors import (
    BodyTooLargeError,
    BusyError,
    IngressError,
    InvalidKeyError,
    UnknownModelError,
    UnsupportedEncodingError,
)
from services.ingress.events import RequestReceived
from services.ingress.identity import PASSED_APIS, Signals, read_headers, resolve, unreadable_identity
from services.ingress.keys import Key, allowed
from services.ingress.passing import METHODS, passed_api, read_passed
from services.ingress.replies import ErrorReply, error_reply, reply_to
from services.ingress.shell.keys import Access
from services.ingress.shell.metrics import IngressMetrics
from services.ingress.shell.serving import RequestServing, Tools
from services.ingress.turn_state import HEADER
from web.headers import Headers
from web.server import Request, Responder

TEXT: Headers = [(b"content-type", b"text/plain; charset=utf-8")]
MODELS = "/v1/models"
JSON: Headers = [(b"content-type", b"application/json")]

UNPACKING = 2
"""Bodies that are unpacked at a time, each in a thread: beyond what is held for requests, as many may be in memory."""

_MESSAGES = {
    "malformed_request": "The request is not valid HTTP/1.1.",
    "headers_too_large": "The request's headers are too large.",
    "transfer_encoding": "Of transfer encodings only chunked is taken.",
    "request_timeout": "The request did not arrive in time.",
    "busy": "Too many bytes of requests are held already.",
    "internal_error": "Tidegate failed.",
}


def _advice(error: IngressError) -> Headers:
    """How to come with a key, or with a body (RFC 9110 wants them beside a 401 and a 415)."""
    if isinstance(error, InvalidKeyError):
        return [(b"www-authenticate", b"Bearer")]
    return [(b"accept-encoding", b"gzip, identity")] if isinstance(error, UnsupportedEncodingError) else []


class FrontDoor:
    """One handler for everything that clients ask."""

    def __init__(
        self,
        settings: IngressSettings,
        tools: Tools,
        core: IngressCore,
        access: Access,
        metrics: IngressMetrics,
        registry: CollectorRegistry,
        not_ready: Callable[[], str | None],
    ) -> None:
        self._settings = settings
        self._tools = tools
        self._core = core
        self._access = access
        self._metrics = metrics
        self._registry = registry
        self._not_ready = not_ready
        self._started_s = int(time.time())
        self._unpacking = asyncio.Semaphore(UNPACKING)
        self._pages: dict[str, Callable[[Responder], None]] = {
            "/healthz": lambda responder: responder.send(200, TEXT, b"ok\n"),
            "/readyz": self._readyz,
            "/metrics": self._metrics_page,
        }

    async def handle(self, request: Request, responder: Responder) -> None:
        """`web.server.Handler`."""
        endpoint = self._endpoint(request.path)
        methods = METHODS if endpoint == "passthrough" else ("POST",)
        allow = ", ".join((*methods, "OPTIONS")).encode()
        if endpoint is None:
            self._page(request, responder)
        elif request.method == "OPTIONS":
            responder.send(204, [(b"allow", allow)], b"")
        elif request.method not in methods:
            message = f"{request.path} takes {', '.join(methods)}."
            self._refuse(responder, error_reply(endpoint, 405, "method_not_allowed", message), [(b"allow", allow)])
        else:
            await self._api(endpoint, request, responder)

    def _endpoint(self, path: str) -> Endpoint | None:
        """Which API is asked for; ``None``: a page of ours, or nothing."""
        endpoint = endpoint_of(path)
        wanted = self._settings.passthrough
        if endpoint is not None or wanted is False or path == MODELS or path.startswith(f"{MODELS}/"):
            return endpoint
        passed = passed_api(path)
        return None if passed == "passthrough" and self._access.on and not wanted else passed

    async def _api(self, endpoint: Endpoint, request: Request, responder: Responder) -> None:
        signals = read_headers(request.headers)
        self._metrics.unreadable_identity.inc(unreadable_identity(request.headers, signals))
        try:
            key = self._access.key(request.headers)
            await self._unpack(signals.get("content-encoding"), request)
            charge = self._access.charge(key, endpoint, len(request.body))
        except IngressError as error:
            self._refuse(responder, reply_to(endpoint, error), _advice(error))
            return
        try:
            charge.settle(await self._serve(endpoint, signals, key, request, responder))
        finally:
            charge.settle(None)

    async def _unpack(self, header: str | None, request: Request) -> None:
        """Give ``request`` its plain body. Raises `IngressError`."""
        if encoding_of(header) is None:
            return
        limit = self._settings.body_bytes
        if len(request.body) <= SMALL_BYTES:
            request.body = unpacked(request.body, limit)
        else:
            async with self._unpacking:
                request.body = await asyncio.to_thread(unpacked, request.body, limit)
        if not request.hold.grow_to(len(request.body)):
            raise BusyError

    async def _serve(
        self, endpoint: Endpoint, signals: Signals, key: Key | None, request: Request, responder: Responder
    ) -> int:
        """A request of somebody who may ask. Returns the tokens that it took."""
        try:
            asked = self._read(endpoint, key, request)
            asked = self._access.granted(key, asked)
        except IngressError as error:
            self._refuse(responder, reply_to(endpoint, error))
            return 0
        request_id = secrets.token_hex(16)
        tenant = self._settings.tenant if key is None else key.tenant
        resolved = resolve(signals, asked.facts, endpoint, tenant=tenant, request_id=request_id)
        received = RequestReceived(
            request_id=request_id,
            request=asked,
            resolved=resolved,
            x_request_id=signals.get("x-request-id"),
            sticky=self._tools.turn_states.read(signals.get(HEADER), resolved.identity.key.text(), time.time()),
        )
        serving = RequestServing(self._tools, received, request, responder)
        await serving.run()
        return serving.tokens or 0

    def _read(self, endpoint: Endpoint, key: Key | None, request: Request) -> ClientRequest:
        """Raises `IngressError`."""
        if endpoint not in PASSED_APIS:
            return read_request(endpoint, request.body, prompt_bytes=self._settings.prompt_bytes)
        models = allowed(self._core.workers.models(time.time()), key)
        return read_passed(endpoint, request.method, request.query, request.body, models)

    def _page(self, request: Request, responder: Responder) -> None:
        page = self._pages.get(request.path)
        if request.path == MODELS or request.path.startswith(f"{MODELS}/"):
            model = request.path.removeprefix(MODELS).removeprefix("/")
            page = lambda responder: self._models(request.headers, responder, model)  # noqa: E731 - one of the pages
        if page is None:
            message = f"Unknown request URL: {request.method} {request.path[:200]}."
            self._refuse(responder, error_reply(None, 404, "unknown_url", message))
        elif request.method not in ("GET", "HEAD"):
            reply = error_reply(None, 405, "method_not_allowed", f"{request.path[:200]} takes GET.")
            self._refuse(responder, reply, [(b"allow", b"GET, HEAD")])
        else:
            page(responder)

    def _refuse(self, responder: Responder, reply: ErrorReply, more: Headers | None = None) -> None:
        self._metrics.not_accepted.labels(reply.reason).inc()
        responder.send(reply.status, [*reply.headers, *(more or [])], reply.body)

    def _readyz(self, responder: Responder) -> None:
        reason = self._not_ready()
        responder.send(200 if reason is None else 503, TEXT, f"{reason or 'ready'}\n".encode())

    def _metrics_page(self, responder: Responder) -> None:
        responder.send(200, [(b"content-type", CONTENT_TYPE_LATEST.encode())], generate_latest(self._registry))

    def _models(self, headers: Headers, responder: Responder, model: str) -> None:
        """The models that the asker may use, or one of them."""
        try:
            key = self._access.key(headers)
        except IngressError as error:
            self._refuse(responder, reply_to(None, error), _advice(error))
            return
        models = allowed(self._core.workers.models(time.time()), key)
        if not model:
            data = [self._described(each) for each in models]
            responder.send(200, JSON, msgspec.json.encode({"object": "list", "data": data}))
        elif model in models:
            responder.send(200, JSON, msgspec.json.encode(self._described(model)))
        else:
            self._refuse(responder, reply_to(None, UnknownModelError(model)))

    def _described(self, model: str) -> dict[str, object]:
        described: dict[str, object] = {
            "id": model,
            "object": "model",
            "created": self._started_s,
            "owned_by": "tidegate",
        }
        lengths = [
            state.profile.max_model_len
            for state in self._core.workers.placeable(model, time.time())
            if state.profile.max_model_len is not None
        ]
        if lengths:
            described["max_model_len"] = min(lengths)
        return described

    def refusal(self, status: int, reason: str, target: str) -> tuple[Headers, bytes]:
        """`web.server.ErrorAnswer`: what is refused before it reaches `handle`, in its API's shape."""
        endpoint = endpoint_of(target)
        if reason == BodyTooLargeError.reason:
            reply = reply_to(endpoint, BodyTooLargeError(self._settings.body_bytes))
        else:
            reply = error_reply(endpoint, status, reason, _MESSAGES.get(reason, HTTPStatus(status).phrase))
        return list(reply.headers), reply.body

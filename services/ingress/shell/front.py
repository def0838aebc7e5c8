"""The HTTP routes of the front door."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from http import HTTPStatus

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from services.ingress.client_hints import with_hints
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
from services.ingress.models import model_entry, model_list
from services.ingress.passing import METHODS, passed_api, read_passed
from services.ingress.replies import ErrorReply, error_reply, reply_to
from services.ingress.shell.keys import Access
from services.ingress.shell.metrics import IngressMetrics
from services.ingress.shell.serving import RequestServing, Tools
from services.ingress.turn_state import HEADER
from web.headers import Headers, find
from web.requests import path_and_query
from web.server import Answer, Head, Request, Responder

TEXT: Headers = [(b"content-type", b"text/plain; charset=utf-8")]
MODELS = "/v1/models"
JSON: Headers = [(b"content-type", b"application/json")]

HERE = b"""Tidegate: one address for the APIs of OpenAI and Anthropic, in front of inference engines.
/v1/models says which models; ask below /v1. Health: /healthz, /readyz; figures: /metrics.
"""
PAGE_METHODS = ("GET", "HEAD")

UNPACKING = 2
"""Bodies that are unpacked at a time, each in a thread: beyond what is held for requests, as many may be in memory."""

_MESSAGES = {
    "malformed_request": "The request is not valid HTTP/1.1.",
    "headers_too_large": "The request's headers are too large.",
    "host_header": "The request must have one Host header.",
    "http_version": "HTTP/1.1 and 1.0 are spoken here.",
    "method_not_allowed": "This is no proxy for other addresses.",
    "expectation": "Of expectations only 100-continue is met.",
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
            "/": lambda responder: responder.send(200, TEXT, HERE),
            "/healthz": lambda responder: responder.send(200, TEXT, b"ok\n"),
            "/readyz": self._readyz,
            "/metrics": self._metrics_page,
        }

    def screen(self, head: Head) -> Answer | None:
        """`web.server.Screen`: what need not be read to be refused, a stranger's request above all."""
        path = path_and_query(head.target)[0]
        endpoint = self._endpoint(path)
        answer = self._misdirected(endpoint, head.method, path, sized=True)
        if answer is not None:
            return answer
        if endpoint is None or head.method == "OPTIONS":
            return self._refused(error_reply(endpoint, 400, "body_not_taken", f"{path[:200]} takes no body."))
        try:
            self._access.key(head.headers)
            encoding_of(read_headers(head.headers).get("content-encoding"))
        except IngressError as error:
            return self._refused(reply_to(endpoint, error), _advice(error))
        return None

    async def handle(self, request: Request, responder: Responder) -> None:
        """`web.server.Handler`."""
        endpoint = self._endpoint(request.path)
        sized = any(find(request.headers, name) is not None for name in (b"content-length", b"transfer-encoding"))
        answer = self._misdirected(endpoint, request.method, request.path, sized=sized)
        if answer is not None:
            responder.send(answer.status, answer.headers, answer.body)
        elif request.method == "OPTIONS":
            allow = ", ".join((*self._methods(endpoint, request.path), "OPTIONS")).encode()
            responder.send(204, [(b"allow", allow)], b"")
        elif endpoint is None:
            self._page(request, responder)
        else:
            await self._api(endpoint, request, responder)

    def _methods(self, endpoint: Endpoint | None, path: str) -> tuple[str, ...]:
        """What may be asked there; empty: nothing is there."""
        if endpoint is not None:
            return METHODS if endpoint == "passthrough" else ("POST",)
        if path == "*":
            return (*PAGE_METHODS, "POST")
        known = path in self._pages or path == MODELS or path.startswith(f"{MODELS}/")
        return PAGE_METHODS if known else ()

    def _misdirected(self, endpoint: Endpoint | None, method: str, path: str, *, sized: bool) -> Answer | None:
        """The answer where nothing is served, or not in this way. ``sized``: the request says how long its body is."""
        methods = self._methods(endpoint, path)
        if not methods or (path == "*" and method != "OPTIONS"):
            return self._refused(error_reply(None, 404, "unknown_url", f"Unknown request URL: {method} {path[:200]}."))
        if method not in (*methods, "OPTIONS"):
            message = f"{path[:200]} takes {', '.join(methods)}."
            allow = ", ".join((*methods, "OPTIONS")).encode()
            return self._refused(error_reply(endpoint, 405, "method_not_allowed", message), [(b"allow", allow)])
        if not sized and method == "POST" and endpoint != "passthrough":
            message = "The request must say how long its body is (content-length), or send it in chunks."
            return self._refused(error_reply(endpoint, 411, "length_required", message))
        return None

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
            tokens = await self._serve(endpoint, signals, key, request, responder)
            if tokens is None:
                charge.refund()
            else:
                charge.settle(tokens)
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
    ) -> int | None:
        """A request of somebody who may ask. Returns the tokens that it took; ``None`` of one that is not accepted."""
        try:
            asked = self._read(endpoint, key, request)
            asked = with_hints(self._access.granted(key, asked), signals, self._high_first)
        except IngressError as error:
            self._refuse(responder, reply_to(endpoint, error))
            return None
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
        del asked, received  # what they hold of its body may go before its end
        await serving.run()
        return (serving.tokens or 0) if serving.accepted else None

    def _read(self, endpoint: Endpoint, key: Key | None, request: Request) -> ClientRequest:
        """Raises `IngressError`."""
        if endpoint not in PASSED_APIS:
            return read_request(endpoint, request.body, prompt_bytes=self._settings.prompt_bytes)
        models = allowed(self._core.workers.models(time.time()), key)
        return read_passed(endpoint, request.method, request.query, request.body, models)

    def _high_first(self, model: str) -> bool:
        return self._core.workers.high_first(model, time.time())

    def _page(self, request: Request, responder: Responder) -> None:
        page = self._pages.get(request.path)
        if page is not None:
            page(responder)
        else:
            self._models(request.headers, responder, request.path.removeprefix(MODELS).removeprefix("/"))

    def _refused(self, reply: ErrorReply, more: Headers | None = None) -> Answer:
        """What was not accepted, counted."""
        self._metrics.not_accepted.labels(reply.reason).inc()
        return Answer(status=reply.status, headers=[*reply.headers, *(more or [])], body=reply.body)

    def _refuse(self, responder: Responder, reply: ErrorReply, more: Headers | None = None) -> None:
        answer = self._refused(reply, more)
        responder.send(answer.status, answer.headers, answer.body)

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
            page = model_list([self._entry(each) for each in models])
            responder.send(200, JSON, msgspec.json.encode(page))
        elif model in models:
            responder.send(200, JSON, msgspec.json.encode(self._entry(model)))
        else:
            self._refuse(responder, reply_to(None, UnknownModelError(model)))

    def _entry(self, model: str) -> dict[str, object]:
        started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started_s))
        workers = self._core.workers.placeable(model, time.time())
        return model_entry(model, workers, self._started_s, started_at)

    def refusal(self, status: int, reason: str, target: str) -> tuple[Headers, bytes]:
        """`web.server.ErrorAnswer`: what is refused before it reaches `handle`, in its API's shape."""
        endpoint = endpoint_of(target)
        if reason == BodyTooLargeError.reason:
            reply = reply_to(endpoint, BodyTooLargeError(self._settings.body_bytes))
        else:
            reply = error_reply(endpoint, status, reason, _MESSAGES.get(reason, HTTPStatus(status).phrase))
        return list(reply.headers), reply.body

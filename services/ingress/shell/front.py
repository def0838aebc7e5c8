"""The HTTP routes of the front door."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from http import HTTPStatus

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from services.ingress.config import IngressSettings
from services.ingress.core import IngressCore
from services.ingress.endpoints import Endpoint, endpoint_of, read_request
from services.ingress.errors import BodyTooLargeError, IngressError, UnknownModelError
from services.ingress.events import RequestReceived
from services.ingress.identity import read_headers, resolve, unreadable_identity
from services.ingress.replies import ErrorReply, error_reply, reply_to
from services.ingress.shell.metrics import IngressMetrics
from services.ingress.shell.serving import RequestServing, Tools
from web.headers import Headers
from web.server import Request, Responder

TEXT: Headers = [(b"content-type", b"text/plain; charset=utf-8")]
JSON: Headers = [(b"content-type", b"application/json")]
SERVED: frozenset[Endpoint] = frozenset({"chat_completions", "completions"})
"""APIs that are served; the others are recognised and answered 501."""

_MESSAGES = {
    "malformed_request": "The request is not valid HTTP/1.1.",
    "headers_too_large": "The request's headers are too large.",
    "request_timeout": "The request did not arrive in time.",
    "busy": "Too many bytes of requests are held already.",
    "internal_error": "Tidegate failed.",
}


class FrontDoor:
    """One handler for everything that clients ask."""

    def __init__(
        self,
        settings: IngressSettings,
        tools: Tools,
        core: IngressCore,
        metrics: IngressMetrics,
        registry: CollectorRegistry,
        not_ready: Callable[[], str | None],
    ) -> None:
        self._settings = settings
        self._tools = tools
        self._core = core
        self._metrics = metrics
        self._registry = registry
        self._not_ready = not_ready
        self._started_s = int(time.time())
        self._pages: dict[str, Callable[[Responder], None]] = {
            "/healthz": lambda responder: responder.send(200, TEXT, b"ok\n"),
            "/readyz": self._readyz,
            "/metrics": self._metrics_page,
            "/v1/models": self._models,
        }

    async def handle(self, request: Request, responder: Responder) -> None:
        """`web.server.Handler`."""
        endpoint = endpoint_of(request.path)
        if endpoint is None:
            self._page(request, responder)
        elif request.method == "OPTIONS":
            responder.send(204, [(b"allow", b"POST, OPTIONS")], b"")
        elif request.method != "POST":
            message = f"{request.path} takes POST."
            self._refuse(responder, error_reply(endpoint, 405, "method_not_allowed", message), [(b"allow", b"POST")])
        else:
            await self._api(endpoint, request, responder)

    async def _api(self, endpoint: Endpoint, request: Request, responder: Responder) -> None:
        signals = read_headers(request.headers)
        self._metrics.unreadable_identity.inc(unreadable_identity(request.headers, signals))
        request_id = secrets.token_hex(16)
        if signals.get("content-encoding", "identity") != "identity":
            message = "Compressed request bodies are not supported."
            self._refuse(responder, error_reply(endpoint, 415, "content_encoding", message))
            return
        try:
            asked = read_request(endpoint, request.body, prompt_bytes=self._settings.prompt_bytes)
        except IngressError as error:
            self._refuse(responder, reply_to(endpoint, error))
            return
        tenant = self._settings.tenant
        resolved = resolve(signals, asked.facts, endpoint, tenant=tenant, request_id=request_id)
        if endpoint not in SERVED:
            message = f"{request.path} is not served yet; use /v1/chat/completions or /v1/completions."
            self._refuse(responder, error_reply(endpoint, 501, "not_implemented", message))
            return
        received = RequestReceived(
            request_id=request_id, request=asked, resolved=resolved, x_request_id=signals.get("x-request-id")
        )
        await RequestServing(self._tools, received, request, responder).run()

    def _page(self, request: Request, responder: Responder) -> None:
        page = self._pages.get(request.path)
        if page is None and request.path.startswith("/v1/models/"):
            model = request.path.removeprefix("/v1/models/")
            page = lambda responder: self._model(responder, model)  # noqa: E731 - one of several pages
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

    def _models(self, responder: Responder) -> None:
        data = [self._described(model) for model in self._core.workers.models(time.time())]
        responder.send(200, JSON, msgspec.json.encode({"object": "list", "data": data}))

    def _model(self, responder: Responder, model: str) -> None:
        if model not in self._core.workers.models(time.time()):
            self._refuse(responder, reply_to(None, UnknownModelError(model)))
            return
        responder.send(200, JSON, msgspec.json.encode(self._described(model)))

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

"""The engine's HTTP face: vLLM's endpoints, and ``/sim/*`` for tests."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from load.engine.api import ApiError, DetokenizeBody, TokenizeBody, error_body, read_body
from load.engine.completions import JSON, Completions, hang
from load.engine.engine import Engine
from load.engine.misbehave import Misbehaviour
from load.engine.tokens import BadConversationError
from web.server import Headers, HttpServer, Request, Responder

TEXT: Headers = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
Route = Callable[[Request, Responder], Awaitable[None]]


class EngineServer:
    """Routes requests to one `Engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._completions = Completions(engine)
        self._created = int(time.time())
        self._routes: dict[tuple[str, str], Route] = {
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._text,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("GET", "/kv_event_sources"): self._event_sources,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("GET", "/sim/served"): self._served,
            ("GET", "/sim/resident"): self._resident,
            ("GET", "/sim/misbehave"): self._flags,
            ("POST", "/sim/misbehave"): self._misbehave,
        }
        self._paths = {path for _, path in self._routes}
        self.http = HttpServer(self.handle, error_answer=_own_error)

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer one request; the client's mistakes in OpenAI's error shape."""
        engine = self._engine
        if not request.path.startswith("/sim/") and engine.flags.take_stall("accept"):
            await hang(engine, responder)
        route = self._routes.get((request.method, request.path))
        try:
            if route is None:
                known = request.path in self._paths
                status, words = (405, "Method Not Allowed") if known else (404, "Not Found")
                raise ApiError(words, status=status, kind=words.replace(" ", "") + "Error")
            await route(request, responder)
        except ApiError as error:
            headers = [*JSON, (b"retry-after", b"1")] if error.status in (429, 503) else JSON
            responder.send(error.status, headers, error_body(error.status, str(error), error.kind, error.param))

    # vLLM's endpoints

    async def _chat(self, request: Request, responder: Responder) -> None:
        await self._completions.serve("chat", request, responder)

    async def _text(self, request: Request, responder: Responder) -> None:
        await self._completions.serve("completions", request, responder)

    async def _models(self, request: Request, responder: Responder) -> None:
        settings = self._engine.settings
        cards = [self._model_card(settings.model, None)]
        cards += [self._model_card(adapter, settings.model) for adapter in settings.adapters]
        _send_json(responder, {"object": "list", "data": cards})

    def _model_card(self, name: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": name,
            "parent": parent,
            "max_model_len": self._engine.max_model_len,
            "permission": [],
        }

    async def _health(self, request: Request, responder: Responder) -> None:
        responder.send(200, [], b"")

    async def _version(self, request: Request, responder: Responder) -> None:
        _send_json(responder, {"version": self._engine.settings.engine_version})

    async def _metrics(self, request: Request, responder: Responder) -> None:
        responder.send(200, TEXT, self._engine.metrics.page())

    async def _tokenize(self, request: Request, responder: Responder) -> None:
        engine = self._engine
        body = read_body(request.body, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("exactly one of prompt and messages is needed", param="prompt")
        text = body.prompt
        if text is None:
            try:
                text = engine.tokenizer.template.render(body.messages or [], body.tools, body.add_generation_prompt)
            except BadConversationError as error:
                raise ApiError(str(error), param="messages") from error
        tokens = (await engine.tokenize(text)).tolist()
        names = engine.tokenizer.pieces(tokens) if body.return_token_strs else None
        page = {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens, "token_strs": names}
        _send_json(responder, page)

    async def _detokenize(self, request: Request, responder: Responder) -> None:
        body = read_body(request.body, DetokenizeBody)
        size = len(self._engine.tokenizer.vocabulary)
        if any(not 0 <= token < size for token in body.tokens):
            raise ApiError(f"token ids must be 0..{size - 1}", param="tokens")
        _send_json(responder, {"prompt": self._engine.tokenizer.decode(body.tokens)})

    async def _event_sources(self, request: Request, responder: Responder) -> None:
        _send_json(responder, self._engine.event_sources())

    async def _reset_prefix_cache(self, request: Request, responder: Responder) -> None:
        wish = parse_qs(request.query).get("reset_running_requests", ["false"])[0]
        done = self._engine.reset_prefix_cache(reset_running=wish.lower() == "true")
        _send_json(responder, {"success": done})

    # For tests

    async def _served(self, request: Request, responder: Responder) -> None:
        _send_json(responder, self._engine.ledger.page())

    async def _resident(self, request: Request, responder: Responder) -> None:
        _send_json(responder, self._engine.resident())

    async def _flags(self, request: Request, responder: Responder) -> None:
        _send_json(responder, self._engine.flags)

    async def _misbehave(self, request: Request, responder: Responder) -> None:
        """Flags of `Misbehaviour`, and three acts: ``behave`` (all flags back), ``lose_history``, ``restart``."""
        changes = read_body(request.body, dict[str, Any])
        acts = {name: bool(changes.pop(name, False)) for name in ("behave", "lose_history", "restart")}
        base = msgspec.structs.asdict(Misbehaviour()) if acts["behave"] else {}
        try:
            self._engine.flags.change({**base, **changes})
        except ValueError as error:
            raise ApiError(str(error)) from error
        if acts["lose_history"]:
            for rank in self._engine.ranks:
                rank.publisher.forget()
        if acts["restart"]:
            await self._engine.restart()
        _send_json(responder, self._engine.flags)


def _send_json(responder: Responder, page: Any) -> None:
    responder.send(200, JSON, msgspec.json.encode(page))


def _own_error(status: int, reason: str, target: str) -> tuple[Headers, bytes]:
    kind = "InternalServerError" if status >= 500 else "BadRequestError"
    return JSON, error_body(status, reason.replace("_", " "), kind)

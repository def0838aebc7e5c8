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
from load.engine.embeddings import EmbeddingsBody
from load.engine.engine import Engine
from load.engine.hints import PROTOCOL_VERSION, SUPPORTED, HintsError, read_envelope
from load.engine.messages_api import count_answer
from load.engine.messages_api import error_body as messages_error_body
from load.engine.misbehave import Misbehaviour
from load.engine.tokens import BadConversationError
from web.server import Headers, HttpServer, Request, Responder

MESSAGES_PATH = "/v1/messages"
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
            ("POST", "/v1/embeddings"): self._embeddings,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("GET", "/kv_event_sources"): self._event_sources,
            ("GET", "/get_hicache_l3_cache_layout"): self._pool_layout,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/kv_hints"): self._hint_capabilities,
            ("POST", "/kv_hints"): self._hints,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("GET", "/sim/served"): self._served,
            ("GET", "/sim/resident"): self._resident,
            ("GET", "/sim/misbehave"): self._flags,
            ("POST", "/sim/misbehave"): self._misbehave,
        }
        if engine.settings.responses_api:
            self._routes["POST", "/v1/responses"] = self._responses
        if engine.settings.messages_api:
            self._routes["POST", MESSAGES_PATH] = self._messages
            self._routes["POST", f"{MESSAGES_PATH}/count_tokens"] = self._count_tokens
        self._paths = {path for _, path in self._routes}
        self.http = HttpServer(self.handle, error_answer=_own_error)

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer one request; the client's mistakes in the error shape of its API."""
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
            responder.send(error.status, headers, self._error_body(request.path, error))

    def _error_body(self, path: str, error: ApiError) -> bytes:
        if path.startswith(MESSAGES_PATH) and self._engine.settings.messages_api:
            return messages_error_body(str(error), error.kind)
        return error_body(error.status, str(error), error.kind, error.param)

    # vLLM's endpoints

    async def _chat(self, request: Request, responder: Responder) -> None:
        await self._completions.serve("chat", request, responder)

    async def _text(self, request: Request, responder: Responder) -> None:
        await self._completions.serve("completions", request, responder)

    async def _responses(self, request: Request, responder: Responder) -> None:
        await self._completions.serve("responses", request, responder)

    async def _messages(self, request: Request, responder: Responder) -> None:
        await self._completions.serve("messages", request, responder)

    async def _count_tokens(self, request: Request, responder: Responder) -> None:
        responder.send(200, JSON, count_answer(await self._completions.count(request)))

    async def _embeddings(self, request: Request, responder: Responder) -> None:
        answer = await self._completions.embed(read_body(request.body, EmbeddingsBody), self._created)
        responder.send(200, JSON, answer)

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
        settings = self._engine.settings
        page: dict[str, Any] = {"version": settings.engine_version}
        if settings.kv_hints:
            page["features"] = ["kv_hints"]
        _send_json(responder, page)

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

    # Tiers, pool and hints

    async def _pool_layout(self, request: Request, responder: Responder) -> None:
        """As SGLang 0.5.23. Without a pool, or with vLLM's keys in it: 404, as engines without the endpoint."""
        settings = self._engine.settings
        self._need(bool(settings.pool_url) and settings.pool_scheme == "sglang_hicache")
        _send_json(responder, self._engine.pages.describe())

    async def _server_info(self, request: Request, responder: Responder) -> None:
        """What SGLang's says of layouts, where this engine writes into a pool as SGLang does."""
        settings = self._engine.settings
        self._need(bool(settings.pool_url) and settings.pool_scheme == "sglang_hicache")
        layout = self._engine.pages.config
        page = {
            "version": settings.engine_version,
            "served_model_name": settings.model,
            "page_size": layout.page_size,
            "tp_size": layout.tp,
            "pp_size": layout.pp,
            "dp_size": settings.ranks,
            "hicache_storage_backend": "mooncake",
            "hicache_storage_backend_extra_config": {"extra_backend_tag": layout.tag} if layout.tag else {},
        }
        _send_json(responder, page)

    async def _hint_capabilities(self, request: Request, responder: Responder) -> None:
        """Whether and which hints this engine takes; 404 where it takes none, as real engines answer."""
        self._need(self._engine.settings.kv_hints)
        settings = self._engine.settings
        tiers = {"host": settings.host_blocks, "disk": settings.disk_blocks, "pool": settings.pool_url}
        page = {
            "protocol_versions": [PROTOCOL_VERSION],
            "actions": {name: list(versions) for name, versions in SUPPORTED.items()},
            "tiers": [name for name, there in tiers.items() if there],
            "max_pinned_ratio": settings.max_pinned_ratio,
        }
        _send_json(responder, page)

    async def _hints(self, request: Request, responder: Responder) -> None:
        """An envelope; ``?rank=N`` names the rank, else each action goes to the one that knows its session."""
        engine = self._engine
        self._need(engine.settings.kv_hints)
        raw = parse_qs(request.query).get("rank", [None])[0]
        if raw is not None and not (raw.isdigit() and int(raw) < len(engine.ranks)):
            raise ApiError(f"rank must be 0..{len(engine.ranks) - 1}", param="rank")
        try:
            envelope = read_envelope(request.body)
        except HintsError as error:
            raise ApiError(str(error), param="kv_hints") from error
        results = await engine.take_hints(envelope, None if raw is None else int(raw))
        rows = [
            {"action_id": row.action_id, "action_type": row.action_type, "outcome": row.outcome, "reason": row.reason}
            for row in results
        ]
        _send_json(responder, {"message_id": envelope.message_id, "results": rows})

    @staticmethod
    def _need(there: bool) -> None:
        if not there:
            raise ApiError("Not Found", status=404, kind="NotFoundError")

    # For tests

    async def _served(self, request: Request, responder: Responder) -> None:
        lost_s = sum(rank.lost_s for rank in self._engine.ranks)
        _send_json(responder, {**self._engine.ledger.page(), "lost_s": round(lost_s, 3)})

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

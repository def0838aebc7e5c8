"""Asks the engine over HTTP: what it is, how loaded it is, and where its KV events are."""

from __future__ import annotations

import ssl

from services.bridge.adapters.sglang import PIN_PREFIX
from services.bridge.endpoints import RankSource, from_sglang, from_vllm
from services.bridge.errors import BadEndpointError, ScrapeError
from services.bridge.hint_page import HintPage, parse_hint_page
from services.bridge.layout import LayoutPage, parse_layout_page
from services.bridge.profile import (
    MetricsReport,
    ModelsReport,
    ServerInfo,
    parse_metrics,
    parse_models,
    parse_server_info,
    parse_version,
)
from web.client import Answer, ClientLimits, HttpClient, Timeouts
from web.errors import WebError

_OK = 200
ANSWER_BYTES = 8 * 1024 * 1024
"""The largest page that is read: a large engine's ``/metrics`` has below 1 MB."""

_METHOD_NOT_ALLOWED = 405
_NOT_HERE = frozenset({404, 405, 501})


class EngineScraper:
    """One engine's HTTP side. Every method raises `ScrapeError`; paths that an engine lacks are ``None``. ``tls``: see
    `HttpClient`."""

    def __init__(
        self, engine_url: str, timeout_s: float, api_key: str = "", *, tls: ssl.SSLContext | None = None
    ) -> None:
        self._url = engine_url.rstrip("/")
        self._client = HttpClient(ClientLimits(answer_bytes=ANSWER_BYTES), tls=tls)
        self._timeouts = Timeouts(connect_s=timeout_s, first_byte_s=timeout_s, idle_s=timeout_s, total_s=timeout_s)
        self._headers = [(b"authorization", f"Bearer {api_key}".encode())] if api_key else []

    async def close(self) -> None:
        await self._client.close()

    async def metrics(self) -> MetricsReport | None:
        """``/metrics``; ``None`` where the engine has no such page (SGLang without ``--enable-metrics``)."""
        answer = await self._get("/metrics")
        return None if answer is None else parse_metrics(answer.body.decode("utf-8", "replace"))

    async def models(self) -> ModelsReport:
        """``/v1/models``, which every OpenAI-compatible engine has."""
        answer = await self._get("/v1/models")
        if answer is None:
            raise ScrapeError("bad_answer", f"{self._url} has no /v1/models: not an OpenAI-compatible engine")
        return parse_models(answer.body)

    async def version(self) -> str | None:
        """``/version``."""
        answer = await self._get("/version")
        return None if answer is None else parse_version(answer.body)

    async def server_info(self) -> ServerInfo | None:
        """``/server_info``, which SGLang has (and vLLM in developer mode, in another shape)."""
        answer = await self._get("/server_info")
        return None if answer is None else parse_server_info(answer.body)

    async def layout(self) -> LayoutPage | None:
        """``/get_hicache_l3_cache_layout``, which SGLang has since it stores pages in a shared pool."""
        answer = await self._get("/get_hicache_l3_cache_layout")
        return None if answer is None else parse_layout_page(answer.body)

    async def hints(self) -> HintPage | None:
        """``/kv_hints``: what hints it takes. Whatever an engine answers that is no such page: it takes none."""
        answer = await self._fetch("/kv_hints")
        return parse_hint_page(answer.body) if answer.status == _OK else None

    async def has_pin_prefix(self) -> bool:
        """Whether SGLang's endpoint, which is only for POST, is there."""
        return (await self._fetch(PIN_PREFIX)).status == _METHOD_NOT_ALLOWED

    async def sources(self, host: str) -> tuple[RankSource, ...]:
        """Where KV events are published, as the engine itself says; empty when it does not say."""
        for path, read in (("/kv_event_sources", from_vllm), ("/server_info", from_sglang)):
            answer = await self._get(path)
            if answer is None:
                continue
            try:
                found = read(answer.body, host)
            except BadEndpointError as error:
                raise ScrapeError("bad_answer", str(error)) from error
            if found:
                return found
        return ()

    async def _get(self, path: str) -> Answer | None:
        answer = await self._fetch(path)
        if answer.status in _NOT_HERE:
            return None
        if answer.status != _OK:
            raise ScrapeError(f"http_{answer.status}", f"{path} answered {answer.status}")
        return answer

    async def _fetch(self, path: str) -> Answer:
        try:
            return await self._client.fetch("GET", self._url + path, self._headers, b"", self._timeouts)
        except WebError as error:
            raise ScrapeError(error.reason, f"{path}: {error}") from error

"""A prompt's tokens: by the model's local tokenizer in a thread, or by an engine's ``/tokenize``; else its text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from bus.log import EventLog
from schemas.base import UNDECODABLE
from services.ingress.config import IngressSettings
from services.ingress.contents import Dialect
from services.ingress.effects import CountPrompt
from services.ingress.endpoints import ChatPrompt, ClientRequest, LargePrompt, TextPrompt, TokensPrompt
from services.ingress.errors import TemplateError
from services.ingress.events import PromptCounted
from services.ingress.message_chain import MessageChain, message_chain
from services.ingress.modalities import Media, media_of
from services.ingress.prefix_tokens import Plan
from services.ingress.shell.local_tokenizer import LocalTokenizer
from services.ingress.shell.tokenizing import SkippedError, TokenizingPool
from services.ingress.texts import TextBlocks, text_blocks
from services.ingress.tokenize_body import goes_as_it_came, tokenize_body
from services.ingress.tokens import PromptTokens, from_ids
from web.client import HttpClient, Timeouts
from web.errors import WebError

log = EventLog(__name__)

ENGINE_PAUSE_S = 60.0
"""An engine that cannot tokenize is not asked again for this long."""

LAST_RESORT_S = 5.0
"""An engine that gave no tokens in time is asked again so soon only where no other can be."""

INLINE_BYTES = 32 * 1024
"""A request with a body up to this is read as text at once (well below a millisecond), a larger one in a thread."""

INLINE_RENDER_BYTES, INLINE_ITEMS = 512 * 1024, 512
"""A body up to this, of so many messages and tools at most, is rendered at once: 1 ms for 300 KB."""

INLINE_TOKENIZE_BYTES = 4 * 1024
"""So much new text is tokenized at once: below a millisecond."""

JSON = [(b"content-type", b"application/json")]
WorkerUrls = Callable[[str], Sequence[str]]
"""A model to the URLs of engines that serve it, and do not fail."""


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_tokenized = msgspec.json.Decoder(_Tokenized)


class PromptCounter:
    """Answers `CountPrompt`. Every way out is a `PromptCounted`: a prompt that cannot be read is never an error."""

    def __init__(self, settings: IngressSettings, client: HttpClient, worker_urls: WorkerUrls) -> None:
        self._settings = settings
        self._client = client
        self._worker_urls = worker_urls
        self._pool = TokenizingPool(settings.tokenize_threads, settings.tokenize_queue, settings.tokenize_timeout_s)
        # Tokenizers may have taken every thread of the other pool: that is one reason for a chain over text.
        self._texts = TokenizingPool(1, settings.tokenize_queue, settings.tokenize_timeout_s)
        self._tokenizers: dict[str, LocalTokenizer] = {}
        self._not_before: dict[str, float] = {}
        self._last_resort: dict[str, float] = {}
        self._headers = JSON

    async def load(self, engine_api_key: str = "") -> None:
        """Read the tokenizers; ``engine_api_key``: what engines want to be brought. Raises `SettingsError`."""
        if engine_api_key:
            self._headers = [*JSON, (b"authorization", f"Bearer {engine_api_key}".encode())]
        if self._settings.tokenize not in ("auto", "local"):
            return
        for model, path in self._settings.tokenizers.items():
            self._tokenizers[model] = await asyncio.to_thread(
                LocalTokenizer, Path(path), cache_bytes=self._settings.tokenize_cache_bytes
            )

    @property
    def depth(self) -> int:
        """Prompts being counted or waiting for a thread."""
        return self._pool.depth + self._texts.depth

    def cache_tokens(self) -> tuple[int, int]:
        """Tokens found in the cache, and encoded, since the start."""
        tokenizers = self._tokenizers.values()
        return sum(one.hit_tokens for one in tokenizers), sum(one.missed_tokens for one in tokenizers)

    async def count(self, effect: CountPrompt) -> PromptCounted:
        """The tokens of one prompt, or why there are none, and its text's chain instead."""
        counted = await self._counted(effect)
        return replace(counted, messages=await self._messages(effect)) if effect.messages else counted

    async def _counted(self, effect: CountPrompt) -> PromptCounted:
        try:
            tokens, tokens_from = await self._count(effect)
        except (SkippedError, TemplateError) as error:
            skipped: str = error.reason
        except Exception as error:  # noqa: BLE001 - tokenizers and templates raise anything; the engine will judge
            log.warning("prompt_not_counted", error=error, request=effect.request_id, model=effect.request.model)
            skipped = "failed"
        else:
            return PromptCounted(request_id=effect.request_id, tokens=tokens, tokens_from=tokens_from)
        media, text = await self._text(effect)
        return PromptCounted(request_id=effect.request_id, skipped=skipped, text=text, media=media)

    async def _messages(self, effect: CountPrompt) -> MessageChain | None:
        request = effect.request
        try:
            if len(request.body) <= INLINE_BYTES:
                return message_chain(request)
            return await self._texts.run(lambda: message_chain(request))
        except SkippedError:
            return None

    async def _text(self, effect: CountPrompt) -> tuple[Media, TextBlocks | None]:
        """What the prompt holds besides text, and its chain over text where that is wanted."""
        settings, request, adapter = self._settings, effect.request, effect.adapter

        def read() -> tuple[Media, TextBlocks | None]:
            media = _media(request)
            if not settings.text_blocks:
                return media, None
            sizes = {"block_bytes": settings.text_block_bytes, "max_bytes": settings.text_bytes}
            return media, text_blocks(request, adapter=adapter, dialect=effect.dialect, **sizes)

        try:
            return read() if len(request.body) <= INLINE_BYTES else await self._texts.run(read)
        except SkippedError:
            return request.media, None

    async def _count(self, effect: CountPrompt) -> tuple[PromptTokens, Literal["tokenizer", "engine"]]:
        prompt = effect.request.prompt
        if prompt is None:
            raise SkippedError("unscored")
        if self._settings.tokenize == "none":
            raise SkippedError("off")
        if isinstance(prompt, LargePrompt):
            raise SkippedError("too_large")
        block_size, salt, adapter = effect.block_size, effect.request.cache_salt, effect.adapter

        def named(tokens: PromptTokens) -> PromptTokens:
            return tokens.under(salt, adapter).paged(effect.pages, salt, adapter)

        if isinstance(prompt, TokensPrompt):
            ids = prompt.tokens
            return await self._pool.run(lambda: named(from_ids(ids, block_size))), "tokenizer"
        tokenizer = self._tokenizers.get(effect.request.model)
        if tokenizer is not None and (tokenizer.template is not None or isinstance(prompt, TextPrompt)):
            return await self._tokenized(tokenizer, prompt, effect), "tokenizer"
        if self._settings.tokenize == "local":
            raise SkippedError("no_tokenizer")
        request = effect.request
        small = len(request.body) <= INLINE_BYTES
        media = _media(request) if small else await self._pool.run(lambda: _media(request))
        if media.parts:
            raise SkippedError("media")  # an engine counts places for them, and none says what is in those
        answer = await self._ask_engine(effect.request.model, prompt, effect.dialect)
        return await self._pool.run(lambda: named(_read_tokens(answer, block_size))), "engine"

    async def _tokenized(
        self, tokenizer: LocalTokenizer, prompt: ChatPrompt | TextPrompt, effect: CountPrompt
    ) -> PromptTokens:
        """By the local tokenizer: what is short, or short but for what is known, at once. A thread would cost as much
        again as 500 tokens do, and could not render while others have the interpreter's lock."""
        salt, adapter, apart = effect.request.cache_salt, effect.adapter, effect.request.apart

        def finish(plan: Plan) -> PromptTokens:
            return tokenizer.finish(plan, effect.block_size, salt, adapter).paged(effect.pages, salt, adapter)

        if len(effect.request.body) > INLINE_RENDER_BYTES or _items(prompt) > INLINE_ITEMS:
            return await self._pool.run(lambda: finish(tokenizer.plan(prompt, effect.dialect, apart)))
        plan = tokenizer.plan(prompt, effect.dialect, apart)
        if plan.missing_bytes <= INLINE_TOKENIZE_BYTES and effect.pages is None:
            return finish(plan)
        return await self._pool.run(lambda: finish(plan))

    async def _ask_engine(self, model: str, prompt: ChatPrompt | TextPrompt, dialect: Dialect) -> bytes:
        url = self._tokenizing_url(model)
        if url is None:
            raise SkippedError("no_tokenizer")
        if goes_as_it_came(prompt, dialect):
            body = tokenize_body(model, prompt, dialect)
        else:
            body = await self._pool.run(lambda: tokenize_body(model, prompt, dialect))
        try:
            answer = await self._client.fetch(
                "POST",
                f"{url.rstrip('/')}/tokenize",
                self._headers,
                body,
                Timeouts(total_s=self._settings.tokenize_timeout_s),
            )
        except WebError as error:
            _put_off(self._last_resort, url, LAST_RESORT_S)
            raise SkippedError("failed") from error
        if answer.status != 200:
            if answer.status in (404, 405, 501):
                _put_off(self._not_before, url, ENGINE_PAUSE_S)
            raise SkippedError("failed")
        return answer.body

    def _tokenizing_url(self, model: str) -> str | None:
        """The first engine that tokenizes and has not been silent just now; a silent one where there is no other."""
        now = asyncio.get_running_loop().time()
        urls = [url for url in self._worker_urls(model) if now >= self._not_before.get(url, 0.0)]
        return min(urls, key=lambda url: now < self._last_resort.get(url, 0.0), default=None)

    def close(self) -> None:
        self._pool.close()
        self._texts.close()
        for tokenizer in self._tokenizers.values():
            tokenizer.close()


def _put_off(until: dict[str, float], url: str, seconds: float) -> None:
    """Note the engine, and forget those whose time is over: engines come and go, under ever new addresses."""
    now = asyncio.get_running_loop().time()
    for gone in [known for known, time in until.items() if time <= now]:
        del until[gone]
    until[url] = now + seconds


def _items(prompt: ChatPrompt | TextPrompt) -> int:
    return len(prompt.messages) + len(prompt.tools) if isinstance(prompt, ChatPrompt) else 0


def _media(request: ClientRequest) -> Media:
    prompt = request.prompt
    return media_of(request.body, prompt.messages) if isinstance(prompt, ChatPrompt) else request.media


def _read_tokens(answer: bytes, block_size: int | None) -> PromptTokens:
    """Raises `SkippedError` for an answer that is not a list of token ids."""
    try:
        return from_ids(_tokenized.decode(answer).tokens, block_size)
    except (*UNDECODABLE, OverflowError, ValueError) as error:
        raise SkippedError("failed") from error

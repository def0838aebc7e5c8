"""A prompt's tokens: by the model's local tokenizer in a thread, or by an engine's ``/tokenize``; else its text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from bus.log import EventLog
from schemas.base import UNDECODABLE
from services.ingress.config import IngressSettings
from services.ingress.effects import CountPrompt
from services.ingress.endpoints import ChatPrompt, LargePrompt, TextPrompt, TokensPrompt
from services.ingress.errors import TemplateError
from services.ingress.events import PromptCounted
from services.ingress.shell.local_tokenizer import LocalTokenizer
from services.ingress.shell.tokenizing import SkippedError, TokenizingPool
from services.ingress.texts import TextBlocks, text_blocks
from services.ingress.tokens import PromptTokens, from_ids
from web.client import HttpClient, Timeouts
from web.errors import WebError

log = EventLog(__name__)

ENGINE_PAUSE_S = 60.0
"""An engine that cannot tokenize is not asked again for this long."""

INLINE_BYTES = 32 * 1024
"""A request with a body up to this is read as text at once (well below a millisecond), a larger one in a thread."""

JSON = [(b"content-type", b"application/json")]
WorkerUrl = Callable[[str], str | None]
"""A model to the URL of some engine that serves it."""


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_tokenized = msgspec.json.Decoder(_Tokenized)


class PromptCounter:
    """Answers `CountPrompt`. Every way out is a `PromptCounted`: a prompt that cannot be read is never an error."""

    def __init__(self, settings: IngressSettings, client: HttpClient, worker_url: WorkerUrl) -> None:
        self._settings = settings
        self._client = client
        self._worker_url = worker_url
        self._pool = TokenizingPool(settings.tokenize_threads, settings.tokenize_queue, settings.tokenize_timeout_s)
        # Tokenizers may have taken every thread of the other pool: that is one reason for a chain over text.
        self._texts = TokenizingPool(1, settings.tokenize_queue, settings.tokenize_timeout_s)
        self._tokenizers: dict[str, LocalTokenizer] = {}
        self._not_before: dict[str, float] = {}

    async def load(self) -> None:
        """Read the tokenizers. Raises `SettingsError`."""
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
        try:
            tokens, tokens_from = await self._count(effect)
        except (SkippedError, TemplateError) as error:
            skipped: str = error.reason
        except Exception as error:  # noqa: BLE001 - tokenizers and templates raise anything; the engine will judge
            log.warning("prompt_not_counted", error=error, request=effect.request_id, model=effect.request.model)
            skipped = "failed"
        else:
            return PromptCounted(request_id=effect.request_id, tokens=tokens, tokens_from=tokens_from)
        return PromptCounted(request_id=effect.request_id, skipped=skipped, text=await self._text(effect))

    async def _text(self, effect: CountPrompt) -> TextBlocks | None:
        settings, request, adapter = self._settings, effect.request, effect.adapter
        if not settings.text_blocks:
            return None

        def chain() -> TextBlocks | None:
            sizes = {"block_bytes": settings.text_block_bytes, "max_bytes": settings.text_bytes}
            return text_blocks(request, adapter=adapter, **sizes)

        try:
            return chain() if len(request.body) <= INLINE_BYTES else await self._texts.run(chain)
        except SkippedError:
            return None

    async def _count(self, effect: CountPrompt) -> tuple[PromptTokens, Literal["tokenizer", "engine"]]:
        prompt = effect.request.prompt
        if prompt is None:
            raise SkippedError("unscored")
        if self._settings.tokenize == "none":
            raise SkippedError("off")
        if isinstance(prompt, LargePrompt):
            raise SkippedError("too_large")
        block_size, salt, adapter = effect.block_size, effect.request.cache_salt, effect.adapter
        if isinstance(prompt, TokensPrompt):
            ids = prompt.tokens
            return await self._pool.run(lambda: from_ids(ids, block_size).under(salt, adapter)), "tokenizer"
        tokenizer = self._tokenizers.get(effect.request.model)
        if tokenizer is not None and (tokenizer.template is not None or isinstance(prompt, TextPrompt)):
            return await self._pool.run(lambda: tokenizer.count(prompt, block_size).under(salt, adapter)), "tokenizer"
        if self._settings.tokenize == "local":
            raise SkippedError("no_tokenizer")
        answer = await self._ask_engine(effect.request.model, prompt)
        return await self._pool.run(lambda: _read_tokens(answer, block_size).under(salt, adapter)), "engine"

    async def _ask_engine(self, model: str, prompt: ChatPrompt | TextPrompt) -> bytes:
        url = self._worker_url(model)
        now = asyncio.get_running_loop().time()
        if url is None or now < self._not_before.get(url, 0.0):
            raise SkippedError("no_tokenizer")
        body = _question(model, prompt)
        try:
            answer = await self._client.fetch(
                "POST", f"{url.rstrip('/')}/tokenize", JSON, body, Timeouts(total_s=self._settings.tokenize_timeout_s)
            )
        except WebError as error:
            raise SkippedError("failed") from error
        if answer.status != 200:
            if answer.status in (404, 405, 501):
                self._not_before[url] = now + ENGINE_PAUSE_S
            raise SkippedError("failed")
        return answer.body

    def close(self) -> None:
        self._pool.close()
        self._texts.close()


def _read_tokens(answer: bytes, block_size: int | None) -> PromptTokens:
    """Raises `SkippedError` for an answer that is not a list of token ids."""
    try:
        return from_ids(_tokenized.decode(answer).tokens, block_size)
    except (*UNDECODABLE, OverflowError, ValueError) as error:
        raise SkippedError("failed") from error


def _question(model: str, prompt: ChatPrompt | TextPrompt) -> bytes:
    """vLLM's ``/tokenize`` body, around the client's own bytes. Raises `SkippedError` for another API's messages."""
    encoded_model = msgspec.json.encode(model)
    if isinstance(prompt, TextPrompt):
        special = b"true" if prompt.add_special_tokens else b"false"
        text = msgspec.json.encode(prompt.text)
        return b'{"model":%b,"prompt":%b,"add_special_tokens":%b}' % (encoded_model, text, special)
    if prompt.api != "chat":
        raise SkippedError("no_tokenizer")
    members = [b'"model":' + encoded_model, b'"messages":[%b]' % b",".join(map(bytes, prompt.messages))]
    if prompt.tools:
        members.append(b'"tools":[%b]' % b",".join(map(bytes, prompt.tools)))
    if prompt.template_kwargs is not None:
        members.append(b'"chat_template_kwargs":%b' % bytes(prompt.template_kwargs))
    members.append(b'"add_generation_prompt":%b' % (b"true" if prompt.add_generation_prompt else b"false"))
    if prompt.continue_final_message:
        members.append(b'"continue_final_message":true')
    return b"{%b}" % b",".join(members)

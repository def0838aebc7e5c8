"""Prompts without tokens get a chain over their text, whatever the reason, and never at the event loop's cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.ingress.config import IngressSettings
from services.ingress.effects import CountPrompt
from services.ingress.endpoints import read_request
from services.ingress.events import PromptCounted
from services.ingress.shell.counting import PromptCounter
from web.client import HttpClient

WORDS = "What is to be done about it? "


@pytest_asyncio.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = HttpClient()
    yield client
    await client.close()


def counter(client: HttpClient, **settings: Any) -> PromptCounter:
    return PromptCounter(IngressSettings(instance="i", **settings), client, lambda model: ())


def asked(content: Any, **members: Any) -> CountPrompt:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **members}).encode()
    settings = IngressSettings(instance="i")
    return CountPrompt("r1", read_request("chat_completions", body, prompt_bytes=settings.prompt_bytes), 16)


async def count(of: PromptCounter, effect: CountPrompt) -> PromptCounted:
    try:
        return await of.count(effect)
    finally:
        of.close()


@pytest.mark.parametrize(
    ("content", "settings", "skipped"),
    [
        (WORDS * 20, {}, "no_tokenizer"),
        (WORDS * 20, {"tokenize": "none"}, "off"),
        (
            [{"type": "text", "text": WORDS * 20}, {"type": "image_url", "image_url": {"url": "data:"}}],
            {},
            "media",
        ),
        (WORDS * 200_000, {}, "too_large"),
    ],
)
async def test_text_whatever_the_reason(
    client: HttpClient, content: Any, settings: dict[str, Any], skipped: str
) -> None:
    """No tokenizer, none wanted, an image, a body over ``prompt_bytes``: the reason is counted, the chain is there."""
    answer = await count(counter(client, **settings), asked(content))
    assert (answer.tokens, answer.skipped) == (None, skipped)
    assert answer.text is not None
    assert answer.text.block_size == 64
    assert 0 < len(answer.text.chain) // 8 <= 1024 * 1024 // 256


async def test_switched_off(client: HttpClient) -> None:
    """``text_blocks`` off: by session and load, as before."""
    answer = await count(counter(client, text_blocks=False), asked(WORDS * 20))
    assert (answer.text, answer.skipped) == (None, "no_tokenizer")


async def test_token_ids_need_no_text(client: HttpClient) -> None:
    """Where there are tokens there is no second chain."""
    request = read_request("completions", json.dumps({"model": "m", "prompt": list(range(64))}).encode())
    answer = await count(counter(client), CountPrompt("r1", request, 16))
    assert answer.tokens is not None
    assert (len(answer.tokens), answer.text) == (64, None)


async def test_large_text_is_read_in_a_thread(client: HttpClient) -> None:
    """A large prompt is never decoded on the event loop (B6); beyond the bound on those that wait it goes without."""
    at = counter(client, tokenize="none", tokenize_queue=1)
    small, large = asked(WORDS), asked(WORDS * 100_000)
    first = asyncio.create_task(at.count(large))
    await asyncio.sleep(0)
    assert at.depth == 1
    over, beside = await at.count(large), await at.count(small)
    assert (over.text, over.skipped, first.done()) == (None, "off", False)
    assert beside.text is not None, "a small one needs no thread"
    assert (await first).text is not None
    assert at.depth == 0
    at.close()

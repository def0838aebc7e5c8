"""The bounded tokenising pool: over the bound or too late is a reason, not a wait."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from services.ingress.config import IngressSettings
from services.ingress.effects import CountPrompt
from services.ingress.endpoints import read_request
from services.ingress.shell.counting import INLINE_TOKENIZE_BYTES, PromptCounter
from services.ingress.shell.tokenizing import SkippedError, TokenizingPool
from tests.integration.ingress.support import ASSETS, MODEL, until
from web.client import HttpClient


async def test_over_the_bound_is_skipped_at_once() -> None:
    """B6: with every place taken the next prompt is not queued; places come free as work ends."""
    pool = TokenizingPool(threads=1, limit=2, timeout_s=5)
    release = threading.Event()
    waiting = [asyncio.create_task(pool.run(lambda: release.wait(5))) for _ in range(2)]
    await until(lambda: pool.depth == 2)
    with pytest.raises(SkippedError) as caught:
        await pool.run(lambda: True)
    assert caught.value.reason == "queue_full"
    release.set()
    assert await asyncio.gather(*waiting) == [True, True]
    assert await pool.run(lambda: 7) == 7
    assert pool.depth == 0
    pool.close()


async def test_late_work_is_given_up_and_still_counts_until_it_ends() -> None:
    """A deadline frees the request, not the thread: the place stays taken, so the bound holds."""
    pool = TokenizingPool(threads=1, limit=1, timeout_s=0.02)
    release = threading.Event()
    with pytest.raises(SkippedError) as caught:
        await pool.run(lambda: release.wait(5))
    assert caught.value.reason == "timeout"
    assert pool.depth == 1
    release.set()
    await until(lambda: pool.depth == 0)
    pool.close()


async def test_what_work_raises_comes_out() -> None:
    """A failure is the caller's to judge; a time-out inside the work is not mistaken for the deadline."""
    pool = TokenizingPool(threads=1, limit=1, timeout_s=5)

    def fail() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        await pool.run(fail)
    assert pool.depth == 0
    pool.close()


async def test_what_is_short_needs_no_thread() -> None:
    """B6: long new prompts fill the pool; a short one, and one that goes on from a known one, are counted all the
    same, and as ever."""
    settings = IngressSettings(tokenizers={MODEL: str(ASSETS)}, tokenize="local", tokenize_queue=1, instance="door")
    client = HttpClient()
    counter = PromptCounter(settings, client, lambda model: [])
    await counter.load()

    def counting(*texts: str) -> CountPrompt:
        messages = [{"role": "user", "content": text} for text in texts]
        body = json.dumps({"model": MODEL, "messages": messages}).encode()
        return CountPrompt("r", read_request("chat_completions", body), 16)

    long = "word and number 17, " * INLINE_TOKENIZE_BYTES
    known = await counter.count(counting(long))
    taking = asyncio.create_task(counter.count(counting("another " + long)))
    await asyncio.sleep(0)  # its first step takes the place, and what is counted at once lets nothing else run
    assert counter.depth == 1
    more, short = await counter.count(counting(long, "more")), await counter.count(counting("short"))
    refused = await counter.count(counting("a third " + long))
    assert known.tokens is not None
    assert more.tokens is not None
    assert short.tokens is not None
    assert len(more.tokens) > len(known.tokens)
    assert (refused.tokens, refused.skipped) == (None, "queue_full")
    assert (await taking).tokens is not None
    counter.close()
    await client.close()

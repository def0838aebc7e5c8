"""Threads for tokenizers, with a bound: a long prompt never stops the event loop (spec: user-cases B6).

A prompt over the bound, or not counted in time, is placed without its chain; it is counted, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

T = TypeVar("T")
Skipped = Literal["queue_full", "timeout", "failed", "off", "unscored", "no_tokenizer", "too_large", "media"]


class SkippedError(Exception):
    """No tokens for this prompt; ``reason`` says why. The request goes on without its chain."""

    def __init__(self, reason: Skipped) -> None:
        super().__init__(reason)
        self.reason: Skipped = reason


class TokenizingPool:
    """``threads`` workers and at most ``limit`` prompts, running ones included."""

    def __init__(self, threads: int, limit: int, timeout_s: float) -> None:
        self._limit = limit
        self._timeout_s = timeout_s
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self.depth = 0

    async def run(self, work: Callable[[], T]) -> T:
        """``work`` in a thread. Raises `SkippedError` over the bound or after the deadline, and what ``work`` raises.

        Work whose caller gave up runs to its end (a tokenizer cannot be interrupted) and counts until then.
        """
        if self.depth >= self._limit:
            raise SkippedError("queue_full")
        self.depth += 1
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        running.add_done_callback(self._done)
        done, _ = await asyncio.wait((running,), timeout=self._timeout_s)
        if not done:
            raise SkippedError("timeout")
        return running.result()

    def _done(self, future: asyncio.Future[T]) -> None:
        self.depth -= 1
        if not future.cancelled():
            future.exception()  # whoever waited has seen it; nobody waits after a deadline

    def close(self) -> None:
        """Drop what waits; running work ends by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)

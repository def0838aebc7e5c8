"""The bounded tokenising pool: over the bound or too late is a reason, not a wait."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.ingress.shell.tokenizing import SkippedError, TokenizingPool
from tests.integration.ingress.support import until


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

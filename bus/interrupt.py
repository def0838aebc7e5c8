"""A clean Ctrl-C: the work is cancelled, its clean-up runs, and the command ends as if it had been done."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

INTERRUPTED_EXIT = 130
"""Of a command that a signal ended, as shells have it."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def until_interrupted(work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result, or ``None`` when a signal ended it first (after its clean-up)."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)

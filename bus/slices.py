"""Long computations on the event loop, in slices between which everybody else gets a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

SLICE_S = 0.01
"""How long the loop is kept for one slice, plus what one step of the computation takes."""

T = TypeVar("T")


async def in_slices(steps: Generator[None, None, T], slice_s: float = SLICE_S) -> T:
    """Run ``steps`` to its end and return what it returns. It must bear that the world changes between its steps."""
    loop = asyncio.get_running_loop()
    due = loop.time() + slice_s
    try:
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            if loop.time() >= due:
                await asyncio.sleep(0)
                due = loop.time() + slice_s
    finally:
        steps.close()

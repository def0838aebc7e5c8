"""Long computations in slices: others get their turn, the result and the errors come through."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest

from bus.slices import in_slices


async def test_others_get_a_turn_between_slices() -> None:
    """A task that is ready runs after each slice, not after the whole; the result is what the steps return."""
    turns: list[int] = []
    done = 0

    async def other() -> None:
        while True:
            turns.append(done)
            await asyncio.sleep(0)

    def steps() -> Generator[None, None, str]:
        nonlocal done
        for _ in range(10):
            done += 1
            yield
        return "whole"

    task = asyncio.create_task(other())
    assert await in_slices(steps(), slice_s=0.0) == "whole"
    task.cancel()
    assert turns == list(range(1, 11))


async def test_short_computations_are_not_interrupted() -> None:
    """Within one slice nobody else runs."""
    turns: list[int] = []
    asyncio.get_running_loop().call_soon(turns.append, 1)

    def steps() -> Generator[None, None, int]:
        yield
        yield
        return len(turns)

    assert await in_slices(steps(), slice_s=60.0) == 0


async def test_errors_and_cancellation_end_the_steps() -> None:
    """An error of a step is the caller's; a cancelled caller closes the steps."""

    def failing() -> Generator[None, None, None]:
        yield
        raise LookupError("second step")

    with pytest.raises(LookupError):
        await in_slices(failing())

    closed = asyncio.Event()

    def endless() -> Generator[None, None, None]:
        try:
            while True:
                yield
        finally:
            closed.set()

    task = asyncio.create_task(in_slices(endless(), slice_s=0.0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed.is_set()

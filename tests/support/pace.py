"""Bounds on how long something takes that hold for what is tested, not for what else the machine does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

PRESSURE = (Path("/proc/pressure/cpu"), Path("/proc/pressure/io"))
REFRESH_S = 2.2
"""The kernel adds its totals up every two seconds."""

WITHOUT_PRESSURE = 10
"""How many times its bound something may take where the machine does not say whether it was short of anything."""


def short_s() -> float | None:
    """Seconds since boot in which something that could run waited for a processor or a disk (Linux's pressure stall
    information, ``some``); ``None`` where the machine does not say."""
    try:
        lines = [path.read_text().splitlines()[0] for path in PRESSURE]
        return sum(int(line.rpartition("total=")[2]) for line in lines) / 1e6
    except (OSError, IndexError, ValueError):
        return None


class Stopwatch:
    """Runs from the moment it is made."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._short = short_s()

    @property
    def took_s(self) -> float:
        """Seconds since it was made, whatever happened in them."""
        return time.monotonic() - self._began

    async def lost_s(self) -> float | None:
        """Seconds since it was made in which the machine was short of processors or of its disk; ``None`` where it does
        not say."""
        await asyncio.sleep(REFRESH_S)
        short = short_s()
        return None if short is None or self._short is None else short - self._short

    async def within(self, limit_s: float) -> None:
        """Raises `AssertionError` when it took longer than ``limit_s``, not counting the seconds in which the machine
        was short of processors or of its disk."""
        took_s = self.took_s
        if took_s <= limit_s:
            return
        lost_s = await self.lost_s()
        if lost_s is None:
            assert took_s <= WITHOUT_PRESSURE * limit_s
            return
        assert took_s - lost_s <= limit_s, f"took {took_s:.2f} s; the machine was short of something for {lost_s:.2f} s"


STILL_FOR_S = 0.3
LOOKS = 10


async def stands_still(number: Callable[[], int], timeout_s: float = 30.0) -> None:
    """Until ``number`` has moved at all and then has not for `STILL_FOR_S`, over ten looks: one long pause of the
    machine is one look. Raises `TimeoutError`."""
    async with asyncio.timeout(timeout_s):
        before, looks = number(), 0
        while looks < LOOKS or before == 0:
            await asyncio.sleep(STILL_FOR_S / LOOKS)
            now = number()
            before, looks = now, looks + 1 if now == before else 0

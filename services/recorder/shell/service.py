"""The recorder: a loop for each sink (`loop`), which know nothing of each other.

Beside them, where they are switched on, tool events and workers' load come in and become rows of the stream like others
(`intakes`).

While a sink refuses, its loop stands still: the batch is tried again, the process is not ready, and the sink's rows
stay in the stream.
"""

from __future__ import annotations

import asyncio

from bus.interface import Bus
from bus.tasks import Tasks
from services.recorder.config import RecorderSettings
from services.recorder.shell.intakes import Intakes
from services.recorder.shell.loop import SinkLoop
from services.recorder.shell.sinks import make_sinks


class RecorderService:
    """The recorder as `bus.service.run_service` runs it."""

    def __init__(self, settings: RecorderSettings) -> None:
        self._loops = [SinkLoop(settings, sink, settings.durable_of(sink.name)) for sink in make_sinks(settings)]
        self._intakes = Intakes(settings)

    async def start(self, bus: Bus, tasks: Tasks) -> None:
        """Open the sinks, resume their consumers, let tool events in. Raises `SettingsError` for a directory, prefix or
        address that cannot be used."""
        for loop in self._loops:
            await loop.start(bus, tasks)
        await self._intakes.start(bus, tasks)

    def not_ready(self) -> str | None:
        return next((trouble for loop in self._loops if (trouble := loop.not_ready()) is not None), None)

    async def stop(self, timeout_s: float) -> None:
        """Take what the stream still holds, flush, acknowledge, close the sinks."""
        await self._intakes.stop(timeout_s * 0.3)  # first: their rows are written, too
        timeout_s *= 0.7
        await asyncio.gather(*(loop.stop(timeout_s) for loop in self._loops))

"""What the recorder takes in beside the stream and puts into it as rows: tool events and samples of workers' load.

All of it goes through one bounded window of rows that the stream has not acknowledged yet.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client.registry import REGISTRY, CollectorRegistry

from bus.errors import SettingsError
from bus.interface import Bus
from bus.rows import RowCollector, RowPublisher
from bus.tasks import Tasks
from services.recorder.config import RecorderSettings, check_token
from services.recorder.shell.loads import LoadSamples
from services.recorder.shell.tools import ToolEvents


class Intakes:
    """Those that are switched on, from `start` to `stop`."""

    def __init__(self, settings: RecorderSettings, registry: CollectorRegistry = REGISTRY) -> None:
        self._settings = settings
        self._registry = registry
        self._tools = ToolEvents(settings, registry) if settings.takes_tool_events else None
        self._loads = LoadSamples(settings.load_samples_s, registry) if settings.load_samples_s > 0 else None
        self._rows: RowPublisher | None = None
        self._row_metrics: RowCollector | None = None

    async def start(self, bus: Bus, tasks: Tasks) -> None:
        """Raises `SettingsError` for an address that cannot be had and a token that cannot be read."""
        if self._tools is None and self._loads is None:
            return
        token = await asyncio.to_thread(read_token, self._settings)
        self._rows = RowPublisher(bus, tasks, window=self._settings.tool_rows)
        self._row_metrics = RowCollector(self._rows)
        self._registry.register(self._row_metrics)
        if self._tools is not None:
            await self._tools.start(bus, tasks, self._rows, token)
        if self._loads is not None:
            await self._loads.start(bus, self._rows)

    async def stop(self, timeout_s: float) -> None:
        """Take what has arrived, and wait until the stream has its rows."""
        if self._loads is not None:
            await self._loads.stop()
        if self._tools is not None:
            await self._tools.stop(timeout_s * 0.2)
        if self._rows is not None:
            await self._rows.drain(timeout_s * 0.5)
        if self._row_metrics is not None:
            self._registry.unregister(self._row_metrics)
            self._row_metrics = None


def read_token(settings: RecorderSettings) -> str:
    """The bearer token that tool events over HTTP must bring; empty: none. Raises `SettingsError`."""
    if not settings.tool_events_token_file:
        return settings.tool_events_token
    try:
        token = Path(settings.tool_events_token_file).read_text(encoding="utf-8").strip()
        if not token:
            raise ValueError("it is empty")
        check_token(token)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise SettingsError("tool_events_token_file", f"{settings.tool_events_token_file}: {said}") from error
    return token

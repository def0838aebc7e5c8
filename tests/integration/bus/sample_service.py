"""A service as small as one can be, for the tests of `bus.service`: answers one question, and fails when told to."""

from __future__ import annotations

import asyncio
import sys

from bus.errors import SettingsError
from bus.interface import Bus, BusMessage, Endpoint
from bus.service import run_service
from bus.settings import CommonSettings
from bus.tasks import Tasks


class SampleSettings(CommonSettings, frozen=True, kw_only=True):
    """What the sample needs."""

    greeting: str = "hello"
    api_token: str = ""
    drain_s: float = 0.0


class SampleService:
    """Answers ``sample.echo``; ``sample.fail`` ends a task of it, ``sample.busy`` makes it not ready."""

    def __init__(self, settings: SampleSettings) -> None:
        self._settings = settings
        self._busy: str | None = None
        if settings.greeting == "rude":
            raise SettingsError("greeting", "must be polite")

    async def start(self, bus: Bus, tasks: Tasks) -> None:
        async def fail() -> None:
            raise RuntimeError("told to fail")

        def busy(message: BusMessage) -> None:
            self._busy = message.payload.decode() or None
            bus.publish(message.reply, b"")

        def echo(message: BusMessage) -> None:
            bus.publish(message.reply, self._settings.greeting.encode())

        def start_failing(message: BusMessage) -> None:
            tasks.start("fail", fail())

        await bus.subscribe("sample.fail", start_failing)
        await bus.subscribe("sample.busy", busy)
        await bus.serve("sample", "1.0.0", "", [Endpoint("echo", "sample.echo", echo)], {})

    def not_ready(self) -> str | None:
        return self._busy

    async def stop(self, timeout_s: float) -> None:
        await asyncio.sleep(self._settings.drain_s)


if __name__ == "__main__":
    sys.exit(run_service("indexer", SampleSettings, SampleService))

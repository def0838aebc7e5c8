"""What the bus tests share: a handle on a server, a handler that collects, questions asked to the end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from bus.errors import BusTimeoutError
from bus.interface import Bus, BusMessage, Consumer, StoredRow


class Server:
    """A server of either kind."""

    kind = ""

    def __init__(self) -> None:
        self._connections: list[Bus] = []

    async def connect(self, name: str = "test") -> Bus:
        connection = await self._open(name)
        self._connections.append(connection)
        return connection

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()

    async def _open(self, name: str) -> Bus:
        raise NotImplementedError

    def stop(self) -> None:
        """Stops cleanly; what it stored stays."""
        raise NotImplementedError

    def start(self, *, fresh: bool = False) -> None:
        """Runs again; ``fresh``: on another, empty store."""
        raise NotImplementedError


class Collector:
    """A handler that keeps what it gets."""

    def __init__(self) -> None:
        self.messages: list[BusMessage] = []
        self._changed = asyncio.Event()

    def __call__(self, message: BusMessage) -> None:
        self.messages.append(message)
        self._changed.set()

    @property
    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages]

    async def wait_for(self, count: int, timeout_s: float = 30.0) -> list[bytes]:
        """Payloads, once there are ``count``."""
        async with asyncio.timeout(timeout_s):
            while len(self.messages) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.payloads


async def answers_until_silence(
    bus: Bus, subject: str, *, idle_timeout_s: float, deadline_s: float
) -> tuple[list[bytes], BusTimeoutError]:
    """Every answer to an empty question, and how it ended."""
    got: list[bytes] = []
    try:
        async with aclosing(
            bus.request_many(subject, b"", idle_timeout_s=idle_timeout_s, deadline_s=deadline_s)
        ) as answers:
            async for message in answers:
                got.append(message.payload)  # noqa: PERF401 - what came before the error is wanted
    except BusTimeoutError as error:
        return got, error
    raise AssertionError("answers never end by themselves")


async def taken(consumer: Consumer, count: int, timeout_s: float = 30.0) -> list[StoredRow]:
    """The next ``count`` rows: a fetch gives those that have come, which may be fewer than there are."""
    rows: list[StoredRow] = []
    async with asyncio.timeout(timeout_s):
        while len(rows) < count:
            rows += await consumer.fetch(count - len(rows), timeout_s)
    return rows

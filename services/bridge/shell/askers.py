"""Those who ask for a snapshot: all who come while one is being written are answered together by the next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from bus.interface import Bus, BusMessage
from schemas.base import Message, to_json

MAX_WAITING = 256


class Askers:
    """The line of askers, at most `MAX_WAITING`; ``refusal``: what those beyond it read, who come back later.

    ``refused`` counts them.
    """

    def __init__(self, bus: Bus, refusal: Message) -> None:
        self._bus = bus
        self._refusal = refusal
        self._waiting: deque[str] = deque()
        self._asked = asyncio.Event()
        self.refused = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: BusMessage) -> None:
        """One question."""
        if len(self._waiting) >= MAX_WAITING:
            self.refused += 1
            self._reply([message.reply], self._refusal)
            return
        self._add(message.reply)

    def add_nobody(self) -> None:
        """A snapshot is wanted, but not by anybody on the bus."""
        self._add("")

    def _add(self, reply: str) -> None:
        self._waiting.append(reply)
        self._asked.set()

    async def serve(self, answer: Callable[[bool], Awaitable[Message]]) -> None:
        """Answer for ever; ends by being cancelled. ``answer`` is told whether anybody on the bus waits for it."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            askers = list(self._waiting)
            self._waiting.clear()
            if askers:
                self._reply(askers, await answer(any(askers)))

    def _reply(self, askers: list[str], reply: Message) -> None:
        payload = to_json(reply)
        for asker in askers:
            if asker:
                self._bus.publish(asker, payload)

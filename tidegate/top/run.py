"""`tidegate top`, live or once: the bus, the clock and the terminal around the model and the view."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Console

from bus.interface import Bus
from tidegate.errors import NoBusError
from tidegate.locate import Located, open_bus
from tidegate.top.controls import Controls, press, select
from tidegate.top.feed import Feed
from tidegate.top.model import MAX_SESSIONS, Model
from tidegate.top.snapshot import Snapshot
from tidegate.top.terminal import Terminal
from tidegate.top.view import frame, page_of
from tidegate.watch import watch

_NAME = "tidegate-top"


@dataclass(frozen=True, slots=True)
class Options:
    """``interval_s``: between frames. ``max_sessions``: remembered; of more the ones heard of last."""

    interval_s: float = 1.0
    max_sessions: int = MAX_SESSIONS


async def look_once(located: Located, options: Options, after_s: float) -> Snapshot:
    """What is known after listening for ``after_s``. Raises `NoBusError`."""
    bus = await open_bus(located, _NAME)
    model = Model(options.max_sessions)
    feed = Feed(model, time.time)
    try:
        await feed.start(bus)
        with suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                raise NoBusError(f"the bus at {located.shown_url} is gone for good: {await bus.wait_lost()}")
        feed.count_dropped()
        return _snapshot(model)
    finally:
        await bus.close()


class Top:
    """The live view; `run` ends when ``q`` is pressed. ``keyboard``: a terminal's file descriptor, or ``None``."""

    def __init__(
        self, located: Located, options: Options, controls: Controls, console: Console, keyboard: int | None
    ) -> None:
        self._located = located
        self._options = options
        self._controls = controls
        self._console = console
        self._keyboard = keyboard
        self._model = Model(options.max_sessions)
        self._feed = Feed(self._model, time.time)
        self._shown = self._model.snapshot(time.time())
        self._note = ""
        self._redraw = asyncio.Event()
        self._height = 24

    async def run(self) -> None:
        """Ends also when the terminal is gone. Raises `NoBusError` when there is no bus, or no longer."""
        bus = await self._listen()  # before the first picture: what is said from then on is in it
        with Terminal(self._console, self._keyboard, self._press, self._redraw.set) as terminal:
            drawing = asyncio.ensure_future(self._draw(terminal))
            try:
                while True:
                    if await self._follow(bus, drawing):
                        return
                    self._model = Model(self._options.max_sessions)
                    self._feed = Feed(self._model, time.time)
                    bus = await self._listen()
                    self._note = ""
            finally:
                drawing.cancel()
                await asyncio.gather(drawing, return_exceptions=True)

    async def _listen(self) -> Bus:
        """The bus that is looked at, heard from now on."""
        bus = await open_bus(self._located, _NAME)
        try:
            await self._feed.start(bus)
        except BaseException:
            await bus.close()
            raise
        return bus

    async def _follow(self, bus: Bus, drawing: asyncio.Future[None]) -> bool:
        """Look at this bus, and close it. ``True``: it was looked at to the end; ``False``: it is another one now."""
        watching: asyncio.Future[Located] | None = None
        try:
            watching = asyncio.ensure_future(watch(bus, self._located, self._say))
            either: set[asyncio.Future[Any]] = {drawing, watching}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if drawing.done():
                drawing.result()
                return True
            self._located = watching.result()
            return False
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            await bus.close()

    async def _draw(self, terminal: Terminal) -> None:
        """A new picture every interval, and the same one drawn anew after every key."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self._controls.quit:
            if terminal.suspend_wanted:
                terminal.suspend()
            if loop.time() >= due:
                due = loop.time() + self._options.interval_s
                if not self._controls.paused:
                    self._feed.count_dropped()
                    self._shown = _snapshot(self._model)
            width, self._height = terminal.size
            where, clock = self._located.shown_url, clock_of(self._shown)
            lines = frame(self._shown, self._controls, width, self._height, where=where, clock=clock, note=self._note)
            try:
                await terminal.draw(lines)
            except OSError:
                return  # the terminal is gone, and nobody looks any more
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - loop.time())):
                    await self._redraw.wait()
            self._redraw.clear()

    def _press(self, key: str) -> None:
        rows = len(select(self._shown.sessions, self._controls))
        page = page_of(self._shown, self._controls, self._height, note=self._note)
        self._controls = press(self._controls, key, rows=rows, page=page)
        self._redraw.set()

    def _say(self, what: str) -> None:
        self._note = "" if what.endswith(" is back") else what
        self._redraw.set()


def clock_of(snapshot: Snapshot) -> str:
    """The local time of a snapshot."""
    return f"{datetime.fromtimestamp(snapshot.at_ms / 1000).astimezone():%H:%M:%S}"


def _snapshot(model: Model) -> Snapshot:
    now = time.time()
    model.tick(now)
    return model.snapshot(now)

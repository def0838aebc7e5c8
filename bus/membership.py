"""A process as one of several of a service (`bus.process_group`): which one it is, and its line to the parent.

The line is standard input, a socket: we tell our parent where our pages are and that we have started; its end tells us
that the parent is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from bus.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Membership:
    """``number``: from 1 to ``count``. ``memory``: descriptor of memory that all of them share; -1: none."""

    number: int
    count: int
    memory: int = -1

    def option(self) -> str:
        """As `parse_membership` reads it."""
        return f"{self.number}/{self.count}/{self.memory}"


def parse_membership(text: str) -> Membership:
    """What `Membership.option` wrote. Raises `SettingsError`: the option is for parents only."""
    try:
        number, count, memory = (int(part) for part in text.split("/"))
    except ValueError as error:
        raise SettingsError("--member", "is for the processes that a parent starts") from error
    if not 1 <= number <= count or not stat.S_ISSOCK(os.fstat(0).st_mode):
        raise SettingsError("--member", "is for the processes that a parent starts")
    return Membership(number, count, memory)


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One line to the parent. ``pages``: URL of our health pages; ``started``: the service has."""

    pages: str
    started: bool = False


class ParentLine:
    """The child's end."""

    def __init__(self) -> None:
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader | None = None

    async def open(self) -> None:
        """Take standard input."""
        self._reader, self._writer = await asyncio.open_connection(sock=socket.socket(fileno=os.dup(0)))

    def tell(self, pages: str, started: bool = False) -> None:
        """Nothing once the parent is gone."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(Told(pages=pages, started=started)) + b"\n")

    async def watch(self, orphaned: Callable[[], None]) -> None:
        """Until the parent is gone; then ``orphaned`` is called."""
        assert self._reader is not None
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(1024):
                pass
        orphaned()

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()

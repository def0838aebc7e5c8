"""The further connections that one connection has made: counted with it, closed with it."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from bus.interface import BusStats


class _Connection(Protocol):
    @property
    def closed(self) -> bool: ...

    def stats(self) -> BusStats: ...

    async def close(self) -> None: ...


C = TypeVar("C", bound=_Connection)

NO_STATS = BusStats(0, 0, 0, 0, 0, 0)


class Others(Generic[C]):
    """What `bus.interface.Bus.another` made. Counters of those that were closed before stay in `stats`."""

    def __init__(self) -> None:
        self._open: list[C] = []
        self._gone = NO_STATS

    def add(self, connection: C) -> None:
        self._forget_closed()
        self._open.append(connection)

    def stats(self) -> BusStats:
        total = self._gone
        for connection in self._open:
            total += connection.stats()
        return total

    async def close(self) -> None:
        for connection in self._open:
            await connection.close()
        self._forget_closed()

    def _forget_closed(self) -> None:
        for connection in self._open:
            if connection.closed:
                self._gone += connection.stats()
        self._open = [connection for connection in self._open if not connection.closed]

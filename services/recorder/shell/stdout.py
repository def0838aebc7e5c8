"""The sink ``stdout``: bare rows, one a line."""

from __future__ import annotations

import asyncio
import os
import select

from services.recorder.errors import SinkError
from services.recorder.shell.sink import Batch, Written

_PIECE_BYTES = select.PIPE_BUF
"""A pipe that is said to be writable takes so much without blocking."""
_LOOK_S = 0.25


class StdoutSink:
    """See `services.recorder.shell.sink.Sink`. A reader that takes nothing is waited for, and ends no stop."""

    name = "stdout"

    def __init__(self, descriptor: int = 1) -> None:
        self._descriptor = descriptor
        self._batch: Batch | None = None
        self._left = memoryview(b"")
        self._closed = False

    async def open(self) -> tuple[bytes, ...]:
        return ()

    async def write(self, batch: Batch) -> Written:
        """A batch that is given again goes on with the byte at which it failed."""
        if batch is not self._batch:
            self._batch = batch
            self._left = memoryview(b"".join(row + b"\n" for row in batch.rows))
        try:
            await asyncio.to_thread(self._print)
        except OSError as error:
            raise SinkError(f"cannot write to standard output: {error}") from error
        self._batch = None
        return Written(bytes=sum(map(len, batch.rows)) + len(batch.rows))

    def _print(self) -> None:
        while self._left:
            if self._closed:
                raise SinkError("standard output is closed")
            if select.select([], [self._descriptor], [], _LOOK_S)[1]:
                self._left = self._left[os.write(self._descriptor, self._left[:_PIECE_BYTES]) :]

    async def close(self) -> None:
        self._closed = True

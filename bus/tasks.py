"""Tasks with an owner: started by name, awaited at stop, and whose failure is the owner's failure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Tasks:
    """The tasks of one service. The first that fails sets `failed`; all are cancelled and awaited by `stop`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def start(self, name: str, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run ``coroutine`` until it ends; an exception of it ends the service."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        log.error("task %s failed", task.get_name(), exc_info=error)
        if not self.failed.done():
            self.failed.set_result(error)

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Cancel what still runs and wait for it, at most ``timeout_s``."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=timeout_s)
            for task in pending:
                log.error("task %s did not stop within %g s", task.get_name(), timeout_s)


async def end(future: asyncio.Future[Any]) -> None:
    """Cancel ``future`` until it has ended. Once is not enough where it is in a `asyncio.wait_for` of Python 3.11 whose
    awaited part ends at that moment: the cancellation is lost, and who tries for ever to connect goes on."""
    while not future.done():
        future.cancel()
        await asyncio.wait({future}, timeout=0.1)
    await asyncio.gather(future, return_exceptions=True)

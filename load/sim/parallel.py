"""Jobs in several processes: results in the order of the jobs, whatever the number of processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

LOOK_S = 0.5
"""So often the main thread looks for a signal while it waits."""
END_S = 5.0


class Runs(Protocol[T_co]):
    """A job: plain data that another process can be given."""

    def run(self) -> T_co: ...


class WorkerLostError(Exception):
    """A process ended in the midst of a job (killed, most likely for its memory)."""

    reason = "worker_lost"


class Processes:
    """So many processes, from the first jobs on; with one, jobs run in this process. Whatever ends it, none is left.

    with Processes(4) as processes:
        results = processes.run(jobs, on_done)
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: ProcessPoolExecutor | None = None
        self._before = set(multiprocessing.active_children())

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        ours = set(multiprocessing.active_children()) - self._before
        self._pool.shutdown(wait=error is None, cancel_futures=True)
        if error is not None:
            for process in ours:
                process.terminate()
            for process in ours:
                process.join(END_S)

    def run(self, jobs: Sequence[Runs[T]], on_done: Callable[[int, T], None]) -> list[T]:
        """The results of ``jobs``, in their order; ``on_done`` is called after each, with its place and result. Raises
        what a job raises, and `WorkerLostError`."""
        if self._count <= 1 or len(jobs) <= 1:
            results = []
            for number, job in enumerate(jobs):
                results.append(job.run())
                on_done(number, results[-1])
            return results
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._count, mp_context=spawn, initializer=_be_a_worker)
        try:
            with _without_interrupts():
                futures: list[Future[T]] = [self._pool.submit(_run, job) for job in jobs]
            places = {future: number for number, future in enumerate(futures)}
            pending = set(futures)
            while pending:
                done, pending = wait(pending, LOOK_S, FIRST_COMPLETED)
                for future in done:
                    on_done(places[future], future.result())
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            text = "a process of the simulation was ended from outside; try fewer --processes"
            raise WorkerLostError(text) from error


def _run(job: Runs[T]) -> T:
    return job.run()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C is the parent's: processes that start meanwhile never see it; here it comes when this is over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _be_a_worker() -> None:
    """When the parent is gone, so are we."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.join,), daemon=True).start()


def _end_with(parent_ends: Callable[[], None]) -> None:
    parent_ends()
    os._exit(1)

"""Tasks with an owner: the first failure is told, all are awaited at stop. And a row's place in its stream."""

from __future__ import annotations

import asyncio

import pytest

from bus.nats.pull import RowPlace, place_of
from bus.tasks import Tasks


async def test_the_first_failure_is_the_owner_s(caplog: pytest.LogCaptureFixture) -> None:
    """One ends well, one fails: `failed` has its error, the log its name, the others go on until stop."""
    tasks = Tasks()
    cancelled = asyncio.Event()

    async def well() -> int:
        return 1

    async def badly() -> None:
        raise LookupError("first")

    async def long() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    assert await tasks.start("well", well()) == 1
    tasks.start("long", long())
    tasks.start("badly", badly())
    assert isinstance(await asyncio.wait_for(tasks.failed, 5), LookupError)
    assert len(tasks) == 1
    await tasks.stop()
    assert cancelled.is_set()
    assert len(tasks) == 0
    assert "task badly failed" in caplog.text


async def test_a_task_that_does_not_stop_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Stop has a deadline, whatever a task does."""
    tasks = Tasks()
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    task = tasks.start("stubborn", stubborn())
    await asyncio.sleep(0)
    await tasks.stop(timeout_s=0.05)
    assert "stubborn did not stop" in caplog.text
    release.set()
    await task


@pytest.mark.parametrize(
    "reply",
    [
        "$JS.ACK.TG_TRACES.recorder.2.40.3.1795982412435880275.7",
        "$JS.ACK.hub.acc.TG.recorder.2.40.3.17959.7.tok",
    ],
)
def test_place_of_a_row(reply: str) -> None:
    """Both forms of the acknowledgement subject: without and with domain and account."""
    assert place_of(reply) == RowPlace(consumer="recorder", delivered=2, stream_seq=40, consumer_seq=3, pending=7)

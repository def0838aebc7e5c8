"""The recorder and the bus die in the middle of 500 requests at once: every request has one row on the disk."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from load.workload.client import WorkloadClient
from load.workload.results import RequestResult
from load.workload.sessions import WorkloadShape, plan
from tests.support.processes import eventually
from tests.support.system import RunningSystem, running_system
from tidegate.demo.observe import recorded_requests

SESSIONS = 500
SHAPE = WorkloadShape(
    sessions=SESSIONS, turns=1, sub_agents=0, system_words=40, turn_words=10, max_tokens=8, spread_s=0
)
RECORDER = ("services.recorder",)
SETTINGS = """
[recorder]
ack_wait_s = 2
flush_interval_ms = 50
flush_bytes = 20000
roll_bytes = 200000
fetch_rows = 32
"""
"""Small members and segments, so that a kill finds something half done."""


class Chaos:
    """Signals to parts once so many requests have ended."""

    def __init__(self, system: RunningSystem) -> None:
        self._system = system
        self._ended = 0
        self._more = asyncio.Event()

    def on_end(self, result: RequestResult) -> None:
        self._ended += 1
        self._more.set()

    async def signal(self, after: int, number: signal.Signals, *words: str) -> None:
        """To the part with these ``words``, which must then be back as another process."""
        while self._ended < after:
            self._more.clear()
            await self._more.wait()
        await eventually(lambda: self._system.child_pid(*words) is not None, 60, f"{words} runs")
        pid = self._system.child_pid(*words)
        assert pid is not None
        os.kill(pid, number)
        await eventually(lambda: self._system.child_pid(*words) not in (None, pid), 60, f"{words} is back")


@pytest.mark.timeout(400)
async def test_rows_on_the_disk_are_the_requests_that_ended(tmp_path: Path) -> None:
    """SIGTERM and kill -9 of the recorder, then kill -9 of nats-server, which is started again on its store, while 500
    requests are in flight: no request without a row, none with two, and every segment is whole gzip to its last
    byte (report E2)."""
    config = tmp_path / "tidegate.toml"
    config.write_text(SETTINGS)
    async with running_system(tmp_path, "--config", str(config)) as system:
        chaos = Chaos(system)
        client = WorkloadClient(system.url, system.addresses["model"], timeout_s=180.0, failure_pause_s=0.5)
        try:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(client.run(plan(SHAPE, run_id="chaos"), chaos.on_end))
                await chaos.signal(50, signal.SIGTERM, *RECORDER)
                await chaos.signal(150, signal.SIGKILL, *RECORDER)
                await chaos.signal(250, signal.SIGKILL, "-c", str(system.workdir / "nats.conf"))
        finally:
            await client.close()
        results = running.result()
        traces = Path(system.addresses["traces"])
        ended = {result.request_id for result in results if result.request_id}
        assert not [result.error for result in results if result.hung], system.logs()
        assert len(ended) >= SESSIONS * 0.9, Counter(result.error for result in results)
        await eventually(lambda: ended <= set(recorded_requests(traces)), 60, "every request has its row")
        assert await system.process.stop(60) == 0, system.process.output
    recorded = Counter(recorded_requests(traces))
    assert set(recorded) == ended, system.logs()
    assert set(recorded.values()) == {1}
    assert all(text.endswith(b"}\n") for text in whole_segments(traces))


def whole_segments(directory: Path) -> list[bytes]:
    """The text of every segment, to its last byte. Raises what `gzip` says of one that is torn."""
    return [gzip.decompress(path.read_bytes()) for path in directory.glob("*.jsonl.gz")]

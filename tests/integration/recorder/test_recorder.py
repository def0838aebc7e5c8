"""The recorder as a process over a real nats-server: nothing lost, nothing doubled, readable after a crash."""

from __future__ import annotations

import asyncio
import gzip
import json
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from bus.errors import BusTimeoutError, NotConnectedError
from bus.nats import NatsBus
from bus.subjects import trace
from schemas.base import to_json
from schemas.session import SessionKey
from schemas.trace import RequestMetrics, TraceRow
from segments.format import segment_indices, segment_name, unwrap
from tests.support.nats import NatsServer
from tests.support.processes import HelperProcess, python_process, settings_arguments, start_process
from tidegate.supervisor.ports import PortPicker

StartRecorder = Callable[..., AbstractAsyncContextManager[HelperProcess]]


@pytest.fixture
def start(nats_server: NatsServer, tmp_path: Path) -> StartRecorder:
    @asynccontextmanager
    async def start(name: str = "recorder", **settings: object) -> AsyncIterator[HelperProcess]:
        known: dict[str, object] = {
            "nats_url": nats_server.url,
            "directory": tmp_path / "traces",
            "flush_interval_ms": 50,
        }
        arguments = settings_arguments({**known, **settings})
        async with python_process("services.recorder", *arguments, directory=tmp_path, name=name) as process:
            yield process

    return start


def row_for(request_id: str) -> bytes:
    request = RequestMetrics(request_id=request_id, model="m", outcome="completed", output_tokens=1)
    return to_json(TraceRow(event_type="request_end", event_time_unix_ms=1, request=request))


async def publish(bus: NatsBus, first: int, count: int) -> None:
    subject = trace("request_end", "m", SessionKey(root="s").text())
    await asyncio.gather(
        *(bus.publish_row(subject, row_for(f"r{n}"), message_id=f"r{n}") for n in range(first, first + count))
    )


def segments(directory: Path, prefix: str = "tidegate") -> list[Path]:
    if not directory.exists():
        return []
    names = [path.name for path in directory.iterdir()]
    return [directory / segment_name(prefix, index) for index in segment_indices(prefix, names)]


def recorded(directory: Path, prefix: str = "tidegate") -> list[str]:
    """Request ids in all segments; only whole members, as a reader beside a running recorder sees them."""
    requests: list[str] = []
    for path in segments(directory, prefix):
        lines = gzip.decompress(path.read_bytes()).splitlines()
        requests += [json.loads(unwrap(line))["request"]["request_id"] for line in lines]
    return requests


async def wait_recorded(process: HelperProcess, directory: Path, count: int, timeout_s: float = 60.0) -> None:
    await process.wait_for(lambda: len(recorded(directory)) >= count, timeout_s)


def names(count: int) -> list[str]:
    return sorted(f"r{number}" for number in range(count))


async def test_rows_are_sunk_in_the_peers_envelope(bus: NatsBus, start: StartRecorder, tmp_path: Path) -> None:
    """A line is {timestamp, event}; the event is the publisher's row, byte for byte; they are there while it runs."""
    async with start() as process:
        await publish(bus, 0, 5)
        await wait_recorded(process, tmp_path / "traces", 5)
        (path,) = segments(tmp_path / "traces")
        for line in gzip.decompress(path.read_bytes()).splitlines():
            envelope = json.loads(line)
            assert set(envelope) == {"timestamp", "event"}
            assert 0 <= envelope["timestamp"] < 60_000
            assert unwrap(line) == row_for(envelope["event"]["request"]["request_id"])
        assert await process.stop() == 0
    assert sorted(recorded(tmp_path / "traces")) == names(5)


async def test_a_term_signal_during_load_loses_no_row(bus: NatsBus, start: StartRecorder, tmp_path: Path) -> None:
    """SIGTERM in the middle of 500 rows: the rest comes after a restart; rows = requests and gzip -t is content
    (report E2)."""
    async with start() as process:
        publishing = asyncio.ensure_future(publish(bus, 0, 500))
        await wait_recorded(process, tmp_path / "traces", 1)
        assert await process.stop() == 0
        await publishing
    async with start("second", fetch_rows=64) as process:
        await process.wait_said("service_started")
        await wait_recorded(process, tmp_path / "traces", 500)
        assert await process.stop() == 0
    assert sorted(recorded(tmp_path / "traces")) == names(500)
    for path in segments(tmp_path / "traces"):
        checking = await asyncio.create_subprocess_exec("gzip", "-t", str(path))
        assert await checking.wait() == 0


async def test_a_term_signal_drains_what_the_stream_holds(bus: NatsBus, start: StartRecorder, tmp_path: Path) -> None:
    """Rows that are in the stream when SIGTERM comes are on disk when the process has ended, also with a long flush
    interval (report E2)."""
    async with start(flush_interval_ms=5_000, ack_wait_s=30, fetch_rows=10) as process:
        await process.wait_said("service_started")
        await publish(bus, 0, 200)
        assert await process.stop() == 0
    assert sorted(recorded(tmp_path / "traces")) == names(200)


async def test_kills_neither_lose_nor_double_rows(bus: NatsBus, start: StartRecorder, tmp_path: Path) -> None:
    """kill -9 five times in the middle of rows: each row is on disk exactly once, redelivered ones included, when a
    last recorder, stopped right after its start, has drained the stream."""
    directory = tmp_path / "traces"
    publishing = asyncio.ensure_future(publish(bus, 0, 600))
    for attempt in range(5):
        before = len(recorded(directory))
        async with start(
            f"r{attempt}", fetch_rows=16, flush_interval_ms=20, ack_wait_s=1, flush_bytes=2_000
        ) as process:
            await wait_recorded(process, directory, min(600, before + 20))
            await process.kill()
    await publishing
    async with start("last", flush_interval_ms=20, ack_wait_s=1) as process:
        await process.wait_said("service_started")
        assert await process.stop() == 0
    assert sorted(recorded(directory)) == names(600)
    consumer = await bus.consume("recorder", "tg.v1.trace.>")
    assert await consumer.pending() == 0
    await consumer.close()


async def test_a_torn_member_is_cut_and_its_rows_come_again(bus: NatsBus, start: StartRecorder, tmp_path: Path) -> None:
    """A crash in the middle of a write leaves half a member; the next start cuts it and goes on in a new segment."""
    directory = tmp_path / "traces"
    async with start() as process:
        await publish(bus, 0, 3)
        await wait_recorded(process, directory, 3)
        await process.kill()
    (path,) = segments(directory)
    with path.open("ab") as file:
        file.write(b"\x1f\x8b\x08\x00half a member")
    async with start("second") as process:
        await publish(bus, 3, 2)
        await process.wait_for(lambda: len(segments(directory)) == 2)
        await wait_recorded(process, directory, 5)
        assert "torn_member_cut" in process.stderr
        assert await process.stop() == 0
    assert sorted(recorded(directory)) == names(5)


async def test_segments_roll_and_a_bad_row_harms_none(bus: NatsBus, start: StartRecorder, tmp_path: Path) -> None:
    """Two lines a segment; what is no JSON is counted, acknowledged and skipped."""
    directory = tmp_path / "traces"
    async with start(roll_lines=2) as process:
        await process.wait_said("service_started")
        await publish(bus, 0, 2)
        subject = trace("request_end", "m", "s")
        await bus.publish_row(subject, b"no json", message_id="bad")
        await publish(bus, 2, 3)
        await wait_recorded(process, directory, 5)
        assert await process.stop() == 0
    assert [len(gzip.decompress(path.read_bytes()).splitlines()) for path in segments(directory)] == [2, 2, 1]
    assert sorted(recorded(directory)) == names(5)
    consumer = await bus.consume("recorder", "tg.v1.trace.>")
    assert await consumer.pending() == 0
    await consumer.close()


async def test_old_segments_go(bus: NatsBus, start: StartRecorder, tmp_path: Path) -> None:
    """A row a segment, three segments at most: the newest rows stay, and the stream is told that all are taken."""
    directory = tmp_path / "traces"
    async with start(roll_lines=1, keep_segments=3) as process:
        await publish(bus, 0, 3)
        await wait_recorded(process, directory, 3)
        await publish(bus, 3, 4)
        await process.wait_for(lambda: [path.name for path in segments(directory)] == kept(4, 7))
        assert await process.stop() == 0
    assert len(set(recorded(directory)) & {"r3", "r4", "r5", "r6"}) == 3
    consumer = await bus.consume("recorder", "tg.v1.trace.>")
    assert await consumer.pending() == 0
    await consumer.close()


def kept(first: int, end: int) -> list[str]:
    return [segment_name("tidegate", index) for index in range(first, end)]


async def test_a_sink_that_refuses_holds_no_other_back(bus: NatsBus, nats_server: NatsServer, tmp_path: Path) -> None:
    """Standard output is a full disk: the file has every row, /readyz and the log say which sink refuses, its rows stay
    in the stream, and the next recorder prints them once."""
    directory, port = tmp_path / "traces", PortPicker().pick()
    settings = {"nats_url": nats_server.url, "directory": directory, "flush_interval_ms": 50, "stop_timeout_s": 2}
    both = {**settings, "sinks": '["stdout", "file"]', "http_port": port}
    command = [sys.executable, "-m", "services.recorder", *settings_arguments(both)]
    process = await start_process(["sh", "-c", f"exec {shlex.join(command)} >/dev/full"], tmp_path, name="full")
    try:
        await process.wait_said("service_started")
        await publish(bus, 0, 300)
        await wait_recorded(process, directory, 300)
        await process.wait_said("write_failed")
        status, reason = await asyncio.to_thread(ask_ready, port)
        assert status == 503
        assert reason.startswith("sink_failed: stdout: ")
        assert await process.stop() == 0
    finally:
        await process.close()
    assert sorted(recorded(directory)) == names(300)
    arguments = settings_arguments({**settings, "sinks": '["stdout"]', "ack_wait_s": 1, "flush_interval_ms": 100})
    async with python_process("services.recorder", *arguments, directory=tmp_path, name="again") as again:
        await again.wait_for(lambda: again.stdout.count("\n") >= 300)
        assert await again.stop() == 0
    printed = [json.loads(line)["request"]["request_id"] for line in again.stdout.splitlines()]
    assert sorted(printed) == names(300)


async def test_the_bus_may_be_killed_and_come_back(
    nats_server: NatsServer, bus: NatsBus, start: StartRecorder, tmp_path: Path
) -> None:
    """kill -9 of nats-server between rows: the recorder waits, resumes, and doubles nothing."""
    directory = tmp_path / "traces"
    async with start() as process:
        await publish(bus, 0, 50)
        await wait_recorded(process, directory, 50)
        nats_server.kill()
        nats_server.start()
        await publish_when_back(bus, 50, 50)
        await wait_recorded(process, directory, 100)
        assert await process.stop() == 0
    assert sorted(recorded(directory)) == names(100)


async def test_a_disk_that_refuses_holds_rows_back_and_loses_none(
    bus: NatsBus, start: StartRecorder, tmp_path: Path
) -> None:
    """While nothing can be written the process says so on /readyz and rows stay in the stream; a stop in that state
    ends in time, and what was held back is written once when the disk takes it again."""
    directory = tmp_path / "traces"
    port = PortPicker().pick()
    async with start(stop_timeout_s=2.0, http_port=port) as process:
        await publish(bus, 0, 5)
        await wait_recorded(process, directory, 5)
        directory.rename(tmp_path / "away")
        directory.write_text("a file stands where the directory was")
        (tmp_path / "away" / segment_name("tidegate", 0)).unlink()
        await publish(bus, 5, 5)
        await process.wait_said("write_failed")
        status, reason = await asyncio.to_thread(ask_ready, port)
        assert status == 503
        assert "sink_failed" in reason
        assert await process.stop() == 0
        assert "drain_timed_out" in process.stderr
    directory.unlink()
    async with start("second") as process:
        await wait_recorded(process, directory, 5)
        assert await process.stop() == 0
    assert sorted(recorded(directory)) == sorted(f"r{number}" for number in range(5, 10))


def ask_ready(port: int) -> tuple[int, str]:
    try:
        with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


async def publish_when_back(bus: NatsBus, first: int, count: int) -> None:
    """As an ingress does: again with the same message id until it is acknowledged."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await publish(bus, first, count)
            except (NotConnectedError, BusTimeoutError):
                await asyncio.sleep(0.1)


async def test_two_recorders_never_write_the_same_files(start: StartRecorder, tmp_path: Path) -> None:
    """The second with the same prefix ends with one sentence and code 2; with its own prefix it runs."""
    async with start("first") as first:
        await first.wait_said("service_started")
        async with start("second") as second:
            assert await second.wait() == 2
            assert "another process writes 'tidegate'" in second.stderr
            assert "Traceback" not in second.stderr


async def test_recorders_of_one_name_share_the_rows(bus: NatsBus, start: StartRecorder, tmp_path: Path) -> None:
    """Two with the same durable, each with its own prefix: every row is in one of them, whose acknowledgement lets none
    of the other's go; a third with its own name has them all."""
    directory = tmp_path / "traces"
    async with (
        start("first", fetch_rows=8) as first,
        start("second", fetch_rows=8, prefix="other") as second,
        start("third", durable="archive", prefix="archive") as third,
    ):
        for process in (first, second, third):
            await process.wait_said("service_started")
        for part in range(10):
            await publish(bus, part * 40, 40)
        await third.wait_for(lambda: len(recorded(directory, "archive")) >= 400)
        await first.wait_for(lambda: len(recorded(directory)) + len(recorded(directory, "other")) >= 400)
        assert [await process.stop() for process in (first, second, third)] == [0, 0, 0]
    assert sorted(recorded(directory) + recorded(directory, "other")) == names(400)
    assert recorded(directory)
    assert recorded(directory, "other")
    assert sorted(recorded(directory, "archive")) == names(400)


async def test_rows_go_to_standard_output(bus: NatsBus, start: StartRecorder, tmp_path: Path) -> None:
    """The sink stdout prints bare rows, one a line, and no file is made."""
    async with start(sinks='["stdout"]') as process:
        await publish(bus, 0, 3)
        await process.wait_for(lambda: process.stdout.count("\n") == 3)
        process.signal(signal.SIGINT)
        assert await process.wait() == 0
        lines = process.stdout.splitlines()
    assert sorted(json.loads(line)["request"]["request_id"] for line in lines) == names(3)
    assert not (tmp_path / "traces").exists()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"roll_bytes": 0}, "roll_bytes must be at least 1"),
        ({"prefix": "a/b"}, "prefix"),
        ({"durable": "a.b"}, "durable must be a consumer's name"),
        ({"ack_wait_s": 1, "flush_interval_ms": 1000}, "ack_wait_s"),
        ({"directory": "/proc/nowhere"}, "directory"),
    ],
)
async def test_a_wrong_setting_is_one_sentence(start: StartRecorder, setting: dict[str, object], said: str) -> None:
    """Exit code 2, the key named, no traceback."""
    async with start(**setting) as process:
        assert await process.wait() == 2
        assert said in process.stderr
        assert "Traceback" not in process.stderr

"""The supervisor over real children: nats-server, simulated engines, and programs that misbehave."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from bus.restarts import RestartRules
from tests.support.processes import REPOSITORY, eventually, python_process
from tidegate.errors import ChildFailedError
from tidegate.supervisor.layout import ChildSpec, Stage
from tidegate.supervisor.nats_server import configuration, find_executable
from tidegate.supervisor.ports import PortPicker
from tidegate.supervisor.process import ChildLog
from tidegate.supervisor.supervisor import ChildEvent, Supervisor

Make = Callable[[list[ChildSpec], list[ChildEvent]], Supervisor]
QUICK = RestartRules(first_delay_s=0.05, max_delay_s=0.2, max_exits=3)


def bus_spec(directory: Path, picker: PortPicker) -> ChildSpec:
    monitor = picker.pick()
    file = directory / "nats.conf"
    file.write_text(configuration("127.0.0.1", picker.pick(), monitor, directory / "store"))
    url = f"http://127.0.0.1:{monitor}/healthz"
    return ChildSpec("nats", (str(find_executable()), "-c", str(file)), Stage.BUS, url)


def engine_spec(name: str, picker: PortPicker) -> ChildSpec:
    port = picker.pick()
    command = (sys.executable, "-P", "-m", "load.engine", "--set", f"http_port={port}")
    return ChildSpec(name, command, Stage.ENGINE, f"http://127.0.0.1:{port}/health")


def script_spec(name: str, script: str, stop_s: float = 1.0) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", script), Stage.RECORDER, "http://127.0.0.1:9/readyz", stop_s)


def pid_of(supervisor: Supervisor, name: str) -> int:
    (pid,) = [status.pid for status in supervisor.status() if status.name == name]
    assert pid is not None
    return pid


def is_gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rsplit(")", 1)[1].split()[0] == "Z"


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes supervisors that are stopped whatever happens."""
    made: list[Supervisor] = []

    def make(specs: list[ChildSpec], events: list[ChildEvent]) -> Supervisor:
        supervisor = Supervisor(specs, tmp_path, rules=QUICK, on_event=events.append)
        made.append(supervisor)
        return supervisor

    yield make
    for supervisor in made:
        await supervisor.stop()


async def test_children_start_heal_and_stop(run: Make, tmp_path: Path) -> None:
    """All ready; a child killed with -9 is started again on its port and becomes ready; a stop leaves none behind."""
    picker = PortPicker()
    events: list[ChildEvent] = []
    supervisor = run([bus_spec(tmp_path, picker), engine_spec("engine-1", picker)], events)
    await supervisor.start(30.0)
    assert {status.state for status in supervisor.status()} == {"ready"}
    for name in ("nats", "engine-1"):
        before = pid_of(supervisor, name)
        os.kill(before, signal.SIGKILL)
        healed = ChildEvent(name, "ready", "is ready again")
        await eventually(partial(events.__contains__, healed))
        assert pid_of(supervisor, name) != before
    pids = [pid_of(supervisor, name) for name in ("nats", "engine-1")]
    assert await supervisor.stop() == []
    assert all(is_gone(pid) for pid in pids)
    assert [status.restarts for status in supervisor.status()] == [1, 1]


async def test_a_child_that_hangs_is_started_again(tmp_path: Path) -> None:
    """Stopped by SIGSTOP it neither ends nor answers: it is killed, said to have been silent, and ready again."""
    events: list[ChildEvent] = []
    supervisor = Supervisor(
        [engine_spec("engine-1", PortPicker())], tmp_path, rules=QUICK, hung_s=1.0, on_event=events.append
    )
    try:
        await supervisor.start(60.0)
        before = pid_of(supervisor, "engine-1")
        os.kill(before, signal.SIGSTOP)
        await eventually(partial(events.__contains__, ChildEvent("engine-1", "ready", "is ready again")), 120)
        assert is_gone(before)
        assert events[0] == ChildEvent("engine-1", "restarting", "answers nothing for 1 s: killed")
        assert pid_of(supervisor, "engine-1") != before
    finally:
        await supervisor.stop()


async def test_a_child_that_is_never_ready_is_named_with_its_last_words(run: Make) -> None:
    """The error names the child, says why it is not ready, and shows the end of its log."""
    script = "import time; print('waiting for a disk', flush=True); time.sleep(60)"
    supervisor = run([script_spec("sleeper", script)], [])
    with pytest.raises(ChildFailedError) as caught:
        await supervisor.start(1.0)
    assert caught.value.child == "sleeper"
    assert "not ready in time" in str(caught.value)
    assert "waiting for a disk" in str(caught.value)


async def test_a_wrong_setting_is_not_tried_again(run: Make) -> None:
    """Exit code 2 before it was ever ready: given up at once, with what it said."""
    events: list[ChildEvent] = []
    supervisor = run([script_spec("wrong", "import sys; print('port: no'); sys.exit(2)")], events)
    with pytest.raises(ChildFailedError, match="refused its settings"):
        await supervisor.start(20.0)
    assert [event.state for event in events] == ["given_up"]


async def test_a_crash_loop_is_given_up(run: Make) -> None:
    """Three short runs in a row, then it is left alone."""
    events: list[ChildEvent] = []
    supervisor = run([script_spec("crasher", "import sys; sys.exit(1)")], events)
    with pytest.raises(ChildFailedError, match="ended 3 times"):
        await supervisor.start(20.0)
    assert [event.state for event in events] == ["restarting", "restarting", "given_up"]


async def test_a_child_that_cannot_be_started_now_is_tried_again(tmp_path: Path) -> None:
    """No log can be opened at the first try, as on a full disk: said, and started when it can be."""
    picker = PortPicker()
    events: list[ChildEvent] = []
    logs = tmp_path / "logs"

    def on_event(event: ChildEvent) -> None:
        events.append(event)
        logs.mkdir(exist_ok=True)

    supervisor = Supervisor([engine_spec("engine-1", picker)], tmp_path, rules=QUICK, on_event=on_event)
    logs.rmdir()
    try:
        await supervisor.start(30.0)
    finally:
        await supervisor.stop()
    assert [event.state for event in events] == ["restarting", "ready"]
    assert "cannot be started" in events[0].what


async def test_a_program_that_does_not_exist_is_given_up(run: Make) -> None:
    """No such file: said in the error, and the stop still works."""
    spec = ChildSpec("ghost", ("/nonexistent/program",), Stage.ENGINE, "http://127.0.0.1:9/health")
    supervisor = run([spec], [])
    with pytest.raises(ChildFailedError, match="ghost"):
        await supervisor.start(20.0)


async def test_a_child_that_ignores_term_is_killed_after_its_deadline(run: Make, tmp_path: Path) -> None:
    """The stop takes its deadline and no longer, and says whom it killed."""
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    supervisor = run([script_spec("deaf", script, stop_s=0.3)], [])
    starting = asyncio.ensure_future(supervisor.start(20.0))
    log = tmp_path / "logs" / "deaf.log"
    await eventually(lambda: log.exists() and "deaf" in log.read_text())
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    async with asyncio.timeout(5):
        assert await supervisor.stop() == ["deaf"]


async def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    """kill -9 of the supervisor leaves no child behind."""
    (tmp_path / "owner.py").write_text(OWNER)
    async with python_process(
        "owner", str(tmp_path), directory=tmp_path, environment={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    ) as owner:
        child = int(await owner.wait_line())
        assert not is_gone(child)
        await owner.kill()
        await eventually(lambda: is_gone(child))


OWNER = """
import asyncio, sys
from pathlib import Path
from tidegate.supervisor.process import ChildLog, ChildProcess

async def main() -> None:
    folder = Path(sys.argv[1])
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    child = await ChildProcess.start(command, ChildLog(folder, "child", 65536), folder)
    print(child.pid, flush=True)
    await child.wait()

asyncio.run(main())
"""


def test_a_log_that_cannot_be_copied_is_cut_nevertheless(tmp_path: Path) -> None:
    """On a full disk the older lines are lost, not the limit: the cut is what frees the disk."""
    log = ChildLog(tmp_path, "child", 100)
    log.path.write_bytes(b"a" * 150)
    (tmp_path / "child.log.1").mkdir()
    log.turn_over()
    assert log.path.read_bytes() == b""


def test_a_log_is_turned_over_at_its_limit(tmp_path: Path) -> None:
    """The file is copied aside and cut; who writes to it goes on in the same file."""
    log = ChildLog(tmp_path, "child", 100)
    descriptor = log.open()
    os.write(descriptor, b"a" * 150)
    log.turn_over()
    os.write(descriptor, b"later\n")
    os.close(descriptor)
    assert log.path.read_bytes() == b"later\n"
    assert (tmp_path / "child.log.1").read_bytes() == b"a" * 150
    assert log.last_lines(3) == ["later"]

"""A command that stays on the bus notices what becomes of it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from bus.nats import NatsBus, connect
from tests.integration.tidegate.test_commands import ROWS, keep_publishing, publish, shown, tidegate
from tests.support.nats import NatsServer
from tidegate.errors import NoBusError
from tidegate.locate import Located, locate
from tidegate.supervisor.state import SystemState, remove_state, write_state
from tidegate.watch import watch


def running(nats_url: str, workdir: Path, pid: int | None = None) -> SystemState:
    """The state of a system on that bus, written where commands look for it."""
    state = SystemState(
        pid=pid or os.getpid(),
        url="http://127.0.0.1:9",
        nats_url=nats_url,
        model="m",
        workdir=str(workdir),
        traces="",
        logs="",
        engines=(),
        health={},
    )
    write_state(workdir, state)
    return state


def watched(bus: NatsBus, workdir: Path, said: list[str], grace_s: float = 0.0) -> asyncio.Task[Located]:
    """Located now, watched for 10 s at most."""
    located = locate(None, workdir, {})
    return asyncio.ensure_future(asyncio.wait_for(watch(bus, located, said.append, grace_s=grace_s), 30))


async def test_tail_says_that_its_bus_is_gone_and_back(nats_server: NatsServer, bus: NatsBus, tmp_path: Path) -> None:
    """An address given by --nats is waited for as long as it takes: a line when it is lost, a line when it is back."""
    async with tidegate(tmp_path, "tail", "--json", "--from-start", "--nats", nats_server.url) as process:
        await publish(bus, ROWS[0])
        await process.wait_for(lambda: len(process.stdout.splitlines()) == 1)
        nats_server.kill()
        await process.wait_for(lambda: len(process.stderr.splitlines()) == 1)
        assert process.stderr == f"tidegate: the bus at {nats_server.url} is gone; waiting for it\n"
        nats_server.start()
        await process.wait_for(lambda: len(process.stderr.splitlines()) == 2)
        assert process.stderr.splitlines()[1] == f"tidegate: the bus at {nats_server.url} is back"
        process.signal(signal.SIGINT)
        assert await process.wait() == 130
        assert shown(process) == ["r0"]


async def test_a_killed_system_is_not_waited_for(nats_server: NatsServer, bus: NatsBus, tmp_path: Path) -> None:
    """up.json names a process that is no more, and its bus is gone: code 1 and a sentence, no endless wait."""
    ended = await asyncio.create_subprocess_exec("true")
    await ended.wait()
    running(nats_server.url, tmp_path, ended.pid)
    said: list[str] = []
    waiting = watched(bus, tmp_path, said)
    nats_server.kill()
    with pytest.raises(NoBusError, match="was stopped"):
        await waiting
    assert said == [f"the bus at {nats_server.url} is gone; waiting for it"]


async def test_a_stopped_system_is_not_waited_for(nats_server: NatsServer, bus: NatsBus, tmp_path: Path) -> None:
    """up.json is gone: after a moment in which it may be started again, a sentence that names the folder."""
    running(nats_server.url, tmp_path)
    waiting = watched(bus, tmp_path, [])
    remove_state(tmp_path)
    with pytest.raises(NoBusError, match=f"the system in {tmp_path} was stopped"):
        await waiting


async def test_a_system_that_moved_is_followed(nats_server: NatsServer, bus: NatsBus, tmp_path: Path) -> None:
    """Started again on another port: said in a line, and the new address is what comes back."""
    running(nats_server.url, tmp_path)
    said: list[str] = []
    waiting = watched(bus, tmp_path, said, grace_s=5.0)
    remove_state(tmp_path)
    state = running("nats://127.0.0.1:9", tmp_path)
    found = await waiting
    assert (found.nats_url, found.state, found.workdir) == ("nats://127.0.0.1:9", state, tmp_path)
    assert said == [f"the system in {tmp_path} is on nats://127.0.0.1:9 now; following it, from its next row on"]


async def test_tail_follows_a_system_to_its_new_bus(
    nats_server: NatsServer, bus: NatsBus, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rows of the old bus and of the new one, from one command; it says at its start which bus it reads."""
    running(nats_server.url, tmp_path)
    other = NatsServer(tmp_path_factory.mktemp("other")).start()
    try:
        options = ("--json", "--from-start", "--workdir", str(tmp_path), "--count", "2")
        async with tidegate(tmp_path, "tail", *options) as process:
            await publish(bus, ROWS[0])
            await process.wait_for(lambda: len(process.stdout.splitlines()) == 1)
            running(other.url, tmp_path)
            publisher = await connect(other.url, name="publisher", timeout_s=30)
            publishing = asyncio.ensure_future(keep_publishing(publisher))
            assert await process.wait() == 0
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
            await publisher.close()
            assert shown(process)[0] == "r0"
            assert len(shown(process)) == 2
            first, second = process.stderr.splitlines()
            assert first == f"tidegate: rows of {nats_server.url} (from {tmp_path / 'up.json'})"
            assert other.url in second
    finally:
        other.stop()

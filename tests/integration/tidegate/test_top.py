"""`tidegate top` in a terminal of its own (a pty), over a real bus and with a whole system."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bus import subjects
from bus.errors import BusTimeoutError, NotConnectedError
from bus.nats import NatsBus
from schemas.base import Fact, to_json
from tests.support.nats import NatsServer
from tests.support.processes import REPOSITORY, eventually, start_process
from tests.support.system import running_system
from tests.unit.tidegate.top.facts import House, identity
from web.client import HttpClient, Timeouts

_DRAWING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ALLOWED = re.compile(r"\x1b\[(?:[0-9;]*m|H|\?25[hl]|\?1049[hl]|2J)")
"""What the view itself says to a terminal: colours, home, cursor, the other screen."""


class Screen:
    """A program in a terminal of 80 columns and 24 lines."""

    def __init__(self, process: asyncio.subprocess.Process, master: int, slave: int) -> None:
        self.process = process
        self._master = master
        self._slave = slave
        self._found = termios.tcgetattr(slave)
        self._raw = bytearray()
        asyncio.get_running_loop().add_reader(master, self._read)

    @property
    def raw(self) -> str:
        """All that was written since `press`."""
        return self._raw.decode(errors="replace")

    @property
    def frame(self) -> str:
        """The last whole frame that was written since `press`."""
        frames = self.raw.split("\x1b[H")
        return _DRAWING.sub("", frames[-2]) if len(frames) > 2 else ""

    @property
    def restored(self) -> bool:
        """Whether the terminal is as it was found, and shows its first screen and its cursor."""
        ended = self.raw.rindex("\x1b[?1049l") > self.raw.find("\x1b[?1049h") and "\x1b[?25h" in self.raw
        return ended and termios.tcgetattr(self._slave) == self._found

    def press(self, keys: bytes) -> None:
        self._raw.clear()
        os.write(self._master, keys)

    async def shows(self, text: str, timeout_s: float = 30.0) -> None:
        """Until a frame written since the last key holds it."""
        await eventually(lambda: text in _DRAWING.sub("", self.raw), timeout_s, f"{text!r} in {self.raw[-3000:]}")

    async def ends(self) -> int:
        async with asyncio.timeout(30):
            return await self.process.wait()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            self._raw += os.read(self._master, 65_536)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)
        os.close(self._slave)


@asynccontextmanager
async def top(*arguments: str) -> AsyncIterator[Screen]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tidegate", "top", "--interval", "0.2", *arguments),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=REPOSITORY,
        env={**os.environ, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    screen = Screen(process, master, slave)
    try:
        yield screen
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        screen.close()


def say(bus: NatsBus, *heard: tuple[str, Fact]) -> None:
    """Facts of the test's own house, each on a subject of its family."""
    for family, fact in heard:
        token = subjects.encode_id(getattr(fact, "worker", None) or "m")
        bus.publish(f"{subjects.ROOT}.{family}.{token}", to_json(fact))


async def test_the_picture_follows_the_bus_and_strangers_do_not_drive_the_terminal(
    nats_server: NatsServer, bus: NatsBus
) -> None:
    """Facts are shown as they come; ids full of escape sequences are shown, not obeyed. What is no fact is counted.
    The bus goes (kill -9) and comes back: both are seen. Ctrl-Z gives the terminal back for a while, SIGTERM for good,
    with exit code 130."""
    house, evil = House(), identity("\x1b]0;pwned\x07\x9b2J\x1b[99;99H‮" + "x" * 4096)
    async with top("--nats", nats_server.url) as screen:
        await screen.shows("no sessions")
        say(
            bus,
            house.worker(0.0, "engine-7"),
            house.accepted(0.1, "r1", evil),
            house.accepted(0.2, "r2", identity("a")),
        )
        bus.publish(subjects.request("end", "m"), b"\xff not a fact")
        await screen.shows("engine-7")
        await screen.shows("unreadable 1")
        await screen.shows("\\x1b]0;")
        nats_server.kill()
        await screen.shows("gone; waiting for it")
        nats_server.start()
        screen.press(b"")
        async with asyncio.timeout(30):
            while "engine-8" not in screen.raw:
                with contextlib.suppress(NotConnectedError, BusTimeoutError):
                    await bus.flush()
                    say(bus, house.worker(1.0, "engine-8"))
                await asyncio.sleep(0.1)
        screen.press(b"w")
        await screen.shows("1-2 of 2")
        written = screen.raw
        screen.process.send_signal(signal.SIGTSTP)
        await eventually(lambda: "\x1b[?1049l" in screen.raw and screen.restored, what="the terminal is the shell's")
        screen.process.send_signal(signal.SIGCONT)
        screen.press(b"w")
        await screen.shows("1-2 of 2")
        screen.process.send_signal(signal.SIGTERM)
        assert await screen.ends() == 130
        await eventually(lambda: "\x1b[?1049l" in screen.raw)
        assert screen.restored
        rest = _ALLOWED.sub("", written)
        assert not [character for character in rest if ord(character) < 32 and character not in "\r\n"]
        assert not [character for character in rest if character in "\x7f\x9b‮"]


async def test_a_flood_keeps_neither_keys_nor_memory(nats_server: NatsServer, bus: NatsBus) -> None:
    """Facts as fast as they can be sent, of ever new sessions: keys are answered meanwhile, and the process stays as
    large as its bounds allow."""
    house, stop = House(), asyncio.Event()

    async def flood() -> None:
        number = 0
        while not stop.is_set():
            for _ in range(200):
                number += 1
                say(bus, house.accepted(0.0, f"r{number}", identity(f"s{number}" + "y" * 2_000)))
            await bus.flush()

    async with top("--nats", nats_server.url, "--max-sessions", "100") as screen:
        await screen.shows("no sessions")
        flooding = asyncio.ensure_future(flood())
        try:
            await screen.shows("sessions forgotten")
            before = resident(screen.process.pid)
            for text in ("filter: one", "filter: two", "filter: three"):
                screen.press(b"\x1b")
                screen.press(b"/" + text.removeprefix("filter: ").encode())
                await screen.shows(text)
            assert resident(screen.process.pid) < before + 60_000
        finally:
            stop.set()
            await flooding
        screen.press(b"\x1b")
        await screen.shows("of 100")
        screen.press(b"q")
        assert await screen.ends() == 0
        await eventually(lambda: "\x1b[?1049l" in screen.raw)
        assert screen.restored


def resident(pid: int) -> int:
    """KiB of memory that a process holds."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


async def test_without_a_terminal_one_frame_or_object_is_what_there_is(
    nats_server: NatsServer, bus: NatsBus, tmp_path: Path
) -> None:
    """Live into a file: a sentence and code 2. As JSON: one object in ASCII, without unknown keys."""
    command = [sys.executable, "-m", "tidegate", "top", "--nats", nats_server.url]
    live = await start_process(command, tmp_path, name="live")
    once = await start_process([*command, "--json", "--session", "\x9b", "--after", "1"], tmp_path, name="json")
    try:
        house, evil = House(), identity("\x9b2J")
        while once.returncode is None:
            say(bus, house.accepted(0.1, "r1", evil), house.accepted(0.1, "r2", identity("other")))
            await asyncio.sleep(0.05)
        assert once.stdout.isascii()
        (row,) = json.loads(once.stdout)["sessions"]
        assert (row["session_id"], row["state"], "worker" in row) == ("\x9b2J", "held", False)
        assert await live.wait() == 2
        assert "--once" in live.stderr
        assert len(live.stderr.splitlines()) == 1
    finally:
        await once.close()
        await live.close()


_ROW = re.compile(r"(?:idle|leased) +\S+ (run-\d)[^\r\n]* (\d+) +(\d+)% (engine-\d)")


async def test_a_real_house_is_shown(tmp_path: Path) -> None:
    """Two simulated engines and three sessions: each with its three turns, what they found in a cache, and where they
    ran; the filter and the panes; no fact is missed."""
    async with running_system(tmp_path) as system, top("--workdir", str(system.workdir)) as screen:
        await screen.shows("engine-2")
        screen.press(b"x")
        await asyncio.gather(*(talk(system.url, f"run-{number}", 3) for number in range(3)))
        rows: dict[str, tuple[str, ...]] = {}

        def complete() -> bool:
            found = [match.groups() for match in _ROW.finditer(_DRAWING.sub("", screen.raw))]
            rows.update({session: tuple(figures) for session, *figures in found})
            return sorted((session, turns) for session, (turns, *_) in rows.items()) == [
                (f"run-{number}", "3") for number in range(3)
            ]

        await eventually(complete, what="three turns of three sessions")
        assert all(int(hit) > 0 for _, hit, _ in rows.values())
        screen.press(b"/run-1\r")
        await eventually(lambda: "1-1 of 1  filter 'run-1'" in screen.frame and "HEALTH" in screen.frame)
        screen.press(b"w")
        await eventually(lambda: "run-1" in screen.frame and "HEALTH" not in screen.frame)
        assert "facts missed" not in screen.raw
        screen.press(b"q")
        assert await screen.ends() == 0
        await eventually(lambda: "\x1b[?1049l" in screen.raw)
        assert screen.restored


async def talk(url: str, session: str, turns: int) -> None:
    """A conversation in which each turn holds the one before."""
    client, messages = HttpClient(), []
    try:
        for number in range(turns):
            messages.append({"role": "user", "content": f"{session} {number} " + "word " * 200})
            body = {"model": "sim-8b", "messages": messages, "max_tokens": 8}
            headers = [(b"content-type", b"application/json"), (b"x-tidegate-session-id", session.encode())]
            answer = await client.fetch(
                "POST", f"{url}/v1/chat/completions", headers, json.dumps(body).encode(), Timeouts(total_s=30.0)
            )
            messages.append(json.loads(answer.body)["choices"][0]["message"])
    finally:
        await client.close()

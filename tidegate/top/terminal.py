"""The terminal: its other screen, its keys, and how it is given back as it was, however this ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import termios
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tidegate.top.keys import KeyReader

ESCAPE_S = 0.05
"""An escape that nothing follows for so long was the key itself."""

_READ_BYTES = 1024


class Terminal:
    """While entered: the other screen is shown and keys come to ``on_key``; ``on_change`` hears of another size, and of
    Ctrl-Z (`suspend_wanted`). ``keyboard``: a file descriptor of a terminal, ``None``: no keys.
    """

    def __init__(
        self, console: Console, keyboard: int | None, on_key: Callable[[str], None], on_change: Callable[[], None]
    ) -> None:
        self._console = console
        self._keyboard = keyboard
        self._on_key = on_key
        self._on_change = on_change
        self._reader = KeyReader()
        self._saved: list[Any] | None = None
        self._escape: asyncio.TimerHandle | None = None
        self._live: Live | None = None
        self.suspend_wanted = False

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        size = self._console.size
        return size.width, size.height

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, self._on_change)
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGWINCH)
        loop.remove_signal_handler(signal.SIGTSTP)
        self._restore()

    async def draw(self, lines: Sequence[Text]) -> None:
        """One frame, written by a thread: a terminal that is slow, or gone, must not keep facts waiting.

        Raises `OSError` when the terminal is gone.
        """
        if self._live is not None:
            await asyncio.to_thread(self._live.update, Group(*lines), refresh=True)

    def suspend(self) -> None:
        """Ctrl-Z: the terminal is the shell's until the process goes on."""
        self.suspend_wanted = False
        self._restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._show()

    def _show(self) -> None:
        if self._keyboard is not None:
            self._saved = termios.tcgetattr(self._keyboard)
            raw = termios.tcgetattr(self._keyboard)
            raw[0] &= ~(termios.IXON | termios.ICRNL)  # Ctrl-S must not stop the picture
            raw[3] &= ~(termios.ICANON | termios.ECHO)
            termios.tcsetattr(self._keyboard, termios.TCSANOW, raw)
            asyncio.get_running_loop().add_reader(self._keyboard, self._read)
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            vertical_overflow="crop",
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def _restore(self) -> None:
        if self._escape is not None:
            self._escape.cancel()
        if self._keyboard is not None and self._saved is not None:
            asyncio.get_running_loop().remove_reader(self._keyboard)
            with contextlib.suppress(termios.error):  # it has hung up
                termios.tcsetattr(self._keyboard, termios.TCSANOW, self._saved)
            self._saved = None
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

    def _suspend(self) -> None:
        self.suspend_wanted = True
        self._on_change()

    def _read(self) -> None:
        if self._keyboard is None:
            return
        try:
            data = os.read(self._keyboard, _READ_BYTES)
        except OSError:
            data = b""
        if not data:  # it has hung up; the signal says the rest
            asyncio.get_running_loop().remove_reader(self._keyboard)
            return
        if self._escape is not None:
            self._escape.cancel()
            self._escape = None
        for key in self._reader.feed(data):
            self._on_key(key)
        if self._reader.waiting:
            self._escape = asyncio.get_running_loop().call_later(ESCAPE_S, self._flush)

    def _flush(self) -> None:
        for key in self._reader.flush():
            self._on_key(key)

"""Runs a command that dies with the process that started it (Linux ``PR_SET_PDEATHSIG``).

``python -I -S launch.py PARENT_PID COMMAND [ARGUMENT ...]``. A small exec wrapper, because running Python code between
fork and exec is not safe in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Replaces this process by the command."""
    parent = int(arguments[0])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            sys.exit("the process that wanted this one is gone")
    os.execvp(arguments[1], arguments[1:])  # noqa: S606 - the whole point


if __name__ == "__main__":
    main(sys.argv[1:])

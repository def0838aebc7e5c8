"""Free TCP ports for children that must keep them over a restart.

They are taken from below the kernel's ephemeral range: a port inside it may at any moment become the local end of
somebody's outgoing connection, and a restarted child would find it taken.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterable
from pathlib import Path

from tidegate.errors import PortTakenError, TidegateError, WrongUseError

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_240
_TRIES = 200


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now (it may reuse an address in TIME_WAIT, as our servers do).

    Raises `WrongUseError` where none ever could: the address is not this machine's, or the port needs more rights.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise WrongUseError(f"--host: nothing can listen on {host} port {port}: {error.strerror}") from error
    return True


class PortPicker:
    """Hands out ports of ``host``, none of them twice."""

    def __init__(self, host: str = "127.0.0.1", taken: Iterable[int] = ()) -> None:
        self._host = host
        self._random = random.Random()  # noqa: S311 - not a secret
        self._taken = set(taken)
        self._highest = _lowest_ephemeral() - 1

    def exactly(self, port: int, option: str) -> int:
        """``port`` itself; 0 means any. Raises `PortTakenError` naming ``option``, and `WrongUseError` as `is_free`."""
        if port == 0:
            return self.pick()
        if port in self._taken or not is_free(self._host, port):
            raise PortTakenError(self._host, port, option)
        self._taken.add(port)
        return port

    def pick(self, preferred: int = 0) -> int:
        """``preferred`` if it is free, else any free port."""
        candidates = [preferred] if preferred else []
        candidates += [self._random.randint(_LOWEST, self._highest) for _ in range(_TRIES)]
        for port in candidates:
            if port not in self._taken and is_free(self._host, port):
                self._taken.add(port)
                return port
        raise TidegateError(f"no free port between {_LOWEST} and {self._highest} on {self._host}")


def _lowest_ephemeral() -> int:
    try:
        return max(_LOWEST + 1000, int(_EPHEMERAL_RANGE.read_text(encoding="ascii").split()[0]))
    except (OSError, ValueError, IndexError):
        return 32_768

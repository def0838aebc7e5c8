"""An address that one parent holds for its children, who share it by ``SO_REUSEPORT``, and that nobody else can take.

The kernel lets any process of the same user share a port with ``SO_REUSEPORT``: two systems would each get half of the
other's connections and none would notice. So the parent binds without it, which fails where anybody listens, and
allows sharing only afterwards, for those who ask for it: another parent does not. Its socket never listens.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

from bus.errors import SettingsError, cannot_listen


class HeldAddress:
    """``port``: the one that was got (0 picks one)."""

    def __init__(self, key: str, host: str, port: int) -> None:
        """Raises `SettingsError` naming ``key`` when the address is taken or cannot be had."""
        if sys.platform != "linux":
            raise SettingsError("workers", "more than one process can share a port on Linux only")
        self.port = port
        self._sockets: list[socket.socket] = []
        try:
            for family, address in _addresses(host, port):
                self._sockets.append(held := socket.socket(family, socket.SOCK_STREAM))
                if family == socket.AF_INET6:
                    held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections are not in the way
                held.bind((address[0], self.port, *address[2:]))
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                self.port = int(held.getsockname()[1])
        except OSError as error:
            self.close()
            raise cannot_listen(key, host, port, error) from error

    def close(self) -> None:
        """Again, nothing."""
        while self._sockets:
            self._sockets.pop().close()


def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Family and address of each that ``host`` stands for."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))

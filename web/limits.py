"""Bounds of one server, and the count of the body bytes that it holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bounds of one server. Sizes in bytes, times in seconds.

    ``header_bytes``: of a request's head, and as many again of what surrounds the pieces of its body (chunk extensions,
    trailers); ``headers``: how many.
    ``body_bytes``: of one request; ``held_body_bytes``: of all requests that are being read, or are not over and were
    not let go, a body whose length is declared counting whole from its headers on. ``read_over_bytes``: the body of a
    request that is refused by its head is read over up to here, which keeps the connection; a larger one closes it.

    ``header_timeout_s`` runs from a request's first byte (or the accept) to the end of its headers, ``body_timeout_s``
    from there to the end of its body, ``keepalive_s`` between two requests, ``stall_timeout_s`` while a client does
    not read its answer. ``pipelined``: requests that may wait behind one being answered; those after them are
    not answered (the connection is closed, which HTTP allows). ``connections``: those that shake hands included.
    """

    header_bytes: int = 65_536
    headers: int = 256
    read_over_bytes: int = 65_536
    body_bytes: int = 32 * 1024 * 1024
    held_body_bytes: int = 512 * 1024 * 1024
    keepalive_s: float = 75.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    stall_timeout_s: float = 120.0
    linger_s: float = 2.0
    connections: int = 20_000
    pipelined: int = 8
    write_high_bytes: int = 262_144


class HeldBytes:
    """Body bytes in memory, ``limit`` at most: the sum of every `Hold`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.size = 0

    def take(self, size: int) -> bool:
        """Count ``size`` more bytes; whether they fit (nothing is counted when they do not)."""
        if self.size + size > self._limit:
            return False
        self.size += size
        return True

    def give(self, size: int) -> None:
        self.size -= size


class Hold:
    """One request's share of `HeldBytes`. ``size``: its bytes; 0 once released."""

    __slots__ = ("_held", "size")

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self.size = 0

    def grow_to(self, size: int) -> bool:
        """Hold ``size`` bytes (never fewer than before); whether they fit."""
        more = size - self.size
        if more <= 0:
            return True
        if not self._held.take(more):
            return False
        self.size = size
        return True

    def release(self) -> None:
        """Give back all of it; again, nothing."""
        self._held.give(self.size)
        self.size = 0

"""What a client asks: its head, its whole request, and what the server answers when it serves neither."""

from __future__ import annotations

from dataclasses import dataclass

from web.headers import Headers, find
from web.limits import Hold

GATHERED_BYTES = 65_536
_SMALL_PIECE = 4096


def path_and_query(target: str) -> tuple[str, str]:
    """Of a request target in any form; a host that it names is dropped, not followed. The query without its ``?``."""
    origin_form = target
    if not target.startswith("/") and "://" in target:
        origin_form = "/" + target.split("://", 1)[1].partition("/")[2]
    path, _, query = origin_form.partition("?")
    return path, query


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A request's head, its body not read yet. ``sized``: the wire says how long the body is, or that it is chunked."""

    method: str
    target: str
    headers: Headers
    sized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes


class Request:
    """One request, read whole. ``headers`` in wire order and spelling; ``query`` without its ``?``.

    ``hold``: its body's share of what the server may hold; released when the request is over, if not before.
    ``answer``: the screen's, of a request whose small body was read over; the handler is not asked.
    """

    __slots__ = (
        "answer", "body", "headers", "hold", "http_version", "keep_alive", "method", "path", "peer", "query", "target",
    )  # fmt: skip

    def __init__(
        self, method: str, target: str, headers: Headers, http_version: str, body: bytes, peer: str, hold: Hold
    ) -> None:
        self.method = method
        self.target = target
        self.path, self.query = path_and_query(target)
        self.headers = headers
        self.http_version = http_version
        self.body = body
        self.peer = peer
        self.hold = hold
        self.keep_alive = True
        self.answer: Answer | None = None

    def header(self, name: str) -> bytes | None:
        """The first value of ``name``, in whatever case it came, or ``None``."""
        return find(self.headers, name.lower().encode("latin-1"))

    def let_go(self) -> None:
        """Its body is not wanted any more, and counts as held no longer."""
        self.body = b""
        self.hold.release()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that cannot be served: what the server gives itself before it closes the connection. ``answer``: the
    screen's; ``None``: the server's own, from status and reason."""

    status: int
    reason: str
    target: str
    answer: Answer | None = None


class Pieces:
    """A body as it comes. Small pieces are gathered: a body in chunks of two bytes takes its size, not twenty times it
    in objects."""

    __slots__ = ("_pieces", "size")

    def __init__(self) -> None:
        self._pieces: list[bytes | bytearray] = []
        self.size = 0

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, bytearray) and len(last) < GATHERED_BYTES:
            last += piece
        else:
            self._pieces.append(piece if len(piece) >= _SMALL_PIECE else bytearray(piece))

    def whole(self) -> bytes:
        """The body; a copy only where it came in several pieces, or in a small one."""
        if len(self._pieces) == 1:
            return bytes(self._pieces[0])
        return b"".join(self._pieces)

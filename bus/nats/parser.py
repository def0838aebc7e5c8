"""nats-py's parser with a shorter way for messages that are there as a whole: 8 us less for each.

It is for those who take messages as bytes, and for handlers that may have theirs at once. What it does not know
(errors, pings, what the server says of itself), what has to wait, and headers that must be read go nats-py's way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

if TYPE_CHECKING:
    from bus.nats.client import NatsClient

DirectBytes = Callable[[bytes, bytes, bytes | None, bytes], None]
"""Handles a message of which nothing is decoded: subject, payload, headers (the whole block, ``None``: none), reply."""

_END = b"\r\n"


class FastParser(Parser):
    """See `nats.protocol.parser.Parser`. ``takers``: by subscription, who takes messages as bytes, at once."""

    def __init__(self, client: NatsClient, takers: dict[int, DirectBytes]) -> None:
        super().__init__(client)
        self._client = client
        self._takers = takers

    async def parse(self, data: bytes = b"") -> None:
        if self.buf or self.state != AWAITING_CONTROL_LINE:
            self.buf.extend(data)
            if self.state != AWAITING_CONTROL_LINE:
                if len(self.buf) < self.needed + 2:
                    return
                await self._finish()
            data = bytes(self.buf)
            self.buf.clear()
        left = self.take_now(data)
        if left is not data:
            await self._client.pause()
        self.buf.extend(left)
        if self.buf:
            await super().parse()

    async def _finish(self) -> None:
        """The message of which the beginning was there."""
        of, buffer = self.msg_arg, self.buf
        head, end = self.header_needed, self.needed
        headers = bytes(buffer[:head]) if head else None
        payload = bytes(buffer[head:end])
        del buffer[: end + 2]
        self.state, self.header_needed = AWAITING_CONTROL_LINE, 0
        taker = self._taker(of["sid"], with_headers=headers is not None)
        if taker is None:
            await self._client._process_msg(of["sid"], of["subject"], of["reply"], payload, headers)  # type: ignore[arg-type]  # nats-py passes None too
        else:
            self._client.take_bytes(taker, of["subject"], payload, headers, of["reply"])

    @property
    def is_clear(self) -> bool:
        """Whether nothing waits for its other half."""
        return not self.buf and self.state == AWAITING_CONTROL_LINE

    def take_now(self, data: bytes) -> bytes:
        """All messages at the beginning of ``data`` that have come as a whole and may be taken at once; returns what is
        left."""
        take, position = self._client.take_bytes, 0
        while (found := self._whole(data, position)) is not None:
            taker, words, head, start, end = found
            reply = words[3] if len(words) == (6 if head else 5) else b""
            take(taker, words[1], data[start + head : end], data[start : start + head] if head else None, reply)
            position = end + 2
        return data[position:] if position else data

    def _taker(self, sid: int, *, with_headers: bool) -> DirectBytes | None:
        """Who takes a message of this subscription as it is, now."""
        return self._takers.get(sid) or (None if with_headers else self._client.direct(sid))

    def _whole(self, data: bytes, position: int) -> tuple[DirectBytes, list[bytes], int, int, int] | None:
        """What begins at ``position``, if it is whole and somebody takes it as it is: its taker, the words of its
        control line, the bytes of its headers, where they begin, and where its payload ends."""
        with_headers = data.startswith(b"HMSG ", position)
        if not with_headers and not data.startswith(b"MSG ", position):
            return None
        line_end = data.find(_END, position)
        if line_end < 0:
            return None
        words = data[position:line_end].split()
        if len(words) < (5 if with_headers else 4):
            return None
        try:
            sid = int(words[2])
            head = int(words[-2]) if with_headers else 0
            end = line_end + 2 + int(words[-1])
        except ValueError:
            return None  # nats-py says what is wrong with it
        if end + 2 > len(data) or (taker := self._taker(sid, with_headers=with_headers)) is None:
            return None
        return taker, words, head, line_end + 2, end

"""The short way of the parser: the same messages as nats-py's, in the same order, wherever the pieces are cut."""

from __future__ import annotations

import asyncio
from typing import cast

from hypothesis import given
from hypothesis import strategies as st
from nats.protocol.parser import Parser

from bus.nats.client import NatsClient
from bus.nats.parser import DirectBytes, FastParser

Message = tuple[int, bytes, bytes, bytes | None, bytes]
TAKEN, DIRECT = (1,), 2


class Receiver:
    """What a client does with parsed messages. Of `DIRECT`, every third has to wait."""

    def __init__(self) -> None:
        self.all: list[Message] = []
        self.pings = 0
        self._asked = 0

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.all.append((sid, subject, data, headers or None, reply))

    async def _process_ping(self) -> None:
        self.pings += 1

    def taker(self, sid: int) -> DirectBytes:
        def take(subject: bytes, payload: bytes, headers: bytes | None, reply: bytes) -> None:
            self.all.append((sid, subject, payload, headers, reply))

        return take

    def take_bytes(self, taker: DirectBytes, subject: bytes, data: bytes, headers: bytes | None, reply: bytes) -> None:
        taker(subject, data, headers, reply)

    def direct(self, sid: int) -> DirectBytes | None:
        self._asked += 1
        return self.taker(sid) if sid == DIRECT and self._asked % 3 else None

    async def pause(self) -> None:
        await asyncio.sleep(0)


def on_the_wire(message: Message) -> bytes:
    sid, subject, payload, headers, reply = message
    words = [b"HMSG" if headers else b"MSG", subject, b"%d" % sid, *([reply] if reply else [])]
    if headers:
        words.append(b"%d" % len(headers))
    head = headers or b""
    words.append(b"%d" % (len(head) + len(payload)))
    return b" ".join(words) + b"\r\n" + head + payload + b"\r\n"


messages = st.tuples(
    st.integers(1, 3),
    st.sampled_from([b"a", b"tg.v1.trace.x"]),
    st.sampled_from([b"", b"\r\n", b"MSG a 1 3\r\n", b"x" * 300, b'{"a":1}']),
    st.sampled_from([None, b"NATS/1.0\r\nNats-Msg-Id: r\r\n\r\n", b"NATS/1.0 404 No Messages\r\n\r\n"]),
    st.sampled_from([b"", b"$JS.ACK.S.c.1.2.3.4.5"]),
)


@given(
    st.lists(st.one_of(messages, st.just("ping")), max_size=12), st.lists(st.integers(1, 400), min_size=1, max_size=8)
)
async def test_it_parses_what_nats_py_parses(said: list[Message | str], cuts: list[int]) -> None:
    """Messages for takers, for others, and pings, cut anywhere."""
    data = b"".join(b"PING\r\n" if isinstance(each, str) else on_the_wire(each) for each in said)
    fast, plain = Receiver(), Receiver()
    parsers = (
        FastParser(cast(NatsClient, fast), {sid: fast.taker(sid) for sid in TAKEN}),
        Parser(plain),
    )
    position, turn = 0, 0
    while position < len(data):
        piece = data[position : position + cuts[turn % len(cuts)]]
        for parser in parsers:
            await parser.parse(piece)
        position, turn = position + len(piece), turn + 1
    assert fast.all == plain.all == [each for each in said if not isinstance(each, str)]
    assert fast.pings == plain.pings == said.count("ping")

"""nats-py's client with some holes closed, which its public interface cannot reach, and two hops fewer per message.

A lone message costs nats-py three turns of the event loop: the reader parses it into its subscription's queue, a task
takes it out, and what the handler publishes is written by another task. Each turn is 10 to 40 us of a question that is
answered in 250. Here a message whose subscription has nothing waiting is handled where its bytes come, and the first
message that is published in a turn of the loop is written at once. The others of that turn are written together at the
beginning of the next: uvloop does not wait, so that each write is a system call of its own. What may linger waits in
the buffer for the next write, whoever causes it: a write here is a read at the server, and one at each hearer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from nats import errors as nats_errors
from nats.aio.client import PING_PROTO, Client
from nats.aio.transport import TcpTransport

from bus.interface import TURN_S
from bus.log import EventLog
from bus.nats.access import DEFAULT_INBOX
from bus.nats.parser import DirectBytes, FastParser

log = EventLog(__name__)

Direct = Callable[[str, bytes, dict[str, str] | None, str], None]
"""Handles a message: subject, payload, headers, reply. Must not raise."""

_READ_AHEAD_S = 0.003
"""How long after its turn a client goes on to sort what has arrived into lines, so that a lone message is not
kept behind a flood to another subscription."""

_WRITE_AT_ONCE_BYTES = 64 * 1024
"""Bytes that the socket has not taken yet, up to which more is written without asking whether it may."""


class NatsClient(Client):
    """See `nats.aio.client.Client`. ``inbox_prefix``: of every inbox, also before connecting. ``demands_tls``: nothing
    is sent to a server that does not offer TLS; nats-py itself does as the server says."""

    def __init__(self, inbox_prefix: str = DEFAULT_INBOX, *, demands_tls: bool = False) -> None:
        super().__init__()
        self._inbox_prefix = bytearray(inbox_prefix.encode())
        self._demands_tls = demands_tls
        self._direct: dict[int, Direct] = {}
        self._at_once: dict[int, DirectBytes] = {}
        self._takers: dict[int, DirectBytes] = {}
        self._parser = self._ps = FastParser(self, self._takers)
        self._turn_ends: float | None = None
        self._write_is_due = False
        self._later: asyncio.TimerHandle | None = None
        self.linger_s = 0.0
        """How long what is published now may wait for others, to be written with them."""
        self.unreadable = 0
        """Messages whose subject or headers could not be read."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self._demands_tls and not info.get("tls_required"):
            secured = self._current_server is not None and self._current_server.uri.scheme == "wss"
            if not secured:
                raise nats_errors.Error("nats: TLS is wanted, and this server does not demand it")
        await super()._process_info(info, initial_connection)

    def handle_directly(self, sid: int, handler: Direct) -> None:
        """Messages of the subscription ``sid`` go to ``handler`` where they are parsed, as long as none of them waits
        and everybody has his turn every `TURN_S`; the others go through its queue."""
        subscription = self._subs[sid]

        def at_once(subject: bytes, data: bytes, headers: bytes | None, reply: bytes) -> None:
            subscription._received += 1
            handler(subject.decode(), data, None, reply.decode())

        self._direct[sid], self._at_once[sid] = handler, at_once

    def direct(self, sid: int) -> DirectBytes | None:
        """Who takes a message without headers of the subscription ``sid`` at once; ``None`` where it has to wait."""
        at_once, subscription = self._at_once.get(sid), self._subs.get(sid)
        if at_once is None or subscription is None or subscription.pending_msgs or self._late_s() > 0.0:
            return None
        return at_once

    def handle_bytes(self, sid: int, handler: DirectBytes) -> None:
        """All messages of the subscription ``sid`` go to ``handler`` where they are parsed: for what comes only as
        it is asked for, and is put away at once. 20 us less a message than through the queue."""
        self._takers[sid] = handler

    def forget_handler(self, sid: int) -> None:
        """No message comes for it any more."""
        self._direct.pop(sid, None)
        self._at_once.pop(sid, None)
        self._takers.pop(sid, None)

    async def _read_loop(self) -> None:
        """What has come as a whole is handled where it comes: its way through the reader is a turn of the loop."""
        reader = self._transport._io_reader if isinstance(self._transport, TcpTransport) else None
        if isinstance(reader, asyncio.StreamReader):
            reader.feed_data = partial(self._heard, reader, reader.feed_data)  # type: ignore[method-assign]
        await super()._read_loop()

    def _heard(self, reader: asyncio.StreamReader, feed: Callable[[bytes], None], data: bytes) -> None:
        waiter = reader._waiter  # type: ignore[attr-defined]
        waits = waiter is not None and not waiter.done() and not reader._buffer  # type: ignore[attr-defined]
        left = self._parser.take_now(data) if waits and self._parser.is_clear else data
        if left:
            feed(left)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        try:
            await self._take(sid, subject, reply, data, headers)
        except Exception:
            # A subject that is not UTF-8, headers that are none: nats-py would never read again, and seem connected.
            if self._unreadable_is_said():
                log.exception("message_unreadable", subject=repr(subject[:100]), unreadable=self.unreadable)

    async def _take(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        late_s = self._late_s()
        taker = self._takers.get(sid)
        if taker is not None:
            self.take_bytes(taker, subject, data, headers, reply)
            return
        handler, subscription = self._direct.get(sid), self._subs.get(sid)
        if handler is None or subscription is None or subscription.pending_msgs or late_s > 0.0:
            await super()._process_msg(sid, subject, reply, data, headers)
            if late_s > _READ_AHEAD_S:
                await asyncio.sleep(0)  # what is not parsed yet waits here and in the socket
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        subscription._received += 1
        handler(subject.decode(), data, await self._process_headers(headers) if headers else None, reply.decode())

    def take_bytes(self, taker: DirectBytes, subject: bytes, data: bytes, headers: bytes | None, reply: bytes) -> None:
        """One message for who takes it as it is."""
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        try:
            taker(subject, data, headers, reply)
        except Exception:
            if self._unreadable_is_said():
                log.exception("message_unreadable", subject=repr(subject[:100]), unreadable=self.unreadable)

    def ping(self) -> asyncio.Future[bool]:
        """Done when the server has taken all that was published before; never, if the connection is lost meanwhile.

        nats-py's own goes past the buffer. This one goes behind what is in it, and at once: the answers come in the
        order of the questions, and nothing else tells whose they are.
        """
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pongs.append(answered)
        self._pending.append(PING_PROTO)
        self._pending_data_size += len(PING_PROTO)
        if isinstance(self._transport, TcpTransport):
            self._write()
        else:
            self._step(super()._flush_pending())
        return answered

    async def pause(self) -> None:
        """After messages for who takes bytes: everybody else has a turn when it is time."""
        if self._late_s() > _READ_AHEAD_S:
            await asyncio.sleep(0)

    def _unreadable_is_said(self) -> bool:
        """Count one more; at each doubling it is said: a flood shall not fill the log."""
        self.unreadable += 1
        return self.unreadable & (self.unreadable - 1) == 0

    def _late_s(self) -> float:
        """For how long messages have been taken in beyond the `TURN_S` since the loop came back to this client."""
        loop = asyncio.get_running_loop()
        if self._turn_ends is None:
            self._turn_ends = loop.time() + TURN_S
            loop.call_soon(self._begin_turn)
        return loop.time() - self._turn_ends

    def _begin_turn(self) -> None:
        self._turn_ends = None

    def send(self, subject: str, payload: bytes, reply: str, headers: bytes | None) -> None:
        """`publish` without its coroutines, and of what was checked already; ``headers``: the whole block."""
        if headers is None:
            piece = b"%b %d\r\n%b\r\n" % (f"PUB {subject} {reply}".encode(), len(payload), payload)
        else:
            sizes = len(headers), len(headers) + len(payload)
            piece = b"%b %d %d\r\n%b%b\r\n" % (f"HPUB {subject} {reply}".encode(), *sizes, headers, payload)
        self._send_piece(piece, 1, len(payload))

    def send_together(self, subjects: Sequence[str], payload: bytes) -> None:
        """``payload`` to each of ``subjects``, which are the server's own, as one piece."""
        end = b" %d\r\n%b\r\n" % (len(payload), payload)
        piece = b"".join([b"PUB " + subject.encode() + end for subject in subjects])
        self._send_piece(piece, len(subjects), len(payload) * len(subjects))

    def _send_piece(self, piece: bytes, messages: int, payload_bytes: int) -> None:
        """What is kept while the server is away, nats-py sends after the reconnection."""
        self.stats["out_msgs"] += messages
        self.stats["out_bytes"] += payload_bytes
        self._pending.append(piece)
        self._pending_data_size += len(piece)
        soon = self._write_is_due or (self.linger_s > 0.0 and self._later is not None)
        if soon and self._pending_data_size < _WRITE_AT_ONCE_BYTES:
            return
        if self.is_connected and not self._write_soon() and self._flush_queue is not None and self._flush_queue.empty():
            self._step(super()._flush_pending())

    @staticmethod
    def _step(flush: Coroutine[Any, Any, Any]) -> None:
        try:
            flush.send(None)
        except StopIteration:
            pass
        else:
            flush.close()  # it waits for the flusher; what was published is in the buffer

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        if force_flush or not self.is_connected or not self._write_soon():
            return await super()._flush_pending(force_flush)
        return None

    def _write_soon(self) -> bool:
        """What is pending is written now, at the end of this turn or after its lingering; ``False``: nats-py's flusher
        has to, which waits until the socket takes more."""
        transport = self._transport
        if not isinstance(transport, TcpTransport):
            return False
        socket = _socket_of(transport)
        if socket is None or socket.is_closing():
            return True  # the reader will notice; what is pending is sent after the reconnection
        if socket.get_write_buffer_size() > _WRITE_AT_ONCE_BYTES:
            return False
        if self._write_is_due:
            return True
        if self.linger_s and self._pending_data_size < _WRITE_AT_ONCE_BYTES:
            if self._later is None:
                self._later = asyncio.get_running_loop().call_later(self.linger_s, self._write)
            return True
        self._write()
        self._write_is_due = True
        asyncio.get_running_loop().call_soon(self._write)
        return True

    @property
    def writable(self) -> bool:
        """Whether there is a socket that takes what is written."""
        socket = _socket_of(self._transport)
        return self.is_connected and (socket is None or not socket.is_closing())

    def _write(self) -> None:
        self._write_is_due = False
        if self._later is not None:
            self._later.cancel()
            self._later = None
        socket = _socket_of(self._transport)
        if self._pending and socket is not None and self.is_connected and not socket.is_closing():
            pending, self._pending, self._pending_data_size = self._pending, [], 0
            if len(pending) == 1:
                socket.write(pending[0])
            else:
                socket.writelines(pending)

    def forget_pending(self) -> None:
        """Before `close` without a `writable` socket: nats-py would write what is left to the closed socket, which
        uvloop refuses, and would skip the rest of its own cleaning up."""
        self._pending = []
        self._pending_data_size = 0

    def drop_failed_connection(self) -> None:
        """Before the next try: nats-py forgets the socket of a try that got as far as a refused password."""
        if self._transport is not None:
            self._transport.close()  # type: ignore[no-untyped-call]


def _socket_of(transport: object) -> asyncio.WriteTransport | None:
    """The socket of a TCP connection, with TLS or without."""
    writer = transport._io_writer if isinstance(transport, TcpTransport) else None
    return None if writer is None else writer.transport

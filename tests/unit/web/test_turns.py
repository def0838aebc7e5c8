"""A connection with much to read leaves the loop to others between two large reads, and stays stopped for a client
that does not read."""

from __future__ import annotations

import asyncio

from web.client_connection import LARGE_READ, AnswerStream, ClientConnection, Timeouts

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n"


class Transport(asyncio.Transport):
    """Says whether it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = True

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Nobody is there."""

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def abort(self) -> None:
        self.reads = False


def test_a_large_read_ends_a_turn_and_back_pressure_outlasts_it() -> None:
    """Small reads go on at once; after a large one the next turn goes on, unless its reader has said stop meanwhile."""

    async def scenario() -> None:
        transport = Transport()
        connection = ClientConnection(lambda _: None, lambda _: None)
        connection.connection_made(transport)
        stream = AnswerStream(connection, Timeouts(), asyncio.get_running_loop().time(), 1 << 30, head_only=False)
        connection.send(stream, b"GET / HTTP/1.1\r\n\r\n", b"")
        reads = []
        connection.data_received(HEAD + b"x" * 100)
        reads.append(transport.reads)
        connection.data_received(b"x" * LARGE_READ)
        reads.append(transport.reads)
        await asyncio.sleep(0)
        reads.append(transport.reads)
        connection.data_received(b"x" * LARGE_READ)
        stream.pause()
        await asyncio.sleep(0)
        reads.append(transport.reads)
        stream.resume()
        reads.append(transport.reads)
        stream.close()
        assert reads == [True, False, True, False, True]

    asyncio.run(scenario())

"""The engine of `load.bench.router`: a process that costs as little as Python allows, so that it is no bottleneck.

``python -m load.bench.router_engine PORT``. It reads a request whole, looks for a few members in its bytes and answers
with chunks that are ready made: ``max_tokens`` of them, ``seed`` ms between two (0: as fast as they are read, one write
each). ``/v1/chat/completions/render`` answers with one token for every four bytes.
"""

from __future__ import annotations

import asyncio
import re
import sys
from functools import lru_cache
from typing import cast

import msgspec
import uvloop

MODEL = "bench/model"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_PACE = re.compile(rb'"seed": ?(\d+)')
_BYTES_PER_TOKEN = 4


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    head = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1795973189, "model": MODEL}
    return b"data: " + msgspec.json.encode({**head, "choices": [choice]}) + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _whole(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


_USAGE = {"prompt_tokens": 500, "completion_tokens": 16, "total_tokens": 516}
_MESSAGE = {"role": "assistant", "content": "done " * 16}
_ANSWER = _whole(
    msgspec.json.encode(
        {
            "id": "chatcmpl-0123456789abcdef",
            "object": "chat.completion",
            "created": 1795973189,
            "model": MODEL,
            "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "stop"}],
            "usage": _USAGE,
        }
    )
)
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_TOKEN = _chunk(_event({"content": " word"}))
_LAST = _chunk(_event({}, "stop"))
_USAGE_CHUNK = _chunk(
    b"data: " + msgspec.json.encode({"id": "chatcmpl-0123456789abcdef", "choices": [], "usage": _USAGE}) + b"\n\n"
)
_DONE = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_PAGES = {
    b"/v1/models": _whole(
        msgspec.json.encode(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 1 << 20}]}
        )
    ),
    b"/version": _whole(b'{"version":"0.32.0"}'),
    b"/metrics": _whole(
        b'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n'
        b'vllm:kv_cache_usage_perc{engine="0"} 0\n'
        b'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100000000"} 1\n',
        b"text/plain",
    ),
    b"/health": _whole(b"", b"text/plain"),
}
_MISSING = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


@lru_cache(maxsize=512)
def _tokens(count: int) -> bytes:
    ids = [(number * 7919) % 30_000 for number in range(count)]
    return _whole(msgspec.json.encode({"request_id": "r", "token_ids": ids}))


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._data = bytearray()
        self._left = 0
        self._pace_s = 0.0
        self._next_at = 0.0
        self._last = b""
        self._timer: asyncio.Handle | None = None
        self._stalled = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._data[:end])
            found = _LENGTH.search(head)
            size = int(found[1]) if found else 0
            if len(self._data) < end + 4 + size:
                return
            body = bytes(self._data[end + 4 : end + 4 + size])
            del self._data[: end + 4 + size]
            self._answer(head.split(b" ", 2)[1].partition(b"?")[0], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        write = self._transport.write
        if path.endswith(b"/render"):
            write(_tokens(len(body) // _BYTES_PER_TOKEN))
        elif not body:
            write(_PAGES.get(path, _MISSING))
        elif b'"stream":true' not in body and b'"stream": true' not in body:
            write(_ANSWER)
        else:
            tokens, pace = _TOKENS.search(body), _PACE.search(body)
            self._left = int(tokens[1]) if tokens else 16
            self._pace_s = int(pace[1]) / 1000 if pace else 0.0
            self._last = _LAST + (_USAGE_CHUNK if b'"include_usage"' in body else b"") + _DONE
            self._next_at = self._loop.time()
            write(_STREAM)
            self._token()

    def _token(self) -> None:
        """One chunk, and the next one later."""
        if self._left <= 0:
            self._timer = None
            self._transport.write(self._last)
            self._last = b""
            return
        self._left -= 1
        self._transport.write(_TOKEN)
        if self._pace_s:
            self._next_at += self._pace_s
            self._timer = self._loop.call_at(self._next_at, self._token)
        elif not self._stalled:
            self._timer = self._loop.call_soon(self._token)
        else:
            self._timer = None

    def pause_writing(self) -> None:
        self._stalled = True

    def resume_writing(self) -> None:
        self._stalled = False
        if self._timer is None and self._last:
            self._timer = self._loop.call_soon(self._token)

    def connection_lost(self, error: Exception | None) -> None:
        self._last = b""
        if self._timer is not None:
            self._timer.cancel()


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", port, backlog=1024)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(int(sys.argv[1])))

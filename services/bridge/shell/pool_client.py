"""Asks a Mooncake master over HTTP: status, metrics, segments, and the list of all keys.

Only pages that grant no lease (spec: pool-events §4.4): ``/query_key``, ``is_exist`` and the like would keep objects
from being evicted.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from services.bridge.errors import ScrapeError
from services.bridge.pool.report import PoolReport, parse_master_metrics, parse_segments, parse_status
from web.client import ClientLimits, HttpClient, Timeouts
from web.errors import WebError

_OK = 200
ANSWER_BYTES = 32 * 1024 * 1024
"""The largest page that is read whole: thousands of segments have some MB."""

MAX_LINE_BYTES = 1024 * 1024
"""A key longer than this ends the list: what the master sends is no list of keys."""


class PoolClient:
    """One master's HTTP side. Every method raises `ScrapeError`."""

    def __init__(self, url: str, timeout_s: float, list_timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._client = HttpClient(ClientLimits(answer_bytes=ANSWER_BYTES))
        self._timeouts = Timeouts(connect_s=timeout_s, first_byte_s=timeout_s, idle_s=timeout_s, total_s=timeout_s)
        # A master of millions of keys writes its list for seconds before the first byte comes.
        self._list_timeouts = Timeouts(
            connect_s=timeout_s, first_byte_s=list_timeout_s, idle_s=list_timeout_s, total_s=list_timeout_s
        )

    async def close(self) -> None:
        await self._client.close()

    async def look(self) -> PoolReport:
        """Status, metrics and segments, in this order: what is published between them is noticed at the next look."""
        status = parse_status(await self._get("/kv_events/status"))
        metrics = parse_master_metrics((await self._get("/metrics")).decode("utf-8", "replace"))
        return PoolReport(status, metrics, parse_segments(await self._get("/get_segments_detail")))

    async def keys(self) -> AsyncGenerator[bytes, None]:
        """The list of all keys, as it comes, in pieces of whole lines."""
        path = "/get_all_keys"
        try:
            stream = await self._client.open("GET", self._url + path, [], b"", self._list_timeouts)
        except WebError as error:
            raise ScrapeError(error.reason, f"{path}: {error}") from error
        try:
            if stream.status != _OK:
                raise ScrapeError(f"http_{stream.status}", f"{path} answered {stream.status}")
            rest = b""
            while piece := await stream.read():
                lines, newline, tail = piece.rpartition(b"\n")
                if newline:
                    yield rest + lines + newline
                    rest = tail
                else:
                    rest += tail
                if len(rest) > MAX_LINE_BYTES:
                    raise ScrapeError("bad_answer", f"{path} has a line of more than {MAX_LINE_BYTES} bytes")
            if rest:
                yield rest
        except WebError as error:
            raise ScrapeError(error.reason, f"{path}: {error}") from error
        finally:
            stream.close()

    async def _get(self, path: str) -> bytes:
        try:
            answer = await self._client.fetch("GET", self._url + path, [], b"", self._timeouts)
        except WebError as error:
            raise ScrapeError(error.reason, f"{path}: {error}") from error
        if answer.status != _OK:
            raise ScrapeError(f"http_{answer.status}", f"{path} answered {answer.status}")
        return answer.body

"""Carries hints to the engine over HTTP: a few calls at once, in order within a session, each with a deadline that
counts from its beginning in the line, so that an engine that hangs never makes a line that hangs."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from services.bridge.adapters.actions import CallAnswer
from services.bridge.config import BridgeSettings
from services.bridge.effects import CallEngine
from services.bridge.events import HintCallAnswered
from web.client import ClientLimits, HttpClient, Timeouts
from web.errors import ConnectError, ConnectionLostError, WebError

ANSWER_BYTES = 1024 * 1024
UNREACHABLE = CallAnswer(problem="engine_unreachable")
TIMEOUT = CallAnswer(problem="engine_timeout")
BAD_ANSWER = CallAnswer(problem="bad_answer")
BUSY = CallAnswer(problem="bridge_busy")


@dataclass(frozen=True, slots=True)
class _Waiting:
    call: CallEngine
    due: float


class HintCaller:
    """``told`` hears of every call's end, exactly once, unless the bridge stops before. ``tls``: see `HttpClient`."""

    def __init__(
        self, settings: BridgeSettings, told: Callable[[HintCallAnswered], None], tls: ssl.SSLContext | None = None
    ) -> None:
        self._url = settings.engine_url.rstrip("/")
        self._timeout_s = settings.hint_timeout_s
        self._told = told
        self._client = HttpClient(ClientLimits(answer_bytes=ANSWER_BYTES), tls=tls)
        self._headers = [(b"content-type", b"application/json")]
        if settings.engine_api_key:
            self._headers.append((b"authorization", f"Bearer {settings.engine_api_key}".encode()))
        # The core lets no more than `hint_calls` be under way, so that a line of as many never overflows.
        self._lanes = [asyncio.Queue[_Waiting](settings.hint_calls) for _ in range(settings.hint_lanes)]

    def loops(self) -> list[tuple[str, Coroutine[None, None, None]]]:
        """One task for each lane, for the owner to start."""
        return [(f"hints-{number}", self._serve(lane)) for number, lane in enumerate(self._lanes)]

    def call(self, call: CallEngine) -> None:
        """Put it into its line."""
        waiting = _Waiting(call, asyncio.get_running_loop().time() + self._timeout_s)
        try:
            self._lanes[call.lane].put_nowait(waiting)
        except asyncio.QueueFull:
            asyncio.get_running_loop().call_soon(self._told, HintCallAnswered(call.ticket, BUSY))

    async def close(self) -> None:
        await self._client.close()

    async def _serve(self, lane: asyncio.Queue[_Waiting]) -> None:
        while True:
            waiting = await lane.get()
            answer = await self._make(waiting)
            self._told(HintCallAnswered(waiting.call.ticket, answer))

    async def _make(self, waiting: _Waiting) -> CallAnswer:
        left = waiting.due - asyncio.get_running_loop().time()
        if left <= 0:
            return TIMEOUT
        call = waiting.call
        timeouts = Timeouts(connect_s=left, first_byte_s=left, idle_s=left, total_s=left)
        try:
            async with asyncio.timeout(left):
                answer = await self._client.fetch("POST", self._url + call.path, self._headers, call.body, timeouts)
        except TimeoutError:
            return TIMEOUT
        except WebError as error:
            if error.reason.endswith("_timeout"):
                return TIMEOUT
            return UNREACHABLE if isinstance(error, ConnectError | ConnectionLostError) else BAD_ANSWER
        return CallAnswer(answer.status, answer.body)

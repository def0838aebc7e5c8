"""The replies to one question, for both implementations."""

from __future__ import annotations

import asyncio
from collections import deque

from bus.errors import AnswerFailedError, BusError, BusTimeoutError, NoRespondersError
from bus.interface import BusMessage

STATUS = "Status"
NO_RESPONDERS = "503"
SERVICE_ERROR = "Nats-Service-Error"


class Answers:
    """Replies in order of arrival, bounded by ``limit`` (further ones are counted in `dropped`)."""

    def __init__(self, subject: str, limit: int = 1_024) -> None:
        self._subject = subject
        self._limit = limit
        self._ready: deque[BusMessage | BusError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.dropped = 0

    def receive(self, answer: BusMessage | BusError) -> None:
        """A reply, or why there will be none."""
        if len(self._ready) >= self._limit:
            self.dropped += 1
            return
        self._ready.append(answer)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self, timeout_s: float) -> BusMessage:
        """Raises `TimeoutError`, and what the reply says: `NoRespondersError`, `AnswerFailedError`, ..."""
        if not self._ready:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, _expire, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                self._waiter = None
        answer = self._ready.popleft()
        if isinstance(answer, BusError):
            raise answer
        if answer.headers:
            if answer.headers.get(STATUS) == NO_RESPONDERS and not answer.payload:
                raise NoRespondersError(self._subject)
            if SERVICE_ERROR in answer.headers:
                raise AnswerFailedError(self._subject, answer.headers[SERVICE_ERROR])
        return answer

    async def next_of_many(self, idle_timeout_s: float, deadline: float, deadline_s: float) -> BusMessage:
        """The next reply. Raises as `next`, and `BusTimeoutError` after ``idle_timeout_s`` of silence or at
        ``deadline``, a time of the loop, which is ``deadline_s`` after the question."""
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise BusTimeoutError(self._subject, deadline_s)
        try:
            return await self.next(min(idle_timeout_s, left))
        except TimeoutError:
            raise BusTimeoutError(self._subject, min(idle_timeout_s, left)) from None


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())

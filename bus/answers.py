"""The replies to one question, for both implementations."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from bus.errors import AnswerFailedError, BusError, BusTimeoutError, NoRespondersError
from bus.interface import BusMessage

STATUS = "Status"
NO_RESPONDERS = "503"
SERVICE_ERROR = "Nats-Service-Error"


def problem_of(subject: str, answer: BusMessage) -> BusError | None:
    """What a reply says instead of answering."""
    if answer.headers.get(STATUS) == NO_RESPONDERS and not answer.payload:
        return NoRespondersError(subject)
    if SERVICE_ERROR in answer.headers:
        return AnswerFailedError(subject, answer.headers[SERVICE_ERROR])
    return None


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
        if answer.headers and (problem := problem_of(self._subject, answer)) is not None:
            raise problem
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


class ManyAnswers:
    """See `bus.interface.Bus.request_many`. No generator: the loop would keep a register of each. ``ask``: sends the
    question, when the first answer is waited for, and returns its inbox; ``over``: closes that."""

    def __init__(
        self,
        answers: Answers,
        ask: Callable[[], str],
        over: Callable[[str, Answers], None],
        idle_timeout_s: float,
        deadline_s: float,
    ) -> None:
        self._answers = answers
        self._ask = ask
        self._over = over
        self._idle_timeout_s = idle_timeout_s
        self._deadline_s = deadline_s
        self._deadline = 0.0
        self._inbox = ""
        self._closed = False

    def __aiter__(self) -> ManyAnswers:
        return self

    async def __anext__(self) -> BusMessage:
        if self._closed:
            raise StopAsyncIteration
        if not self._inbox:
            self._deadline = asyncio.get_running_loop().time() + self._deadline_s
            self._inbox = self._ask()
        try:
            return await self._answers.next_of_many(self._idle_timeout_s, self._deadline, self._deadline_s)
        except BaseException:
            self.close()
            raise

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """No more answers are wanted."""
        self._closed = True
        inbox, self._inbox = self._inbox, ""
        if inbox:
            self._over(inbox, self._answers)


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())

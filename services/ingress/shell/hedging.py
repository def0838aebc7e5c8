"""The second sending of a slow request, in a task of its own beside the request's: asked for, sent, and heard up to its
first byte. What it answers is passed on by the request's task (`effects.Follow`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bus.log import EventLog
from schemas.admit import Granted
from services.ingress.effects import AskHedge, Forward
from services.ingress.events import Event, HedgeAnswered, HedgeDue, RequestFailed
from services.ingress.shell.attempt import Attempt

log = EventLog(__name__)

FIRST = 0
"""The attempt that may be slow; a retry is not sent twice."""


class SecondSending:
    """Owned by the request, which closes it and waits for it. ``ask``: admission's answer, ``None`` for no; ``send``:
    an attempt, and its hearing up to the first byte, which is delivered."""

    def __init__(
        self,
        request_id: str,
        deliver: Callable[[Event], None],
        ask: Callable[[AskHedge], Awaitable[Granted | None]],
        send: Callable[[Forward], tuple[Attempt, Awaitable[bool]]],
    ) -> None:
        self.attempt: Attempt | None = None
        self._id = request_id
        self._deliver = deliver
        self._ask = ask
        self._send = send
        self._question: AskHedge | None = None
        self._forward: Forward | None = None
        self._closed = False
        self._task = asyncio.create_task(self._run(), name=f"hedge-{request_id}")

    def take(self, effect: AskHedge | Forward) -> None:
        """What the core answers to what is delivered here."""
        if isinstance(effect, AskHedge):
            self._question = effect
        else:
            self._forward = effect

    @property
    def awaits_forward(self) -> bool:
        """Whether a `Forward` of now is for it."""
        return asyncio.current_task() is self._task and self.attempt is None

    def close(self) -> None:
        """Nobody wants it any more."""
        self._closed = True
        if self.attempt is not None:
            self.attempt.close()
        if self._task is not asyncio.current_task():
            self._task.cancel()

    async def over(self) -> None:
        """Its first byte is here, or none will be."""
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            self._deliver(HedgeDue(request_id=self._id, attempt=FIRST))
            if self._question is None:
                return
            number = self._question.question.attempt
            granted = await self._ask(self._question)
            self._deliver(HedgeAnswered(request_id=self._id, attempt=number, granted=granted))
            if self._forward is not None:
                self.attempt, heard = self._send(self._forward)
                await heard
        except asyncio.CancelledError:
            if not self._closed:
                raise
            # A task that ends as cancelled keeps its frames, with the body that it sent, for as long as it is kept.
        except Exception as error:  # noqa: BLE001 - the border of one request, as in its own task
            log.error("request_failed", error=error, request=self._id)  # noqa: TRY400 - with the traceback
            self._deliver(RequestFailed(request_id=self._id))

"""One request from its arrival to its end: the core's effects done one after the other, until the client goes.

A step (count the prompt, ask admission, forward to an engine) is cut short when the client goes, or when the core wants
no more of it; what follows from it is the core's next effect.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import cast, get_args

import msgspec

from bus.interface import Bus
from bus.log import EventLog
from schemas.admit import AdmitReply, Granted
from schemas.request import Usage
from schemas.trace import TraceRow
from services.ingress.answers import AnswerFacts
from services.ingress.config import IngressSettings
from services.ingress.effects import (
    Answer,
    AskAdmission,
    AskHedge,
    AskIndexer,
    BreakOff,
    CancelAdmission,
    CloseUpstream,
    CountPrompt,
    Effect,
    Follow,
    Forward,
    HeldComment,
    Relay,
)
from services.ingress.endpoints import REQUEST_ID_HEADERS
from services.ingress.errors import EventTooLargeError
from services.ingress.events import (
    AdmitFailed,
    AdmitReplied,
    AnswerEnded,
    AnswerFailed,
    AnswerFailure,
    AnswerProgress,
    ClientGone,
    FirstByte,
    RequestFailed,
    RequestReceived,
)
from services.ingress.leaders import Leaders
from services.ingress.requests import API_NOT_SERVED, COUNTING
from services.ingress.shell.asking import NoDecisionError, ask, ask_indexer
from services.ingress.shell.attempt import SSE, Attempt, Splices, spliced_body
from services.ingress.shell.capture import Capture
from services.ingress.shell.counting import PromptCounter
from services.ingress.shell.dispatcher import Dispatcher
from services.ingress.shell.forwarding import ForwardList
from services.ingress.shell.hedging import FIRST, SecondSending
from services.ingress.shell.metrics import IngressMetrics
from services.ingress.turn_state import HEADER, TURN_STATE_FAMILY, TurnStates, foreign
from web.client import HttpClient, Timeouts
from web.errors import WebError
from web.headers import Headers
from web.server import Request, Responder

log = EventLog(__name__)

STREAM_HEAD = (
    (b"content-type", SSE + b"; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
"""Of a stream that begins with a comment. The last one is for nginx, which would keep comments back."""

_FAILURES: frozenset[str] = frozenset(get_args(AnswerFailure))
Step = CountPrompt | AskIndexer | AskAdmission | Forward | Follow


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What every request's task works with."""

    settings: IngressSettings
    bus: Bus
    client: HttpClient
    counter: PromptCounter
    dispatcher: Dispatcher
    metrics: IngressMetrics
    forward_list: ForwardList
    splices: Splices
    timeouts: Timeouts
    turn_states: TurnStates
    capture: Capture | None = None
    leaders: Leaders = field(default_factory=Leaders)


class RequestServing:
    """Serves one request; `run` returns when it is over and everything it opened is closed. ``tokens``: what it took,
    once it is over. ``accepted``: whether it was taken on; one that was not has no row."""

    def __init__(self, tools: Tools, received: RequestReceived, request: Request, responder: Responder) -> None:
        self._tools = tools
        self._received = received
        self._request = request
        self._responder = responder
        self._id = received.request_id
        self._steps: deque[Step] = deque()
        self._task: asyncio.Task[None] | None = None
        self._stepping = False
        self._cut = False
        self._attempt: Attempt | None = None
        self._second: SecondSending | None = None
        self._relaying = False
        self._told_chunks = 0
        self._answered: str | None = None
        self.tokens: int | None = None
        self.accepted = True
        captured = tools.capture is not None and not received.request.passed
        self._kept = tools.capture.begin(received, request.headers) if tools.capture and captured else None

    async def run(self) -> None:
        """Raises nothing: a bug is logged, counted by the core, and answered."""
        dispatcher = self._tools.dispatcher
        dispatcher.enter(self._id, self)
        self._task = asyncio.current_task()
        self._responder.on_gone = self._cut_short
        try:
            dispatcher.deliver(self._received)
            if self._responder.finished:
                self.accepted = False
                self._tools.metrics.not_accepted.labels(self._answered or "").inc()
            while self._steps:
                await self._do(self._steps.popleft())
        except Exception as error:  # noqa: BLE001 - the border of one request: a bug ends it, and nothing else
            log.error("request_failed", error=error, request=self._id)  # noqa: TRY400 - with the traceback
            dispatcher.deliver(RequestFailed(request_id=self._id, answer=self._facts()))
        finally:
            self._responder.on_gone = None
            if self._attempt is not None:
                self._attempt.close()
            if self._second is not None:
                self._second.close()
                await self._second.over()
            dispatcher.leave(self._id)
            if self._tools.capture is not None:
                self._tools.capture.forget(self._id)

    async def _do(self, step: Step) -> None:
        """One step in the request's own task: another one, and a third that waits for the client's going, would cost
        more than most steps do."""
        responder, task = self._responder, self._task
        assert task is not None
        self._cut, self._stepping = False, True
        try:
            if not responder.gone.is_set():
                await self._perform(step)
        except asyncio.CancelledError:
            if not self._cut:
                raise
        finally:
            self._stepping = False
            if self._cut and task.uncancel() > 0:  # somebody else ends the whole request
                raise asyncio.CancelledError
        if responder.gone.is_set() and not responder.finished:
            self._tools.dispatcher.deliver(ClientGone(request_id=self._id, answer=self._facts()))
            self._steps.clear()

    def _cut_short(self) -> None:
        """End the step that runs now, unless it is the one that says so."""
        if self._stepping and not self._cut and self._task is not None and self._task is not asyncio.current_task():
            self._cut = True
            self._task.cancel()

    def take(self, effect: Effect) -> None:
        """One effect of the core about this request."""
        if isinstance(effect, Forward) and self._second is not None and self._second.awaits_forward:
            self._second.take(effect)
        elif isinstance(effect, Step):
            if isinstance(effect, Follow):
                self._attempt = self._second.attempt if self._second is not None else None
            self._steps.append(effect)
        elif isinstance(effect, Relay):
            self._relaying = True
        elif isinstance(effect, HeldComment):
            self._comment(effect.text)
        elif isinstance(effect, CancelAdmission):
            if effect.cancel.hedge:
                self._close_second()
            else:
                self._cut_short()
        elif isinstance(effect, AskHedge):
            if self._second is not None:
                self._second.take(effect)
        elif isinstance(effect, CloseUpstream):
            self._close_attempt(effect.attempt)
        elif isinstance(effect, Answer):
            self._answered = effect.reply.reason
            headers = [*effect.reply.headers, *self._named]
            self._responder.send(effect.reply.status, headers, effect.reply.body)
        elif isinstance(effect, BreakOff):
            self._responder.break_off(effect.event)

    @property
    def _named(self) -> Headers:
        """Our request id, also under the name by which Anthropic's clients read it."""
        names = REQUEST_ID_HEADERS.get(self._received.request.endpoint, (b"x-request-id",))
        return [(name, self._id.encode("ascii")) for name in names]

    def _comment(self, text: bytes) -> None:
        """To a client that reads; the head of its stream first."""
        responder = self._responder
        if responder.finished or responder.gone.is_set():
            return
        if not responder.started:
            responder.start(200, [*STREAM_HEAD, *self._named])
        if not responder.congested:
            responder.write(text)
            self._tools.metrics.held_comments.inc()

    def ended(self, row: TraceRow) -> None:
        """Keep what it took: ``tokens`` of its prompt and its answer, as its row has them; none of one that no engine
        began to answer."""
        if row.request is not None:
            began = row.request.ttft_ms is not None
            self.tokens = (row.request.input_tokens or 0) + (row.request.output_tokens or 0) if began else 0

    def progress(self) -> None:
        """Tell the core how far the stream is, when it has moved."""
        attempt = self._attempt
        if self._relaying and attempt is not None and attempt.chunks != self._told_chunks:
            self._told_chunks = attempt.chunks
            self._tools.dispatcher.deliver(
                AnswerProgress(request_id=self._id, attempt=attempt.forward.attempt, chunks=attempt.chunks)
            )

    def _close_second(self) -> None:
        if self._second is not None:
            self._second.close()

    def _close_attempt(self, number: int) -> None:
        second = self._second.attempt if self._second is not None else None
        if second is not None and second.forward.attempt == number:
            self._close_second()
        if self._attempt is None or self._attempt.forward.attempt != number:
            return
        self._attempt.close()
        self._cut_short()

    def _facts(self) -> AnswerFacts | None:
        return self._attempt.facts() if self._attempt is not None else None

    # Steps

    async def _perform(self, step: Step) -> None:
        if isinstance(step, CountPrompt):
            counted = await self._tools.counter.count(step)
            self._tools.metrics.tokens.labels(counted.skipped or counted.tokens_from).inc()
            if counted.text is not None:
                self._tools.metrics.text_chains.inc()
            self._tools.dispatcher.deliver(counted)
        elif isinstance(step, AskIndexer):
            recognised = await ask_indexer(
                self._tools.bus, step, deadline_s=self._tools.settings.recognise_deadline_ms / 1000
            )
            reply = recognised.reply
            self._tools.metrics.recognised.labels(recognised.failure or (reply.relation if reply else "")).inc()
            self._tools.dispatcher.deliver(recognised)
        elif isinstance(step, AskAdmission):
            await self._ask(step)
        elif isinstance(step, Follow):
            await self._follow()
        else:
            await self._forward(step)

    async def _ask(self, step: AskAdmission) -> None:
        deliver = self._tools.dispatcher.deliver
        attempt = step.question.attempt

        def told(reply: AdmitReply) -> None:
            deliver(AdmitReplied(request_id=self._id, attempt=attempt, reply=reply))

        idle_s = self._tools.settings.admit_idle_s
        try:
            await ask(self._tools.bus, step, idle_s=idle_s, counts=self._counts, told=told)
        except NoDecisionError as error:
            deliver(AdmitFailed(request_id=self._id, attempt=attempt, reason=error.reason))

    def _counts(self, reply: AdmitReply) -> bool:
        if self._tools.leaders.counts(reply.epoch, time.monotonic()):
            return True
        self._tools.metrics.deposed.inc()
        return False

    async def _ask_hedge(self, effect: AskHedge) -> Granted | None:
        """The grant of a second sending; ``None``: there is none."""
        replies: list[AdmitReply] = []
        step = AskAdmission(effect.subject, effect.question)
        try:
            await ask(
                self._tools.bus,
                step,
                idle_s=self._tools.settings.admit_idle_s,
                counts=self._counts,
                told=replies.append,
            )
        except NoDecisionError:
            return None
        return reply if isinstance(reply := replies[-1], Granted) else None

    async def _forward(self, step: Forward) -> None:
        attempt, heard = self._send(step)
        self._attempt, self._relaying, self._told_chunks = attempt, False, 0
        timer = self._hedge_timer(step)
        try:
            begun = await heard
        finally:
            if timer is not None:
                timer.cancel()
        if begun:
            await self._pass_on(attempt)

    async def _follow(self) -> None:
        """Its second sending is the request's: pass on what that one answers, once it does."""
        assert self._second is not None
        await self._second.over()
        if self._relaying and self._attempt is not None and not self._attempt.closed:
            await self._pass_on(self._attempt)

    def _hedge_timer(self, step: Forward) -> asyncio.TimerHandle | None:
        """Of a request that may be sent twice, as far as we know."""
        after_ms, request = self._tools.settings.hedge_after_ms, self._received.request
        if not after_ms or step.attempt != FIRST or not request.repeatable or request.endpoint in COUNTING:
            return None
        return asyncio.get_running_loop().call_later(after_ms / 1000, self._send_twice)

    def _send_twice(self) -> None:
        if self._second is None:
            self._second = SecondSending(self._id, self._tools.dispatcher.deliver, self._ask_hedge, self._send)

    def _send(self, step: Forward) -> tuple[Attempt, Awaitable[bool]]:
        """An attempt, and its hearing: see `_hear`."""
        tools = self._tools
        request = self._received.request
        body, asked_usage = spliced_body(request, tools.splices, step)
        headers = foreign(tools.forward_list.upstream(self._request.headers, self._id))
        headers.append((b"accept-encoding", b"identity"))
        if step.ranks > 1:
            headers.append((b"x-data-parallel-rank", b"%d" % step.rank))
        attempt = Attempt(
            step,
            request.endpoint,
            event_limit=tools.settings.event_bytes,
            strip_usage=asked_usage,
            token_ids=request.token_ids,
            kept=self._kept.answer if self._kept is not None else None,
            more_headers=[*self._turn_state(step), *self._named],
        )
        return attempt, self._hear(attempt, headers, body)

    async def _hear(self, attempt: Attempt, headers: Headers, body: bytes) -> bool:
        """Send it and wait for the first byte of its answer, which is delivered; whether it is to be passed on."""
        tools, step, method = self._tools, attempt.forward, self._received.request.method
        try:
            status = await attempt.open(tools.client, self._url(step), headers, body, tools.timeouts, method)
            if await attempt.lacks_api():
                await self._without_api(step, status)
                return False
        except (WebError, EventTooLargeError) as error:
            self._failed(attempt, error)
            return False
        tools.dispatcher.deliver(
            FirstByte(request_id=self._id, attempt=step.attempt, status=status, is_stream=attempt.is_stream)
        )
        return self._relaying

    def _failed(self, attempt: Attempt, error: WebError | EventTooLargeError) -> None:
        if not attempt.closed:
            number, facts = attempt.forward.attempt, attempt.facts()
            failed = AnswerFailed(request_id=self._id, attempt=number, reason=_failure(error), answer=facts)
            self._tools.dispatcher.deliver(failed)

    async def _pass_on(self, attempt: Attempt) -> None:
        """To its end. It is sent to nobody else: neither we nor the server hold its body any longer."""
        self._received = replace(self._received, request=self._received.request.answered())
        self._request.let_go()
        try:
            await attempt.relay(self._responder, self._id)
        except (WebError, EventTooLargeError) as error:
            self._failed(attempt, error)
            return
        facts = attempt.facts()
        assert facts is not None
        if facts.complete or not self._received.request.stream:
            self._responder.finish()  # the client waits for the end, nobody for what is said of it
        number = attempt.forward.attempt
        self._tools.dispatcher.deliver(AnswerEnded(request_id=self._id, attempt=number, answer=facts))
        self._responder.finish()

    def _turn_state(self, step: Forward) -> Headers:
        """What a client that sends turn states back is given."""
        states, identity = self._tools.turn_states, self._received.resolved.identity
        if not states.on or identity.key.family != TURN_STATE_FAMILY or identity.weak:
            return []
        return [(HEADER.encode(), states.make(step.worker, identity.key.text(), time.time()))]

    async def _without_api(self, step: Forward, status: int) -> None:
        """The engine has no such API. Tokens we may have counted ourselves; all else is the engine's to answer."""
        deliver = self._tools.dispatcher.deliver
        counted = await self._count_here() if self._received.request.endpoint == "count_tokens" else None
        if counted is None:
            detail = f"Engine {step.worker} does not serve {self._request.path}: it answered with status {status}."
            failed = AnswerFailed(request_id=self._id, attempt=step.attempt, reason=API_NOT_SERVED, detail=detail)
            deliver(failed)
            return
        deliver(FirstByte(request_id=self._id, attempt=step.attempt, status=200, is_stream=False))
        if not self._relaying:
            return
        headers = [(b"content-type", b"application/json"), *self._named]
        body = msgspec.json.encode({"input_tokens": counted})
        if self._kept is not None and self._kept.answer is not None:
            self._kept.answer.add(body)
        self._responder.send(200, headers, body)
        usage = Usage(input_tokens=counted, output_tokens=0, estimated=True)
        deliver(AnswerEnded(request_id=self._id, attempt=step.attempt, answer=AnswerFacts(usage=usage, complete=True)))

    async def _count_here(self) -> int | None:
        """Tokens of the prompt by our own tokenizer; ``None`` where there is none for it."""
        counted = await self._tools.counter.count(CountPrompt(self._id, self._received.request, 0))
        self._tools.metrics.tokens.labels(counted.skipped or counted.tokens_from).inc()
        return None if counted.tokens is None else len(counted.tokens)

    def _url(self, step: Forward) -> str:
        query = f"?{self._request.query}" if self._request.query else ""
        return f"{step.url.rstrip('/')}{self._request.path}{query}"


def _failure(error: WebError | EventTooLargeError) -> AnswerFailure:
    if error.reason not in _FAILURES:
        raise error
    return cast(AnswerFailure, error.reason)

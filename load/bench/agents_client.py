"""The agents of `load.bench.agents` at work: so many root sessions at a time, through the official ``openai`` client.

Needs the package ``openai`` (extra ``demo``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import openai
from openai.types.chat import ChatCompletionChunk, ChatCompletionFunctionToolParam, ChatCompletionMessageParam

from load.bench.agents_plan import TOOLS, AgentPlan, AgentSession, AgentTurn

_TOOLS: list[ChatCompletionFunctionToolParam] = [
    {"type": "function", "function": tool["function"]}  # the same bytes as in the plan: the template renders them
    for tool in TOOLS
]


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What the client saw of one request. Tokens as the answer's usage says; ``ended_s``: seconds after the run's
    start. ``error``: what failed."""

    session_id: str
    kind: str
    turn: int
    request_id: str | None = None
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RootResult:
    """A root session, its sub-agents and tools included: seconds after the run's start."""

    session_id: str
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """Turns and root sessions in the order in which they ended."""

    turns: tuple[TurnResult, ...]
    roots: tuple[RootResult, ...]


class AgentClient:
    """Drives plans. ``timeout_s`` bounds each request as a whole; nothing is retried, so that what fails is seen."""

    def __init__(self, base_url: str, model: str, *, timeout_s: float) -> None:
        self._model = model
        self._timeout_s = timeout_s
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=timeout_s)
        self._started = 0.0
        self._turns: list[TurnResult] = []
        self._roots: list[RootResult] = []

    async def run(self, plan: AgentPlan, concurrency: int, progress: Callable[[int, int], None]) -> RunResult:
        """Every session of the plan to its end, ``concurrency`` root sessions at a time; the next one starts when one
        ends. ``progress`` is told turns that ended, and how many of them failed."""
        self._turns, self._roots = [], []
        self._started = time.monotonic()
        waiting = iter(plan.roots)
        failed = 0

        def done(result: TurnResult) -> None:
            nonlocal failed
            self._turns.append(result)
            failed += result.error is not None
            progress(len(self._turns), failed)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(plan.roots))):
                group.create_task(self._one_after_another(waiting, done))
        return RunResult(tuple(self._turns), tuple(self._roots))

    async def close(self) -> None:
        await self._client.close()

    def _now(self) -> float:
        return time.monotonic() - self._started

    async def _one_after_another(self, waiting: Iterator[AgentSession], done: Callable[[TurnResult], None]) -> None:
        for session in waiting:
            started_s = self._now()
            await self._session(session, done)
            self._roots.append(RootResult(session.session_id, started_s, self._now()))

    async def _session(self, session: AgentSession, done: Callable[[TurnResult], None]) -> None:
        """Turn by turn; a turn that fails is its last."""
        messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": session.system_prompt}]
        call_id = None
        for number, turn in enumerate(session.turns):
            if call_id is None:
                messages.append({"role": "user", "content": turn.text})
            else:
                messages.append({"role": "tool", "tool_call_id": call_id, "content": turn.text})
            result, answer = await self._ask(session, number, messages)
            done(result)
            if answer is None or turn.tool is None:
                return
            messages.append(answer.message())
            call_id = answer.call_id
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(turn.gap_s))
                for child in turn.children:
                    group.create_task(self._session(child, done))

    async def _ask(
        self, session: AgentSession, number: int, messages: list[ChatCompletionMessageParam]
    ) -> tuple[TurnResult, _Answer | None]:
        turn = session.turns[number]
        answer = _Answer()
        error: str | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(session, number, messages, answer)
        except (TimeoutError, openai.APITimeoutError):
            error = f"no end within {self._timeout_s:g} s"
        except openai.APIStatusError as failure:
            answer.request_id = failure.response.headers.get("x-request-id")
            error = f"status {failure.status_code}: {failure.message}"
        except openai.APIError as failure:
            error = f"{type(failure).__name__}: {failure}"
        if error is None and answer.finish != ("tool_calls" if turn.tool else "length") and answer.finish != "stop":
            error = f"finish reason {answer.finish}"
        result = TurnResult(
            session_id=session.session_id,
            kind=session.kind,
            turn=number,
            request_id=answer.request_id,
            error=error,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            ended_s=self._now(),
        )
        return result, None if error else answer

    async def _stream(
        self, session: AgentSession, number: int, messages: list[ChatCompletionMessageParam], answer: _Answer
    ) -> None:
        turn = session.turns[number]
        stream = await self._client.chat.completions.create(
            model=self._model,
            messages=messages,
            tools=_TOOLS,
            max_tokens=openai.omit if turn.tool else turn.max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=session.headers(number),
            extra_body=_wanted(turn),
        )
        async with stream:
            answer.request_id = stream.response.headers.get("x-request-id")
            async for chunk in stream:
                answer.take(chunk)


def _wanted(turn: AgentTurn) -> dict[str, object] | None:
    """What the simulated engine is to call."""
    if turn.tool is None:
        return None
    return {"sim_tool": {"name": turn.tool, "arguments": {"command": turn.command}}}


class _Answer:
    """What has come of one answer so far."""

    def __init__(self) -> None:
        self.request_id: str | None = None
        self.finish: str | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.call_id: str | None = None
        self._name = ""
        self._text: list[str] = []
        self._arguments: list[str] = []

    def take(self, chunk: ChatCompletionChunk) -> None:
        for choice in chunk.choices:
            self._text.append(choice.delta.content or "")
            for call in choice.delta.tool_calls or ():
                self.call_id = call.id or self.call_id
                if call.function is not None:
                    self._name = call.function.name or self._name
                    self._arguments.append(call.function.arguments or "")
            self.finish = choice.finish_reason or self.finish
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage.prompt_tokens
            self.output_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            self.cached_tokens = (details.cached_tokens if details else None) or 0

    def message(self) -> ChatCompletionMessageParam:
        """As it joins the conversation."""
        assert self.call_id is not None
        return {
            "role": "assistant",
            "content": "".join(self._text),
            "tool_calls": [
                {
                    "id": self.call_id,
                    "type": "function",
                    "function": {"name": self._name, "arguments": "".join(self._arguments)},
                }
            ],
        }

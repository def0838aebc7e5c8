"""Drives a plan through the official ``openai`` client, streaming, without retries: what fails is seen.

Needs the package ``openai`` (extra ``demo``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import openai
from openai.types.chat import ChatCompletionMessageParam

from load.workload.results import RequestResult
from load.workload.sessions import SessionPlan, WorkloadPlan

Progress = Callable[[RequestResult], None]


def _ignore(_: RequestResult) -> None:
    return None


class WorkloadClient:
    """One client for all sessions of a plan. ``timeout_s`` bounds each request as a whole; ``failure_pause_s`` is how
    long a session waits after a failed turn before it goes on."""

    def __init__(
        self, base_url: str, model: str, *, api_key: str = "none", timeout_s: float = 30.0, failure_pause_s: float = 0.5
    ) -> None:
        self._model = model
        self._timeout_s = timeout_s
        self._failure_pause_s = failure_pause_s
        self._client = openai.AsyncOpenAI(
            base_url=base_url.rstrip("/") + "/v1", api_key=api_key, max_retries=0, timeout=timeout_s
        )

    async def run(self, plan: WorkloadPlan, progress: Progress = _ignore) -> list[RequestResult]:
        """Every session of the plan to its end; results in the order in which requests ended."""
        results: list[RequestResult] = []

        def done(result: RequestResult) -> None:
            results.append(result)
            progress(result)

        async with asyncio.TaskGroup() as group:
            for session in plan.roots:
                group.create_task(self._start_later(plan, session, done))
        return results

    async def close(self) -> None:
        await self._client.close()

    async def _start_later(self, plan: WorkloadPlan, session: SessionPlan, done: Progress) -> None:
        await asyncio.sleep(session.start_s)
        await self._run_session(plan, session, done)

    async def _run_session(self, plan: WorkloadPlan, session: SessionPlan, done: Progress) -> None:
        messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": session.system_prompt}]
        for number, turn in enumerate(session.turns):
            if turn.joins:
                async with asyncio.TaskGroup() as group:
                    for child in turn.joins:
                        group.create_task(self._run_session(plan, plan.session(child), done))
            await asyncio.sleep(turn.gap_s)
            messages.append({"role": "user", "content": turn.text})
            result, reply = await self._ask(session, number, messages)
            done(result)
            if reply is None:
                await asyncio.sleep(self._failure_pause_s)
            else:
                messages.append({"role": "assistant", "content": reply})

    async def _ask(
        self, session: SessionPlan, turn: int, messages: list[ChatCompletionMessageParam]
    ) -> tuple[RequestResult, str | None]:
        started = time.monotonic()
        seen = _Seen()
        error: str | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(session, turn, messages, seen, started)
        except (TimeoutError, openai.APITimeoutError):
            error = f"timeout: no end within {self._timeout_s:g} s"
        except openai.APIStatusError as failure:
            seen.request_id = failure.response.headers.get("x-request-id")
            error = f"status {failure.status_code}: {failure.message}"
        except openai.APIError as failure:
            error = f"{type(failure).__name__}: {failure}"
        if error is None and not seen.finished:
            error = "the stream ended without a finish reason"
        result = RequestResult(
            session_id=session.session_id,
            turn=turn,
            request_id=seen.request_id,
            error=error,
            input_tokens=seen.input_tokens,
            cached_tokens=seen.cached_tokens,
            output_tokens=seen.output_tokens,
            ttft_ms=seen.ttft_ms,
            total_ms=(time.monotonic() - started) * 1000,
        )
        return result, None if error else "".join(seen.text)

    async def _stream(
        self, session: SessionPlan, turn: int, messages: list[ChatCompletionMessageParam], seen: _Seen, started: float
    ) -> None:
        stream = await self._client.chat.completions.create(
            model=self._model,
            messages=messages,
            max_tokens=session.turns[turn].max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=session.request_headers(turn),
        )
        async with stream:
            seen.request_id = stream.response.headers.get("x-request-id")
            async for chunk in stream:
                for choice in chunk.choices:
                    if choice.delta.content:
                        if seen.ttft_ms is None:
                            seen.ttft_ms = (time.monotonic() - started) * 1000
                        seen.text.append(choice.delta.content)
                    seen.finished = seen.finished or choice.finish_reason is not None
                if chunk.usage is not None:
                    seen.take_usage(chunk.usage)


class _Seen:
    """What has come of one answer so far."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.request_id: str | None = None
        self.ttft_ms: float | None = None
        self.finished = False
        self.input_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0

    def take_usage(self, usage: openai.types.CompletionUsage) -> None:
        self.input_tokens = usage.prompt_tokens
        self.output_tokens = usage.completion_tokens
        details = usage.prompt_tokens_details
        self.cached_tokens = (details.cached_tokens if details else None) or 0

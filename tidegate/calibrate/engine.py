"""The engine under measurement, over HTTP: what it is, whether it is busy, the time to first token of a prompt."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import NoReturn

import msgspec

from schemas.base import UNDECODABLE
from schemas.worker import WorkerState
from services.bridge.engine import EngineView, Sight
from services.bridge.errors import ScrapeError
from services.bridge.shell.scraper import EngineScraper
from tidegate.calibrate.sweep import Run, Subject
from tidegate.errors import CalibrationError, WrongUseError
from tidegate.streamed_answer import AnswerReader, short_error
from web.client import AnswerStream, HttpClient, Timeouts, parse_url
from web.errors import BadUrlError, WebError

SCRAPE_TIMEOUT_S = 5.0
PROMPT_TIMEOUT_S = 900.0
"""The longest that one prompt may take: a million tokens on a slow engine."""

BUSY_PATIENCE_S = 2.0
"""Gauges of engines lag: a request of ours that has just ended may still be counted."""

_POLL_S = 0.1
_ERROR_BYTES = 1 << 16
_WHAT_TO_DO: dict[int, str] = {
    HTTPStatus.BAD_REQUEST: "if that is the model's longest context, give less with --max-context",
    HTTPStatus.UNAUTHORIZED: "give --api-key",
    HTTPStatus.FORBIDDEN: "give --api-key",
    HTTPStatus.NOT_FOUND: "does it serve that model with /v1/completions? see --model",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "give less with --max-context",
}
_PASSAGE = (
    "The quick brown fox jumps over the lazy dog while seven wise wizards pack five dozen boxes of jugs and every "
    "sailor keeps a small green lamp near his window when the tide comes in from open water before morning light"
)


class _Tokens(msgspec.Struct):
    tokens: list[int]


class MeasuredEngine:
    """One engine. Methods raise `CalibrationError`, which says what to do; `close` in any case."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = base_url(url)
        self._scraper = EngineScraper(self.url, SCRAPE_TIMEOUT_S, api_key)
        self._client = HttpClient()
        self._headers = [(b"content-type", b"application/json")]
        if api_key:
            self._headers.append((b"authorization", f"Bearer {api_key}".encode()))

    async def close(self) -> None:
        """Cut what is open: a prompt that still runs is aborted by the engine."""
        await self._client.close()
        await self._scraper.close()

    async def describe(self, model: str | None, worker: WorkerState | None = None) -> Subject:
        """What is measured. ``model``: one that the engine serves (default: its first); ``worker``: what its bridge
        says of it, which is then believed, as the engine's profile will be looked up by that."""
        try:
            models = await self._scraper.models()
            sight = Sight(models, await self._scraper.version(), await self._scraper.server_info())
            metrics = await self._scraper.metrics()
        except ScrapeError as error:
            raise self._unreachable(error) from error
        if model is not None and model not in models.models:
            raise CalibrationError(
                f"{self.url} serves no model {model!r}; with --model name one of {', '.join(models.models[:10])}"
            )
        if worker is not None:
            return Subject(worker.profile, model or worker.profile.model, worker.worker)
        view = EngineView(url=self.url, engine=None, block_size=None, unhealthy_after=1, ready_after=1)
        view.scrape_worked(metrics, sight)
        return Subject(view.profile(), model or models.model)

    def _unreachable(self, error: ScrapeError) -> CalibrationError:
        if error.reason in ("http_401", "http_403"):
            return CalibrationError(f"{self.url} wants a key ({error}); give --api-key")
        return CalibrationError(f"no engine answers at {self.url} ({error}); is it up, and is the address its own?")

    async def requests(self) -> int | None:
        """Requests that run or wait in the engine; None where it does not tell."""
        try:
            report = await self._scraper.metrics()
        except ScrapeError as error:
            raise self._unreachable(error) from error
        if report is None or not report.loads:
            return None
        return sum(load.running + load.waiting for load in report.loads)

    async def check_idle(self) -> None:
        """Raises `CalibrationError` where other requests run, or nobody can tell."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BUSY_PATIENCE_S
        while count := await self.requests():
            if loop.time() > deadline:
                raise CalibrationError(
                    f"{self.url} is busy: requests that run or wait there (now {count}) would be measured too; take it "
                    "out of service first, or measure all the same with --force"
                )
            await asyncio.sleep(_POLL_S)
        if count is None:
            raise CalibrationError(
                f"{self.url} does not tell how many requests it runs (/metrics; SGLang: --enable-metrics); if it is "
                "an engine and idle, go on with --force"
            )

    async def vocabulary(self, model: str) -> list[int]:
        """Ids of some ordinary words; empty where the engine has no tokenizer to ask."""
        body = json.dumps({"model": model, "prompt": _PASSAGE, "add_special_tokens": False}).encode()
        timeouts = Timeouts(connect_s=SCRAPE_TIMEOUT_S, first_byte_s=SCRAPE_TIMEOUT_S, total_s=SCRAPE_TIMEOUT_S)
        try:
            answer = await self._client.fetch("POST", f"{self.url}/tokenize", self._headers, body, timeouts)
            tokens = msgspec.json.decode(answer.body, type=_Tokens).tokens if answer.status == HTTPStatus.OK else []
        except (WebError, *UNDECODABLE):
            return []
        return [token for token in tokens if token >= 0]

    async def measure(self, model: str, prompt: list[int]) -> Run:
        """Time to first token of a prompt of token ids."""
        body = json.dumps(
            {
                "model": model,
                "prompt": prompt,
                "max_tokens": 1,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        timeouts = Timeouts(first_byte_s=PROMPT_TIMEOUT_S, idle_s=PROMPT_TIMEOUT_S, total_s=PROMPT_TIMEOUT_S)
        loop = asyncio.get_running_loop()
        try:
            began = loop.time()
            stream = await self._client.open("POST", f"{self.url}/v1/completions", self._headers, body, timeouts)
            try:
                if stream.status != HTTPStatus.OK:
                    await self._refused(stream, len(prompt))
                answer = AnswerReader()
                while answer.problem is None and (piece := await stream.read()):
                    answer.feed(piece, loop.time() * 1000)
            finally:
                stream.close()
        except WebError as error:
            raise CalibrationError(
                f"a prompt of {len(prompt)} tokens failed at {self.url}: {error} ({error.reason}); see the engine's log"
            ) from error
        if answer.problem is not None:
            raise CalibrationError(f"{self.url} gave no completion of {len(prompt)} tokens: {answer.detail}")
        if answer.first_ms is None:
            raise CalibrationError(f"{self.url} answered a prompt of {len(prompt)} tokens without a token")
        if answer.cached_tokens:
            raise CalibrationError(
                f"{self.url} says that {answer.cached_tokens} of {len(prompt)} prompt tokens, never sent before, were "
                "cached: its times tell nothing of computing them"
            )
        return Run(answer.input_tokens or len(prompt), answer.first_ms / 1000 - began)

    async def _refused(self, stream: AnswerStream, tokens: int) -> NoReturn:
        body = b""
        while len(body) < _ERROR_BYTES and (piece := await stream.read()):
            body += piece
        told = short_error(body)
        what_to_do = _WHAT_TO_DO.get(stream.status, "see the engine's log")
        raise CalibrationError(
            f"{self.url} refused a prompt of {tokens} tokens with status {stream.status}: {told}; {what_to_do}"
        )


def base_url(url: str) -> str:
    """The engine's address without ``/v1`` and user. Raises `WrongUseError`."""
    try:
        address = parse_url(url)
    except BadUrlError as error:
        raise WrongUseError(f"{error}; write http://HOST:PORT or https://HOST:PORT") from error
    path = address.target.decode("ascii").split("?")[0].rstrip("/").removesuffix("/v1")
    scheme = "https" if address.secure else "http"
    return f"{scheme}://{address.authority.decode('ascii')}{path.rstrip('/')}"

"""The endpoint that is played against: is it there, does it take what will be sent, and one request to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal
from urllib.parse import quote

import msgspec

from schemas.base import UNDECODABLE
from tidegate.errors import TidegateError, WrongUseError
from tidegate.replay.told import Told
from tidegate.streamed_answer import AnswerReader, short_error
from web.client import ClientLimits, Headers, HttpClient, Timeouts, parse_url
from web.errors import BadUrlError, WebError

Api = Literal["completions", "chat"]
Family = Literal["tidegate", "dynamo", "none"]

_CHECK_S = 30.0
_ERROR_BYTES = 1 << 16
_PROBE = list(range(2_000, 2_033))
_VISIBLE = "".join(map(chr, range(0x21, 0x7F)))


class EndpointError(TidegateError):
    """The endpoint is not there, or does not take what would be sent; the message says what to do."""

    reason = "endpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How requests are sent. ``exact``: members that vLLM and SGLang know make every answer as long as recorded;
    without them only ``max_tokens`` is sent. ``first_byte_s``, ``total_s``: time-outs of a request."""

    api: Api = "completions"
    family: Family = "tidegate"
    api_key: str = ""
    exact: bool = True
    first_byte_s: float = 600.0
    total_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request. ``prompt`` as `content.Prompts` writes it; ``session``: ``None`` sends none."""

    request_id: str
    model: str
    prompt: bytes
    output_tokens: int
    session: str | None = None
    parent: str | None = None
    final: bool = False
    wants_ids: bool = False


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Endpoint:
    """An OpenAI-shaped endpoint at ``url`` (with or without ``/v1``). `close` it. Raises `WrongUseError` for an address
    that is none. ``https://``: the certificate must be trusted (``SSL_CERT_FILE`` names others than the system's)."""

    def __init__(self, url: str, manner: Manner) -> None:
        self.url = _base_url(url)
        self._manner = manner
        self._client = HttpClient(ClientLimits(idle_per_origin=4096))
        self._timeouts = Timeouts(
            first_byte_s=manner.first_byte_s, idle_s=max(120.0, manner.first_byte_s), total_s=manner.total_s
        )
        self._common: Headers = [(b"content-type", b"application/json")]
        if manner.api_key:
            self._common.append((b"authorization", f"Bearer {manner.api_key}".encode()))
        self._target = "/v1/completions" if manner.api == "completions" else "/v1/chat/completions"

    async def close(self) -> None:
        """Cut what is open: engines stop working on it."""
        await self._client.close()

    async def models(self) -> list[str]:
        """Names of its models. Raises `EndpointError`."""
        timeouts = Timeouts(first_byte_s=_CHECK_S, total_s=_CHECK_S)
        try:
            answer = await self._client.fetch("GET", f"{self.url}/v1/models", self._common, b"", timeouts)
        except WebError as error:
            raise EndpointError(f"nobody answers at {self.url} ({error}); is it up? give another with --url") from error
        if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise EndpointError(f"{self.url} wants a key; give --api-key")
        try:
            if answer.status != HTTPStatus.OK:
                raise ValueError(f"status {answer.status}")
            return [model.id for model in msgspec.json.decode(answer.body, type=_Models).data]
        except (ValueError, *UNDECODABLE) as error:
            raise EndpointError(
                f"{self.url}/v1/models names no models ({error}): is that an OpenAI endpoint?"
            ) from error

    async def probe(self, model: str) -> bool:
        """One small request as all will be. Whether the endpoint tells an answer's token ids. Raises
        `EndpointError`."""
        chat = self._manner.api == "chat"
        prompt = b"hello" if chat else b",".join(b"%d" % token for token in _PROBE)
        asked = Asked(request_id="replay-probe", model=model, prompt=prompt, output_tokens=2, wants_ids=not chat)
        told = await self.ask(asked, time.monotonic)
        if told.reason is not None:
            what = "a prompt of words" if chat else "a prompt of token ids"
            hint = "" if chat else "; if it takes no token ids, try --api chat"
            hint += "; if it does not know ignore_eos and min_tokens, add --no-exact" if self._manner.exact else ""
            raise EndpointError(
                f"{self.url}{self._target} did not take {what}: {told.detail or told.reason} ({told.reason}){hint}"
            )
        if not chat and told.input_tokens not in (None, len(_PROBE)):
            raise EndpointError(
                f"{self.url} counts {told.input_tokens} tokens where {len(_PROBE)} ids were sent: it does not take "
                "token ids as they are; try --api chat"
            )
        return bool(told.token_ids) and len(told.token_ids or ()) == told.output_tokens

    async def ask(self, asked: Asked, now_ms: Callable[[], float]) -> Told:
        """Send it and read its answer to the end; whatever goes wrong is told, not raised."""
        body, headers = self._body(asked), self._headers(asked)
        reader = AnswerReader()
        sent_ms = now_ms()
        reason: str | None = None
        detail = ""
        try:
            stream = await self._client.open("POST", self.url + self._target, headers, body, self._timeouts)
            try:
                if stream.status == HTTPStatus.OK:
                    await stream.pipe(lambda piece: reader.feed(piece, now_ms()))
                    reader.close()
                    reason, detail = reader.problem, reader.detail
                else:
                    said = b""
                    while len(said) < _ERROR_BYTES and (piece := await stream.read()):
                        said += piece
                    reason, detail = f"status_{stream.status}", short_error(said)
            finally:
                stream.close()
        except WebError as error:
            reason, detail = error.reason, str(error)
        return Told(
            sent_ms=sent_ms,
            ended_ms=now_ms(),
            first_ms=reader.first_ms,
            last_ms=reader.last_ms,
            reason=reason,
            detail=detail,
            input_tokens=reader.input_tokens,
            output_tokens=reader.output_tokens if reader.output_tokens is not None else reader.events,
            cached_tokens=reader.cached_tokens,
            token_ids=reader.token_ids or None,
        )

    def _body(self, asked: Asked) -> bytes:
        """The prompt is put in as it is: it may be long, and is JSON already."""
        members: dict[str, object] = {
            "model": asked.model,
            "max_tokens": asked.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._manner.exact:
            members |= {"ignore_eos": True, "min_tokens": asked.output_tokens}
        if asked.wants_ids:
            members["return_token_ids"] = True
        rest = msgspec.json.encode(members)[1:]
        if self._manner.api == "chat":
            return b'{"messages":[{"role":"user","content":"' + asked.prompt + b'"}],' + rest
        return b'{"prompt":[' + asked.prompt + b"]," + rest

    def _headers(self, asked: Asked) -> Headers:
        headers: Headers = [*self._common, (b"x-request-id", _value(asked.request_id))]
        family = self._manner.family
        if family == "none" or asked.session is None:
            return headers
        prefix = f"x-{family}-".encode()
        headers.append((prefix + b"session-id", _value(asked.session)))
        if asked.parent is not None:
            headers.append((prefix + b"parent-session-id", _value(asked.parent)))
        if asked.final:
            headers.append((prefix + b"session-final", b"true"))
        return headers


def _base_url(url: str) -> str:
    """The endpoint without ``/v1`` and user. Raises `WrongUseError`."""
    try:
        address = parse_url(url)
    except BadUrlError as error:
        raise WrongUseError(f"--url: {url!r} is no address; write http://HOST:PORT or https://HOST") from error
    path = address.target.decode("ascii").split("?")[0].rstrip("/").removesuffix("/v1").rstrip("/")
    authority = address.authority.decode("ascii")
    return f"{'https' if address.secure else 'http'}://{authority}{path}"


def _value(text: str) -> bytes:
    """Printable ASCII stays as it is; the rest, which no header holds, is percent-encoded."""
    return text.encode() if text.isascii() and text.isprintable() else quote(text, safe=_VISIBLE).encode()

"""What a client asks: bodies of chat and completions, read and checked, with errors as vLLM words them. The other APIs'
bodies become chat's (`load.engine.messages_api`, `load.engine.responses_api`)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from load.engine.errors import EngineError

MAX_SALT = 1024
HeaderLookup = Callable[[str], bytes | None]


class ApiError(EngineError):
    """The client's fault: answered with ``status`` in OpenAI's error shape."""

    reason = "bad_request"

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


def error_body(status: int, message: str, kind: str, param: str | None = None) -> bytes:
    """OpenAI's error shape, as vLLM fills it."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonBody(msgspec.Struct, kw_only=True):
    """Fields that chat and completions share. Unknown fields are ignored, as vLLM does.

    ``kv_hints``: an envelope (`load.engine.hints`), carried out before the request is queued; nobody is told of its
    results, as in engines that pass hints on to a connector. ``sim_tool``: name of the tool to call, or
    ``{"name", "arguments"}``; header ``X-Sim-Tool`` does the same.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_hints: dict[str, Any] | None = None
    sim_tool: str | dict[str, Any] | None = None

    @property
    def longest_output(self) -> int | None:
        return self.max_tokens


def common_fields(body: CommonBody) -> dict[str, Any]:
    """What other APIs' requests share with chat's, by name."""
    return {name: getattr(body, name) for name in CommonBody.__struct_fields__}


class ChatBody(CommonBody, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True

    @property
    def longest_output(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionBody(CommonBody, kw_only=True):
    """``POST /v1/completions``."""

    prompt: Any = None
    """Text, token ids, or a list of one of them: see `completion_prompt`."""


class TokenizeBody(msgspec.Struct, kw_only=True):
    """``POST /tokenize``: ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


B = TypeVar("B")


def read_body(raw: bytes, kind: type[B]) -> B:
    """Decode a JSON body. Raises `ApiError` (400)."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise ApiError(f"Validation error: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"There was an error parsing the body: {error}") from error


def completion_prompt(prompt: Any) -> str | array[int]:
    """The one prompt of a completions body: text, or token ids. Raises `ApiError`."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        if not prompt:
            raise ApiError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
        return prompt
    if isinstance(prompt, list) and prompt:
        try:
            return array("I", prompt)
        except (TypeError, OverflowError) as error:
            raise ApiError(f"prompt must be text or token ids ({error})", param="prompt") from error
    raise ApiError("prompt must be one non-empty text or list of token ids", param="prompt")


def check_common(body: CommonBody) -> None:
    """Rules of the shared fields. Raises `ApiError`."""
    if body.n is not None and body.n != 1:
        raise ApiError("only n = 1 is served by this engine", param="n")
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= MAX_SALT:
        problem = "must be a non-empty string if provided" if not body.cache_salt else "is too long"
        raise ApiError(f"Parameter 'cache_salt' {problem}. (parameter=cache_salt)", param="cache_salt")
    longest = body.longest_output
    if longest is not None and longest < 1:
        raise ApiError(f"max_tokens must be at least 1, got {longest}.", param="max_tokens")
    if body.stream_options is not None and not body.stream:
        raise ApiError("Stream options can only be defined when `stream=True`.", param="stream_options")


def output_room(prompt_tokens: int, longest: int | None, max_model_len: int) -> int:
    """How many tokens may come after the prompt. Raises `ApiError` when prompt or wish are too long."""
    room = max_model_len - prompt_tokens
    if room < 1:
        raise ApiError(
            f"This model's maximum context length is {max_model_len} tokens. However, your request has {prompt_tokens} "
            "input tokens. Please reduce the length of the input messages.",
            param="input_tokens",
        )
    if longest is not None and longest > room:
        raise ApiError(
            f"'max_tokens' or 'max_completion_tokens' is too large: {longest}. This model's maximum context length is "
            f"{max_model_len} tokens and your request has {prompt_tokens} input tokens ({longest} > {max_model_len} - "
            f"{prompt_tokens}).",
            param="max_tokens",
        )
    return room if longest is None else longest


def priority_of(body: CommonBody, header: HeaderLookup) -> int:
    """The header wins over the body (vLLM 0.28+). Raises `ApiError`."""
    return _integer(header("x-vllm-priority"), "X-Vllm-Priority", body.priority)


def rank_of(header: HeaderLookup, ranks: int) -> int | None:
    """The rank that the client pins; ``None``: free choice. Raises `ApiError`."""
    raw = header("x-data-parallel-rank")
    if raw is None:
        return None
    rank = _integer(raw, "X-data-parallel-rank", 0)
    if not 0 <= rank < ranks:
        raise ApiError(f"data_parallel_rank {rank} is out of range [0, {ranks}).")
    return rank


def session_of(body: CommonBody, header: HeaderLookup) -> str | None:
    """Attribution only: body, header, ``vllm_xargs``, in this order (spec: engine-events §2.4)."""
    if body.session_id:
        return body.session_id
    raw = header("x-session-id")
    if raw:
        return raw.decode("latin-1")
    session = (body.vllm_xargs or {}).get("session_id")
    return session if isinstance(session, str) and session else None


def sim_tool_of(body: CommonBody, header: HeaderLookup) -> tuple[str | None, Mapping[str, Any] | None]:
    """(name, arguments) of the tool that a test wants called; ``None`` where it does not say. Raises `ApiError`."""
    wish = body.sim_tool
    if wish is None:
        raw = header("x-sim-tool")
        return (raw.decode("latin-1"), None) if raw else (None, None)
    if isinstance(wish, str):
        return wish, None
    name, arguments = wish.get("name"), wish.get("arguments")
    if not isinstance(name, str) or not (arguments is None or isinstance(arguments, dict)):
        raise ApiError('sim_tool must be a name or {"name": ..., "arguments": {...}}', param="sim_tool")
    return name, arguments


def _integer(raw: bytes | None, name: str, default: int) -> int:
    if raw is None:
        return default
    try:
        return int(raw)
    except ValueError as error:
        raise ApiError(f"{name} must be an integer") from error

"""The APIs of the front door: one extractor each, over one decode of the body.

A body is decoded once into the few members that routing needs; messages and tools stay views of the client's own
bytes (`msgspec.Raw`) and are decoded only where a prompt is rendered, off the event loop. Nothing is re-serialised.
Members that serve weak identity never make a request bad; members that change how we serve it must have the right
type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from schemas.base import UNDECODABLE
from schemas.session import InputTrigger
from services.ingress.errors import BadJsonError, BadRequestError
from services.ingress.identity import BodyFacts, Signals

Endpoint = Literal["chat_completions", "completions", "responses", "messages", "count_tokens"]

PATHS: dict[str, Endpoint] = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
}

ONE_SHOT_MESSAGES = 8
"""A side request has few messages; a longer list is never looked through for one."""

MAX_FIELD_CHARACTERS = 8192
"""A longer identity field counts as absent: it would be in every fact of its request. Harnesses send below 1,000."""

TITLE_TELL = b'"Generate a title for this conversation'
"""How OpenCode's title request begins (harness.md §4)."""


LARGEST_NUMBER = (1 << 53) - 1
"""A client's numbers are cut to what every reader of JSON can hold; the engine judges the number itself."""

_NULL = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Messages to render, as the client's own bytes. ``api`` says in whose shape they are; ``system`` is Anthropic's
    top-level ``system`` or Responses' ``instructions``; ``template_kwargs`` go to the chat template."""

    api: Literal["chat", "messages", "responses"]
    messages: tuple[msgspec.Raw, ...]
    tools: tuple[msgspec.Raw, ...] = ()
    system: msgspec.Raw | None = None
    template_kwargs: msgspec.Raw | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A completions prompt as text."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """A completions prompt as token ids."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LargePrompt:
    """A prompt over the bound: read, and let go (its parts take up to twenty times its bytes)."""


Prompt = ChatPrompt | TextPrompt | TokensPrompt | LargePrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """One request as read. ``body`` is the client's own; ``prompt`` is ``None`` where it cannot be scored (a batch, a
    stored previous response). ``choices``: how many answers are asked for. ``usage_asked``: the client will see usage
    in its stream; ``stream_options``: the body has that member, as an object. ``cache_salt``: the namespace in which
    the engine caches the prompt (spec: engine-events §3)."""

    endpoint: Endpoint
    model: str
    body: bytes
    facts: BodyFacts
    prompt: Prompt | None
    stream: bool = False
    choices: int = 1
    max_output_tokens: int | None = None
    usage_asked: bool = True
    priority: int = 0
    cache_salt: str | None = None


class _Nvext(msgspec.Struct, forbid_unknown_fields=True):
    """The peer's extension object; an unknown member is an error (spec: identity-and-traces §1.4, §1.6, H22)."""

    greed_sampling: Any = None
    use_raw_prompt: Any = None
    annotations: Any = None
    backend_instance_id: Any = None
    token_data: Any = None
    max_thinking_tokens: Any = None
    cache_salt: Any = None
    extra_fields: Any = None
    metadata_upload: Any = None
    prefill_worker_id: Any = None
    decode_worker_id: Any = None
    dp_rank: Any = None
    prefill_dp_rank: Any = None
    agent_hints: Any = None
    request_timestamp_ms: Any = None
    routing_constraints: Any = None
    router: Any = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct, kw_only=True):
    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    priority: int | None = None
    nvext: _Nvext | None = None
    tools: list[msgspec.Raw] | None = None
    user: Any = None
    metadata: Any = None
    client_metadata: Any = None
    prompt_cache_key: Any = None


class _ChatBody(_Body, kw_only=True):
    messages: list[msgspec.Raw]
    cache_salt: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    chat_template_kwargs: msgspec.Raw = _NULL
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class _CompletionsBody(_Body, kw_only=True):
    prompt: str | list[int | str | list[int]]
    cache_salt: Any = None
    max_tokens: int | None = None
    add_special_tokens: bool = True


class _ResponsesBody(_Body, kw_only=True):
    input: msgspec.Raw
    cache_salt: Any = None
    instructions: msgspec.Raw = _NULL
    max_output_tokens: int | None = None
    previous_response_id: str | None = None


class _MessagesBody(_Body, kw_only=True):
    messages: list[msgspec.Raw]
    system: msgspec.Raw = _NULL
    max_tokens: int | None = None
    output_config: Any = None


class _Head(msgspec.Struct):
    """A message or input item, as far as its role and type."""

    role: str = ""
    type: str = ""
    content: msgspec.Raw = _NULL


class _Block(msgspec.Struct):
    type: str = ""


_head = msgspec.json.Decoder(_Head)
_blocks = msgspec.json.Decoder(list[_Block])
_items = msgspec.json.Decoder(str | list[msgspec.Raw])
_user_id = msgspec.json.Decoder(dict[str, Any])
_NO_HEAD = _Head()


def endpoint_of(path: str) -> Endpoint | None:
    """Which API a request target asks for, its query ignored; ``None`` for none of ours."""
    return PATHS.get(path.partition("?")[0])


def read_request(endpoint: Endpoint, body: bytes, *, prompt_bytes: int | None = None) -> ClientRequest:
    """One request; of a body over ``prompt_bytes`` the prompt is not kept. Raises `BadJsonError`, `BadRequestError`."""
    decoder, build = _EXTRACTORS[endpoint]
    try:
        decoded = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _bad_request(error) from error
    except UNDECODABLE as error:
        raise BadJsonError(f"The request body is not a JSON object: {error}") from error
    if not decoded.model.strip():
        raise BadRequestError("model: must not be empty", param="model")
    request = build(decoded, body)
    if prompt_bytes is not None and len(body) > prompt_bytes and request.prompt is not None:
        return replace(request, prompt=LargePrompt())
    return request


def _bad_request(error: msgspec.ValidationError) -> BadRequestError:
    """msgspec's sentence, with the member it is about: ``Expected `str`, got `int` - at `$.model` ``."""
    problem, _, place = str(error).partition(" - at ")
    path = place.strip("`").removeprefix("$").removeprefix(".")
    if path.startswith("nvext"):
        return BadRequestError(f"invalid nvext: {problem}", param=path, reason="invalid_nvext")
    return BadRequestError(f"{path}: {problem}" if path else problem, param=path or None)


def _chat(body: _ChatBody, raw: bytes) -> ClientRequest:
    options = body.stream_options
    prompt = ChatPrompt(
        api="chat",
        messages=tuple(body.messages),
        tools=tuple(body.tools or ()),
        template_kwargs=_given(body.chat_template_kwargs),
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
    )
    return ClientRequest(
        endpoint="chat_completions",
        model=body.model,
        body=raw,
        facts=_message_facts(body, body.messages, _chat_trigger(body.messages)),
        prompt=prompt,
        stream=bool(body.stream),
        choices=body.n or 1,
        max_output_tokens=_first_number(body.max_completion_tokens, body.max_tokens),
        usage_asked=not body.stream or bool(options and options.include_usage),
        priority=_priority(body),
        cache_salt=_salt(body.cache_salt),
    )


def _completions(body: _CompletionsBody, raw: bytes) -> ClientRequest:
    options = body.stream_options
    prompt, prompts = _completions_prompt(body)
    return ClientRequest(
        endpoint="completions",
        model=body.model,
        body=raw,
        facts=BodyFacts(fields=_identity_fields(body)),
        prompt=prompt,
        stream=bool(body.stream),
        choices=max(body.n or 1, body.best_of or 1) * prompts,
        max_output_tokens=_first_number(body.max_tokens),
        usage_asked=not body.stream or bool(options and options.include_usage),
        priority=_priority(body),
        cache_salt=_salt(body.cache_salt),
    )


def _responses(body: _ResponsesBody, raw: bytes) -> ClientRequest:
    try:
        given = _items.decode(body.input)
    except UNDECODABLE as error:
        raise BadRequestError("input: must be a text or a list of items", param="input") from error
    items = [body.input] if isinstance(given, str) else given
    trigger: InputTrigger = "user_message" if isinstance(given, str) else _responses_trigger(given)
    prompt = ChatPrompt(
        api="responses", messages=tuple(items), tools=tuple(body.tools or ()), system=_given(body.instructions)
    )
    return ClientRequest(
        endpoint="responses",
        model=body.model,
        body=raw,
        facts=_message_facts(body, [] if isinstance(given, str) else items, trigger),
        prompt=None if body.previous_response_id else prompt,
        stream=bool(body.stream),
        max_output_tokens=_first_number(body.max_output_tokens),
        priority=_priority(body),
        cache_salt=_salt(body.cache_salt),
    )


def _messages(body: _MessagesBody, raw: bytes, endpoint: Endpoint = "messages") -> ClientRequest:
    return ClientRequest(
        endpoint=endpoint,
        model=body.model,
        body=raw,
        facts=_message_facts(
            body, body.messages, _anthropic_trigger(body.messages), _member(body.output_config, "format", "type")
        ),
        prompt=ChatPrompt(
            api="messages", messages=tuple(body.messages), tools=tuple(body.tools or ()), system=_given(body.system)
        ),
        stream=bool(body.stream),
        max_output_tokens=_first_number(body.max_tokens),
        priority=_priority(body),
    )


def _count_tokens(body: _MessagesBody, raw: bytes) -> ClientRequest:
    return _messages(body, raw, "count_tokens")


_EXTRACTORS: dict[Endpoint, tuple[msgspec.json.Decoder[Any], Callable[[Any, bytes], ClientRequest]]] = {
    "chat_completions": (msgspec.json.Decoder(_ChatBody), _chat),
    "completions": (msgspec.json.Decoder(_CompletionsBody), _completions),
    "responses": (msgspec.json.Decoder(_ResponsesBody), _responses),
    "messages": (msgspec.json.Decoder(_MessagesBody), _messages),
    "count_tokens": (msgspec.json.Decoder(_MessagesBody), _count_tokens),
}


# Facts


def _message_facts(
    body: _Body, messages: list[msgspec.Raw], trigger: InputTrigger, output_format: str | None = None
) -> BodyFacts:
    one_shot = len(messages) <= ONE_SHOT_MESSAGES and all(_is_input(_read_head(message)) for message in messages)
    return BodyFacts(
        has_tools=bool(body.tools),
        one_shot=one_shot,
        title_asked=one_shot and not body.tools and any(TITLE_TELL in bytes(message) for message in messages),
        output_format=output_format,
        input_trigger=trigger,
        fields=_identity_fields(body),
    )


def _identity_fields(body: _Body) -> Signals:
    """Weak identity: only texts, trimmed, that are printable and at most `MAX_FIELD_CHARACTERS` long."""
    found = {
        "codex_session": _member(body.client_metadata, "session_id"),
        "codex_thread": _member(body.client_metadata, "thread_id"),
        "codex_turn_metadata": _member(body.client_metadata, "x-codex-turn-metadata"),
        "user_session": _user_session(_member(body.metadata, "user_id")),
        "prompt_cache_key": body.prompt_cache_key,
    }
    return {
        name: value.strip()
        for name, value in found.items()
        if isinstance(value, str) and len(value) <= MAX_FIELD_CHARACTERS and value.strip() and value.isprintable()
    }


def _user_session(user_id: Any) -> str | None:
    """Claude Code's ``metadata.user_id``: a JSON object with ``session_id``, or ``user_..._session_<id>``."""
    if not isinstance(user_id, str):
        return None
    if user_id.startswith("{"):
        try:
            session = _member(_user_id.decode(user_id), "session_id")
        except UNDECODABLE:
            return None
        return session if isinstance(session, str) else None
    return user_id.rpartition("_session_")[2] if "_session_" in user_id else None


def _member(value: Any, *path: str) -> Any:
    """A nested member, or ``None`` where there is no such thing."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _read_head(message: msgspec.Raw) -> _Head:
    try:
        return _head.decode(message)
    except UNDECODABLE:
        return _NO_HEAD


def _is_input(head: _Head) -> bool:
    """Something that was said to the model, not by it or by its tools."""
    return head.type in ("", "message") and head.role in ("user", "system", "developer")


# What made the sender send it: the last item decides (spec: identity-and-traces §1.4)

_CHAT_TRIGGERS: dict[str, InputTrigger] = {
    "user": "user_message",
    "tool": "tool_result",
    "function": "tool_result",
}


def _chat_trigger(messages: list[msgspec.Raw]) -> InputTrigger:
    return _CHAT_TRIGGERS.get(_read_head(messages[-1]).role, "other") if messages else "other"


def _responses_trigger(items: list[msgspec.Raw]) -> InputTrigger:
    head = _read_head(items[-1]) if items else _NO_HEAD
    if head.type == "function_call_output":
        return "tool_result"
    return "user_message" if head.type in ("", "message") and head.role == "user" else "other"


def _anthropic_trigger(messages: list[msgspec.Raw]) -> InputTrigger:
    head = _read_head(messages[-1]) if messages else _NO_HEAD
    if head.role != "user":
        return "other"
    try:
        blocks = _blocks.decode(head.content)
    except UNDECODABLE:
        return "user_message"
    return "tool_result" if any(block.type == "tool_result" for block in blocks) else "user_message"


def _completions_prompt(body: _CompletionsBody) -> tuple[Prompt | None, int]:
    """The prompt, and how many there are; a batch is not scored."""
    given = body.prompt
    if isinstance(given, str):
        return TextPrompt(given, body.add_special_tokens), 1
    kinds = {type(item) for item in given}
    if len(kinds) != 1:
        raise BadRequestError("prompt: must hold texts, or tokens, and at least one", param="prompt")
    if kinds == {int}:
        return _tokens(given), 1
    if len(given) > 1:
        return None, len(given)
    only = given[0]
    return (_tokens(only) if isinstance(only, list) else TextPrompt(str(only), body.add_special_tokens)), 1


def _tokens(ids: Sequence[object]) -> TokensPrompt:
    tokens = tuple(token for token in ids if isinstance(token, int) and 0 <= token < 1 << 32)
    if not tokens or len(tokens) != len(ids):
        raise BadRequestError("prompt: token ids must be unsigned 32-bit numbers", param="prompt")
    return TokensPrompt(tokens)


def _priority(body: _Body) -> int:
    """The client's wish; what the engine sees is decided by admission."""
    if body.priority is not None:
        return _bounded(body.priority)
    hinted = _member(body.nvext.agent_hints, "priority") if body.nvext else None
    return _bounded(hinted) if isinstance(hinted, int) and not isinstance(hinted, bool) else 0


def _salt(given: Any) -> str | None:
    """A text; anything else, and the empty text, is for the engine to refuse."""
    return given if isinstance(given, str) and given else None


def _given(raw: msgspec.Raw) -> msgspec.Raw | None:
    """``None`` for a member that is absent or null."""
    return None if raw == _NULL else raw


def _first_number(*numbers: int | None) -> int | None:
    return next((_bounded(number) for number in numbers if number is not None), None)


def _bounded(number: int) -> int:
    return max(-LARGEST_NUMBER, min(LARGEST_NUMBER, number))

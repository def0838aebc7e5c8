"""The APIs of the front door: one extractor each, over one decode of the body.

A body is decoded once into the few members that routing needs; messages and tools stay views of the client's own
bytes (`msgspec.Raw`) and are decoded only where a prompt is rendered, off the event loop. Nothing is re-serialised.
Members that serve weak identity never make a request bad; members that change how we serve it must have the right
type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec

from schemas.base import UNDECODABLE
from schemas.session import InputTrigger
from services.ingress.body_facts import (
    Told,
    anthropic_trigger,
    chat_trigger,
    identity_fields,
    member,
    message_facts,
    responses_trigger,
)
from services.ingress.completions_prompt import count_texts, is_empty, read_prompt
from services.ingress.decoding import no_json
from services.ingress.errors import BadJsonError, BadRequestError
from services.ingress.identity import PASSED_APIS, BodyFacts
from services.ingress.modalities import TEXT_ONLY, Media, media_of

Endpoint = Literal[
    "chat_completions",
    "completions",
    "responses",
    "messages",
    "count_tokens",
    "embeddings",
    "tokenize",
    "detokenize",
    "passthrough",
]

PATHS: dict[str, Endpoint] = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
}

REQUEST_ID_HEADERS: dict[Endpoint, tuple[bytes, ...]] = dict.fromkeys(
    ("messages", "count_tokens"), (b"x-request-id", b"request-id")
)
"""Headers of an answer by which an API's clients read our request id, where it is not ``x-request-id`` alone."""

LARGEST_NUMBER = (1 << 53) - 1
"""A client's numbers are cut to what every reader of JSON can hold; the engine judges the number itself."""

MOST_CHOICES = 1 << 16
"""Answers to one prompt that are told apart; vLLM takes 16,384."""

SPLICED = ("stream_options", "priority", "cache_salt", "nvext", "session_id", "vllm_xargs", "kv_hints")
"""Members that we may put into a body: which of them it lacks is known when it is read."""

_NULL = msgspec.Raw(b"null")
_ABSENT: Any = msgspec.UNSET
"""In place of a member of `SPLICED` that is not there: as false as ``None``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Messages to render, as the client's own bytes. ``api`` says in whose shape they are; ``system`` is Anthropic's
    top-level ``system`` or Responses' ``instructions``; ``template_kwargs`` go to the chat template, and so does
    ``effort``, how much thinking the client asks for; ``thinks``: whether it wants any."""

    api: Literal["chat", "messages", "responses"]
    messages: tuple[msgspec.Raw, ...]
    tools: tuple[msgspec.Raw, ...] = ()
    system: msgspec.Raw | None = None
    template_kwargs: msgspec.Raw | None = None
    effort: str | None = None
    thinks: bool = True
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
    """One request as read. ``body`` is the client's own; ``prompt`` is ``None`` where it cannot be scored (a batch,
    a stored previous response, one that its engine makes by a template of the client's own or cuts). ``choices``:
    how many answers are asked for. ``usage_asked``: the client will see usage in its stream; ``stream_options``:
    the body has that member, as an object. ``cache_salt``: the namespace in which the engine caches the prompt
    (spec: engine-events §3). ``priority``: lower runs earlier; ``as_engine_counts``: it is the engine's own member,
    and means what that engine takes it for. ``expected_output_tokens``: what the client expects of its answer,
    beside what it allows (`services.ingress.client_hints`). ``media``: what the prompt holds besides text, where
    that is known at reading (of a prompt that is counted, it is known then). ``token_ids``: the client asked for
    the ids of what is generated. ``tenant_salt``: the salt that goes into the body in place of the client's;
    ``nvext_salt``: the one that the client has in ``nvext``; ``apart``: what we keep of the prompt is only for
    requests with the same. ``absent``: those of `SPLICED` that are surely not in the body."""

    endpoint: Endpoint
    method: str = "POST"
    model: str
    body: bytes
    facts: BodyFacts
    prompt: Prompt | None
    stream: bool = False
    choices: int = 1
    max_output_tokens: int | None = None
    usage_asked: bool = True
    priority: int = 0
    as_engine_counts: bool = False
    expected_output_tokens: int | None = None
    cache_salt: str | None = None
    media: Media = TEXT_ONLY
    token_ids: bool = False
    tenant_salt: str | None = None
    nvext_salt: str | None = None
    apart: str = ""
    absent: frozenset[str] = frozenset()

    def answered(self) -> ClientRequest:
        """What is known of it, without what it asks for."""
        return replace(self, body=b"", prompt=None)

    @property
    def passed(self) -> bool:
        """It is passed on as it comes; see `services.ingress.passing`."""
        return self.endpoint in PASSED_APIS

    @property
    def repeatable(self) -> bool:
        """Whether an engine may get it twice: what an unknown API does with the second nobody knows."""
        return self.endpoint != "passthrough" or self.method in ("GET", "HEAD")


class _AgentHints(msgspec.Struct, forbid_unknown_fields=True):
    """What the peer's clients say of a request; an unknown member or another type is an error there too."""

    priority: int | None = None
    strict_priority: int | None = None
    osl: Annotated[int, msgspec.Meta(ge=0)] | None = None
    speculative_prefill: bool | None = None
    latency_sensitivity: float | None = None


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
    agent_hints: _AgentHints | None = None
    request_timestamp_ms: Any = None
    routing_constraints: Any = None
    router: Any = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(Told, kw_only=True):
    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = _ABSENT
    n: int | None = None
    best_of: int | None = None
    priority: int | None = _ABSENT
    nvext: _Nvext | None = _ABSENT
    cache_salt: Any = _ABSENT
    session_id: msgspec.Raw = _ABSENT
    vllm_xargs: msgspec.Raw = _ABSENT
    kv_hints: msgspec.Raw = _ABSENT


class _ChatBody(_Body, kw_only=True):
    messages: list[msgspec.Raw]
    return_token_ids: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: Any = None
    chat_template_kwargs: msgspec.Raw = _NULL
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Any = None
    documents: Any = None
    add_special_tokens: Any = None
    truncate_prompt_tokens: Any = None


class _CompletionsBody(_Body, kw_only=True):
    prompt: msgspec.Raw = _NULL
    prompt_embeds: msgspec.Raw = _NULL
    return_token_ids: Any = None
    max_tokens: int | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: Any = None


class _ResponsesBody(_Body, kw_only=True):
    input: msgspec.Raw
    instructions: msgspec.Raw = _NULL
    reasoning: Any = None
    chat_template_kwargs: msgspec.Raw = _NULL
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    conversation: Any = None


class _MessagesBody(_Body, kw_only=True):
    messages: list[msgspec.Raw]
    cache_salt: msgspec.Raw = _ABSENT
    system: msgspec.Raw = _NULL
    chat_template_kwargs: msgspec.Raw = _NULL
    max_tokens: int | None = None
    thinking: Any = None
    output_config: Any = None


_items = msgspec.json.Decoder(str | list[msgspec.Raw])


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
        raise BadJsonError(no_json(body, error)) from error
    if not body.isascii():
        _check_encoding(body)
    if not decoded.model.strip():
        raise BadRequestError("model: must not be empty", param="model")
    large = prompt_bytes is not None and len(body) > prompt_bytes
    is_completion = isinstance(decoded, _CompletionsBody)
    request = _completions(decoded, body, large=large) if is_completion else build(decoded, body)
    if decoded.nvext or decoded.priority:
        priority, as_engine_counts = _priority(decoded)
        request = replace(
            request,
            priority=priority,
            as_engine_counts=as_engine_counts,
            expected_output_tokens=_expected(decoded),
        )
    if decoded.nvext and decoded.nvext.cache_salt is not None:
        request = replace(request, nvext_salt=str(decoded.nvext.cache_salt))
    if large and request.prompt is not None:
        media = media_of(body, request.prompt.messages) if isinstance(request.prompt, ChatPrompt) else request.media
        return replace(request, prompt=LargePrompt(), media=media)
    return request


def _absent(body: _Body) -> frozenset[str]:
    """The names of `SPLICED` that the body lacks, however they would be spelled."""
    return frozenset(name for name in SPLICED if getattr(body, name) is msgspec.UNSET)


def _check_encoding(body: bytes) -> None:
    """The decoder passes over what it does not keep: what is no UTF-8 there would be found by the splice,
    too late, or by nobody but the engine. Raises `BadJsonError`."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise BadJsonError(f"The request body is not UTF-8 (byte {error.start}).") from error


def _bad_request(error: msgspec.ValidationError) -> BadRequestError:
    """msgspec's sentence, with the member it is about: ``Expected `str`, got `int` - at `$.model` ``."""
    problem, _, place = str(error).partition(" - at ")
    path = place.strip("`").removeprefix("$").removeprefix(".")
    if path.startswith("nvext"):
        return BadRequestError(f"invalid nvext: {problem}", param=path, reason="invalid_nvext")
    return BadRequestError(f"{path}: {problem}" if path else problem, param=path or None)


def _chat(body: _ChatBody, raw: bytes) -> ClientRequest:
    options = body.stream_options
    of_its_own = body.chat_template or body.documents or body.add_special_tokens is True
    prompt = ChatPrompt(
        api="chat",
        messages=tuple(body.messages),
        tools=tuple(body.tools or ()),
        template_kwargs=_given(body.chat_template_kwargs),
        effort=_text(body.reasoning_effort),
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
    )
    return ClientRequest(
        endpoint="chat_completions",
        model=body.model,
        body=raw,
        facts=message_facts(body, body.messages, chat_trigger(body.messages)),
        prompt=None if of_its_own or body.truncate_prompt_tokens is not None else prompt,
        stream=bool(body.stream),
        choices=_choices(body.n),
        max_output_tokens=_first_number(body.max_completion_tokens, body.max_tokens),
        usage_asked=not body.stream or bool(options and options.include_usage),
        cache_salt=_text(body.cache_salt),
        token_ids=body.return_token_ids is True,
        absent=_absent(body),
    )


def _completions(body: _CompletionsBody, raw: bytes, *, large: bool = False) -> ClientRequest:
    options = body.stream_options
    embedded = _embedded(body.prompt_embeds)
    prompt, prompts = _completions_prompt(body, embedded, large)
    return ClientRequest(
        endpoint="completions",
        model=body.model,
        body=raw,
        facts=BodyFacts(fields=identity_fields(body)),
        prompt=prompt if body.truncate_prompt_tokens is None else None,
        stream=bool(body.stream),
        choices=_choices(max(body.n or 1, body.best_of or 1)) * prompts,
        max_output_tokens=_first_number(body.max_tokens),
        usage_asked=not body.stream or bool(options and options.include_usage),
        cache_salt=_text(body.cache_salt),
        media=Media(("embeddings",), embedded, len(memoryview(body.prompt_embeds))) if embedded else TEXT_ONLY,
        token_ids=body.return_token_ids is True,
        absent=_absent(body),
    )


def _responses(body: _ResponsesBody, raw: bytes) -> ClientRequest:
    try:
        given = _items.decode(body.input)
    except UNDECODABLE as error:
        raise BadRequestError("input: must be a text or a list of items", param="input") from error
    items = [body.input] if isinstance(given, str) else given
    trigger: InputTrigger = "user_message" if isinstance(given, str) else responses_trigger(given)
    scored = not (body.previous_response_id or body.conversation)
    prompt = ChatPrompt(
        api="responses",
        messages=tuple(items),
        tools=tuple(body.tools or ()),
        system=_given(body.instructions),
        template_kwargs=_given(body.chat_template_kwargs),
        effort=member(body.reasoning, "effort"),
    )
    return ClientRequest(
        endpoint="responses",
        model=body.model,
        body=raw,
        facts=message_facts(body, [] if isinstance(given, str) else items, trigger),
        prompt=prompt if scored else None,
        stream=bool(body.stream),
        max_output_tokens=_first_number(body.max_output_tokens),
        cache_salt=_text(body.cache_salt),
        media=TEXT_ONLY if scored else media_of(raw, items),
        absent=_absent(body),
    )


def _messages(body: _MessagesBody, raw: bytes, endpoint: Endpoint = "messages") -> ClientRequest:
    return ClientRequest(
        endpoint=endpoint,
        model=body.model,
        body=raw,
        facts=message_facts(
            body, body.messages, anthropic_trigger(body.messages), member(body.output_config, "format", "type")
        ),
        prompt=ChatPrompt(
            api="messages",
            messages=tuple(body.messages),
            tools=tuple(body.tools or ()),
            system=_given(body.system),
            template_kwargs=_given(body.chat_template_kwargs),
            effort=member(body.output_config, "effort"),
            thinks=member(body.thinking, "type") != "disabled",
        ),
        stream=bool(body.stream),
        max_output_tokens=_first_number(body.max_tokens),
        absent=_absent(body),
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


def _completions_prompt(body: _CompletionsBody, embedded: int, large: bool) -> tuple[Prompt | None, int]:
    """The prompt, and how many there are; a batch is not scored, nor are embeddings. Of a ``large`` one nothing is
    built."""
    given = _given(body.prompt)
    raw = b"" if given is None else bytes(given)
    if embedded and (not raw or is_empty(raw)):
        return None, embedded
    if not raw:
        raise BadRequestError("prompt: is missing", param="prompt")
    try:
        prompt, prompts = read_prompt(raw, keep=not (embedded or large))
    except msgspec.ValidationError as error:
        raise _bad_request(error) from error
    if embedded or prompts > 1:
        return None, embedded + prompts
    if prompt is None:
        return LargePrompt(), 1
    return (TextPrompt(prompt, body.add_special_tokens) if isinstance(prompt, str) else TokensPrompt(prompt)), 1


def _embedded(raw: msgspec.Raw) -> int:
    """How many prompts are given as embeddings (vLLM's ``prompt_embeds``: one, or a list of texts in base64)."""
    given = _given(raw)
    if given is None:
        return 0
    embeds = bytes(given)
    if not embeds.startswith(b"["):
        return 1
    return 0 if is_empty(embeds) else max(1, count_texts(embeds))


def _priority(body: _Body) -> tuple[int, bool]:
    """The client's wish, lower for earlier, and whether it is the engine's own member; what the engine sees is decided
    by admission. What is said to a scheduler stands before what is said to the engine."""
    hinted = body.nvext.agent_hints.priority if body.nvext and body.nvext.agent_hints else None
    if hinted is not None:
        return -_bounded(hinted), False
    return _bounded(body.priority or 0), bool(body.priority)


def _expected(body: _Body) -> int | None:
    hinted = body.nvext.agent_hints.osl if body.nvext and body.nvext.agent_hints else None
    return _bounded(hinted) if hinted else None


def _text(given: Any) -> str | None:
    """A text; anything else, and the empty text, is for the engine to refuse."""
    return given if isinstance(given, str) and given else None


def _given(raw: msgspec.Raw) -> msgspec.Raw | None:
    """``None`` for a member that is absent or null."""
    return None if raw == _NULL else raw


def _first_number(*numbers: int | None) -> int | None:
    return next((_bounded(number) for number in numbers if number is not None), None)


def _choices(number: int | None) -> int:
    """At least one; of what no engine takes, as much as a row can say."""
    return max(1, min(number or 1, MOST_CHOICES))


def _bounded(number: int) -> int:
    return max(-LARGEST_NUMBER, min(LARGEST_NUMBER, number))

"""The APIs of the front door: one extractor each, over one decode of the body.

A body is decoded once into the few members that routing needs; messages and tools stay views of the client's own
bytes (`msgspec.Raw`) and are decoded only where a prompt is rendered, off the event loop. Nothing is re-serialised.
Members that serve weak identity never make a request bad; members that change how we serve it must have the right
type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from schemas.base import UNDECODABLE
from schemas.session import InputTrigger
from services.ingress.bodies import (
    Body,
    ChatBody,
    CompletionsBody,
    MessagesBody,
    ResponsesBody,
    build_lists,
    decoders_of,
)
from services.ingress.body_facts import (
    anthropic_trigger,
    chat_trigger,
    identity_fields,
    message_facts,
    responses_trigger,
)
from services.ingress.completions_prompt import count_texts, is_empty, read_prompt
from services.ingress.decoding import no_json
from services.ingress.errors import BadJsonError, BadRequestError
from services.ingress.identity import PASSED_APIS, BodyFacts
from services.ingress.members import (
    USUAL_BYTES,
    given,
    is_set,
    is_true,
    member,
    text,
    value,
)
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


_items = msgspec.json.Decoder(str | list[msgspec.Raw])


def endpoint_of(path: str) -> Endpoint | None:
    """Which API a request target asks for, its query ignored; ``None`` for none of ours."""
    return PATHS.get(path.partition("?")[0])


def read_request(endpoint: Endpoint, body: bytes, *, prompt_bytes: int | None = None) -> ClientRequest:
    """One request; of a body over ``prompt_bytes`` the prompt is not kept. Raises `BadJsonError`, `BadRequestError`."""
    decoder, large_decoder, build = _EXTRACTORS[endpoint]
    if len(body) > USUAL_BYTES:
        decoder = large_decoder
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
    built = len(body) <= USUAL_BYTES or build_lists(decoded)
    large = not built or (prompt_bytes is not None and len(body) > prompt_bytes)
    is_completion = isinstance(decoded, CompletionsBody)
    request = _completions(decoded, body, large=large) if is_completion else build(decoded, body)
    if decoded.nvext or decoded.priority:
        priority, as_engine_counts = _priority(decoded)
        request = replace(
            request,
            priority=priority,
            as_engine_counts=as_engine_counts,
            expected_output_tokens=_expected(decoded),
        )
    if decoded.nvext and given(decoded.nvext.cache_salt) is not None:
        request = replace(request, nvext_salt=str(value(decoded.nvext.cache_salt)))
    if large and request.prompt is not None:
        media = media_of(body, request.prompt.messages) if isinstance(request.prompt, ChatPrompt) else request.media
        return replace(request, prompt=LargePrompt(), media=media)
    return request


def _absent(body: Body) -> frozenset[str]:
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


def _chat(body: ChatBody, raw: bytes) -> ClientRequest:
    options = body.stream_options
    of_its_own = is_set(body.chat_template) or is_set(body.documents) or is_true(body.add_special_tokens)
    prompt = ChatPrompt(
        api="chat",
        messages=tuple(body.messages),
        tools=tuple(body.tools or ()),
        template_kwargs=given(body.chat_template_kwargs),
        effort=text(body.reasoning_effort),
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
    )
    return ClientRequest(
        endpoint="chat_completions",
        model=body.model,
        body=raw,
        facts=message_facts(body, body.messages, chat_trigger(body.messages)),
        prompt=None if of_its_own or given(body.truncate_prompt_tokens) else prompt,
        stream=bool(body.stream),
        choices=_choices(body.n),
        max_output_tokens=_first_number(body.max_completion_tokens, body.max_tokens),
        usage_asked=not body.stream or bool(options and options.include_usage),
        cache_salt=text(body.cache_salt),
        token_ids=is_true(body.return_token_ids),
        absent=_absent(body),
    )


def _completions(body: CompletionsBody, raw: bytes, *, large: bool = False) -> ClientRequest:
    options = body.stream_options
    embedded = _embedded(body.prompt_embeds)
    prompt, prompts = _completions_prompt(body, embedded, large)
    return ClientRequest(
        endpoint="completions",
        model=body.model,
        body=raw,
        facts=BodyFacts(fields=identity_fields(body)),
        prompt=None if given(body.truncate_prompt_tokens) else prompt,
        stream=bool(body.stream),
        choices=_choices(max(body.n or 1, body.best_of or 1)) * prompts,
        max_output_tokens=_first_number(body.max_tokens),
        usage_asked=not body.stream or bool(options and options.include_usage),
        cache_salt=text(body.cache_salt),
        media=Media(("embeddings",), embedded, len(memoryview(body.prompt_embeds))) if embedded else TEXT_ONLY,
        token_ids=is_true(body.return_token_ids),
        absent=_absent(body),
    )


def _responses(body: ResponsesBody, raw: bytes) -> ClientRequest:
    try:
        said = _items.decode(body.input)
    except UNDECODABLE as error:
        raise BadRequestError("input: must be a text or a list of items", param="input") from error
    items = [body.input] if isinstance(said, str) else said
    trigger: InputTrigger = "user_message" if isinstance(said, str) else responses_trigger(said)
    scored = not (body.previous_response_id or is_set(body.conversation))
    prompt = ChatPrompt(
        api="responses",
        messages=tuple(items),
        tools=tuple(body.tools or ()),
        system=given(body.instructions),
        template_kwargs=given(body.chat_template_kwargs),
        effort=_effort(member(body.reasoning, "effort")),
    )
    return ClientRequest(
        endpoint="responses",
        model=body.model,
        body=raw,
        facts=message_facts(body, [] if isinstance(said, str) else items, trigger),
        prompt=prompt if scored else None,
        stream=bool(body.stream),
        max_output_tokens=_first_number(body.max_output_tokens),
        cache_salt=text(body.cache_salt),
        media=TEXT_ONLY if scored else media_of(raw, items),
        absent=_absent(body),
    )


def _messages(body: MessagesBody, raw: bytes, endpoint: Endpoint = "messages") -> ClientRequest:
    return ClientRequest(
        endpoint=endpoint,
        model=body.model,
        body=raw,
        facts=message_facts(
            body, body.messages, anthropic_trigger(body.messages), text(member(body.output_config, "format", "type"))
        ),
        prompt=ChatPrompt(
            api="messages",
            messages=tuple(body.messages),
            tools=tuple(body.tools or ()),
            system=given(body.system),
            template_kwargs=given(body.chat_template_kwargs),
            effort=_effort(member(body.output_config, "effort")),
            thinks=text(member(body.thinking, "type")) != "disabled",
        ),
        stream=bool(body.stream),
        max_output_tokens=_first_number(body.max_tokens),
        absent=_absent(body),
    )


def _count_tokens(body: MessagesBody, raw: bytes) -> ClientRequest:
    return _messages(body, raw, "count_tokens")


_EXTRACTORS: dict[
    Endpoint,
    tuple[msgspec.json.Decoder[Any], msgspec.json.Decoder[Any], Callable[[Any, bytes], ClientRequest]],
] = {
    "chat_completions": (*decoders_of(ChatBody), _chat),
    "completions": (*decoders_of(CompletionsBody), _completions),
    "responses": (*decoders_of(ResponsesBody), _responses),
    "messages": (*decoders_of(MessagesBody), _messages),
    "count_tokens": (*decoders_of(MessagesBody), _count_tokens),
}


def _completions_prompt(body: CompletionsBody, embedded: int, large: bool) -> tuple[Prompt | None, int]:
    """The prompt, and how many there are; a batch is not scored, nor are embeddings. Of a ``large`` one nothing is
    built."""
    said = given(body.prompt)
    raw = b"" if said is None else bytes(said)
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
    if given(raw) is None:
        return 0
    embeds = bytes(raw)
    if not embeds.startswith(b"["):
        return 1
    return 0 if is_empty(embeds) else max(1, count_texts(embeds))


def _priority(body: Body) -> tuple[int, bool]:
    """The client's wish, lower for earlier, and whether it is the engine's own member; what the engine sees is decided
    by admission. What is said to a scheduler stands before what is said to the engine."""
    hinted = body.nvext.agent_hints.priority if body.nvext and body.nvext.agent_hints else None
    if hinted is not None:
        return -_bounded(hinted), False
    return _bounded(body.priority or 0), bool(body.priority)


def _expected(body: Body) -> int | None:
    hinted = body.nvext.agent_hints.osl if body.nvext and body.nvext.agent_hints else None
    return _bounded(hinted) if hinted else None


def _effort(raw: msgspec.Raw) -> Any:
    """As it is said, of any type: templates and engines judge it."""
    return None if given(raw) is None else value(raw)


def _first_number(*numbers: int | None) -> int | None:
    return next((_bounded(number) for number in numbers if number is not None), None)


def _choices(number: int | None) -> int:
    """At least one; of what no engine takes, as much as a row can say."""
    return max(1, min(number or 1, MOST_CHOICES))


def _bounded(number: int) -> int:
    return max(-LARGEST_NUMBER, min(LARGEST_NUMBER, number))

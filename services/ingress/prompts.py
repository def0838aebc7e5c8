"""A prompt as the model sees it: messages of any API in one shape, rendered by the model's own chat template.

Rendering follows Hugging Face's (immutable sandbox, its filters and globals) and what vLLM does to messages before
it: text parts are joined with a line break unless the template loops over them, tool-call arguments are decoded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from schemas.base import UNDECODABLE
from services.ingress.canonical import Conversation, Dialect, conversation_of
from services.ingress.endpoints import ChatPrompt
from services.ingress.errors import TemplateError

_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template's expressions can raise inside the sandbox."""

_DICT_ATTRIBUTES = frozenset(dir(dict))

StrftimeNow = Callable[[str], str]
"""The template's clock: a `strftime` format to the time as text."""


class _Generation(jinja2.ext.Extension):
    """Hugging Face's ``{% generation %}`` block marks the assistant's tokens for training; its body renders as is."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's ``tojson``: nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise TemplateError(f"the chat template refuses the messages: {message}")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which looks for an attribute first and for an item then. An object out of JSON has no attributes
    but those of every dict: a message's ``role`` is looked up once, without an exception."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


class ChatTemplate:
    """A ``chat_template`` of a ``tokenizer_config.json`` or a ``chat_template.jinja``.

    ``variables``: ``bos_token``, ``eos_token`` and the like, as text. Raises `TemplateError` for a template that does
    not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, str], strftime_now: StrftimeNow) -> None:
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=strftime_now)
        try:
            self._template = environment.from_string(source)
            self.loops_over_parts = _loops_over_content(environment.parse(source))
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. ``extra``: the request's ``chat_template_kwargs``. Raises `TemplateError`."""
        variables = {
            **self._variables,
            **(extra or {}),
            "messages": [self._prepared(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except _TEMPLATE_FAILURES as error:
            raise TemplateError(f"the messages cannot be rendered: {error}") from error

    def _prepared(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if type(message.get("content")) is str and not self.loops_over_parts and not message.get("tool_calls"):
            return message  # as nearly all are: the sandbox changes nothing in it
        prepared = dict(message)
        prepared["content"] = self._content(message.get("content"))
        calls = message.get("tool_calls")
        if calls:
            if not isinstance(calls, list):
                raise TemplateError("tool_calls is not a list")
            prepared["tool_calls"] = [_with_arguments(call) for call in calls]
        return prepared

    def _content(self, content: Any) -> Any:
        parts = [content] if isinstance(content, str) else content or []
        if not isinstance(parts, list):
            raise TemplateError("content is neither a text nor a list of parts")
        texts = [_text_of(part) for part in parts]
        if self.loops_over_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)


def render_prompt(template: ChatTemplate, prompt: ChatPrompt, dialect: Dialect = "vllm") -> str:
    """The text of one chat prompt, as an engine of this ``dialect`` sees it. Raises `TemplateError`."""
    conversation: Conversation = conversation_of(prompt, dialect)
    text = template.render(
        conversation.messages,
        conversation.tools,
        add_generation_prompt=prompt.add_generation_prompt,
        extra=_decoded(prompt.template_kwargs),
    )
    if prompt.continue_final_message and conversation.messages:
        last = conversation.messages[-1].get("content")
        if isinstance(last, str) and last.strip() in text:
            return text[: text.rindex(last.strip()) + len(last.strip())]
    return text


def _decoded(raw: msgspec.Raw | None) -> dict[str, Any] | None:
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except UNDECODABLE as error:
        raise TemplateError(f"chat_template_kwargs is not an object: {error}") from error


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise TemplateError(f"only text can be counted here, not {kind}")
    return text


def _with_arguments(call: Any) -> Any:
    """A tool call whose arguments are decoded where they are JSON, as vLLM does before it renders."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str | None):
        return call
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _loops_over_content(template: jinja2.nodes.Template) -> bool:
    """Whether the template iterates over a message's content, so that it wants parts and not a text."""
    for loop in template.find_all(jinja2.nodes.For):
        iterated = loop.iter
        if isinstance(iterated, jinja2.nodes.Name) and iterated.name == "content":
            return True
        if isinstance(iterated, jinja2.nodes.Getattr) and iterated.attr == "content":
            return True
        if isinstance(iterated, jinja2.nodes.Getitem):
            argument = iterated.arg
            if isinstance(argument, jinja2.nodes.Const) and argument.value == "content":
                return True
    return False

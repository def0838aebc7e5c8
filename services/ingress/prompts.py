"""A prompt as the model sees it: messages of any API in one shape, rendered by the model's own chat template.

Rendering follows Hugging Face's (immutable sandbox, its filters and globals); what engines do to messages before it is
in `canonical` and `chat_messages`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from services.ingress.canonical import conversation_of, template_options
from services.ingress.chat_messages import prepared
from services.ingress.content_format import TEMPLATE_FAILURES, knows_developer, loops_over_content, system_first
from services.ingress.contents import Dialect, texts_of
from services.ingress.decoded import Decode, decode_all
from services.ingress.endpoints import ChatPrompt
from services.ingress.errors import TemplateError

_EFFORTS = ("low", "medium", "high", "xhigh", "max")
"""What a client of Messages can ask for."""

_GOES_ON = "CONTINUE_FINAL_MESSAGE_TAG "
"""Hugging Face's mark in an unfinished message: whether the space after it is still there says whether the template
trims messages."""

_DICT_ATTRIBUTES = frozenset(dir(dict))
_OPEN = frozenset({LoopContext, Namespace, str})
"""Types of which a template may see all that does not begin with an underscore (``str.format`` in the sandbox's form).
"""

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
    but those of every dict: a message's ``role`` is looked up once, without an exception. And of what is `_OPEN` the
    sandbox keeps nothing back but what begins with an underscore: to ask it costs ten times the look."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if kind in _OPEN and attribute[:1] != "_":
            try:
                value = getattr(obj, attribute)
            except AttributeError:
                return super().getattr(obj, attribute)
            formats = self.wrap_str_format(value)
            return value if formats is None else formats
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
            self.loops_over_parts = loops_over_content(environment.parse(source))
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self._knows_developer = knows_developer(source)
        self.system_first = system_first(source)
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        dialect: Dialect = "vllm",
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. ``extra``: the request's ``chat_template_kwargs``. Raises `TemplateError`."""
        variables = {
            "documents": None,
            **self._variables,
            **(extra or {}),
            "messages": prepared(
                messages, dialect, loops_over_parts=self.loops_over_parts, knows_developer=self._knows_developer
            ),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except TEMPLATE_FAILURES as error:
            raise TemplateError(f"the messages cannot be rendered: {error}") from error

    @cached_property
    def effort_of_none(self) -> str:
        """What vLLM takes for "do not think" in Messages: ``none``, or ``low`` where the template treats ``none`` as it
        treats some effort, or refuses it."""

        def said(effort: str) -> str | None:
            options = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
            try:
                return self.render([{"role": "user", "content": "Hi"}], extra=options)
            except TemplateError:
                return None

        none = said("none")
        return "low" if none is None or none in map(said, _EFFORTS) else "none"


def render_prompt(
    template: ChatTemplate, prompt: ChatPrompt, dialect: Dialect = "vllm", decode: Decode = decode_all
) -> str:
    """The text of one chat prompt, as an engine of this ``dialect`` sees it. Raises `TemplateError`."""
    conversation = conversation_of(prompt, dialect, system_first=template.system_first, decode=decode)
    options = template_options(prompt, "none" if prompt.thinks else template.effort_of_none)
    if not conversation.continues:
        return template.render(
            conversation.messages,
            conversation.tools,
            dialect=dialect,
            add_generation_prompt=prompt.add_generation_prompt,
            extra=options,
        )
    text = template.render(
        _marked(conversation.messages), conversation.tools, dialect=dialect, add_generation_prompt=False, extra=options
    )
    before, mark, after = text.rpartition(_GOES_ON.strip())
    if not mark:
        raise TemplateError("the chat template does not show the message that is to be continued")
    return before if after.startswith(" ") else before.rstrip()


def _marked(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with a mark at the end of the last text, where the model goes on. Raises `TemplateError`."""
    *others, last = messages or [{}]
    content = last.get("content")
    texts = texts_of(content)
    if not texts:
        raise TemplateError("there is no message to continue")
    return [*others, last | {"content": [*texts[:-1], texts[-1] + _GOES_ON]}]

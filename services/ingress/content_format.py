"""What a chat template is like, as vLLM finds it out (``renderers/hf.py``, ``entrypoints/anthropic/serving.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template's expressions can raise inside the sandbox."""

_TURN = [{"role": "system", "content": "t"}, {"role": "user", "content": "t"}]


def loops_over_content(template: nodes.Template) -> bool:
    """Whether the template iterates over a message's content, so that it wants parts and not a text."""
    messages = _messages(template)
    in_macros: dict[int, frozenset[str]] = {}
    for macro in template.find_all(nodes.Macro):
        parameters = _content_parameters(template, macro, messages)
        for loop in macro.find_all(nodes.For):
            in_macros[id(loop)] = parameters
    return any(_is_over_content(loop, messages, in_macros.get(id(loop))) for loop in template.find_all(nodes.For))


def _is_over_content(loop: nodes.For, messages: set[str], parameters: frozenset[str] | None) -> bool:
    """``parameters``: those of the macro that the loop is in which are given a content; ``None`` outside of macros."""
    if any(_is_access(loop.iter, name, "content") for name in messages):
        return True
    if not isinstance(loop.iter, nodes.Name):
        return False
    return loop.iter.name == "content" if parameters is None else loop.iter.name in parameters


def _content_parameters(template: nodes.Template, macro: nodes.Macro, messages: set[str]) -> frozenset[str]:
    """The parameters of ``macro`` that some call gives a message's content."""
    named = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in template.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given: list[tuple[str, nodes.Node]] = list(zip(named, call.args, strict=False))
        given += [(pair.key, pair.value) for pair in call.kwargs if pair.key in named]
        found |= {name for name, value in given if any(_is_access(value, each, "content") for each in messages)}
    return frozenset(found)


def _messages(template: nodes.Template) -> set[str]:
    """Names of the variables of loops over the messages, or over what was assigned from them."""
    lists = ["messages"]
    for name in lists:
        for assigned in template.find_all(nodes.Assign):
            target = assigned.target
            if isinstance(target, nodes.Name) and target.name not in lists and _is_access(assigned.node, name):
                lists.append(target.name)
    return set(_targets(template, lists))


def _targets(template: nodes.Template, lists: list[str]) -> Iterator[str]:
    for loop in template.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name) and any(_is_access(loop.iter, name) for name in lists):
            yield loop.target.name


def _is_access(node: nodes.Node | None, name: str, member: str | None = None) -> bool:
    """Whether ``node`` reads the variable ``name``, or its ``member``: as it is, filtered, tested or a slice of it."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _is_access(node.node, name, member)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_access(node.node, name, member)
    if member is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return _is_named(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == member
    return isinstance(node, nodes.Getattr) and _is_named(node.node, name) and node.attr == member


def _is_named(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def knows_developer(source: str) -> bool:
    """Whether the template has a word for the role ``developer``."""
    return '"developer"' in source or "'developer'" in source


def system_first(source: str) -> bool:
    """Whether the template refuses a system message that is not the first. As vLLM asks it: without the filters and
    functions of Hugging Face, so that a template that calls one of them outright counts as one that refuses."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    messages: list[Any] = _TURN * 2
    try:
        environment.from_string(source).render(messages=messages, add_generation_prompt=False)
    except TEMPLATE_FAILURES:
        return True
    return False

"""Prompts as the model sees them: chat templates as Hugging Face renders them, every API's messages in one shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.ingress.canonical import conversation_of
from services.ingress.contents import Dialect
from services.ingress.endpoints import ChatPrompt, Endpoint, read_request
from services.ingress.errors import TemplateError
from services.ingress.prompts import ChatTemplate, render_prompt
from services.ingress.tokens import from_ids, shared_blocks

CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def template(source: str) -> ChatTemplate:
    """A template with a clock that stands still."""
    return ChatTemplate(source, {"bos_token": "<s>"}, lambda form: f"now as {form}")


def prompt(endpoint: Endpoint, **body: Any) -> ChatPrompt:
    """The prompt of a small request."""
    given = read_request(endpoint, json.dumps({"model": "m", **body}).encode()).prompt
    assert isinstance(given, ChatPrompt)
    return given


def test_a_chat_is_rendered() -> None:
    """Messages, special tokens, the generation prompt; parts of text are joined as vLLM joins them."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = render_prompt(template(CHATML), prompt("chat_completions", messages=[{"role": "user", "content": parts}]))
    assert text == "<s><|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"


def test_globals_and_filters_of_hugging_face() -> None:
    """tojson without HTML escapes, strftime_now, loop controls, the generation block, trimmed blocks."""
    source = """{%- for tool in tools %}
    {%- if loop.index > 1 %}{% break %}{% endif %}
{{ tool | tojson }}|{{ tool | tojson(indent=1) }}
{%- endfor %}
{% generation %}x{% endgeneration %}|{{ strftime_now("%d %b") }}|{{ extra }}"""
    rendered = template(source).render([], [{"a": "<é>"}, {"b": 1}], extra={"extra": 7})
    assert rendered == '{"a": "<é>"}|{\n "a": "<é>"\n}x|now as %d %b|7'


def test_a_template_that_refuses() -> None:
    """raise_exception is the client's business: a named error that only costs the score."""
    with pytest.raises(TemplateError, match="roles must alternate"):
        template("{{ raise_exception('roles must alternate') }}").render([])


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[5].role }}", "{{ 1 / 0 }}"],
)
def test_a_template_cannot_reach_out(source: str) -> None:
    """The sandbox holds: no attributes of Python, no change of what it was given, no other error than ours."""
    with pytest.raises(TemplateError):
        template(source).render([{"role": "user", "content": "x"}])


def test_names_in_a_template_are_looked_up_as_jinja_does() -> None:
    """An object's member by its name, unless every dict has an attribute of that name; what is not there is undefined,
    and so is what the sandbox does not show."""
    source = (
        "{% for m in tools %}{{ m.role }}|{{ m.absent is defined }}|{{ m.items is callable }}|{{ m.__class__ }}|"
        "{{ m['items'] }}|{{ m.content.upper() }}{% endfor %}"
    )
    tools = [{"role": "user", "content": "a", "items": 7}]
    ours = template(source).render([], tools)
    assert ours == ImmutableSandboxedEnvironment().from_string(source).render(tools=tools)
    assert ours == "user|False|True||7|A"


@pytest.mark.parametrize(
    "expression",
    [
        *("'a'.upper()", "'a'.nothing", "'{0}'.format(7)", "'{0.a}'.format(ns)", "'{a}'.format_map({'a': 1})"),
        *("ns.a", "ns.nothing", "ns.b.title()", "ns.items"),
        *("loop.first", "loop.nothing", "loop.previtem", "loop.cycle('x', 'y')"),
        *("'a'.__class__", "'a'.__len__()", "loop._iterator", "loop.__init__", "ns.__class__", "ns._c"),
        *("'{0.__class__}'.format(1)", "'{0._c}'.format(ns)", "[].append(1)"),
    ],
)
def test_the_sandbox_keeps_back_what_it_does(expression: str) -> None:
    """Texts, loops and namespaces are read without asking it: what they show, and what not, is the same."""
    source = "{% set ns = namespace(a=1, b='b', _c=2) %}{% for m in [1] %}{{ EXPRESSION }}{% endfor %}"
    source = source.replace("EXPRESSION", expression)
    renders: list[Callable[[], str]] = [
        ImmutableSandboxedEnvironment().from_string(source).render,
        partial(template(source).render, []),
    ]
    said = []
    for render in renders:
        try:
            said.append(render())
        except (jinja2.TemplateError, TemplateError) as error:
            said.append(str(error).removeprefix("the messages cannot be rendered: "))
    assert said[0] == said[1]


def test_a_template_that_does_not_compile() -> None:
    """Said when it is loaded, not at the first request."""
    with pytest.raises(TemplateError, match="does not compile"):
        template("{% for %}")


@pytest.mark.parametrize(
    ("source", "loops"),
    [
        (CHATML, False),
        ("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}", True),
        ("{% macro t(content) %}{% for p in content %}{{ p.text }}{% endfor %}{% endmacro %}", False),
        (
            "{% macro t(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
            "{% for m in messages[1:] %}{{ t(m.content) }}{% endfor %}",
            True,
        ),
        ("{% set all = messages %}{% for m in all %}{% for p in m.content[1:] %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for call in m.tool_calls %}{% endfor %}{% endfor %}", False),
    ],
)
def test_content_is_given_as_the_template_wants_it(source: str, loops: bool) -> None:
    """A template that loops over a message's content gets parts, any other one text; a macro counts where it is given
    one (vllm/renderers/hf.py)."""
    assert template(source).loops_over_parts == loops
    if loops and "p.text" not in source and "[1:]" not in source:
        assert template(source).render([{"role": "user", "content": "x"}, {"role": "user", "content": None}]) == "x"


def test_tool_call_arguments_are_decoded() -> None:
    """vLLM decodes arguments before it renders, so that their spacing is the template's; broken ones, and those that
    are no object, are an empty one."""
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }};{% endfor %}{% endfor %}"
    )
    calls = [{"function": {"name": "f", "arguments": text}} for text in ('{"a":1}', "{broken", "[1]", "", None)]
    rendered = template(source).render([{"role": "assistant", "content": None, "tool_calls": calls}])
    assert rendered == '{"a": 1};{};{};{};{};'


@pytest.mark.parametrize(
    "content", [[{"type": "image_url", "image_url": {"url": "x"}}], 5, [5], {"text": "x"}], ids=str
)
def test_what_is_not_text_is_not_counted(content: Any) -> None:
    """Images and nonsense: no tokens, a named error, never a crash (C6)."""
    with pytest.raises(TemplateError):
        render_prompt(template(CHATML), prompt("chat_completions", messages=[{"role": "user", "content": content}]))


def test_chat_options() -> None:
    """``chat_template_kwargs`` reach the template; a final message may be continued."""
    source = CHATML + "{{ 'think' if enable_thinking }}"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    given = prompt("chat_completions", **body, chat_template_kwargs={"enable_thinking": True})
    assert render_prompt(template(source), given).endswith("assistant\nthink")
    body["messages"].append({"role": "assistant", "content": "so far "})
    continued = render_prompt(template(CHATML), prompt("chat_completions", **body, continue_final_message=True))
    assert continued.endswith("<|im_start|>assistant\nso far ")
    trimmed = CHATML.replace("message.content", "message.content | trim")
    continued = render_prompt(template(trimmed), prompt("chat_completions", **body, continue_final_message=True))
    assert continued.endswith("<|im_start|>assistant\nso far")


SYSTEM: list[dict[str, Any]] = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.1de;"},
    {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "And careful."},
]


def test_anthropic_messages() -> None:
    """As vLLM reads them: system texts run together without the attribution line, tool results before the text beside
    them, thinking as reasoning for templates that show it (vllm/entrypoints/anthropic/serving.py)."""
    given = prompt(
        "messages",
        system=SYSTEM,
        messages=[
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "text", "text": "I look"},
                    {"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "out"}]},
                    {"type": "text", "text": "go on"},
                ],
            },
            {"role": "system", "content": []},
        ],
        tools=[{"name": "Bash", "description": "d", "input_schema": {"type": "object"}}],
    )
    conversation = conversation_of(given)
    call = {"id": "t", "type": "function", "function": {"name": "Bash", "arguments": '{"command": "ls"}'}}
    assert conversation.messages == [
        {"role": "system", "content": "You are an agent.And careful."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": "out"},
        {"role": "user", "content": "go on"},
    ]
    function = {"name": "Bash", "description": "d", "parameters": {"type": "object"}}
    assert conversation.tools == [{"type": "function", "function": function}]


def test_rolling_cache_marks_and_shapes_do_not_show() -> None:
    """A text and a list of one text are the same, with or without a cache mark (C5, harness.md §2)."""
    marked = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]
    shapes = ["x", [{"type": "text", "text": "x"}], marked]
    seen = {
        render_prompt(template(CHATML), prompt("messages", messages=[{"role": "user", "content": shape}]))
        for shape in shapes
    }
    assert len(seen) == 1


def test_sglang_reads_messages_in_its_own_way() -> None:
    """It keeps the attribution line, puts system texts on lines of their own, says an empty description, and shows no
    thinking (sglang/srt/entrypoints/anthropic/serving.py)."""
    said = [{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "yes"}]}]
    given = prompt("messages", system=SYSTEM, messages=said, tools=[{"name": "Bash", "input_schema": {}}])
    conversation = conversation_of(given, "sglang")
    assert conversation.messages == [
        {"role": "system", "content": f"{SYSTEM[0]['text']}\nYou are an agent.\nAnd careful."},
        {"role": "assistant", "content": "yes"},
    ]
    assert conversation.tools[0]["function"]["description"] == ""
    assert conversation_of(given).tools[0]["function"]["description"] is None


def test_the_billing_line_breaks_no_prefix() -> None:
    """Two sessions that differ in the attribution line only: their prefix breaks inside that line where the engine
    keeps it, and nowhere where it does not; the bodies are not touched (C5)."""
    other = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.7e6;"}, *SYSTEM[1:]]
    given = [
        prompt("messages", system=system, messages=[{"role": "user", "content": "hi"}]) for system in (SYSTEM, other)
    ]

    def chains(dialect: Dialect) -> list[bytes]:
        """Chains of the two prompts, one token a character."""
        rendered = [render_prompt(template(CHATML), one, dialect) for one in given]
        return [from_ids(map(ord, text), 8).chain for text in rendered]

    kept = chains("sglang")
    place = len("<s><|im_start|>system\nx-anthropic-billing-header: cc_version=2.1.332.")
    assert shared_blocks(*kept) == place // 8 < len(kept[0]) // 8
    dropped = chains("vllm")
    assert shared_blocks(*dropped) == len(dropped[0]) // 8 == len(dropped[1]) // 8


def test_responses_items() -> None:
    """Calls, texts and thoughts join the assistant's message before them, ids do not show."""
    given = prompt(
        "responses",
        instructions="base",
        input=[
            {"type": "message", "role": "developer", "id": "msg_1", "content": [{"type": "input_text", "text": "d"}]},
            {"role": "user", "content": "u"},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "shell", "arguments": '{"x":1}', "id": "fc_1"},
            {"type": "function_call_output", "call_id": "c", "output": "out", "id": "fco_1"},
            {"type": "function_call", "call_id": "e", "name": "shell", "arguments": "{}"},
        ],
    )
    first = {"id": "c", "type": "function", "function": {"name": "shell", "arguments": '{"x":1}'}}
    last = {"id": "e", "type": "function", "function": {"name": "shell", "arguments": "{}"}}
    assert conversation_of(given).messages == [
        {"role": "system", "content": "base"},
        {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": "u"},
        {"role": "assistant", "reasoning": "hm", "content": "a", "tool_calls": [first]},
        {"role": "tool", "tool_call_id": "c", "content": "out"},
        {"role": "assistant", "tool_calls": [last]},
    ]
    tools = [
        {"type": "function", "name": "shell", "parameters": {}},
        {"type": "web_search"},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn", "parameters": {}}, 5]},
    ]
    called = {"type": "function_call", "call_id": "e", "namespace": "agents", "name": "spawn", "arguments": "{}"}
    conversation = conversation_of(prompt("responses", input=[called], tools=tools))
    assert [tool["function"]["name"] for tool in conversation.tools] == ["shell", "agents__spawn"]
    assert conversation.messages[0]["tool_calls"][0]["function"]["name"] == "agents__spawn"
    assert conversation_of(prompt("responses", input="hi")).messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("item", [{"type": "web_search_call"}, 5, {"type": "message", "role": "user", "content": [{}]}])
def test_unknown_items_are_not_counted(item: Any) -> None:
    """An item we do not know: no tokens, a named error (C6)."""
    with pytest.raises(TemplateError):
        render_prompt(template(CHATML), prompt("responses", input=[item]))


@pytest.mark.parametrize("calls", [7, "x", {"a": 1}, True])
def test_tool_calls_that_are_no_list_cannot_be_rendered(calls: object) -> None:
    """Bad input is the client's, not a bug of ours: scoring is skipped, and nothing is logged with a traceback."""
    template = ChatTemplate("{{ messages[0].content }}", {}, lambda form: form)
    with pytest.raises(TemplateError, match="tool_calls"):
        template.render([{"role": "assistant", "content": "x", "tool_calls": calls}])

"""Requests at the edges of what engines make prompts of, and chat templates that differ in what they show of them.

What vLLM's own code makes of each is in ``tests/fixtures/engine/vllm_0.32.0_prompts.jsonl``; tests/real compares it
with a vLLM that is there. To make it anew, with an interpreter that has vLLM, as ``DIR/prompts.jsonl``:
``python -m tests.support.prompt_cases DIR; $VLLM_PYTHON tests/support/vllm_prompts.py DIR``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from services.ingress.endpoints import ChatPrompt, Endpoint, read_request
from services.ingress.errors import TemplateError
from services.ingress.prompts import ChatTemplate, render_prompt
from tests.support.tiny_model import CHAT_TEMPLATE

GOLDEN = Path(__file__).parents[1] / "fixtures" / "engine" / "vllm_0.32.0_prompts.jsonl"

TEMPLATES = {
    "tiny": CHAT_TEMPLATE,
    "parts": (
        "{{ bos_token }}{{ tools | tojson if tools }}{% for message in messages %}<|{{ message.role }}|>"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "[{{ part.type }}:{{ part.text }}{{ part.name }}]{% endfor %}{% endif %}"
        "{% if message.reasoning_content is string %}<think>{{ message.reasoning_content }}</think>{% endif %}"
        "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ message.tool_call_id }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
        "{{ '<nothink>' if enable_thinking is defined and enable_thinking is false }}{{ reasoning_effort }}{% endif %}"
    ),
    "developer": (
        "{% for m in messages %}<|{{ 'dev' if m.role == 'developer' else m.role }}|>{{ m.content }}"
        "{{ m.reasoning if m.reasoning is defined }}{{ m.tool_calls | tojson if 'tool_calls' in m }}{{ m.name }}"
        "{% endfor %}{{ tools | tojson if tools }}{{ documents }}"
    ),
    "system_first": (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}<|{{ m.role }}|>"
        "{{ m.content | trim }}{% for c in m.tool_calls or [] %}{{ c.function.name }} "
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{{ tools | tojson if tools }}|"
        "{{ enable_thinking }}|{{ reasoning_effort }}"
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One request's body, for one template."""

    name: str
    endpoint: Endpoint
    template: str
    body: dict[str, Any]


def _user(content: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def _call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "id": "c1", "function": {"name": "read", "arguments": arguments}, **more}


_SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "description": "größer <b>"}}}
_FUNCTION = {"parameters": _SCHEMA, "strict": True, "name": "read", "description": "Reads.", "unknown": 1}
_FLAT = {"type": "function", **_FUNCTION}
_BILLING = "x-anthropic-billing-header: cc_version=2.1.332.abc;"
_TEXT = {"type": "text", "text": "One."}
_MARKED = {"type": "text", "text": "Two.", "cache_control": {"type": "ephemeral"}}
_USE = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "/größe", "n": 1}}
_SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Said."}]}
_CALLED = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path": "/größe"}', "id": "fc_1"}
_THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}


def _result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content, **more}


CHAT: dict[str, dict[str, Any]] = {
    "a developer in the middle": {
        "messages": [{"role": "system", "content": "S."}, _user(), {"role": "developer", "content": [_TEXT, _MARKED]}]
    },
    "a developer alone": {"messages": [{"role": "developer", "content": "D."}, _user()]},
    "two system messages": {"messages": [{"role": "system", "content": "S."}, {"role": "system", "content": "T."}]},
    "an attribution line": {"messages": [{"role": "system", "content": f"{_BILLING}\nRest."}, _user()]},
    "an attribution line alone": {"messages": [{"role": "system", "content": [_MARKED, {**_TEXT, "text": _BILLING}]}]},
    "a thought": {"messages": [_user(), {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}]},
    "a thought under its old name": {
        "messages": [_user(), {"role": "assistant", "content": None, "reasoning_content": "Hm."}]
    },
    "calls and results": {
        "messages": [
            _user([_TEXT, _MARKED]),
            {"role": "assistant", "content": None, "tool_calls": [_call('{"a":1}', index=0), _call("[1]"), _call("{")]},
            {"role": "tool", "tool_call_id": "c1", "content": [_TEXT, _MARKED]},
            {"role": "assistant", "content": "", "tool_calls": []},
        ]
    },
    "tools": {"messages": [_user()], "tools": [{"type": "function", "function": _FUNCTION}]},
    "a tool of a name": {"messages": [_user()], "tools": [{"type": "function", "function": {"name": "read"}}]},
    "a named user": {"messages": [{**_user(), "name": "Ada"}]},
    "a refusal": {"messages": [_user(), {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}]},
    "no thinking": {"messages": [_user()], "reasoning_effort": "none"},
    "an effort": {"messages": [_user()], "reasoning_effort": "high"},
    "an effort and options": {
        "messages": [_user()],
        "reasoning_effort": "high",
        "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"},
    },
    "an unfinished answer": {
        "messages": [_user(), {"role": "assistant", "content": "So far "}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "an image": {"messages": [_user([_TEXT, {"type": "nonsense", "text": "x"}])]},
}

MESSAGES: dict[str, dict[str, Any]] = {
    "system blocks": {"system": [{**_TEXT, "text": _BILLING}, _TEXT, _MARKED], "messages": [_user([_MARKED])]},
    "a system text with an attribution line": {"system": f"{_BILLING}\nRest.", "messages": [_user()]},
    "system messages between": {
        "system": "S.",
        "messages": [
            _user(),
            {"role": "system", "content": [_TEXT, _MARKED]},
            {"role": "system", "content": []},
            {"role": "system", "content": f"{_BILLING}"},
            {"role": "assistant", "content": "A."},
            {"role": "system", "content": "Late."},
        ],
    },
    "thoughts and calls": {
        "messages": [
            _user(),
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, _TEXT, _USE]},
            _user([_result([_TEXT, _MARKED]), _result("Whole.", is_error=True), _TEXT]),
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, _USE]},
            _user([_result(None)]),
            {"role": "assistant", "content": []},
            {"role": "assistant", "content": [_result("Odd.")]},
        ]
    },
    "tools named in a result": {
        "messages": [_user([_result([_TEXT, {"type": "tool_reference", "tool_name": "read"}])])]
    },
    "tools": {
        "messages": [_user()],
        "tools": [
            {"input_schema": _SCHEMA, "name": "read", "cache_control": {"type": "ephemeral"}, "strict": True},
            {"name": "later", "description": "L.", "input_schema": {"properties": {}}, "defer_loading": True},
        ],
    },
    "tools that change": {
        "messages": [
            _user(),
            {
                "role": "system",
                "content": [
                    {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "read"}},
                    {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "later"}},
                    {
                        "type": "tool_addition",
                        "tool": {"type": "tool_definition", "definition": {"name": "new", "input_schema": _SCHEMA}},
                    },
                    _TEXT,
                ],
            },
        ],
        "tools": [
            {"name": "read", "input_schema": _SCHEMA},
            {"name": "later", "input_schema": _SCHEMA, "defer_loading": True},
        ],
    },
    "an effort": {"messages": [_user()], "output_config": {"effort": "medium"}, "thinking": {"type": "adaptive"}},
    "no thinking": {"messages": [_user()], "output_config": {"effort": "high"}, "thinking": {"type": "disabled"}},
}

RESPONSES: dict[str, dict[str, Any]] = {
    "a text": {"input": "Hi", "instructions": "I."},
    "instructions and a developer": {
        "instructions": "I.",
        "input": [
            {"type": "message", "role": "developer", "id": "m1", "content": [{"type": "input_text", "text": "D."}]},
            _user([{"type": "input_text", "text": "One."}, {"type": "input_text", "text": "Two."}]),
        ],
    },
    "a turn": {"input": [_user(), _THOUGHT, _SAID, _CALLED, {**_CALLED, "call_id": "c2", "arguments": "{"}]},
    "a call before what was said": {"input": [_user(), _CALLED, _SAID, _THOUGHT, _THOUGHT, _SAID]},
    "a summary": {
        "input": [_user(), {**_THOUGHT, "content": [], "summary": [{"type": "summary_text", "text": "So."}]}]
    },
    "outputs": {
        "input": [
            _CALLED,
            {"type": "function_call_output", "call_id": "c1", "output": "<one> & 東京"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Part."}]},
            {"type": "message", "role": "assistant", "content": "Said."},
            {**_SAID, "content": [{"type": "output_text", "text": text} for text in ("First.", "Lost.")]},
        ]
    },
    "tools": {
        "input": "Hi",
        "tools": [
            {**_FLAT, "strict": False},
            {"type": "function", "name": "bare", "parameters": None, "strict": None},
            {"type": "web_search"},
            {
                "type": "namespace",
                "name": "agents",
                "description": "N.",
                "tools": [{"type": "function", "name": "spawn", "description": "S.", "parameters": _SCHEMA}],
            },
            {"type": "custom", "name": "patch", "description": "P."},
        ],
    },
    "calls of namespaces and custom tools": {
        "input": [
            _user(),
            {**_CALLED, "namespace": "agents", "name": "spawn"},
            {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "*** größer"},
            {"type": "custom_tool_call_output", "call_id": "c3", "output": "Done."},
        ]
    },
    "an effort": {"input": "Hi", "reasoning": {"effort": "high", "summary": "auto"}},
    "no thinking": {"input": "Hi", "reasoning": {"effort": "none"}, "chat_template_kwargs": {"x": 1}},
    "an unfinished answer": {"input": [_user(), {**_SAID, "id": "m1", "status": "incomplete"}]},
    "secrets": {"input": [_user(), {**_THOUGHT, "encrypted_content": "x"}]},
    "an unknown item": {"input": [_user(), {"type": "agent_message", "author": "a"}]},
}


def cases() -> Iterator[Case]:
    """Every body for every template."""
    named: list[tuple[Endpoint, dict[str, dict[str, Any]]]] = [
        ("chat_completions", CHAT),
        ("messages", MESSAGES),
        ("responses", RESPONSES),
    ]
    for endpoint, bodies in named:
        more = {"max_tokens": 8} if endpoint == "messages" else {}
        for name, body in bodies.items():
            for template in TEMPLATES:
                yield Case(name, endpoint, template, {"model": "m", **more, **body})


@cache
def _template(name: str) -> ChatTemplate:
    """Compiled once: that costs far more than rendering."""
    return ChatTemplate(TEMPLATES[name], {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}, lambda form: form)


def ours(case: Case) -> str | None:
    """The prompt's text, as the front door makes it; ``None`` where it counts none."""
    prompt = read_request(case.endpoint, json.dumps(case.body).encode()).prompt
    assert isinstance(prompt, ChatPrompt)
    try:
        return render_prompt(_template(case.template), prompt)
    except TemplateError:
        return None


def write(directory: Path, given: Iterable[Case]) -> None:
    """The files that tests/support/vllm_prompts.py reads."""
    (directory / "templates.json").write_text(json.dumps(TEMPLATES), encoding="utf-8")
    lines = [json.dumps({"endpoint": case.endpoint, "template": case.template, "body": case.body}) for case in given]
    (directory / "requests.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(path: Path) -> list[str | None]:
    """The prompts that vLLM made, ``None`` where it refused."""
    return [json.loads(line).get("text") for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    write(Path(sys.argv[1]), cases())

"""Prompts of any shape: whatever stands where in a body, it is refused by a rule or it is read; nothing raises."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from services.ingress.canonical import conversation_of
from services.ingress.contents import Dialect
from services.ingress.endpoints import PATHS, ChatPrompt, Endpoint, read_request
from services.ingress.engine_fields import last_tool
from services.ingress.errors import BadRequestError, TemplateError
from services.ingress.message_chain import message_chain
from services.ingress.modalities import media_of
from services.ingress.prompts import ChatTemplate, render_prompt
from services.ingress.texts import text_blocks

NAMES = [
    "type",
    "role",
    "content",
    "text",
    "thinking",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "id",
    "call_id",
    "tool_call_id",
    "tool_use_id",
    "input",
    "output",
    "namespace",
    "tools",
    "source",
    "image_url",
    "input_schema",
    "parameters",
    "description",
    "cache_control",
]
WORDS = [
    "user",
    "assistant",
    "tool",
    "system",
    "developer",
    "ctx",
    "message",
    "text",
    "input_text",
    "output_text",
    "image",
    "image_url",
    "input_image",
    "thinking",
    "reasoning",
    "tool_use",
    "tool_result",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "namespace",
    "function",
    "document",
]
LEAVES = st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats(allow_nan=False) | st.sampled_from(WORDS)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)
MESSAGE = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6)
BODY = st.fixed_dictionaries({"messages": st.lists(MESSAGE | JSON, max_size=4)}, optional={"system": JSON})
TOOLS = st.lists(MESSAGE | JSON, max_size=2)
TEMPLATES = [
    ChatTemplate(f"{{% for m in messages %}}{{{{ m.role }}}}{content}{{% endfor %}}", {}, str)
    for content in ("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}{{ m.tool_calls | tojson }}")
]
DIALECTS: tuple[Dialect, ...] = ("vllm", "sglang")


@pytest.mark.long
@settings(max_examples=50)
@given(body=BODY, tools=TOOLS)
def test_no_prompt_raises(body: dict[str, Any], tools: list[Any]) -> None:
    """A client's strange part is its engine's to judge: never a 500 of ours (C6). Each body goes to every endpoint:
    making one costs far more than reading it."""
    for endpoint in sorted(set(PATHS.values())):
        note(f"as {endpoint}")
        read_everything(endpoint, body, tools)


def read_everything(endpoint: Endpoint, body: dict[str, Any], tools: list[Any]) -> None:
    """All that the front door makes of a prompt, unless a rule refuses it."""
    members = body | {"model": "m", "tools": tools, "input": body["messages"], "instructions": body.get("system")}
    if endpoint == "completions":
        members["prompt"] = body["messages"]
    try:
        request = read_request(endpoint, msgspec.json.encode(members))
    except BadRequestError:
        return
    text_blocks(request, adapter=None, block_bytes=64, max_bytes=1 << 16)
    message_chain(request)
    last_tool(request.prompt)
    if not isinstance(request.prompt, ChatPrompt):
        return
    media_of(request.body, request.prompt.messages)
    for dialect in DIALECTS:
        with contextlib.suppress(TemplateError):
            conversation_of(request.prompt, dialect)
        for template in TEMPLATES:
            with contextlib.suppress(TemplateError):
                render_prompt(template, request.prompt, dialect)

"""The engine's pure modules stay pure, and its renderer agrees with the front door's."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import load.engine
from load.engine.tokens import ASSETS, Tokenizer
from services.ingress.endpoints import ChatPrompt, read_request
from services.ingress.prompts import ChatTemplate as IngressTemplate
from services.ingress.prompts import render_prompt

PURE = (
    *("requests", "block_hash", "blocks", "kv_cache", "kv_events", "scheduler", "timing", "core"),
    *("tokens", "outputs", "api", "responses", "kv_wire", "misbehave", "errors"),
    *("free_queue", "tiers", "tier_scheduler", "sessions", "tool_pins", "hints", "hint_actions", "pool_pages"),
)
FORBIDDEN = {"asyncio", "time", "socket", "zmq", "os", "nats", "uvloop", "web", "threading", "subprocess", "datetime"}


@pytest.mark.parametrize("name", PURE)
def test_no_clock_and_no_sockets(name: str) -> None:
    """The modules that a simulation runs in virtual time import neither time nor I/O."""
    source = (Path(load.engine.__path__[0]) / f"{name}.py").read_text()
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])
    assert imported & FORBIDDEN == set()


@pytest.mark.long
def test_front_door_renders_the_same_prompt() -> None:
    """A14: the ingress's renderer on the same assets writes what the engine computes: parts, calls, results, tools."""
    config = json.loads((ASSETS / "tokenizer_config.json").read_text())
    ingress = IngressTemplate(config["chat_template"], {}, lambda _: "")
    tools = [{"type": "function", "function": {"name": "f", "description": "<é> & 'x'"}}]
    call: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1,"b":"<é>"}'}}
    broken: dict[str, Any] = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "not json"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "one"}]},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "user", "content": ""},
    ]
    template = Tokenizer().template
    for tool_list in (tools, []):
        for prompt in (True, False):
            body = {"model": "m", "messages": messages, "tools": tool_list, "add_generation_prompt": prompt}
            asked = read_request("chat_completions", json.dumps(body).encode()).prompt
            assert isinstance(asked, ChatPrompt)
            assert template.render(messages, tool_list, prompt) == render_prompt(ingress, asked)

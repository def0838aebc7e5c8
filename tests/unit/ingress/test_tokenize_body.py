"""What engines are asked for a prompt's tokens, so that they make of it what they make of the request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.ingress.contents import Dialect
from services.ingress.endpoints import ChatPrompt, Endpoint, TextPrompt, read_request
from services.ingress.tokenize_body import goes_as_it_came, tokenize_body

USER = {"role": "user", "content": "why?"}


def chat_prompt(endpoint: Endpoint, **members: Any) -> ChatPrompt:
    prompt = read_request(endpoint, json.dumps({"model": "m", **members}).encode()).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def asked(prompt: ChatPrompt | TextPrompt, dialect: Dialect = "vllm") -> dict[str, Any]:
    body: dict[str, Any] = json.loads(tokenize_body("m", prompt, dialect))
    return body


def test_a_chat_goes_as_it_came() -> None:
    """The client's bytes, tools too; what vLLM's chat adds is added."""
    body = b'{"model": "m", "messages": [ {"role":"user",  "content":"a\\u00e9"} ], "tools": [{"type":"function"}]}'
    prompt = read_request("chat_completions", body).prompt
    assert isinstance(prompt, ChatPrompt)
    assert goes_as_it_came(prompt, "vllm")
    assert tokenize_body("m", prompt, "vllm") == (
        b'{"model":"m","messages":[{"role":"user",  "content":"a\\u00e9"}],"tools":[{"type":"function"}],'
        b'"add_generation_prompt":true}'
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"reasoning_content": "hm"}, {"reasoning": "hm"}),
        ({"reasoning_content": "old", "reasoning": "new"}, {"reasoning": "new"}),
        ({"reasoning_content": "old", "reasoning": None}, {"reasoning": "old"}),
        ({"reasoning_content": None}, {}),
        ({"content": "say reasoning_content"}, {"content": "say reasoning_content"}),
    ],
)
def test_a_thought_by_its_old_name_is_told_to_vllm_by_the_new(given: dict[str, Any], told: dict[str, Any]) -> None:
    """vLLM 0.32 renames it in a chat, and passes over it in ``/tokenize``: its tokens would be missing."""
    answer = {"role": "assistant", "content": "so", **given}
    prompt = chat_prompt("chat_completions", messages=[USER, answer])
    assert not goes_as_it_came(prompt, "vllm")
    assert asked(prompt)["messages"] == [USER, {"role": "assistant", "content": "so", **told}]
    assert goes_as_it_came(prompt, "sglang")
    assert asked(prompt, "sglang")["messages"] == [USER, answer]


def test_sglang_renders_as_for_a_chat_where_nobody_says_otherwise() -> None:
    """``add_generation_prompt`` makes SGLang's ``/tokenize`` render messages as they are given, without what it does to
    them in a chat; an effort is for SGLang to understand."""
    prompt = chat_prompt(
        "chat_completions", messages=[USER], reasoning_effort="low", chat_template_kwargs={"thinking": True}
    )
    told = {"model": "m", "messages": [USER], "reasoning_effort": "low", "chat_template_kwargs": {"thinking": True}}
    assert asked(prompt, "sglang") == told
    options = {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}
    assert asked(prompt) == {
        "model": "m",
        "messages": [USER],
        "chat_template_kwargs": options,
        "add_generation_prompt": True,
    }
    messages = chat_prompt("messages", messages=[USER], max_tokens=5, system="Be brief.")
    assert "add_generation_prompt" not in asked(messages, "sglang")


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_message_that_goes_on(dialect: Dialect) -> None:
    prompt = chat_prompt("chat_completions", messages=[USER, USER], continue_final_message=True)
    told = asked(prompt, dialect)
    assert told["continue_final_message"] is True
    assert told.get("add_generation_prompt", False) is False
    item = {"type": "message", "role": "assistant", "status": "incomplete", "content": "so"}
    told = asked(chat_prompt("responses", input=[USER, item]), dialect)
    assert told["continue_final_message"] is True
    assert told.get("add_generation_prompt", False) is False


def test_other_apis_are_told_in_chats_shape() -> None:
    prompt = chat_prompt("messages", messages=[USER], max_tokens=5, tools=[{"name": "bash", "input_schema": {}}])
    assert not goes_as_it_came(prompt, "vllm")
    told = asked(prompt)
    assert told["messages"] == [USER]
    assert told["tools"][0]["function"]["name"] == "bash"
    assert told["add_generation_prompt"] is True


def test_a_completions_text() -> None:
    assert asked(TextPrompt("a", add_special_tokens=False)) == {
        "model": "m",
        "prompt": "a",
        "add_special_tokens": False,
    }


@pytest.mark.parametrize("message", [{}, {"reasoning_content": {"deep": []}}])
def test_odd_messages_are_the_engines_to_refuse(message: dict[str, Any]) -> None:
    prompt = chat_prompt("chat_completions", messages=[message, "reasoning_content", None])
    assert asked(prompt)["messages"][1:] == ["reasoning_content", None]

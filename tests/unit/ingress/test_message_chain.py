"""The chain over a prompt's parts: what the model sees alike has one, and it says exactly where a prompt ends."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from services.ingress.endpoints import Endpoint, read_request
from services.ingress.message_chain import MAX_PARTS, MessageChain, message_chain

SYSTEM = {"role": "system", "content": "You help."}
HELLO = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Hi"}
CALLS = [{"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}]
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


def read(endpoint: Endpoint = "chat_completions", **members: Any) -> MessageChain | None:
    return message_chain(read_request(endpoint, json.dumps({"model": "m", **members}).encode()))


def chain_of(endpoint: Endpoint = "chat_completions", **members: Any) -> MessageChain:
    chain = read(endpoint, **members)
    assert chain is not None
    return chain


def test_each_turn_begins_with_the_one_before_and_ends_exactly() -> None:
    """However short what is new: prompts of a conversation are beginnings of each other; another last word is not."""
    messages = [SYSTEM, HELLO, ANSWER, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    chains = [chain_of(messages=messages[:length]).hashes for length in range(1, len(messages) + 1)]
    for shorter, longer in pairwise(chains):
        assert longer.startswith(shorter)
        assert len(longer) == len(shorter) + 8
    other = chain_of(messages=[*messages[:-1], {"role": "user", "content": "c"}]).hashes
    assert other[:-8] == chains[-2]
    assert other != chains[-1]


def test_the_preamble_is_tools_and_leading_system_messages() -> None:
    """A system message in the middle of a conversation (spec: harness.md §2) is not of it."""
    chain = chain_of(messages=[SYSTEM, {"role": "developer", "content": "x"}, HELLO, SYSTEM], tools=TOOLS)
    assert (chain.preamble, len(chain.hashes) // 8) == (3, 5)
    anthropic = chain_of(
        "messages", max_tokens=1, system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        messages=[HELLO], tools=[{"name": "t"}],
    )  # fmt: skip
    assert (anthropic.preamble, len(anthropic.hashes) // 8) == (3, 4)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (HELLO, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}),
        (
            {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": "Hello"},
        ),
        ({"id": "msg_1", **HELLO}, {"id": "msg_2", **HELLO}),
    ],
)
def test_what_the_model_sees_alike_is_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Cache marks and ids wander (spec: harness.md §6.3, user-cases C5)."""
    assert chain_of(messages=[one]) == chain_of(messages=[other])


def test_a_message_that_grows_goes_on_from_itself() -> None:
    """Claude Code's compaction adds a text to the last message (spec: harness.md §2)."""
    shorter = chain_of(messages=[HELLO])
    longer = chain_of(
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "now"}]}]
    )
    assert longer.hashes.startswith(shorter.hashes)


def answers(chain: MessageChain) -> list[bool]:
    return [bool(byte & 1) for byte in chain.hashes[::8]]


def test_the_lowest_bit_says_who_said_it() -> None:
    """Of every API: the model's texts and calls, and what it was given."""
    chat = chain_of(
        messages=[
            HELLO,
            {"role": "assistant", "content": "I read.", "tool_calls": CALLS},
            {"role": "tool", "tool_call_id": "c1", "content": "text"},
        ]
    )
    assert answers(chat) == [False, True, True, False, False]  # of a tool's answer, the call's id is a part
    responses = chain_of(
        "responses",
        input=[
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "text"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
        ],
    )
    assert answers(responses) == [False, True, False, True]


def test_namespaces_do_not_meet() -> None:
    """The same words under another cache salt are somebody else's."""
    plain, salted = chain_of(messages=[HELLO]), chain_of(messages=[HELLO], cache_salt="s")
    assert plain.hashes != salted.hashes


@pytest.mark.long
def test_what_has_no_messages_has_no_chain() -> None:
    """A completion's prompt is a text that ends anywhere; a conversation without end is not carried about."""
    assert read("completions", prompt="Once upon a time") is None
    assert read("completions", prompt=[1, 2, 3]) is None
    assert read(messages=[]) is None
    assert read(messages=[HELLO] * MAX_PARTS) is not None
    assert read(messages=[HELLO] * (MAX_PARTS + 1)) is None


def test_nothing_is_too_odd_to_be_read() -> None:
    """Messages that are no objects, contents that are no texts."""
    body = b'{"model":"m","messages":["x",1,null,{"role":7,"content":{"a":1}}]}'
    chain = message_chain(read_request("chat_completions", body))
    assert chain is not None
    assert len(chain.hashes) == 4 * 8

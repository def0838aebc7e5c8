"""Messages that come again are decoded once, and are what their bytes say."""

from __future__ import annotations

import copy
import gc
import json
import tracemalloc
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ingress import decoded
from services.ingress.decoded import AT_A_MARK, LEAST_BYTES, DecodedCache, Found, decode_all
from services.ingress.endpoints import ChatPrompt, Endpoint, read_request
from services.ingress.prompts import ChatTemplate, render_prompt
from services.ingress.shell.local_tokenizer import LocalTokenizer

ASSETS = Path(__file__).parents[3] / "load" / "engine" / "assets"
LONG = "x" * LEAST_BYTES


def raws(*values: Any) -> list[msgspec.Raw]:
    """Views of one body."""
    return msgspec.json.decode(msgspec.json.encode(values), type=list[msgspec.Raw])


def seen(cache: DecodedCache, items: list[msgspec.Raw], apart: str = "") -> int:
    """How many of ``items`` were known; all of them are kept."""
    found = cache.find(items, apart)
    values = [*found.items, *decode_all(items[len(found.items) :])]
    assert values == decode_all(items)
    kept(cache, found, items, values)
    return len(found.items)


def kept(cache: DecodedCache, found: Found, items: list[msgspec.Raw], values: list[Any]) -> None:
    entry = found.with_values(items, values, cache.max_bytes)
    if entry is not None:
        cache.keep(entry)


def test_a_conversation_goes_on() -> None:
    """Each turn knows the one before, which it replaces; one that went on otherwise knows what both have in common."""
    cache = DecodedCache(max_bytes=1 << 20)
    turns = [LONG, "a", "b", {"role": "user", "content": [1]}]
    assert seen(cache, raws(*turns[:2])) == 0
    assert seen(cache, raws(*turns)) == 2
    assert len(cache) == 1
    assert seen(cache, raws(*turns, "c")) == 4
    assert seen(cache, raws(*turns[:3], "other")) == 3
    assert len(cache) == 2
    assert seen(cache, raws(*turns, "c")) == 5
    assert seen(cache, raws(*turns[:2])) == 2
    assert len(cache) == 2


def test_bytes_decide() -> None:
    """What is spelled otherwise is decoded anew, also where it means the same."""
    cache = DecodedCache(max_bytes=1 << 20)
    body = b'["%b",{"a":1,"b":2}]' % LONG.encode()
    assert seen(cache, msgspec.json.decode(body, type=list[msgspec.Raw])) == 0
    assert seen(cache, msgspec.json.decode(body.replace(b'"a":1', b'"a": 1'), type=list[msgspec.Raw])) == 1


def test_what_is_kept_apart() -> None:
    """Nobody learns by the time it takes what others have sent."""
    cache = DecodedCache(max_bytes=1 << 20)
    turn = raws(LONG, "a")
    assert seen(cache, turn, "one") == 0
    assert seen(cache, turn, "other") == 0
    assert seen(cache, turn, "one") == 2


def test_bounds() -> None:
    """The least recently used goes first, what is larger than all room is not kept, short lists are not looked up."""
    cache = DecodedCache(max_bytes=4 * LEAST_BYTES)
    for name in "abc":
        seen(cache, raws(name + LONG))
    assert cache.size_bytes <= 4 * LEAST_BYTES
    assert seen(cache, raws("a" + LONG)) == 0
    assert seen(cache, raws(LONG * 4)) == 0
    assert seen(cache, raws(LONG * 4)) == 0
    assert seen(cache, raws("short")) == 0
    assert seen(cache, raws("short")) == 0
    forks = DecodedCache(max_bytes=1 << 30)
    for number in range(2 * AT_A_MARK):
        seen(forks, raws(LONG, 1, number))
    assert seen(forks, raws(LONG, 1, 0)) == 2  # that one is forgotten among so many
    assert seen(forks, raws(LONG, 1, 2 * AT_A_MARK - 1)) == 3


def test_many_small_parts_count_for_what_they_take() -> None:
    """A list of 100,000 numbers takes far more than its bytes."""
    cache = DecodedCache(max_bytes=1 << 20)
    assert seen(cache, raws(LONG, [1] * 100_000)) == 0
    assert len(cache) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "a text of some length " * 20},
        {
            "role": "user",
            "content": [{"type": "text", "text": "漢字 " * 100, "cache_control": {"type": "ephemeral"}}] * 3,
        },
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}] * 60},
        {"n": [[], {}, 1] * 200},
        {"n": [{"": 1}] * 1000},
        {"n": [{}] * 1000},
        {"\U0001f600" + "a long name " * 50 + str(number): 1 for number in range(20)},
    ],
)
def test_what_is_counted_is_what_is_held(message: dict[str, Any]) -> None:
    """The bound is one of memory: no less is counted than it takes."""
    cache = DecodedCache(max_bytes=1 << 30)
    bodies = [msgspec.json.encode([f"{number}{LONG}", *[message] * 30]) for number in range(8)]
    gc.collect()
    tracemalloc.start()
    for body in bodies:
        items = msgspec.json.decode(body, type=list[msgspec.Raw])
        kept(cache, cache.find(items), items, decode_all(items))
    del items
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(cache) == len(bodies)
    assert held <= cache.size_bytes


def test_no_body_is_held() -> None:
    """What is kept are copies: a view would hold all of its body, of any size."""
    cache = DecodedCache(max_bytes=1 << 20)
    body = b'["%b","a"]' % LONG.encode()
    seen(cache, msgspec.json.decode(body, type=list[msgspec.Raw]))
    (entry,) = cache._entries.values()
    assert [memoryview(raw).obj is body for raw in entry.raws] == [False, False]


TURN = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "tool", "developer"]),
        "content": st.sampled_from(["a", "é\n", LONG, [{"type": "text", "text": "part"}], ""]),
    },
    optional={
        "tool_calls": st.just([{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b": [1]}'}}])
    },
)


@cache
def tokenizer() -> LocalTokenizer:
    """The simulated engine's, with all that examples before have left in its caches."""
    return LocalTokenizer(ASSETS, cache_bytes=1 << 20)


def template() -> ChatTemplate:
    found = tokenizer().template
    assert found is not None
    return found


def chat(endpoint: Endpoint, **members: Any) -> ChatPrompt:
    prompt = read_request(endpoint, json.dumps({"model": "m", **members}).encode()).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


@pytest.mark.long
@given(turns=st.lists(TURN, min_size=1, max_size=20), cuts=st.lists(st.integers(1, 20), max_size=4))
def test_a_prompt_is_that_of_one_who_knows_nothing(turns: list[dict[str, Any]], cuts: list[int]) -> None:
    """Whatever was seen before, and in whatever order."""
    tools = [{"type": "function", "function": {"name": LONG}}]
    for cut in [*cuts, len(turns)]:
        prompt = chat("chat_completions", messages=turns[:cut], tools=tools)
        plan = tokenizer().plan(prompt)
        tokenizer().finish(plan, 16)
        assert plan._text.decode() == render_prompt(template(), prompt)


def test_nobody_waits_while_many_items_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is the event loop's, too, for what it renders itself: 100,000 items take half a second."""
    tokenizer, measure, alone = LocalTokenizer(ASSETS, cache_bytes=1 << 22), decoded._held, []

    def measured(item: Any, raw_bytes: int) -> int:
        alone.append(tokenizer._lock.locked())
        return measure(item, raw_bytes)

    monkeypatch.setattr(decoded, "_held", measured)
    tokenizer.plan(chat("chat_completions", messages=[{"role": "user", "content": LONG}] * 3))
    assert alone == [False] * 3


def test_what_cannot_be_kept_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of so many items that they alone are more than all room."""
    monkeypatch.setattr(decoded, "_held", lambda *_: pytest.fail("measured"))
    items = raws(LONG, *range(1000))
    assert DecodedCache(max_bytes=1 << 17).find(items).with_values(items, decode_all(items), 1 << 17) is None


@pytest.mark.parametrize("endpoint", ["chat_completions", "messages", "responses"])
def test_nothing_decoded_is_changed(endpoint: Endpoint) -> None:
    """What a prompt is made of is as it was, whatever API it came by."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b": [1]}'}}
    if endpoint == "responses":
        members: dict[str, Any] = {
            "input": [
                {"role": "user", "content": LONG},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "thought"}]},
                {"role": "assistant", "content": ""},
                {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
                {"type": "function_call", "name": "g", "arguments": "{}", "call_id": "d"},
                {"type": "function_call_output", "call_id": "c", "output": "done"},
            ]
        }
    elif endpoint == "messages":
        use = {"type": "tool_use", "id": "c", "name": "f", "input": {"b": [1]}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "done"}]}
        members = {
            "max_tokens": 1,
            "messages": [
                {"role": "user", "content": LONG},
                {"role": "assistant", "content": [{"type": "text", "text": "I do"}, use]},
                {"role": "user", "content": [result]},
            ],
        }
    else:
        members = {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": LONG}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "done"},
            ]
        }
    members["tools"] = [{"type": "function", "name": "f", "function": {"name": "f", "parameters": {"type": "object"}}}]
    prompt = chat(endpoint, **members)
    decoded: list[Any] = []

    def decode(raws: Any) -> list[Any]:
        values = decode_all(raws)
        decoded.append((values, copy.deepcopy(values)))
        return values

    render_prompt(template(), prompt, decode=decode)
    assert len(decoded) == 2
    assert all(now == before for now, before in decoded)

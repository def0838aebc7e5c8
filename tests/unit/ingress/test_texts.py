"""A prompt as text: it grows at its end, and what the model sees alike has one chain."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from services.ingress.contents import Dialect
from services.ingress.endpoints import Endpoint, read_request
from services.ingress.texts import TextBlocks, text_blocks

BLOCK_BYTES = 16


def blocks_of(
    endpoint: Endpoint = "chat_completions",
    *,
    max_bytes: int = 1 << 20,
    prompt_bytes: int | None = None,
    adapter: str | None = None,
    dialect: Dialect = "vllm",
    **members: Any,
) -> TextBlocks | None:
    body = json.dumps({"model": "m", **members}).encode()
    request = read_request(endpoint, body, prompt_bytes=prompt_bytes)
    return text_blocks(request, adapter=adapter, dialect=dialect, block_bytes=BLOCK_BYTES, max_bytes=max_bytes)


def chain_of(endpoint: Endpoint = "chat_completions", **members: Any) -> bytes:
    blocks = blocks_of(endpoint, **members)
    assert blocks is not None
    return blocks.chain


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


LONG = "A sentence that is longer than a block of text. " * 3
TOOLS = [{"type": "function", "function": {"name": "read", "description": LONG, "parameters": {"type": "object"}}}]
CALLS = [{"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}]
CHAT = [
    said("system", LONG),
    said("user", "Read it. " * 9),
    said("assistant", None, tool_calls=CALLS),
    said("tool", "What it says. " * 9, tool_call_id="call_1"),
    said("user", [{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": "data:" + "A" * 99}}]),
    said("assistant", "Done. " * 9),
]
ANTHROPIC = [
    said("user", LONG),
    said("assistant", [{"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a"}}]),
    said("user", [{"type": "tool_result", "tool_use_id": "t1", "content": LONG}, {"type": "text", "text": LONG}]),
]
RESPONSES: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": LONG}]},
    {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": LONG},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": LONG}]},
]


@pytest.mark.parametrize(
    ("endpoint", "items", "member", "more"),
    [
        ("chat_completions", CHAT, "messages", {"tools": TOOLS}),
        ("messages", ANTHROPIC, "messages", {"system": LONG, "tools": [{"name": "read", "input_schema": {}}]}),
        ("responses", RESPONSES, "input", {"instructions": LONG, "tools": TOOLS}),
    ],
)
def test_a_conversation_grows_at_its_end(
    endpoint: Endpoint, items: list[Any], member: str, more: dict[str, Any]
) -> None:
    """Each turn's chain begins with the turn's before, in every API; nothing is too odd to be read (images too)."""
    chains = [chain_of(endpoint, **{member: items[:length]}, **more) for length in range(1, len(items) + 1)]
    for shorter, longer in pairwise(chains):
        assert longer.startswith(shorter)
        assert len(longer) > len(shorter)


def test_a_shared_system_prompt_is_shared() -> None:
    """Two sessions with the same tools and system prompt begin alike; other tools, other beginnings."""
    one = chain_of(messages=[said("system", LONG), said("user", "One thing. " * 9)], tools=TOOLS)
    other = chain_of(messages=[said("system", LONG), said("user", "Another. " * 9)], tools=TOOLS)
    shared = len(LONG) * 2 // BLOCK_BYTES
    assert one[: shared * 8] == other[: shared * 8]
    assert one[-8:] != other[-8:]
    assert chain_of(messages=[said("system", LONG)])[:8] != one[:8]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: [{"type": "text", "text": text}],
        lambda text: [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}],
        lambda text: [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": text}],
    ],
)
def test_what_the_model_sees_alike_has_one_chain(change: Any) -> None:
    """A text and a list of one text; cache marks, which wander; reasoning of earlier turns (C5)."""
    plain = chain_of("messages", messages=[said("user", LONG), said("assistant", LONG)])
    assert chain_of("messages", messages=[said("user", LONG), said("assistant", change(LONG))]) == plain


def test_an_attribution_line_parts_no_sessions_where_the_engine_drops_it() -> None:
    """C5: with vLLM two sessions of Claude Code whose line differs have one chain, and it is that without the line;
    SGLang shows the line, so there they have not."""

    def chains(dialect: Dialect, *lines: str) -> set[bytes]:
        blocks = [[{"type": "text", "text": line}] if line else [] for line in lines]
        spoken = [said("user", LONG), said("system", "And this."), said("user", LONG)]
        return {
            chain_of("messages", system=[*block, {"type": "text", "text": LONG}], messages=spoken, dialect=dialect)
            for block in blocks
        }

    lines = [f"x-anthropic-billing-header: cc_version=2.1.332.{suffix};" for suffix in ("1de", "0ab")]
    assert len(chains("vllm", "", *lines)) == 1
    assert len(chains("sglang", "", *lines)) == 3
    together = [chain_of(messages=[said("system", f"{line}\n{LONG}"), said("user", LONG)]) for line in lines]
    assert {*together} == {chain_of(messages=[said("system", LONG), said("user", LONG)])}
    elsewhere = chain_of(messages=[said("user", f"{lines[0]}\n{LONG}")])
    assert elsewhere != chain_of(messages=[said("user", LONG)])


def test_item_ids_and_reasoning_items_do_not_count() -> None:
    """Responses clients send ids and reasoning back, or not."""
    decorated = [
        {**RESPONSES[0], "id": "msg_1", "status": "completed"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        *RESPONSES[1:],
    ]
    assert chain_of("responses", input=decorated) == chain_of("responses", input=RESPONSES)


def test_namespaces() -> None:
    """Another salt, another adapter: nothing shared."""
    chains = {
        chain_of(messages=[said("user", LONG)]),
        chain_of(messages=[said("user", LONG)], cache_salt="a"),
        chain_of(messages=[said("user", LONG)], adapter="a"),
    }
    assert len({chain[:8] for chain in chains}) == 3


def test_the_bound() -> None:
    """Of a long text its beginning counts; a block is a quarter as many tokens as bytes."""
    whole = blocks_of(messages=[said("user", LONG * 100)])
    begun = blocks_of(messages=[said("user", LONG * 100), said("user", LONG)], max_bytes=64)
    assert whole is not None
    assert begun is not None
    assert (begun.chain, begun.block_size) == (whole.chain[: 64 // BLOCK_BYTES * 8], 4)


def test_a_prompt_that_was_let_go_is_its_body() -> None:
    """Over ``prompt_bytes`` nothing was kept but the body, which begins alike from turn to turn."""
    messages = [said("user", LONG)]
    first = chain_of(messages=messages, prompt_bytes=10)
    second = chain_of(messages=[*messages, said("assistant", LONG)], prompt_bytes=10)
    shared = len(first) // 8 - 1  # the list's end is in the last one
    assert second.startswith(first[: shared * 8])
    assert first != chain_of(messages=messages)


def test_completions() -> None:
    """A text is itself; token ids and batches are no text."""
    assert chain_of("completions", prompt=LONG + LONG).startswith(chain_of("completions", prompt=LONG))
    assert blocks_of("completions", prompt=[1, 2, 3]) is None
    assert blocks_of("completions", prompt=["a", "b"]) is None


@pytest.mark.parametrize("odd", [5, None, "text", [], [[[]]], {"content": {"a": [1, {"cache_control": 1}]}}, {}])
def test_nothing_is_refused(odd: Any) -> None:
    """Whatever is in the place of a message is the engine's to judge."""
    shorter, longer = chain_of(messages=[said("user", LONG)]), chain_of(messages=[said("user", LONG), odd])
    assert longer.startswith(shorter)


def test_what_nests_too_deep_is_one_block_of_the_many() -> None:
    """Hostile nesting is neither refused nor followed."""
    deep = '{"model":"m","messages":[{"role":"user","content":[' + "[" * 900 + "]" * 900 + "]}]}"
    request = read_request("chat_completions", deep.encode())
    assert text_blocks(request, adapter=None, block_bytes=4, max_bytes=1 << 20) is not None


def pictures(endpoint: Endpoint, data: str, *, after: str = LONG) -> dict[str, Any]:
    """One prompt with an image of these bytes, and a text after it, in the API's own words."""
    match endpoint:
        case "chat_completions":
            image: Any = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
            content = [{"type": "text", "text": LONG}, image, {"type": "text", "text": after}]
            return {"messages": [said("user", content)]}
        case "responses":
            image = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
            content = [{"type": "input_text", "text": LONG}, image, {"type": "input_text", "text": after}]
            return {"input": [{"type": "message", "role": "user", "content": content}]}
        case _:
            image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
            result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
            return {
                "messages": [said("user", [{"type": "text", "text": LONG}, result, {"type": "text", "text": after}])]
            }


@pytest.mark.parametrize("endpoint", ["chat_completions", "responses", "messages"])
def test_an_image_is_a_typed_key_and_no_text(endpoint: Endpoint) -> None:
    """However large: its prompt's chain is as long as with another, so that finding it again claims no tokens for its
    bytes. Another image is another prompt from there on, and no other part of it; the same is the same."""
    small, large = (chain_of(endpoint, **pictures(endpoint, data)) for data in ("AAAA", "B" * 400_000))
    assert len(small) == len(large)
    assert len(large) // 8 * BLOCK_BYTES < 2 * len(LONG) + 300
    again = chain_of(endpoint, **pictures(endpoint, "B" * 400_000, after=LONG + LONG))
    assert again.startswith(large)
    before = len(LONG) // BLOCK_BYTES * 8
    assert small[:before] == large[:before]
    assert small[-8:] != large[-8:]


def test_a_key_names_its_kind() -> None:
    """The same bytes as an image and as a file are two prompts."""
    chains = {
        chain_of(messages=[said("user", [{"type": "text", "text": LONG}, {"type": kind, "x": "AAAA"}])], tools=TOOLS)
        for kind in ("image_url", "file", "input_audio")
    }
    assert len(chains) == 3


def test_a_large_body_with_an_image_has_no_chain() -> None:
    """Its bytes would be taken for text; one of text alone is taken as it came."""
    assert blocks_of(**pictures("chat_completions", "A" * 9_000), prompt_bytes=100) is None
    assert blocks_of(messages=CHAT[:2], prompt_bytes=100) is not None

"""Tokens, template and planned outputs: what the engine says comes back as the same tokens."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from load.engine.outputs import OutputLimits, PlannedOutput, Speaker, ToolCall, invent_arguments, wanted_call
from load.engine.tokens import ASSETS, BadConversationError, ChatTemplate, Tokenizer, arguments_text

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run <a> & 'b'",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string"},
                    "seconds": {"type": "integer"},
                    "kind": {"enum": ["x", "y"]},
                    "paths": {"type": "array", "items": {"type": "string"}},
                    "deep": {"type": "object", "properties": {"on": {"type": "boolean"}}},
                },
            },
        },
    }
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer()


@pytest.fixture(scope="module")
def speaker(tokenizer: Tokenizer) -> Speaker:
    return Speaker(tokenizer)


def prompt(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> array[int]:
    return tokenizer.encode(tokenizer.template.render(messages, tools))


def test_template_writes_tools_messages_calls_and_results(tokenizer: Tokenizer) -> None:
    """Tools first and unescaped; parts are joined by a line break; calls and results stand in their own markup."""
    text = tokenizer.template.render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
            {"role": "tool", "tool_call_id": "1", "content": "one"},
            {"role": "tool", "tool_call_id": "2", "content": "two"},
        ],
        TOOLS,
    )
    tools, rest = text.split("</tools>")
    assert json.dumps(TOOLS[0], ensure_ascii=False) in tools
    assert rest.endswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>\n"
        '{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\none\n'
        "</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_special_tokens_are_single(tokenizer: Tokenizer) -> None:
    """ChatML markers and tool markup are one token each, also in the middle of text."""
    for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>"):
        ids = tokenizer.encode(f"a{token}b").tolist()
        assert len(ids) == 3
        assert tokenizer.decode(ids) == f"a{token}b"


def test_cut_and_cached_equals_whole(tokenizer: Tokenizer) -> None:
    """Message by message and cached gives the ids of the whole text, whatever the text; forgetting changes nothing."""
    small = Tokenizer(cache_tokens=50)
    texts = [
        "",
        "plain é\u2028漢字\x00 text",
        "<|im_start|>user\nhi<|im_end|>\n" * 3,
        "x<|im_start|>",
        "a  b\n\n <|im_start|> c",
    ]
    for text in texts * 2:
        whole = small.encode_segments([text])[0] if text else array("I")
        assert tokenizer.encode(text) == whole == small.encode(text)


@pytest.mark.parametrize("with_call", [False, True])
def test_output_returns_as_the_same_tokens(tokenizer: Tokenizer, speaker: Speaker, *, with_call: bool) -> None:
    """Five turns: each next prompt begins with the prompt and output tokens before it, so that the cache is hit."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are an agent.\n"}]
    before = array("I")
    for turn in range(5):
        messages.append({"role": "user", "content": f"question {turn}: why?"})
        tokens = prompt(tokenizer, messages, TOOLS)
        assert tokens[: len(before)] == before
        call = None
        if with_call:
            text = invent_arguments(TOOLS[0]["function"], speaker.generator(tokens, turn), speaker.words)
            call = ToolCall(
                "bash", text if turn else arguments_text({"command": "écho <漢字> & 'x'", "deep": {"a": [1.5]}})
            )
        plan = speaker.plan(tokens, OutputLimits(max_tokens=200), seed=turn, call=call)
        message: dict[str, Any] = {"role": "assistant", "content": plan.text(0, len(plan.tokens))}
        if call is not None:
            assert plan.finish == "tool_calls"
            assert "".join(plan.arguments or []) == call.arguments
            message["tool_calls"] = [
                {"type": "function", "function": {"name": "bash", "arguments": call.arguments}},
            ]
        messages.append(message)
        before = tokens + plan.tokens


def test_output_lengths(tokenizer: Tokenizer, speaker: Speaker) -> None:
    """``max_tokens`` cuts, ``ignore_eos`` fills it, ``min_tokens`` holds, and the natural end is the end token."""
    tokens = array("I", range(50))

    def plan(**limits: Any) -> PlannedOutput:
        return speaker.plan(tokens, OutputLimits(**limits))

    assert (len(plan(max_tokens=7).tokens), plan(max_tokens=7).finish) == (7, "length")
    assert (len(plan(max_tokens=900, ignore_eos=True).tokens), plan(max_tokens=900, ignore_eos=True).finish) == (
        900,
        "length",
    )
    assert len(plan(max_tokens=900, min_tokens=500).tokens) >= 500
    natural = plan(max_tokens=900, asked=False)
    assert natural.finish == "stop"
    assert natural.tokens[-1] == tokenizer.end_token
    assert 32 <= len(natural.tokens) <= 96
    assert len(plan(max_tokens=900, ignore_eos=True, asked=False).tokens) <= 96


def test_output_is_deterministic(speaker: Speaker) -> None:
    """Equal prompt and seed: equal output; another seed or prompt: another one."""
    one, two = array("I", range(20)), array("I", range(21))
    limits = OutputLimits(max_tokens=40)
    assert speaker.plan(one, limits, seed=1) == speaker.plan(one, limits, seed=1)
    assert speaker.plan(one, limits, seed=1).tokens != speaker.plan(one, limits, seed=2).tokens
    assert speaker.plan(one, limits).tokens != speaker.plan(two, limits).tokens


def test_arguments_come_whole_and_fit_the_schema(speaker: Speaker) -> None:
    """The argument pieces of the tokens join to the JSON text; every property of the schema is there."""
    tokens = array("I", range(9))
    text = invent_arguments(TOOLS[0]["function"], speaker.generator(tokens, 0), speaker.words)
    plan = speaker.plan(tokens, OutputLimits(max_tokens=200), call=ToolCall("bash", text))
    assert "".join(plan.arguments or []) == text
    value = json.loads(text)
    assert set(value) == {"command", "seconds", "kind", "paths", "deep"}
    assert value["kind"] == "x"
    assert isinstance(value["seconds"], int)
    assert value["deep"] == {"on": True}
    cut = speaker.plan(tokens, OutputLimits(max_tokens=12), call=ToolCall("bash", text))
    assert (cut.finish, len(cut.tokens)) == ("length", 12)


def test_which_tool_is_called() -> None:
    """Named, required, flagged or none; a name that is not there is the client's mistake."""
    function = TOOLS[0]["function"]
    assert wanted_call(TOOLS, None, None) is None
    assert wanted_call(TOOLS, "auto", None) is None
    assert wanted_call(TOOLS, "required", None) == function
    assert wanted_call(TOOLS, {"type": "function", "function": {"name": "bash"}}, None) == function
    assert wanted_call(TOOLS, "none", "bash") == function
    with pytest.raises(ValueError, match="'nope' is not among"):
        wanted_call(TOOLS, None, "nope")


def test_messages_that_cannot_be_rendered() -> None:
    """A broken conversation is the client's mistake, not a crash."""
    template = ChatTemplate("{{ raise_exception('no such role') }}")
    with pytest.raises(BadConversationError, match="no such role"):
        template.render([])
    with pytest.raises(BadConversationError):
        Tokenizer().template.render([{"content": 3}])


def test_assets_are_small() -> None:
    """They travel with the package."""
    assert (ASSETS / "tokenizer.json").stat().st_size < 600_000

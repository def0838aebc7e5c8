"""Bodies read, rules kept, answers shaped."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from bus.errors import SettingsError
from bus.settings import load_settings
from load.engine import api
from load.engine.api import ApiError, ChatBody, CompletionBody
from load.engine.config import EngineSettings
from load.engine.messages_api import CountTokensBody
from load.engine.misbehave import Misbehaviour
from load.engine.outputs import PlannedOutput, ToolCall
from load.engine.responses import AnswerHead, AnswerStream, UsageNumbers, whole_answer
from load.engine.responses_api import ResponsesBody

USAGE = UsageNumbers(prompt_tokens=10, completion_tokens=3, cached_tokens=0)
HEAD = AnswerHead(endpoint="chat", answer_id="chatcmpl-1", model='m"x', created=5, call_id="call")
PLAN = PlannedOutput(array("I", [1, 2, 3]), ["One", " two", ""], "stop")


def chat(**fields: Any) -> ChatBody:
    return api.read_body(json.dumps({"messages": [], **fields}).encode(), ChatBody)


@pytest.mark.parametrize("part", ["text", 7, None], ids=str)
def test_parts_that_are_no_objects(part: Any) -> None:
    """A client's mistake in any API: 400, never an error of the engine's own."""
    bodies = (
        {"input": [{"role": "user", "content": [part]}]},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [part]}]},
    )
    for body in bodies:
        with pytest.raises(ApiError, match="must be objects"):
            api.read_body(json.dumps(body).encode(), ResponsesBody).as_chat()
    results = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [part]}]}
    with pytest.raises(ApiError, match="must be objects"):
        api.read_body(json.dumps({"messages": [results]}).encode(), CountTokensBody).as_chat()


@pytest.mark.parametrize("tools", [[7], {"a": 1}, None], ids=str)
def test_a_namespace_without_functions(tools: Any) -> None:
    """Nothing of it is shown to the model."""
    body = {"input": "hi", "tools": [{"type": "namespace", "name": "n", "tools": tools}]}
    assert api.read_body(json.dumps(body).encode(), ResponsesBody).as_chat().tools is None


def test_unknown_fields_are_ignored() -> None:
    """Any other field of OpenAI's or a vendor's API passes."""
    body = chat(temperature=0.1, nvext={"a": 1}, kv_hints={}, max_completion_tokens=4, max_tokens=9)
    assert body.longest_output == 4


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"messages":', "parsing the body"),
        (b"\xff", "parsing the body"),
        (b'{"messages": 3}', "messages"),
        (b"{}", "messages"),
        (b"[" * 100_000, "array"),
    ],
)
def test_bad_bodies(raw: bytes, words: str) -> None:
    """Broken JSON and wrong types are 400 with a reason."""
    with pytest.raises(ApiError, match=words) as caught:
        api.read_body(raw, ChatBody)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "fields", [{"n": 2}, {"cache_salt": ""}, {"cache_salt": "x" * 1025}, {"max_tokens": 0}, {"stream_options": {}}]
)
def test_rules(fields: dict[str, Any]) -> None:
    """What this engine cannot serve is refused, not ignored."""
    with pytest.raises(ApiError):
        api.check_common(chat(**fields))


def test_prompts_of_completions() -> None:
    """Text or token ids, alone or as a list of one."""
    assert api.completion_prompt("a") == "a"
    assert api.completion_prompt(["a"]) == "a"
    assert api.completion_prompt([1, 2]) == array("I", [1, 2])
    assert api.completion_prompt([[1, 2]]) == array("I", [1, 2])
    for bad in ("", [], ["a", "b"], [[1], [2]], [-1], [1.5], None, {"a": 1}):
        with pytest.raises(ApiError):
            api.completion_prompt(bad)


def test_context_length() -> None:
    """A prompt over the model's length, or a wish over what is left, is refused."""
    assert api.output_room(90, None, 100) == 10
    assert api.output_room(90, 10, 100) == 10
    with pytest.raises(ApiError, match="maximum context length is 100"):
        api.output_room(100, None, 100)
    with pytest.raises(ApiError, match="too large: 11"):
        api.output_room(90, 11, 100)


def test_headers_and_fields_of_a_router() -> None:
    """Priority header over body; rank in range, 0 included; session from body, header, then vllm_xargs (A13)."""
    headers: dict[str, bytes] = {"x-vllm-priority": b"-3", "x-data-parallel-rank": b"0", "x-session-id": b"h"}
    body = chat(priority=7)

    def header(name: str) -> bytes | None:
        return headers.get(name)

    def no_header(_: str) -> bytes | None:
        return None

    assert api.priority_of(body, header) == -3
    assert api.priority_of(body, no_header) == 7
    assert api.rank_of(header, 2) == 0
    assert api.rank_of(no_header, 2) is None
    with pytest.raises(ApiError, match=r"data_parallel_rank 2 is out of range \[0, 2\)"):
        api.rank_of(lambda _: b"2", 2)
    with pytest.raises(ApiError, match="integer"):
        api.rank_of(lambda _: b"x", 2)
    assert api.session_of(chat(session_id="b"), header) == "b"
    assert api.session_of(chat(), header) == "h"
    assert api.session_of(chat(vllm_xargs={"session_id": "x"}), no_header) == "x"
    assert api.sim_tool_of(chat(sim_tool={"name": "f", "arguments": {"a": 1}}), no_header) == ("f", {"a": 1})


def events_of(raw: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix(b"data: ")) for event in raw]


def test_stream_events() -> None:
    """Role first, one event a step, the last one with the reason; usage apart; names are escaped."""
    stream = AnswerStream(HEAD, PLAN)
    events = events_of(
        [
            *stream.opening(USAGE),
            *stream.tokens(0, 2, None, USAGE),
            *stream.tokens(2, 3, "stop", USAGE),
            stream.usage(USAGE),
        ]
    )
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "One two"}, {"content": ""}]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, "stop"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == 13
    assert {event["model"] for event in events} == {'m"x'}
    assert all("usage" not in event for event in events[:-1])


def test_usage_variants() -> None:
    """C3: continuous usage on request; null in every event as misbehaviour."""
    continuous = AnswerStream(HEAD, PLAN, continuous=True)
    assert events_of(continuous.tokens(0, 1, None, USAGE))[0]["usage"]["prompt_tokens"] == 10
    null = AnswerStream(HEAD, PLAN, usage_mode="null")
    assert events_of(null.tokens(0, 1, None, USAGE))[0]["usage"] is None


def test_tool_calls_stream_name_then_arguments() -> None:
    """The name comes once with the id, then the arguments in pieces; the whole answer carries the call."""
    plan = PlannedOutput(
        array("I", [1, 2, 3, 4]),
        ["Hi", "", "", ""],
        "tool_calls",
        ToolCall("f", '{"a": 1}'),
        1,
        ["", '{"a"', ": 1}", ""],
    )
    stream = AnswerStream(HEAD, plan)
    raw = [event for position in range(3) for event in stream.tokens(position, position + 1, None, USAGE)]
    events = events_of([*raw, *stream.tokens(3, 4, "tool_calls", USAGE)])
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert [call["function"].get("name") for call in calls] == ["f", None, None]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
    assert calls[0]["id"] == "call"
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    message = json.loads(whole_answer(HEAD, plan, "tool_calls", USAGE, None))["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_completions_shape() -> None:
    """Text completions stream ``text`` and answer ``text``; without usage there is none."""
    head = AnswerHead(endpoint="completions", answer_id="cmpl-1", model="m", created=5)
    events = events_of(AnswerStream(head, PLAN).tokens(0, 3, "stop", USAGE))
    assert events[0]["choices"][0] == {
        "index": 0,
        "text": "One two",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    whole = json.loads(whole_answer(head, PLAN, "stop", None, [9]))
    assert "usage" not in whole
    assert whole["choices"][0]["prompt_token_ids"] == [9]
    assert whole["choices"][0]["token_ids"] == [1, 2, 3]


def test_misbehaviour_counts_down_and_changes_whole() -> None:
    """A count holds n times, -1 for ever; a wrong change changes nothing."""
    flags = Misbehaviour(drop_batches=2, stall="head", stall_requests=1)
    assert [flags.take("drop_batches") for _ in range(3)] == [True, True, False]
    assert flags.take_stall("stream") is False
    assert [flags.take_stall("head") for _ in range(2)] == [True, False]
    flags.change({"drop_batches": -1, "die_after_chunks": 5})
    assert [flags.take("drop_batches") for _ in range(3)] == [True] * 3
    assert flags.take_death() == 5
    for wrong in ({"drop_batches": "x"}, {"nope": 1}, {"error_status": 200}, {"drop_batches": 0, "stall": "lunch"}):
        with pytest.raises(ValueError):  # noqa: PT011 - each has its own sentence
            flags.change(wrong)
    assert flags.drop_batches == -1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"block_size": "0"}, "block_size"),
        ({"num_blocks": "10", "max_model_len": "145"}, "max_model_len must be 2..144"),
        ({"speed": "0"}, "speed"),
        ({"profile": "a100"}, "profile"),
        ({"http_port": "-1"}, "http_port"),
        ({"misbehave": '{"stall": "lunch"}'}, "misbehave"),
        ({"blocksize": "16"}, "did you mean block_size"),
    ],
)
def test_wrong_settings(overrides: dict[str, str], words: str) -> None:
    """One sentence that names the key."""
    with pytest.raises(SettingsError, match=words):
        load_settings("engine", EngineSettings, environ={}, overrides=overrides)


def test_settings_follow_from_the_profile() -> None:
    """Blocks from the profile's capacity, the model's length from the blocks."""
    settings = load_settings("engine", EngineSettings, environ={}, overrides={"block_size": "32"})
    assert settings.sizes.num_blocks == 412_000 // 32
    assert settings.sizes.max_model_len == 131_072
    small = load_settings("engine", EngineSettings, environ={}, overrides={"num_blocks": "11"})
    assert small.sizes.max_model_len == 160
    assert small.publisher_config(0).replay_topic is True
    array_form = load_settings("engine", EngineSettings, environ={}, overrides={"event_form": "vllm-array"})
    assert array_form.publisher_config(0).replay_topic is False


def test_completion_body_reads() -> None:
    """The prompt's type is checked after decoding."""
    body = api.read_body(b'{"prompt": [[1, 2]], "stream": true}', CompletionBody)
    assert api.completion_prompt(body.prompt) == array("I", [1, 2])

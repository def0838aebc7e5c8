"""The engine's stream: bytes unchanged, facts read, however the bytes are cut (user-cases C1, C3)."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.request import Usage
from schemas.trace import ChoiceFinish, ToolCall
from services.ingress.answers import MAX_CHARACTERS, MAX_TOOLS, AnswerFacts, AnswerReader
from services.ingress.errors import EventTooLargeError
from services.ingress.sse import EventStream

LIMIT = 1 << 20


def chunk(content: str | None = None, finish: str | None = None, **members: Any) -> str:
    """A chat chunk as vLLM writes it."""
    delta = {} if content is None else {"content": content}
    body = {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **members}
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False)


USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
USAGE_ONLY = json.dumps({"id": "chatcmpl-1", "choices": [], "usage": USAGE})
TOOL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "ls", "arguments": ""}}
ARGUMENTS = {"index": 0, "function": {"arguments": '{"name": "usage"}'}}


def tool_chunk(tool: dict[str, Any]) -> str:
    """A chunk with a piece of a tool call."""
    return json.dumps({"choices": [{"index": 0, "delta": {"tool_calls": [tool]}, "finish_reason": None}]})


LINES = [
    "\ufeff: keep-alive",
    "",
    "data: " + chunk("a\u2028b\u2029c\x85"),
    "",
    "data:" + chunk("no space"),
    "",
    ": comment beside data",
    "id: 7",
    "event: message",
    "data: " + chunk('"usage":{ "finish_reason":"x" [DONE]'),
    "",
    "retry: 10",
    "",
    "",
    'data: {"choices":',
    'data:  [{"index":0,"delta":{"content":"two lines"},',
    'data: "finish_reason":null}]}',
    "",
    "data: " + tool_chunk(TOOL),
    "",
    "data: " + tool_chunk(ARGUMENTS),
    "",
    ":",
    "data: " + chunk(None, "tool_calls", usage=None),
    "",
    "data: " + USAGE_ONLY,
    "",
    "data: [DONE]",
    "",
    "",
]
FACTS = AnswerFacts(
    usage=Usage(input_tokens=9, output_tokens=3, cached_tokens=8),
    response_id="chatcmpl-1",
    finish_reason="tool_calls",
    tool_calls=(ToolCall(id="call_1", name="ls"),),
    complete=True,
    last_event=True,
    data_lines=3,
)
ENDS = {"lf": "\n", "crlf": "\r\n", "cr": "\r"}


def corpus(end: str) -> bytes:
    """The lines above with one way of ending them."""
    return end.join(LINES).encode()


def without_usage(end: str) -> bytes:
    """What a client that did not ask for usage gets."""
    return corpus(end).replace(f"data: {USAGE_ONLY}{end}{end}".encode(), b"")


def run(pieces: list[bytes], *, strip: bool = False, endpoint: str = "chat_completions") -> tuple[bytes, AnswerFacts]:
    """What the client gets of these pieces, and what was read."""
    reader = AnswerReader(endpoint)
    stream = EventStream(reader, event_limit=LIMIT, strip_usage=strip)
    out = [stream.feed(piece) for piece in pieces]
    out.append(stream.finish())
    return b"".join(out), reader.facts()


@pytest.mark.long
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_any_two_pieces(end: str) -> None:
    """The corpus cut at every byte: same bytes to the client, same facts (C1)."""
    whole = corpus(end)
    expected = {False: (whole, FACTS), True: (without_usage(end), FACTS)}
    for cut in range(len(whole) + 1):
        strip = cut % 2 == 0
        assert run([whole[:cut], whole[cut:]], strip=strip) == expected[strip], cut


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("strip", [False, True], ids=["asked", "not asked"])
def test_dribble(end: str, strip: bool) -> None:
    """The corpus byte by byte: same bytes to the client, same facts (C1)."""
    whole = corpus(end)
    assert run([bytes([byte]) for byte in whole], strip=strip) == (without_usage(end) if strip else whole, FACTS)


ends = st.sampled_from(["\n", "\r\n", "\r"])
lines = st.sampled_from([*LINES, "data", "data:", "x", "event: ping"])


@given(st.lists(st.tuples(lines, ends), max_size=14), st.lists(st.integers(0, 3000), max_size=6), st.booleans())
def test_mixed_line_ends_and_any_cuts(said: list[tuple[str, str]], cuts: list[int], strip: bool) -> None:
    """Whatever lines, ends and cuts: pieces give what the whole gives, and without stripping every byte passes."""
    whole = "".join(line + end for line, end in said).encode()
    places = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    pieces = [whole[start:stop] for start, stop in pairwise(places)]
    assert run(pieces, strip=strip) == run([whole], strip=strip)
    assert run(pieces, strip=False)[0] == whole


def test_a_plain_piece_passes_without_a_copy() -> None:
    """Whole events in which there is nothing to read are the very object that came in."""
    reader = AnswerReader("chat_completions")
    stream = EventStream(reader, event_limit=LIMIT, strip_usage=True)
    piece = f"data: {chunk('x')}\n\ndata: {chunk('y')}\n\n".encode()
    assert stream.feed(piece) is piece
    assert reader.facts().data_lines == 2


def test_an_event_is_passed_on_whole_or_not_at_all() -> None:
    """Half an event waits; when the engine dies inside it, the client never saw its half (C2)."""
    stream = EventStream(AnswerReader("chat_completions"), event_limit=LIMIT)
    event = f"data: {chunk('x')}\n\n".encode()
    assert stream.feed(event + event[:20]) == event
    assert stream.waiting_bytes == 20
    assert stream.feed(event[20:]) == event
    assert stream.waiting_bytes == 0


def test_keep_alives_pass_at_once() -> None:
    """A comment line or an empty line is passed on when it is complete, without waiting for an event."""
    stream = EventStream(AnswerReader("chat_completions"), event_limit=LIMIT)
    assert stream.feed(b": ping\n") == b": ping\n"
    assert stream.feed(b"\n") == b"\n"
    assert stream.feed(b": pi") == b""
    assert stream.feed(b"ng\r\n") == b": ping\r\n"
    assert stream.waiting_bytes == 0


def test_a_large_event_passes_and_a_larger_one_is_an_error() -> None:
    """Memory is bounded: up to the limit an event of any pieces passes, beyond it a named error (C1)."""
    stream = EventStream(AnswerReader("chat_completions"), event_limit=LIMIT)
    event = b'data: {"x":"' + b"y" * (LIMIT - 20) + b'"}\n\n'
    pieces = [event[at : at + 999] for at in range(0, len(event), 999)]
    assert b"".join(map(stream.feed, pieces)) == event
    for _ in range(LIMIT // 999):
        assert stream.feed(b"y" * 999) == b""
    with pytest.raises(EventTooLargeError):
        stream.feed(b"y" * 999)
    with pytest.raises(EventTooLargeError):
        EventStream(AnswerReader("chat_completions"), event_limit=10).feed(b"data: 123456789\n\n")
    with pytest.raises(EventTooLargeError):
        EventStream(AnswerReader("chat_completions"), event_limit=10).feed(b"data: 123456789")


@pytest.mark.long
def test_many_small_pieces_of_a_large_event_cost_its_size_once() -> None:
    """The search for the event's end goes on where it stopped: 1 MiB in pieces of 16 bytes is quick (C1)."""
    stream = EventStream(AnswerReader("chat_completions"), event_limit=2 * LIMIT)
    piece = b"x" * 16
    for _ in range(LIMIT // 16):
        assert stream.feed(piece) == b""
    assert len(stream.feed(b"\n\n")) == LIMIT + 2


def events(*datas: str) -> bytes:
    """A stream of these events."""
    return b"".join(f"data: {data}\n\n".encode() for data in datas)


USAGE_VARIANTS = [
    # name, stream, usage, what a client that did not ask gets
    ("none", events(chunk("a"), chunk(None, "stop"), "[DONE]"), Usage(), None),
    (
        "null in every chunk",
        events(chunk("a", usage=None), chunk(None, "stop", usage=None), "[DONE]"),
        Usage(),
        None,
    ),
    (
        "a last chunk of its own",
        events(chunk("a"), chunk(None, "stop"), USAGE_ONLY, "[DONE]"),
        Usage(input_tokens=9, output_tokens=3, cached_tokens=8),
        events(chunk("a"), chunk(None, "stop"), "[DONE]"),
    ),
    (
        "in the last content chunk",
        events(chunk("a"), chunk(None, "stop", usage=USAGE), "[DONE]"),
        Usage(input_tokens=9, output_tokens=3, cached_tokens=8),
        None,
    ),
    (
        "growing in every chunk",
        events(chunk("a", usage={"prompt_tokens": 9, "completion_tokens": 1}), chunk(None, "stop", usage=USAGE)),
        Usage(input_tokens=9, output_tokens=3, cached_tokens=8),
        None,
    ),
]


@pytest.mark.parametrize(("name", "stream", "usage", "stripped"), USAGE_VARIANTS, ids=[v[0] for v in USAGE_VARIANTS])
def test_usage_variants(name: str, stream: bytes, usage: Usage, stripped: bytes | None) -> None:
    """Usage comes in the engine's own way; only a chunk that carries nothing else is kept from who did not ask (C3)."""
    passed, facts = run([stream])
    assert (passed, facts.usage, facts.finish_reason, facts.complete) == (stream, usage, "stop", True)
    passed, facts = run([stream], strip=True)
    assert (passed, facts.usage) == (stream if stripped is None else stripped, usage)


def test_in_band_error() -> None:
    """An error chunk is an error of the answer, by the type that the engine gave it."""
    stream = events(chunk("a"), json.dumps({"error": {"message": "m", "type": "InternalServerError", "code": 500}}))
    assert run([stream])[1].error == "InternalServerError"
    for none in (None, False, ""):
        assert run([events(chunk("a", error=none), chunk(None, "stop"))])[1].error is None


def test_unreadable_events_change_nothing() -> None:
    """What is marked but does not decode is passed on and counted."""
    stream = events('{"usage":{', '{"usage":{"prompt_tokens":"many"}}', chunk(None, "stop"))
    passed, facts = run([stream])
    assert (passed, facts.unreadable, facts.usage, facts.finish_reason) == (stream, 2, Usage(), "stop")


def test_tool_calls_of_several_choices() -> None:
    """Calls are keyed by choice and index; the first id and name of each stay; arguments are never kept (§2.6)."""

    def piece(choice: int, **tool: Any) -> str:
        return json.dumps({"choices": [{"index": choice, "delta": {"tool_calls": [tool]}}]}, separators=(",", ":"))

    stream = events(
        piece(0, index=0, id="a", function={"name": "ls", "arguments": "{"}),
        piece(1, index=0, id="b"),
        piece(0, index=1, function={"name": "cat"}),
        piece(1, index=0, function={"name": "rm"}),
        piece(0, index=0, id="z", function={"name": "other"}),
        piece(0, index=2, function={"arguments": "{}"}),
    )
    assert run([stream])[1].tool_calls == (
        ToolCall(choice_index=0, tool_call_index=0, id="a", name="ls"),
        ToolCall(choice_index=1, tool_call_index=0, id="b", name="rm"),
        ToolCall(choice_index=0, tool_call_index=1, name="cat"),
    )


def typed(*bodies: dict[str, Any]) -> bytes:
    """Events that name their type, as Anthropic's and Responses' streams do."""
    return b"".join(f"event: {body['type']}\ndata: {json.dumps(body)}\n\n".encode() for body in bodies)


def test_anthropic_stream() -> None:
    """Input from message_start, output and stop from message_delta; cached tokens belong to the input."""
    stream = typed(
        {
            "type": "message_start",
            "message": {"id": "msg_1", "usage": {"input_tokens": 5, "cache_read_input_tokens": 20}},
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "id": "t", "name": "Bash"}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 7}},
        {"type": "message_stop"},
    )
    passed, facts = run([stream[:100], stream[100:]], strip=True, endpoint="messages")
    assert passed == stream
    assert facts.usage == Usage(input_tokens=25, output_tokens=7, cached_tokens=20)
    assert (facts.finish_reason, facts.backend_finish_reason, facts.complete) == ("tool_calls", "tool_use", True)
    assert (facts.response_id, facts.stop_reason) == ("msg_1", None)
    assert facts.tool_calls == (ToolCall(tool_call_index=1, id="t", name="Bash"),)
    error = typed({"type": "error", "error": {"type": "overloaded_error", "message": "m"}})
    assert run([error], endpoint="messages")[1].error == "overloaded_error"


def test_sglang_counts_cached_tokens_in_the_input() -> None:
    """Its ``input_tokens`` is the whole prompt, and its first event has zeros: of a stream that dies nothing is known.
    (SGLang: entrypoints/anthropic/serving.py; vLLM after vllm-project/vllm #40912 has Anthropic's way.)"""
    nothing = {"input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
    start = {"type": "message_start", "message": {"id": "m", "usage": nothing}}
    reader = AnswerReader("messages", dialect="sglang")
    reader.read_event(json.dumps(start).encode())
    assert reader.facts().usage == Usage()
    said = {"input_tokens": 25, "cache_read_input_tokens": 20, "output_tokens": 7}
    reader.read_event(
        json.dumps({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": said}).encode()
    )
    assert reader.facts().usage == Usage(input_tokens=25, output_tokens=7, cached_tokens=20)


def test_responses_stream() -> None:
    """The last event carries usage and status; tool items are named when they are added."""
    done = {"status": "completed", "usage": {"input_tokens": 4, "output_tokens": 2}, "error": None}
    stream = typed(
        {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress", "usage": None}},
        {"type": "response.output_text.delta", "delta": "hi"},
        {
            "type": "response.output_item.added",
            "output_index": 1,
            "item": {"type": "function_call", "id": "fc", "call_id": "c", "name": "shell", "arguments": ""},
        },
        {"type": "response.completed", "response": done},
    )
    passed, facts = run([stream], endpoint="responses")
    assert passed == stream
    assert facts.usage == Usage(input_tokens=4, output_tokens=2)
    assert (facts.finish_reason, facts.backend_finish_reason, facts.complete) == ("tool_calls", "completed", True)
    assert facts.response_id == "resp_1"
    assert facts.tool_calls == (ToolCall(tool_call_index=1, id="c", name="shell"),)


@pytest.mark.parametrize(
    ("last", "finish", "word", "error"),
    [
        ({"status": "completed"}, "stop", "completed", None),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            "length",
            "max_output_tokens",
            None,
        ),
        ({"status": "failed", "error": {"code": "rate_limit_exceeded"}}, None, "failed", "rate_limit_exceeded"),
    ],
    ids=lambda value: str(value),
)
def test_responses_endings(last: dict[str, Any], finish: str | None, word: str, error: str | None) -> None:
    """Complete, cut short, failed: in OpenAI's words, the engine's own beside them."""
    facts = run([typed({"type": f"response.{last['status']}", "response": last})], endpoint="responses")[1]
    assert (facts.finish_reason, facts.backend_finish_reason, facts.error) == (finish, word, error)


BODIES: list[tuple[str, dict[str, Any], str, int, tuple[str | None, ...]]] = [
    (
        "chat_completions",
        {
            "choices": [{"index": 0, "finish_reason": "tool_calls", "message": {"tool_calls": [TOOL, {"id": "x"}]}}],
            "usage": USAGE,
        },
        "tool_calls",
        9,
        ("ls", None),
    ),
    ("completions", {"choices": [{"text": "x", "finish_reason": "length"}], "usage": USAGE}, "length", 9, ()),
    (
        "messages",
        {
            "type": "message",
            "content": [{"type": "text", "text": "x"}, {"type": "tool_use", "id": "t", "name": "Bash"}],
            "stop_reason": "tool_use",
            "usage": {"input_tokens": 9, "output_tokens": 1},
        },
        "tool_calls",
        9,
        ("Bash",),
    ),
    (
        "responses",
        {
            "status": "completed",
            "output": [{"type": "function_call", "call_id": "c", "name": "shell"}],
            "usage": {"input_tokens": 9, "output_tokens": 1},
        },
        "tool_calls",
        9,
        ("shell",),
    ),
]


@pytest.mark.parametrize(("endpoint", "body", "finish", "inputs", "names"), BODIES, ids=[b[0] for b in BODIES])
def test_whole_answers(
    endpoint: str, body: dict[str, Any], finish: str, inputs: int, names: tuple[str | None, ...]
) -> None:
    """An answer that is not a stream says the same in one piece."""
    reader = AnswerReader(endpoint)
    reader.read_body(json.dumps(body).encode())
    facts = reader.facts()
    assert (facts.finish_reason, facts.usage.input_tokens, facts.complete) == (finish, inputs, True)
    assert tuple(call.name for call in facts.tool_calls) == names


def test_a_whole_answer_that_is_no_json() -> None:
    """An HTML error page: nothing to read, no error. A count is of a prompt, and generates nothing."""
    reader = AnswerReader("messages")
    reader.read_body(b"<html>")
    assert reader.facts().unreadable == 1
    counted = AnswerReader("count_tokens")
    counted.read_body(b'{"input_tokens": 12}')
    assert (counted.facts().usage, counted.facts().complete) == (Usage(input_tokens=12, output_tokens=0), True)


@pytest.mark.parametrize("number", ["-1", "1" + "0" * 400, str(1 << 40), "1.5", '"9"', "true"])
def test_impossible_usage_is_no_usage(number: str) -> None:
    """What an engine reports goes into facts and rows: a number that cannot be is left out, the rest stands."""
    reader = AnswerReader("chat_completions")
    reader.read_body(b'{"choices":[],"usage":{"prompt_tokens":%b}}' % number.encode())
    assert reader.facts().usage.input_tokens is None


@pytest.mark.long
def test_an_engines_words_are_cut() -> None:
    """Reasons and tool calls go into facts and rows, which must fit into a message (one row per request)."""
    call = {"id": "i" * 5000, "function": {"name": "n" * 5_000_000}}
    calls = [{"index": 10**400, **call}, {"index": -1, **call}, *({"index": at, **call} for at in range(2))]
    calls += [{"index": at, "function": {"name": "n"}} for at in range(2, 5000)]
    choice = {"index": 0, "finish_reason": "f" * 5_000_000, "stop_reason": 10**400, "message": {"tool_calls": calls}}
    reader = AnswerReader("chat_completions")
    reader.read_body(json.dumps({"choices": [choice], "error": "e" * 5_000_000}).encode())
    assert len(msgspec.json.encode(reader.facts())) < 100_000
    assert len(reader.facts().tool_calls) == MAX_TOOLS
    assert reader.facts().finish_reason == "f" * MAX_CHARACTERS


def test_an_answer_is_named_by_its_first_event() -> None:
    """Its id is known although nothing else of it was worth reading; the piece passes as the object that came in, and
    its content still counts as a line."""
    reader = AnswerReader("chat_completions")
    stream = EventStream(reader, event_limit=LIMIT)
    first = json.dumps({"id": "chatcmpl-9", "choices": [{"index": 0, "delta": {"content": "x"}}]})
    piece = f"data: {first}\n\ndata: {chunk('y')}\n\n".encode()
    assert stream.feed(piece) is piece
    assert (reader.facts().response_id, reader.facts().data_lines) == ("chatcmpl-9", 2)


def test_each_choice_ends_by_itself() -> None:
    """n > 1: each choice's end beside the last one that was said; of one choice there is no list (§2.6)."""

    def end(choice: int, reason: str, stop: str | int | None = None) -> str:
        return json.dumps({"choices": [{"index": choice, "finish_reason": reason, "stop_reason": stop}]})

    facts = run([events(chunk("a"), end(1, "stop", "###"), end(0, "length"))])[1]
    assert facts.choices == (
        ChoiceFinish(choice_index=0, finish_reason="length"),
        ChoiceFinish(choice_index=1, finish_reason="stop", stop_reason="###"),
    )
    assert (facts.finish_reason, facts.stop_reason) == ("length", "###")
    assert run([events(end(0, "stop"))])[1].choices == ()


ASKED_IDS = [
    # name, chunks of a client that asked for token ids, of the prompt, generated
    ("chat", [{"prompt_token_ids": [1, 2]}, {"choices": [[3]]}, {"choices": [[4, 5]]}], (1, 2), (3, 4, 5)),
    ("not of two choices", [{"choices": [[3]]}, {"choices": [[], [4]]}], (), ()),
    ("no ids", [{"choices": [[3]]}, {"choices": [[-1]]}], (), ()),
    ("too large", [{"choices": [[1 << 32]]}], (), ()),
]


@pytest.mark.parametrize(("name", "chunks", "prompt", "generated"), ASKED_IDS, ids=[case[0] for case in ASKED_IDS])
def test_token_ids(
    name: str, chunks: list[dict[str, Any]], prompt: tuple[int, ...], generated: tuple[int, ...]
) -> None:
    """vLLM's ``return_token_ids``: the prompt's once, an answer's as they come; of who did not ask nothing is read."""
    said = [
        json.dumps(
            {**piece, "choices": [{"index": at, "token_ids": ids} for at, ids in enumerate(piece.get("choices", [[]]))]}
        )
        for piece in chunks
    ]
    reader = AnswerReader("chat_completions", token_ids=True)
    stream = EventStream(reader, event_limit=LIMIT)
    for piece in said:
        stream.feed(events(piece))
    assert (reader.facts().prompt_token_ids, reader.facts().token_ids) == (prompt, generated)
    assert run([events(*said)])[1].token_ids == ()


def test_token_ids_of_a_whole_completion() -> None:
    """Completions say the prompt's beside each choice."""
    choice = {"index": 0, "token_ids": [7], "prompt_token_ids": [5, 6], "finish_reason": "stop"}
    reader = AnswerReader("completions", token_ids=True)
    reader.read_body(json.dumps({"id": "cmpl-1", "choices": [choice]}).encode())
    assert (reader.facts().prompt_token_ids, reader.facts().token_ids) == ((5, 6), (7,))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'{"type":"response.failed","response":{"status":"failed","error":{"code":"server_error"}}}', "server_error"),
        (b'{"type":"response.failed","response":{"status":"failed","error":null}}', "failed"),
        (b'{"type":"error","code":"internal","message":"m"}', "internal"),
    ],
)
def test_a_response_that_failed_has_an_error(data: bytes, error: str) -> None:
    """Also where the engine does not say which."""
    reader = AnswerReader("responses")
    EventStream(reader, event_limit=10_000).feed(b"event: x\ndata: " + data + b"\n\n")
    assert reader.facts().error == error


def test_the_first_words_of_a_message_are_not_its_output() -> None:
    """vLLM says 0 output tokens in ``message_start``: a stream that dies has as many as came, estimated, not 0."""
    reader = AnswerReader("messages")
    start = b'{"type":"message_start","message":{"id":"m","usage":{"input_tokens":9,"output_tokens":0}}}'
    EventStream(reader, event_limit=10_000).feed(b"event: message_start\ndata: " + start + b"\n\n")
    assert (reader.facts().usage.input_tokens, reader.facts().usage.output_tokens) == (9, None)

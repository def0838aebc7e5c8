"""Streams of all four APIs, cut everywhere: what is passed on and what is read never depend on the pieces (C1, C3)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.request import Usage
from services.ingress.answers import AnswerFacts, AnswerReader
from services.ingress.sse import EventStream

LIMIT = 1 << 22
ENDS = {"lf": "\n", "crlf": "\r\n", "cr": "\r"}
WORDS = ("Look", " at\u2028", "\u2029it", " \x85\xe9", ' "usage":{ ', " [DONE]", "", "\\", "data: ", " \n\n")
"""Texts that look like something else, or have what some readers take for the end of a line."""


def compact(body: dict[str, Any]) -> str:
    """JSON as engines write it: no spaces, characters as they are."""
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False)


def chat(**members: Any) -> str:
    """A chunk of a chat as vLLM writes it, ``usage: null`` beside it where it was asked for."""
    return "data: " + compact({"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", **members})


def chat_lines(null_usage: dict[str, Any]) -> Iterator[str]:
    """Words, reasoning, a tool call, the end, usage of its own."""
    yield ": keep-alive"
    for key, words in (("content", WORDS[:7]), ("reasoning", WORDS[7:])):
        for word in words:
            choice = {"index": 0, "delta": {key: word}, "logprobs": None, "finish_reason": None}
            yield chat(choices=[choice], **null_usage)
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "ls", "arguments": ""}}
    for tool in (call, {"index": 0, "function": {"arguments": '{"name": "usage"'}}, {"index": 0, "function": {}}):
        yield chat(choices=[{"index": 0, "delta": {"tool_calls": [tool]}, "finish_reason": None}], **null_usage)
    yield chat(choices=[{"index": 0, "delta": {}, "finish_reason": "tool_calls"}], **null_usage)
    yield chat(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 30})
    yield "data:[DONE]"


def completion_lines() -> Iterator[str]:
    """A completion of two choices, without a space after the colon."""
    for index, word in enumerate(WORDS[1::2]):
        choice = {"index": index % 2, "text": word, "logprobs": None, "finish_reason": None}
        yield "data:" + compact({"id": "cmpl-1", "choices": [choice], "usage": None})
    for index in (0, 1):
        yield "data:" + compact({"id": "cmpl-1", "choices": [{"index": index, "text": "", "finish_reason": "length"}]})
    yield "data:" + compact({"id": "cmpl-1", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 30}})
    yield "data: [DONE]"


def typed(kind: str, **members: Any) -> str:
    """An event that names its type twice."""
    return f"event: {kind}\ndata: " + compact({"type": kind, **members})


def message_lines() -> Iterator[str]:
    """Anthropic's: text, thinking and a tool's input."""
    yield typed("message_start", message={"id": "msg_1", "usage": {"input_tokens": 9, "output_tokens": 0}})
    for index, (kind, key, words) in enumerate(
        (("text_delta", "text", WORDS[:3]), ("thinking_delta", "thinking", WORDS[3:5]))
    ):
        yield typed("content_block_start", index=index, content_block={"type": "text", "text": ""})
        for word in words:
            yield typed("content_block_delta", index=index, delta={"type": kind, key: word})
        yield typed("ping")
        yield typed("content_block_stop", index=index)
    yield typed("content_block_start", index=2, content_block={"type": "tool_use", "id": "t", "name": "Bash"})
    yield typed("content_block_delta", index=2, delta={"type": "input_json_delta", "partial_json": '{"name":"x"}'})
    yield typed("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 30})
    yield typed("message_stop")


def response_lines() -> Iterator[str]:
    """Responses': every event has its number."""
    yield typed(
        "response.created", sequence_number=0, response={"id": "resp_1", "status": "in_progress", "usage": None}
    )
    for number, word in enumerate(WORDS[:3]):
        yield typed("response.output_text.delta", item_id="i", delta=word, sequence_number=number + 1)
    for word in WORDS[3:6]:
        yield typed("response.output_text.delta", item_id="i", delta=word)
    item = {"type": "function_call", "id": "fc", "call_id": "c", "name": "shell", "arguments": ""}
    yield typed("response.output_item.added", output_index=1, item=item)
    done = {"id": "resp_1", "status": "completed", "usage": {"input_tokens": 9, "output_tokens": 30}}
    yield typed("response.completed", response=done)


STREAMS = {
    "chat": ("chat_completions", list(chat_lines({"usage": None}))),
    "chat, not asked": ("chat_completions", list(chat_lines({}))),
    "completions": ("completions", list(completion_lines())),
    "messages": ("messages", list(message_lines())),
    "responses": ("responses", list(response_lines())),
}


def events_of(name: str, end: str) -> list[bytes]:
    """The stream's events with one way of ending lines."""
    return [(event + "\n\n").replace("\n", end).encode() for event in STREAMS[name][1]]


def run(name: str, pieces: list[bytes], *, strip: bool) -> tuple[bytes, AnswerFacts]:
    """What the client gets of these pieces, and what was read."""
    reader = AnswerReader(STREAMS[name][0])
    stream = EventStream(reader, event_limit=LIMIT, strip_usage=strip)
    out = [stream.feed(piece) for piece in pieces]
    out.append(stream.finish())
    return b"".join(out), reader.facts()


@pytest.mark.long
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("name", STREAMS)
def test_every_split(name: str, end: str) -> None:
    """Two pieces cut at every byte, one byte at a time, one event at a time: the same bytes, less the usage chunk that
    nobody asked for, and the same facts."""
    events = events_of(name, end)
    whole = b"".join(events)
    facts = run(name, [whole], strip=False)[1]
    assert facts.usage == Usage(input_tokens=9, output_tokens=30)
    assert (facts.complete, facts.last_event, facts.unreadable) == (True, True, 0)
    stripped = b"".join(event for event in events if b'"choices":[],"usage"' not in event)
    expected = {False: (whole, facts), True: (stripped, facts)}
    for strip in (False, True):
        assert run(name, events, strip=strip) == expected[strip]
        assert run(name, [bytes([byte]) for byte in whole], strip=strip) == expected[strip]
    for cut in range(len(whole) + 1):
        strip = cut % 2 == 0
        assert run(name, [whole[:cut], whole[cut:]], strip=strip) == expected[strip], cut


@given(
    st.sampled_from(list(STREAMS)),
    st.sampled_from(list(ENDS.values())),
    st.lists(st.integers(1, 400), max_size=40),
    st.booleans(),
)
def test_any_pieces(name: str, end: str, sizes: list[int], strip: bool) -> None:
    """Pieces that begin and end wherever the network cut them, some of them with many events."""
    whole = b"".join(events_of(name, end))
    places = [0]
    for size in sizes:
        places.append(min(len(whole), places[-1] + size))
    places.append(len(whole))
    pieces = [whole[start:stop] for start, stop in pairwise(places)]
    assert run(name, pieces, strip=strip) == run(name, [whole], strip=strip)


@given(st.lists(st.tuples(st.sampled_from(WORDS), st.integers(0, 2)), min_size=1, max_size=12))
def test_pieces_of_whole_events(said: list[tuple[str, int]]) -> None:
    """Most pieces are whole events that differ in their words: those that are taken for known ones, alone or several
    in a piece, count as each of them does when it is read."""
    events = [
        (chat(choices=[{"index": 0, "delta": {"content": word}, "finish_reason": None}]) + "\n\n").encode()
        for word, _ in said
    ]
    pieces: list[bytes] = []
    for event, (_, joins) in zip(events, said, strict=True):
        if joins and pieces:
            pieces[-1] += event
        else:
            pieces.append(event)
    once = [*events, b"data: [DONE]\n\n"]
    assert run("chat", [*pieces, once[-1]], strip=True) == run("chat", [b"".join(once)], strip=True)


@pytest.mark.long
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_megabyte_in_one_event(end: str) -> None:
    """Cut around both of its ends, and in pieces of a socket's read: the same bytes and facts."""
    events = events_of("chat", end)
    choice = {"index": 0, "delta": {"content": "word \u2028" * 150_000}, "finish_reason": None}
    events.insert(3, (chat(choices=[choice]) + "\n\n").replace("\n", end).encode())
    assert len(events[3]) > 1 << 20
    whole = b"".join(events)
    expected = run("chat", [whole], strip=False)
    assert expected[0] == whole
    start = sum(map(len, events[:3]))
    stop = start + len(events[3])
    for cut in (*range(start - 3, start + 4), *range(stop - 4, stop + 4)):
        assert run("chat", [whole[:cut], whole[cut:]], strip=False) == expected, cut
    pieces = [whole[at : at + 65_536] for at in range(0, len(whole), 65_536)]
    assert run("chat", pieces, strip=False) == expected

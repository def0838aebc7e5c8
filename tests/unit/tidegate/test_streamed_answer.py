"""Streamed answers to completions, as they are read for replays and calibrations."""

from __future__ import annotations

import pytest

from tidegate.streamed_answer import MAX_UNREAD, AnswerReader, short_error

STREAM = (
    b": held\n\n"
    b'data: {"id":"x","choices":[{"index":0,"text":"a","token_ids":[5],"finish_reason":null}]}\n\n'
    b'data: {"id":"x","choices":[{"index":0,"text":"b","token_ids":[6,7],"finish_reason":"length"}]}\n\n'
    b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":40,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":32}}}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("step", [1, 7, len(STREAM)])
def test_an_answer_is_read_however_it_is_cut(step: int) -> None:
    """Byte by byte or whole: tokens, counts, and when the first and the last came; comments are no tokens."""
    reader = AnswerReader()
    for start in range(0, len(STREAM), step):
        reader.feed(STREAM[start : start + step], float(start))
    reader.close()
    assert reader.problem is None
    assert reader.token_ids == [5, 6, 7]
    assert (reader.input_tokens, reader.output_tokens, reader.cached_tokens, reader.events) == (40, 3, 32, 2)
    if step == 1:
        first = STREAM.index(b"\n", STREAM.index(b"data:"))
        assert reader.first_ms == first
        assert reader.last_ms == STREAM.index(b"\n", first + 3)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (STREAM[:60], "no_end"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', "error_event"),
        (b"data: [" + b"[" * 5000 + b"\n", "bad_answer"),
        (b'data: {"choices": 7}\n', "bad_answer"),
        (b"x" * (MAX_UNREAD + 1), "bad_answer"),
        (b"data: {\n\n", "bad_answer"),
        (b"<html>", "no_end"),
    ],
)
def test_what_is_no_answer_is_told(body: bytes, problem: str) -> None:
    """A cut stream, an error in the middle, no JSON."""
    reader = AnswerReader()
    reader.feed(body, 0.0)
    reader.close()
    assert reader.problem == problem


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"detail": "Not Found"}', '{"detail": "Not Found"}'),
        (b"<html>\n\x1b[31mno</html>", "<html> [31mno</html>"),
        (b"", "no reason given"),
        (b"\xff" * 1000, "�" * 300),
    ],
)
def test_an_error_answer_in_one_line(body: bytes, line: str) -> None:
    """Whatever the server says: printable, and short."""
    assert short_error(body) == line

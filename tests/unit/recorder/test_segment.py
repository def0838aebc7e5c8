"""The file sink's format."""

from __future__ import annotations

import gzip
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.recorder import segment
from services.recorder.errors import BadRowError, SegmentError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_names_are_six_digits_and_grow() -> None:
    """Names sort as numbers up to a million segments and stay legal after it."""
    assert segment.segment_name("tidegate", 7) == "tidegate.000007.jsonl.gz"
    assert segment.segment_name("tidegate", 1_234_567) == "tidegate.1234567.jsonl.gz"


def test_indices_ignore_other_files() -> None:
    """Only this prefix's segments count, whatever else lies in the directory."""
    names = ["a.000002.jsonl.gz", "a.000000.jsonl.gz", "ab.000009.jsonl.gz", "a.01.jsonl.gz", "a.000003.jsonl", "x"]
    assert segment.segment_indices("a", names) == [0, 2]
    assert segment.segment_indices("a.000002", names) == []


@given(st.dictionaries(st.text(), json_values, max_size=4), st.integers(0, 2**40))
def test_a_wrapped_row_comes_back_byte_for_byte(row: dict[str, object], timestamp_ms: int) -> None:
    """The envelope is the peer's ({timestamp, event}), and the row inside it keeps the publisher's bytes."""
    payload = msgspec.json.encode(row)
    line = segment.wrap(segment.one_line(payload), timestamp_ms)
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"timestamp": timestamp_ms, "event": row}
    assert segment.unwrap(line) == payload


def test_a_row_with_line_breaks_becomes_one_line() -> None:
    """A publisher's pretty-printed JSON must not split a line; a line break inside a string is escaped already."""
    assert segment.one_line(b'{\n  "a": "x\\ny",\r\n "b": [1, 2]\n}') == b'{"a":"x\\ny","b":[1,2]}'


@pytest.mark.parametrize("payload", [b"", b"[1]", b'"text"', b"{", b'{"a":1}{"b":2}', b"\xff\xfe"])
def test_what_is_no_json_object_is_refused(payload: bytes) -> None:
    """Bad input is named, so that it can be counted and skipped."""
    with pytest.raises(BadRowError):
        segment.one_line(payload)


def test_unwrap_takes_bare_lines_and_refuses_half_an_envelope() -> None:
    """Readers accept both forms; a damaged envelope is an error, not a row."""
    assert segment.unwrap(b'{"event_type":"tool_end"}\n') == b'{"event_type":"tool_end"}'
    with pytest.raises(SegmentError):
        segment.unwrap(b'{"timestamp":12,"eve')


def test_members_back_to_back_read_as_one_gzip_stream() -> None:
    """Ordinary gzip readers see one stream of lines."""
    first, second = segment.member(b'{"a":1}\n'), segment.member(b'{"b":2}\n{"c":3}\n')
    assert gzip.decompress(first + second) == b'{"a":1}\n{"b":2}\n{"c":3}\n'
    found = list(segment.members(first + second))
    assert [member.lines for member in found] == [(b'{"a":1}',), (b'{"b":2}', b'{"c":3}')]
    assert [member.end for member in found] == [len(first), len(first) + len(second)]


def test_a_segment_cut_at_any_byte_gives_its_whole_members() -> None:
    """Whatever byte a crash stops at, the members before it are found and the rest is the tail (report E2)."""
    parts = [segment.member(b'{"row":%d}\n' % number * 3) for number in range(4)]
    data = b"".join(parts)
    ends = [sum(len(part) for part in parts[: count + 1]) for count in range(4)]
    for cut in range(len(data) + 1):
        assert [member.end for member in segment.members(data[:cut])] == [end for end in ends if end <= cut]


def test_members_larger_than_a_read_are_found() -> None:
    """A member of many reads and a tiny one after it, the boundary inside a read."""
    noise = "".join(chr(33 + (index * index * 7919) % 90) for index in range(200_000)).encode()
    big, small = segment.member(noise + b"\n"), segment.member(b"{}\n")
    assert [member.end for member in segment.members(big + small)] == [len(big), len(big) + len(small)]

"""The format of segments."""

from __future__ import annotations

import gzip
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segments.errors import BadLineError
from segments.format import holds_member, member, members, segment_indices, segment_name, unwrap, wrap

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_names_are_six_digits_and_grow() -> None:
    """Names sort as numbers up to a million segments and stay legal after it."""
    assert segment_name("tidegate", 7) == "tidegate.000007.jsonl.gz"
    assert segment_name("tidegate", 1_234_567) == "tidegate.1234567.jsonl.gz"


def test_indices_ignore_other_files() -> None:
    """Only this prefix's segments count, whatever else lies in the directory."""
    names = ["a.000002.jsonl.gz", "a.000000.jsonl.gz", "ab.000009.jsonl.gz", "a.01.jsonl.gz", "a.000003.jsonl", "x"]
    assert segment_indices("a", names) == [0, 2]
    assert segment_indices("a.000002", names) == []
    assert segment_indices("a", ["a.0000003.jsonl.gz", "a.٠٠٠٠٠٤.jsonl.gz", f"a.{'9' * 5000}.jsonl.gz"]) == []


@pytest.mark.long
@given(st.dictionaries(st.text(), json_values, max_size=4), st.integers(0, 2**40))
def test_a_wrapped_row_comes_back_byte_for_byte(row: dict[str, object], timestamp_ms: int) -> None:
    """The envelope is the peer's ({timestamp, event}), and the row inside it keeps the publisher's bytes."""
    payload = msgspec.json.encode(row)
    line = wrap(payload, timestamp_ms)
    assert b"\n" not in line
    assert json.loads(line) == {"timestamp": timestamp_ms, "event": row}
    assert unwrap(line) == unwrap(line + b"\n") == payload


def test_unwrap_takes_bare_lines_and_refuses_half_an_envelope() -> None:
    """Readers accept both forms; a damaged envelope is an error, not a row."""
    assert unwrap(b'{"event_type":"tool_end"}\n') == b'{"event_type":"tool_end"}'
    with pytest.raises(BadLineError):
        unwrap(b'{"timestamp":12,"eve')


def test_members_back_to_back_read_as_one_gzip_stream() -> None:
    """Ordinary gzip readers see one stream of lines."""
    first, second = member(b'{"a":1}\n'), member(b'{"b":2}\n{"c":3}\n')
    assert gzip.decompress(first + second) == b'{"a":1}\n{"b":2}\n{"c":3}\n'
    found = list(members(first + second))
    assert [each.lines for each in found] == [(b'{"a":1}',), (b'{"b":2}', b'{"c":3}')]
    assert [each.end for each in found] == [len(first), len(first) + len(second)]


def test_a_segment_cut_at_any_byte_gives_its_whole_members() -> None:
    """Whatever byte a crash stops at, the members before it are found and the rest is the tail, behind which nothing
    stands (report E2)."""
    parts = [member(b'{"row":%d}\n' % number * 3) for number in range(4)]
    data = b"".join(parts)
    ends = [sum(len(part) for part in parts[: count + 1]) for count in range(4)]
    for cut in range(len(data) + 1):
        whole = [end for end in ends if end <= cut]
        assert [each.end for each in members(data[:cut])] == whole
        assert not holds_member(data[:cut], whole[-1] if whole else 0)


def test_damage_with_whole_members_behind_it_is_no_torn_tail() -> None:
    """A byte that a disk changed must not cost the rows behind it."""
    first, second, third = (member(b'{"row":%d}\n' % number * 9) for number in range(3))
    spoiled = first + second[:12] + bytes([second[12] ^ 0xFF]) + second[13:] + third
    (found,) = members(spoiled)
    assert found.end == len(first)
    assert holds_member(spoiled, found.end)


def test_members_larger_than_a_read_are_found() -> None:
    """A member of many reads and a tiny one after it, the boundary inside a read."""
    noise = "".join(chr(33 + (index * index * 7919) % 90) for index in range(200_000)).encode()
    big, small = member(noise + b"\n"), member(b"{}\n")
    assert [each.end for each in members(big + small)] == [len(big), len(big) + len(small)]

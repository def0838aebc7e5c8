"""Subjects and headers, by the rules that the server has or should have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.validation import clean_headers, header_bytes, subject_matches


def naive_match(pattern: list[str], subject: list[str]) -> bool:
    """Token by token, recursively."""
    if pattern == [">"]:
        return bool(subject)
    if not pattern or not subject:
        return not pattern and not subject
    return pattern[0] in ("*", subject[0]) and naive_match(pattern[1:], subject[1:])


@given(
    st.lists(st.sampled_from(["a", "b", "*"]), min_size=0, max_size=4),
    st.booleans(),
    st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=5),
)
def test_matching_agrees_with_the_definition(pattern: list[str], rest: bool, subject: list[str]) -> None:
    """``*`` one token, a last ``>`` one or more."""
    wanted = [*pattern, ">"] if rest or not pattern else pattern
    assert subject_matches(".".join(wanted), ".".join(subject)) == naive_match(wanted, subject)


def test_headers_as_they_arrive() -> None:
    """Line breaks cannot inject a header; the size is that of the bytes on the wire."""
    assert clean_headers({"A": " x\r\nB: y ", "C": "é"}) == {"A": "x  B: y", "C": "é"}
    assert header_bytes({"A": "é"}) == len("NATS/1.0\r\nA: é\r\n\r\n".encode())
    for name in ("", "a b", "a:b", "é", "a\n"):
        with pytest.raises(ValueError, match="header name"):
            clean_headers({name: "x"})

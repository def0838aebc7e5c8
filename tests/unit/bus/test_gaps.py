"""Rows that a lagging consumer was never given are counted, and no others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bus.nats.gaps import Gaps
from bus.nats.pull import RowHeaders, RowPlace, read_headers

actions = st.lists(st.sampled_from(["publish", "publish", "give", "give", "again", "expire", "restart"]), max_size=60)


@given(actions)
def test_what_expired_before_it_was_given_is_lost(steps: list[str]) -> None:
    """One consumer's history against the truth: rows come, are given, given again, expire; the process restarts."""
    last = first = given = deliveries = lost = seen = 0
    gaps = Gaps()
    for step in steps:
        if step == "publish":
            last += 1
        elif step == "give" and max(first, given) < last:
            start = max(first, given)
            lost += start - given  # those between were removed unseen
            given, deliveries = start + 1, deliveries + 1
            gaps.see(RowPlace("c", 1, given, deliveries, 0))
        elif step == "again" and given:
            deliveries += 1
            gaps.see(RowPlace("c", 2, given, deliveries, 0))
        elif step == "expire":
            first = max(first, (first + last + 1) // 2)
        elif step == "restart":
            seen += gaps.lost
            gaps = Gaps()
            gaps.begin(given, deliveries)
    assert seen + gaps.lost == lost


def test_rows_that_another_process_was_given_are_not_lost() -> None:
    """Two recorders share a consumer: the stream's numbers have holes, and so have the deliveries'."""
    gaps = Gaps()
    gaps.begin(10, 10)
    gaps.see(RowPlace("c", 1, 14, 14, 0))
    gaps.see(RowPlace("c", 1, 20, 16, 0))
    assert gaps.lost == 4


def test_a_consumer_that_was_made_anew_has_lost_nothing() -> None:
    """The server lost it: its numbers begin again, and the first row it gives is no gap."""
    gaps = Gaps()
    gaps.begin(10, 50)
    gaps.see(RowPlace("c", 1, 100, 1, 0))
    assert gaps.lost == 0


def test_headers_are_read_when_they_are_asked_for() -> None:
    """As the server sends them: with a status and description, or names and values; what is no header is left out."""
    assert read_headers(b"NATS/1.0 409 Consumer Deleted\r\n\r\n") == {
        "Status": "409",
        "Description": "Consumer Deleted",
    }
    assert read_headers(b"NATS/1.0 100\r\nNats-Last-Stream: 7\r\n\r\n") == {"Status": "100", "Nats-Last-Stream": "7"}
    headers = RowHeaders(b"NATS/1.0\r\nNats-Msg-Id: a: b\r\nnonsense\r\nEmpty:\r\n\r\n")
    assert dict(headers) == {"Nats-Msg-Id": "a: b", "Empty": ""}
    assert headers.get("Status") is None

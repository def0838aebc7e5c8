"""Tool events as harnesses send them: what is taken, what is not, and why (spec: identity-and-traces §2.7)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.trace import ToolRun
from services.recorder.errors import BadToolEventError
from services.recorder.tool_messages import (
    DEFAULT_TOPIC,
    MAX_EVENT_BYTES,
    STATUSES,
    ToolReport,
    read_frames,
    read_json,
    read_msgpack,
)

RECORDED = Path(__file__).parents[2] / "fixtures" / "tool_events" / "dynamo_rows.jsonl"
NUMBER = (0).to_bytes(8, "big")


def compact(**changes: object) -> dict[str, Any]:
    event = {
        "schema": "dynamo.request.trace.v1",
        "event_type": "tool_end",
        "event_time_unix_ms": 1_795_975_336_151,
        "session_id": "run-1",
        "tool": {"tool_call_id": "call_0", "tool_class": "bash"},
    }
    return {key: value for key, value in {**event, **changes}.items() if value != "absent"}


def full(**changes: object) -> dict[str, Any]:
    context = {"session_id": "run-1"}
    return compact(**{"session_id": "absent", "event_source": "harness", "agent_context": context, **changes})


def tool(**changes: object) -> dict[str, Any]:
    return {"tool_call_id": "call_0", "tool_class": "bash", **changes}


def read(event: object) -> ToolReport:
    return read_msgpack(msgspec.msgpack.encode(event))


def reason_of(event: object) -> str:
    with pytest.raises(BadToolEventError) as caught:
        read(event)
    assert str(caught.value)
    return caught.value.reason


def test_every_recorded_row_of_the_peer_is_taken_with_all_it_says() -> None:
    """The rows that the peer wrote of a real run come out as they went in."""
    rows = RECORDED.read_bytes().splitlines()
    assert len(rows) > 4
    for row in rows:
        report = read_json(row)
        sent = json.loads(row)
        assert json.loads(msgspec.json.encode(report.tool)) == sent["tool"]
        assert (report.event_type, report.at_ms) == (sent["event_type"], sent["event_time_unix_ms"])
        assert report.session_id == sent["agent_context"]["session_id"]
        assert read(sent) == report


def test_both_forms_say_the_same() -> None:
    """Top-level ``session_id``, or ``agent_context.session_id`` as the public plug-ins send it (report E2)."""
    parents = {"session_id": " run-1 ", "parent_session_id": "run-0"}
    assert read(compact(**parents)) == read(full(agent_context=parents))
    assert read(compact(**parents)).parent_session_id == "run-0"
    assert read(compact()).fingerprint() == read(full()).fingerprint()


def test_all_ten_fields_of_a_tool_are_taken_and_no_other() -> None:
    """What a tool was given or answered is not kept, whatever a harness sends."""
    said = tool(
        started_at_unix_ms=1,
        ended_at_unix_ms=2,
        status="ok",
        duration_ms=1.5,
        output_tokens=3,
        output_bytes=4,
        tool_name_hash="ab",
        error_type="none",
    )
    report = read(compact(tool={**said, "arguments": "rm -rf /"}, secret="x"))
    assert report.tool == ToolRun(**{**said, "status": "succeeded"})


@pytest.mark.parametrize(("said", "status"), sorted(STATUSES.items()))
def test_statuses_and_their_other_names(said: str, status: str) -> None:
    """ok, success: succeeded; failed: error; canceled, timeout: cancelled (oracle of §8.3)."""
    assert read(full(tool=tool(status=said))).tool.status == status


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (full(schema="dynamo.request.trace.v2"), "unknown_schema"),
        (full(event_type="request_end"), "bad_event_type"),
        (full(event_type="tool_progress"), "bad_event_type"),
        (full(event_source="dynamo"), "bad_source"),
        (full(event_source="absent"), "bad_source"),
        (compact(event_source="dynamo"), "bad_source"),
        (full(agent_context=None), "no_session"),
        (full(agent_context={"session_id": "  "}), "no_session"),
        (full(agent_context={}, session_id="run-1"), "no_session"),
        (compact(session_id="absent"), "no_session"),
        (full(tool=None), "no_tool"),
        (full(tool={"tool_class": "bash"}), "undecodable"),
        (full(tool={"tool_call_id": "call_0"}), "undecodable"),
        (full(tool=tool(status="paused")), "bad_status"),
        (full(tool=tool(duration_ms=math.nan)), "bad_duration"),
        (full(tool=tool(duration_ms=math.inf)), "bad_duration"),
        (full(tool=tool(duration_ms=-0.5)), "bad_duration"),
        (full(tool=tool(duration_ms=2.0**50)), "bad_duration"),
        (full(event_time_unix_ms=2**50), "bad_time"),
        (full(tool=tool(started_at_unix_ms=2**50)), "bad_time"),
        (full(tool=tool(ended_at_unix_ms=2**50)), "bad_time"),
        (full(tool=tool(started_at_unix_ms=-1)), "undecodable"),
        (full(request={"request_id": "r"}), "not_a_tool_row"),
        (full(payload={"request_id": "r"}), "not_a_tool_row"),
        (full(event_time_unix_ms="now"), "undecodable"),
        (full(event_time_unix_ms="absent"), "undecodable"),
        (full(schema="absent"), "undecodable"),
        ([full()], "undecodable"),
        (full(tool=tool(error_type="x" * MAX_EVENT_BYTES)), "too_large"),
    ],
)
def test_what_is_not_taken_and_why(event: object, reason: str) -> None:
    """Each broken rule has a reason of its own (oracle of §8.3: NaN duration, no context, a request, another source,
    another type)."""
    assert reason_of(event) == reason


def test_null_is_absent() -> None:
    """Plug-ins may write every field."""
    nothing = dict.fromkeys(("event_source", "agent_context", "parent_session_id", "request", "payload"))
    assert read(compact(**nothing)) == read(compact())
    assert read(full(session_id=None, tool=tool(duration_ms=None, status=None))) == read(full())


@pytest.mark.parametrize("parent", ["run-1", "  ", "x" * 257, "ä" * 129])
def test_a_parent_that_is_none_is_dropped(parent: str) -> None:
    """Itself, blank, or over 256 bytes: as at the front door."""
    assert read(compact(parent_session_id=parent)).parent_session_id is None


def test_frames() -> None:
    """Exactly three; the first is the topic, the second is not looked at."""
    payload = msgspec.msgpack.encode(full())
    topic = DEFAULT_TOPIC.encode()
    for number in (NUMBER, b"", b"not a number"):
        assert read_frames([topic, number, payload], DEFAULT_TOPIC) == read(full())
    assert read_frames([b"anything", NUMBER, payload], "") == read(full())
    for frames, reason in (
        ([topic, payload], "bad_frames"),
        ([topic, NUMBER, payload, b""], "bad_frames"),
        ([b"other", NUMBER, payload], "other_topic"),
        ([b"\xff", NUMBER, payload], "other_topic"),
        ([topic, NUMBER, b"\xc1"], "undecodable"),
        ([topic, NUMBER, b""], "undecodable"),
    ):
        with pytest.raises(BadToolEventError) as caught:
            read_frames(frames, DEFAULT_TOPIC)
        assert caught.value.reason == reason


@given(st.binary(max_size=200), st.integers(0, 400), st.booleans())
def test_bytes_of_strangers_are_refused_or_read_never_worse(noise: bytes, at: int, as_json: bool) -> None:
    """Damage anywhere in an event is a `BadToolEventError` or leaves an event that keeps the rules."""
    whole = msgspec.json.encode(full()) if as_json else msgspec.msgpack.encode(full())
    damaged = whole[:at] + noise + whole[at + len(noise) :]
    try:
        report = read_json(damaged) if as_json else read_msgpack(damaged)
    except BadToolEventError:
        return
    assert report.session_id
    assert len(report.fingerprint()) == 16


@pytest.mark.parametrize("text", ['"\\ud800"', "[" * 60_000])
def test_json_that_is_no_text(text: str) -> None:
    """Half a surrogate and nesting without end are refused, too."""
    with pytest.raises(BadToolEventError):
        read_json(msgspec.json.encode(full(session_id="@")).replace(b'"@"', text.encode()))

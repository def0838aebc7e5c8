"""What is written of a captured request: its form, its headers, its frames; and settings that cannot work."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.trace import AgentContext, RequestMetrics, TraceRow
from services.ingress.capture import (
    CapturedRequest,
    Frames,
    HeaderList,
    Selection,
    captured,
    frame,
    has_whole_answer,
    is_secret_header,
    payload_row,
)
from services.ingress.config import IngressSettings
from services.ingress.errors import BadFrameError
from services.ingress.redaction import HIDDEN, Redaction

NET = Redaction()
BODY = b'{"model": "m",\r\n "messages": [{"role": "user", "content": "hi"}]}'
SECRET = "sk-proj-Ab3dEf6hIj9kLm2nOp5q"


def head(**members: Any) -> CapturedRequest:
    return CapturedRequest(
        **{
            "request_id": "r",
            "endpoint": "chat_completions",
            "model": "m",
            "outcome": "completed",
            "at_ms": 1000,
            **members,
        }
    )


def test_the_row() -> None:
    """The peer's fields in our envelope's row, joined to `request_end` by id, context and time; bodies as they came,
    on one line."""
    context = AgentContext(session_id="s", parent_session_id="p")
    end = TraceRow(
        event_type="request_end",
        event_time_unix_ms=1795975261990,
        agent_context=context,
        request=RequestMetrics(request_id="r", endpoint="chat_completions", model="m", outcome="completed"),
    )
    row = payload_row(captured(end, {"user-agent": "x"}, "document", None), BODY, b'{ "id": 1.50 }\n', NET)
    assert b"\n" not in row
    assert b'"request":{"model": "m",   "messages": [{"role": "user", "content": "hi"}]}' in row
    assert b'"response":{ "id": 1.50 } ' in row
    assert json.loads(row) == {
        "schema": "tidegate.request.trace.v1",
        "event_type": "request_payload",
        "event_source": "tidegate",
        "event_time_unix_ms": 1795975261990,
        "agent_context": {"session_id": "s", "parent_session_id": "p"},
        "payload": {
            "request_id": "r",
            "endpoint": "chat_completions",
            "model": "m",
            "outcome": "completed",
            "request": json.loads(BODY),
            "response": {"id": 1.5},
            "http_request_headers": {"user-agent": "x"},
            "payload_complete": True,
        },
    }


@pytest.mark.parametrize(
    ("kind", "request_body", "response", "dropped", "kept"),
    [
        ("none", BODY, b"", None, {"request"}),
        ("stream", BODY, b"data: {}\n\n", None, {"request", "response"}),
        ("document", BODY, b"<html>busy</html>", None, {"request", "response"}),
        ("document", b"", b"{}", "too_large", {"response"}),
        ("none", BODY, b"", "no_whole_answer", {"request"}),
        ("none", b'{"model": "m", "x": "\xff"}', b"", None, set()),
    ],
)
def test_what_is_missing_is_said(kind: Any, request_body: bytes, response: bytes, dropped: Any, kept: set[str]) -> None:
    """A member that is not there is absent; a body that no reader of JSON could read is left out, the rest stays."""
    payload = json.loads(payload_row(head(response=kind, dropped=dropped), request_body, response, NET))["payload"]
    assert {"request", "response"} & payload.keys() == kept
    reason = dropped or (None if "request" in kept else "unreadable")
    assert payload["payload_complete"] is (reason is None)
    assert payload.get("payload_drop_reason") == reason


def test_secrets_are_hidden_in_bodies_and_headers() -> None:
    """In a prompt, in an answer that is no JSON, in a header that was allowed."""
    body = json.dumps({"model": "m", "prompt": f"my {SECRET}"}).encode()
    row = payload_row(
        head(response="document", headers={"x-note": f"Bearer {SECRET}"}), body, f"<p>{SECRET}</p>".encode(), NET
    )
    assert SECRET.encode() not in row
    payload = json.loads(row)["payload"]
    assert payload["request"]["prompt"] == f"my {HIDDEN}"
    assert payload["response"] == f"<p>{HIDDEN}</p>"


def test_which_answers_are_whole() -> None:
    """Those that completed, and errors that the engine told; not those that broke off, or that nobody gave."""

    def row(outcome: Any, reason: str | None) -> TraceRow:
        request = RequestMetrics(request_id="r", outcome=outcome, reason=reason)
        return TraceRow(event_type="request_end", event_time_unix_ms=0, request=request)

    assert has_whole_answer(row("completed", None))
    assert has_whole_answer(row("client_error", "engine_status"))
    assert has_whole_answer(row("upstream_error", "in_band_error"))
    for outcome, reason in (
        ("upstream_lost", "incomplete_answer"),
        ("client_disconnect", "client_gone"),
        ("refused", "queue_full"),
        ("internal_error", "stopping"),
    ):
        assert not has_whole_answer(row(outcome, reason))


# Headers


@pytest.mark.parametrize(
    "name",
    [
        *("Authorization", "Proxy-Authorization", "cookie", "Set-Cookie", "x-api-key", "API_KEY", "x-goog-api-key"),
        *("x-amz-security-token", "x-my-secret", "X_Auth", "x-csrftoken", "x-hub-signature", "x-tidegate-token"),
    ],
)
def test_headers_that_are_never_written(name: str) -> None:
    """Not even if they are listed: that is an error at the start; a wide pattern passes over them."""
    assert is_secret_header(name)
    with pytest.raises(ValueError, match="never written"):
        IngressSettings(capture="requests", capture_directory="d", capture_headers=(name,))
    assert HeaderList(["*"]).of([(name.encode(), b"v"), (b"X-App", b"1")]) == {"x-app": "1"}


def test_headers_that_are_listed() -> None:
    """Whatever their case; by their beginning; repeated ones together; bytes that are no ASCII as Latin-1."""
    listed = HeaderList(["User-Agent", "x-codex-*"])
    headers = [
        (b"USER-AGENT", b"a\xff"),
        (b"x-codex-turn", b"1"),
        (b"X-Codex-Turn", b"2"),
        (b"x-codex-api-key", b"k"),
        (b"x-other", b"o"),
    ]
    assert listed.of(headers) == {"user-agent": "a\xff", "x-codex-turn": "1, 2"}
    assert HeaderList([]).of(headers) == {}


def test_the_selection() -> None:
    """Of models, and of sessions and their children; empty: all."""
    assert Selection().takes("m", None, None)
    chosen = Selection(models=["m"], sessions=["s"])
    assert chosen.takes("m", "s", None)
    assert chosen.takes("m", "child", "s")
    assert not chosen.takes("m", "other", None)
    assert not chosen.takes("n", "s", None)


# Frames

bodies = st.binary(max_size=40)


@pytest.mark.long
@given(
    st.lists(st.tuples(bodies, st.lists(bodies, max_size=3)), max_size=4),
    st.lists(st.integers(1, 200), max_size=10),
)
@settings(max_examples=50)
def test_frames_split_anywhere(requests: list[tuple[bytes, list[bytes]]], cuts: list[int]) -> None:
    """What goes in comes out, however the pipe cuts it."""
    sent = [(head(request_id=str(number)), *each) for number, each in enumerate(requests)]
    data = b"".join(piece for one in sent for piece in frame(*one))
    frames = Frames()
    found: list[tuple[CapturedRequest, bytes, bytes]] = []
    at = 0
    for cut in [*cuts, len(data)]:
        found += frames.feed(data[at : at + cut])
        at += cut
    assert found == [(one, request, b"".join(response)) for one, request, response in sent]


def test_a_frame_that_is_none() -> None:
    """A bug, and it has a name."""
    with pytest.raises(BadFrameError):
        list(Frames().feed(b"\x01\0\0\0" + bytes(8) + b"x"))


# Settings


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"capture_directory": ""}, "capture_directory must be set"),
        ({"capture_redact": ("(",)}, "capture_redact: .* is not a regular expression"),
        ({"capture_redact": ("x*",)}, "capture_redact: .* matches the empty text"),
        ({"capture_bytes": 0}, "capture_bytes must be greater than 0"),
        ({"capture_held_bytes": 1024}, "capture_held_bytes must be at least twice"),
        ({"capture_keep_bytes": -1}, "capture_keep_bytes must be 0"),
    ],
)
def test_settings_that_cannot_work(given: dict[str, Any], said: str) -> None:
    """They are refused at the start, by name."""
    with pytest.raises(ValueError, match=said):
        IngressSettings(**{"capture": "answers", "capture_directory": "d", **given})

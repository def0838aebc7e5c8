"""The trace row of one request: the peer's field names, ours beside them, nothing null (traces §2, §8.3)."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from kvcore.hashing import pack_tokens, sequence_hashes_with_tail
from schemas.base import from_json, to_json
from schemas.request import Usage
from schemas.trace import ToolCall, TraceRow
from services.ingress import events, rows
from services.ingress.answers import AnswerFacts
from services.ingress.requests import Record
from tests.unit.ingress.builders import GOOD, Scene, counted, granted, held, received

R = "r1"
CLAUDE = {"x-claude-code-session-id": "S", "x-claude-code-agent-id": "a1"}


def row_of(scene: Scene) -> dict[str, Any]:
    """The row as it is written."""
    row = scene.end()[1]
    written: dict[str, Any] = json.loads(to_json(row))
    assert from_json(to_json(row), TraceRow) == row
    return written


def answered(answer: AnswerFacts, *, tokens: int | None = 10, **arrival: Any) -> Scene:
    """A request that was held for 1.5 s, placed, and answered."""
    scene = Scene("w1")
    scene.play(received(R, **arrival))
    scene.play(counted(R, tokens), after_s=0.01)
    scene.play(held(R), after_s=0.5)
    scene.play(granted(R, "w1", hold_ms=1500), after_s=1.5)
    scene.play(events.FirstByte(request_id=R, attempt=0, status=200), after_s=0.25)
    scene.play(events.AnswerEnded(request_id=R, attempt=0, answer=answer), after_s=0.5)
    return scene


def values(value: Any) -> list[Any]:
    """Every leaf of a document."""
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in values(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in values(item)]
    return [value]


def test_a_full_row() -> None:
    """Every field of a completed turn of a sub-agent."""
    call = ToolCall(id="c", name="Bash")
    answer = AnswerFacts(
        usage=Usage(input_tokens=12, output_tokens=6, cached_tokens=8, reasoning_tokens=2),
        finish_reason="tool_calls",
        stop_reason="151645",
        tool_calls=(call,),
        complete=True,
    )
    row = row_of(answered(answer, headers=CLAUDE, x_request_id="mine", stream=True))
    assert row == {
        "schema": "tidegate.request.trace.v1",
        "event_type": "request_end",
        "event_source": "tidegate",
        "event_time_unix_ms": 1_002_760,
        "agent_context": {
            "session_id": "a1",
            "parent_session_id": "S",
            "input_trigger": "user_message",
            "session": {"tenant": "default", "family": "claude_code", "root": "S", "agent": "a1"},
        },
        "request": {
            "request_id": R,
            "x_request_id": "mine",
            "model": "m",
            "endpoint": "chat_completions",
            "kind": "turn",
            "tenant": "default",
            "stream": True,
            "outcome": "completed",
            "status": 200,
            "attempts": 1,
            "input_tokens": 12,
            "output_tokens": 6,
            "cached_tokens": 8,
            "reasoning_tokens": 2,
            "predicted_cached_tokens": 8,
            "request_received_ms": 1_000_000,
            "admission_wait_ms": 2000.0,
            "hold_ms": 1500,
            "hold_reason": "no_room",
            "decision_ms": 500.0,
            "decision_mode": "policy",
            "policy": "kv",
            "grant_id": "grant-r1-0",
            "index_health": "synced",
            "ttft_ms": 2260.0,
            "avg_itl_ms": 100.0,
            "total_time_ms": 2760.0,
            "kv_hit_rate": 0.8,
            "queue_depth": 2,
            "worker": {"worker": "w1", "rank": 0},
            "replay": {
                "trace_block_size": 4,
                "input_length": 10,
                "input_sequence_hashes": list(sequence_hashes_with_tail(pack_tokens(range(10)), 4)),
            },
            "replayable": True,
            "finish_reason_metadata": {
                "finish_reason": "tool_calls",
                "stop_reason": "151645",
                "tool_calls": [{"id": "c", "name": "Bash"}],
            },
        },
    }


def test_a_request_without_identity_has_no_agent_context() -> None:
    """Context-free rows carry the request only, as the peer's do."""
    row = row_of(answered(GOOD))
    assert "agent_context" not in row
    assert row["request"]["request_id"] == R


def test_weak_identity_is_marked() -> None:
    """A session read from the body says so."""
    context = row_of(answered(GOOD, path="/v1/responses", prompt_cache_key="K"))["agent_context"]
    assert (context["session_id"], context["weak"]) == ("K", True)


def test_missing_usage_is_estimated_and_said_so() -> None:
    """Input by our own count, output by the stream's pieces, both marked (C3)."""
    request = row_of(answered(AnswerFacts(data_lines=5, complete=True), stream=True))["request"]
    assert (request["input_tokens"], request["output_tokens"], request["usage_estimated"]) == (10, 5, True)
    assert "cached_tokens" not in request
    reported = row_of(answered(GOOD))["request"]
    assert "usage_estimated" not in reported


def test_without_tokens_there_is_nothing_to_replay() -> None:
    """No tokenizer: input estimated from the body, no replay block, not replayable."""
    request = row_of(answered(GOOD, tokens=None))["request"]
    assert ("replay" in request, request["replayable"], "kv_hit_rate" in request) == (False, False, False)


def test_several_choices_are_not_replayable() -> None:
    """n > 1: the prompt's hashes are there, but one row is not one answer (identity-and-traces §2.1)."""
    request = row_of(answered(GOOD, n=2))["request"]
    assert ("replay" in request, request["replayable"]) == (True, False)


def test_replay_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt over the bound has a row without hashes; at the bound they are exactly ceil(tokens / block size)."""
    monkeypatch.setattr(rows, "MAX_REPLAY_HASHES", 3)
    assert len(row_of(answered(GOOD, tokens=12))["request"]["replay"]["input_sequence_hashes"]) == 3
    assert "replay" not in row_of(answered(GOOD, tokens=13))["request"]


def test_the_longest_row_is_far_below_a_messages_limit() -> None:
    """32768 hashes of 20 digits are less than a tenth of 8 MiB."""
    assert rows.MAX_REPLAY_HASHES * 21 < 8 * 1024 * 1024 / 10


def test_a_request_that_never_ran() -> None:
    """Left while it waited: no worker, no times of an answer, output 0, finish absent (§8.3)."""
    scene = Scene("w1")
    scene.play(received(R, headers=CLAUDE, stream=True), counted(R), held(R))
    scene.play(events.ClientGone(request_id=R), after_s=2.0)
    request = row_of(scene)["request"]
    assert (request["outcome"], request["output_tokens"], request["total_time_ms"]) == ("client_disconnect", 0, 2000.0)
    absent = ("worker", "ttft_ms", "avg_itl_ms", "finish_reason_metadata", "grant_id", "status", "decision_mode")
    assert [name for name in absent if name in request] == []


def test_a_cancelled_stream_counts_what_came() -> None:
    """The client goes in the middle: the tokens until then are in the row."""
    scene = Scene("w1")
    scene.play(received(R, stream=True), counted(R), granted(R, "w1"))
    scene.play(events.FirstByte(request_id=R, attempt=0, status=200), after_s=0.1)
    scene.play(events.ClientGone(request_id=R, answer=AnswerFacts(data_lines=3)), after_s=0.2)
    request = row_of(scene)["request"]
    assert (request["outcome"], request["output_tokens"], request["avg_itl_ms"]) == ("client_disconnect", 3, 100.0)


def test_a_clock_that_goes_back() -> None:
    """Times are never negative: the system's clock may be set back while a request runs."""
    scene = Scene("w1")
    scene.play(received(R, stream=True), counted(R), granted(R, "w1"))
    scene.play(events.FirstByte(request_id=R, attempt=0, status=200), after_s=0.1)
    scene.play(events.AnswerEnded(request_id=R, attempt=0, answer=GOOD), after_s=-5.0)
    numbers = [leaf for leaf in values(row_of(scene)) if isinstance(leaf, float)]
    assert numbers
    assert all(number >= 0 for number in numbers)


def test_a_clock_that_is_no_number() -> None:
    """A time that is NaN or infinite leaves its fields absent (§2.4), and the row is still written."""
    arrival = received(R, stream=True)
    record = Record(R, arrival.request, arrival.resolved, 1000.0, asked_at=1000.0, decided_at=math.inf)
    record.first_byte_at, record.status = math.nan, 200
    ending = rows.Ending(outcome="completed", at=1001.0, answer=GOOD)
    row = rows.request_end_row(record, ending, rows.usage_of(record, GOOD))
    request = json.loads(to_json(row))["request"]
    assert [name for name in ("ttft_ms", "avg_itl_ms", "admission_wait_ms", "decision_ms") if name in request] == []


def test_nothing_is_null() -> None:
    """What is not known is absent, in every row above."""
    for scene in (answered(GOOD), answered(AnswerFacts(), tokens=None), answered(GOOD, headers=CLAUDE, n=3)):
        assert None not in values(row_of(scene))

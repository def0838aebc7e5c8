"""The trace row of one request: the peer's field names, ours beside them, nothing null (traces §2, §8.3)."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from kvcore.hashing import pack_tokens, sequence_hashes_with_tail
from schemas.base import from_json, to_json
from schemas.request import Usage
from schemas.trace import ToolCall, TraceRow
from services.ingress import events, rows
from services.ingress.answers import AnswerFacts
from services.ingress.endpoints import PATHS
from services.ingress.modalities import Media, media_of
from services.ingress.requests import MEDIA_TOKENS, Record
from tests.unit.ingress.builders import GOOD, Scene, counted, granted, held, received, refused

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
            "prefill_wait_time_ms": 2010.0,
            "prefill_time_ms": 250.0,
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


def test_a_held_request_that_went_without_a_decision() -> None:
    """Its leader fell silent while it was held: the hold is no time of the decision; a retry counts for itself."""
    scene = Scene("w1", "w2")
    scene.play(received(R), counted(R))
    scene.play(held(R), after_s=0.5)
    scene.play(held(R), after_s=1.0)
    scene.play(events.AdmitFailed(request_id=R, attempt=0, reason="admit_silent"), after_s=2.0)
    scene.play(events.FirstByte(request_id=R, attempt=0, status=200), after_s=0.25)
    scene.play(events.AnswerEnded(request_id=R, attempt=0, answer=GOOD), after_s=0.5)
    request = row_of(scene)["request"]
    told = {
        name: request[name] for name in ("admission_wait_ms", "hold_ms", "decision_ms", "decision_mode", "hold_reason")
    }
    assert told == {
        "admission_wait_ms": 3500.0,
        "hold_ms": 3000,
        "decision_ms": 500.0,
        "decision_mode": "fallback",
        "hold_reason": "no_room",
    }


def test_a_held_request_that_never_went_says_how_long_it_was_held() -> None:
    """Refused after a hold: the row has the hold and its reason, and no times of a decision."""
    scene = Scene("w1")
    scene.play(received(R), counted(R))
    scene.play(held(R), after_s=0.5)
    scene.play(events.AdmitFailed(request_id=R, attempt=0, reason="hold_timeout"), after_s=3.0)
    request = row_of(scene)["request"]
    assert (request["outcome"], request["hold_ms"], request["hold_reason"]) == ("refused", 3000, "no_room")
    assert "admission_wait_ms" not in request


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
    record = Record(R, arrival.request, arrival.resolved, 1000.0, asked_at=1000.0, held_at=1000.0, decided_at=math.inf)
    record.first_byte_at, record.status = math.nan, 200
    ending = rows.Ending(outcome="completed", at=1001.0, answer=GOOD)
    row = rows.request_end_row(record, ending, rows.usage_of(record, GOOD))
    request = json.loads(to_json(row))["request"]
    assert [name for name in ("ttft_ms", "avg_itl_ms", "admission_wait_ms", "decision_ms") if name in request] == []


def test_nothing_is_null() -> None:
    """What is not known is absent, in every row above."""
    for scene in (answered(GOOD), answered(AnswerFacts(), tokens=None), answered(GOOD, headers=CLAUDE, n=3)):
        assert None not in values(row_of(scene))


def replay_of(scene: Scene) -> dict[str, Any]:
    block: dict[str, Any] = row_of(scene)["request"]["replay"]
    return block


def test_a_long_prompt_has_larger_blocks() -> None:
    """Up to the bound the pool's blocks, one token more and they are of 512 tokens: every 128th hash, and the tail."""
    for tokens, size, count in ((8192, 4, 2048), (8193, 512, 17)):
        block = replay_of(answered(GOOD, tokens=tokens))
        assert (block["trace_block_size"], len(block["input_sequence_hashes"])) == (size, count)
        fine = sequence_hashes_with_tail(pack_tokens(range(tokens)), 4)
        whole = tokens // size
        assert tuple(block["input_sequence_hashes"][:whole]) == fine[size // 4 - 1 : whole * size // 4 : size // 4]


def test_hashes_of_the_answer() -> None:
    """Where the engine told what it generated: prompt and answer together, the prompt's whole blocks first (§2.5)."""
    block = replay_of(answered(AnswerFacts(token_ids=(90, 91, 92), complete=True), tokens=10))
    both = list(sequence_hashes_with_tail(pack_tokens([*range(10), 90, 91, 92]), 4))
    assert (block["completion_sequence_hashes"], len(both)) == (both, 4)
    assert both[:2] == block["input_sequence_hashes"][:2]
    assert "completion_sequence_hashes" not in replay_of(answered(GOOD))
    assert "completion_sequence_hashes" not in replay_of(answered(AnswerFacts(token_ids=(90,)), n=2))


def test_the_engines_count_of_the_prompt() -> None:
    """Nobody counted, but the client asked for ids: the engine's make the block; not where it holds an image, whose
    places are no text."""
    answer = AnswerFacts(prompt_token_ids=tuple(range(5)), token_ids=(7,), complete=True)
    request = row_of(answered(answer, tokens=None))["request"]
    assert request["replay"]["input_sequence_hashes"] == list(sequence_hashes_with_tail(pack_tokens(range(5)), 4))
    assert (request["replayable"], request["output_tokens"]) == (True, 1)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    scene = Scene("w1")
    scene.play(received(R, messages=[image]))
    media = Media(("image",), 1, 50)
    scene.play(events.PromptCounted(request_id=R, skipped="media", media=media), granted(R, "w1"))
    scene.play(events.FirstByte(request_id=R, attempt=0, status=200))
    scene.play(events.AnswerEnded(request_id=R, attempt=0, answer=answer))
    request = row_of(scene)["request"]
    assert (request["modalities"], request["replayable"], "replay" in request) == (["image"], False, False)


def test_an_image_is_not_taken_for_text() -> None:
    """A megabyte of base64 is one image to admission, not a quarter of a million tokens."""
    data = "A" * 1_000_000
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data}}]}
    arrival = received(R, messages=[image])
    record = Record(R, arrival.request, arrival.resolved, 1000.0)
    record.counted_media = media_of(arrival.request.body, [msgspec.Raw(msgspec.json.encode(image))])
    assert MEDIA_TOKENS < record.input_tokens < MEDIA_TOKENS + 100


ASKED = [
    # name, arrival, in the row
    ("n", {"n": 3}, {"choices": 3}),
    ("best of", {"path": "/v1/completions", "best_of": 2}, {"choices": 2}),
    ("as many as no engine takes", {"n": 10**40}, {"choices": 1 << 16}),
    ("a batch", {"path": "/v1/completions", "prompt": ["a", "b"]}, {"choices": 2}),
    ("a batch of tokens", {"path": "/v1/completions", "prompt": [[1], [2]], "n": 2}, {"choices": 4}),
    ("embeddings", {"path": "/v1/completions", "prompt_embeds": "A"}, {"choices": 2, "modalities": ["embeddings"]}),
    ("stored before", {"path": "/v1/responses", "previous_response_id": "r"}, {}),
]


@pytest.mark.parametrize(("name", "arrival", "said"), ASKED, ids=[case[0] for case in ASKED])
def test_rows_that_cannot_be_replayed(name: str, arrival: dict[str, Any], said: dict[str, Any]) -> None:
    """Several answers, several prompts, no text: a row all the same, which says so (traces §2.1 leaves them out)."""
    scene = Scene("w1")
    scene.play(received(R, max_tokens=7, **arrival), counted(R))
    scene.play(granted(R, "w1"), events.FirstByte(request_id=R, attempt=0, status=200))
    scene.play(events.AnswerEnded(request_id=R, attempt=0, answer=GOOD))
    request = row_of(scene)["request"]
    assert {name: request.get(name) for name in said} == said
    assert (request["replayable"], request["outcome"]) == (False, "completed")


@pytest.mark.parametrize("path", [path for path in PATHS if path != "/v1/messages/count_tokens"])
def test_every_api_has_the_same_row(path: str) -> None:
    """All that is measured, whatever the API; its own bound of the answer."""
    bound = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answer = AnswerFacts(usage=GOOD.usage, response_id="id-1", finish_reason="stop", backend_finish_reason="end_turn")
    request = row_of(answered(answer, path=path, headers=CLAUDE, **{bound: 9}))["request"]
    assert request["max_output_tokens"] == 9
    assert request["response_id"] == "id-1"
    assert request["finish_reason_metadata"] == {"finish_reason": "stop", "backend_finish_reason": "end_turn"}
    assert request["prefill_wait_time_ms"] + request["prefill_time_ms"] == request["ttft_ms"]
    assert request["replayable"]


def test_prefill_is_the_attempts_that_answered() -> None:
    """A retry: the wait is from receipt to the second dispatch; dispatched and no byte: no time of prefill."""
    scene = Scene("w1", "w2")
    scene.play(received(R), counted(R))
    scene.play(granted(R, "w1"), after_s=1.0)
    scene.play(events.AnswerFailed(request_id=R, attempt=0, reason="connect_error"), after_s=1.0)
    scene.play(granted(R, "w2", attempt=1), after_s=1.0)
    scene.play(events.ClientGone(request_id=R), after_s=1.0)
    request = row_of(scene)["request"]
    assert (request["prefill_wait_time_ms"], request["outcome"]) == (3000.0, "client_disconnect")
    assert (request["output_tokens"], request["worker"]["worker"]) == (0, "w2")
    absent = ("prefill_time_ms", "ttft_ms", "avg_itl_ms", "finish_reason_metadata")
    assert [name for name in absent if name in request] == []


def test_a_row_without_identity_is_as_complete_as_one_with() -> None:
    """The peer's context-free rows have four fields of the request; ours differ from others in the context only
    (§8.3)."""
    named, nameless = (row_of(answered(GOOD, headers=headers, x_request_id="x")) for headers in (CLAUDE, {}))
    assert named.keys() - nameless.keys() == {"agent_context"}
    assert named["request"] == nameless["request"]


def test_a_request_that_was_never_dispatched_has_no_prefill() -> None:
    """Refused: no wait for a prefill that never was (§8.3)."""
    scene = Scene("w1")
    scene.play(received(R), counted(R), refused(R))
    request = row_of(scene)["request"]
    assert [name for name in request if name.startswith("prefill")] == []


def test_turns_and_compactions_are_in_the_context() -> None:
    """What Codex says of them; nothing of a session that says nothing."""
    said = {"thread_id": "T", "request_kind": "compaction", "agent_name": "/root", "compaction": {"trigger": "auto"}}
    headers = {"thread-id": "T", "x-codex-turn-metadata": json.dumps(said)}
    context = row_of(answered(GOOD, path="/v1/responses", headers=headers))["agent_context"]
    assert (context["turn"], context["compaction"]) == ({"agent_name": "/root"}, {"trigger": "auto"})
    assert not {"turn", "compaction"} & row_of(answered(GOOD, headers=CLAUDE))["agent_context"].keys()

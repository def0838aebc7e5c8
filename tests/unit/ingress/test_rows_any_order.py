"""Whatever happens to a request, in whatever order and by whatever clock: exactly one row, and one that can be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.base import from_json, to_json
from schemas.request import Usage
from schemas.trace import ToolCall, TraceRow
from services.ingress import events
from services.ingress.answers import AnswerFacts
from services.ingress.core import IngressRules
from services.ingress.effects import Answer, PublishRow
from services.ingress.events import AdmitFailure, AnswerFailure
from services.ingress.modalities import Media
from tests.unit.ingress.builders import GOOD, Scene, counted, granted, held, received, refused

R = "r1"
HEADERS: tuple[dict[str, str], ...] = (
    {},
    {"x-claude-code-session-id": "S", "x-claude-code-agent-id": "a1"},
    {"thread-id": "T", "x-codex-turn-metadata": '{"request_kind":"compaction","window_number":1}'},
    {"x-deepseek-harness-compact": "1"},
)
arrivals = st.builds(
    received,
    st.just(R),
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]),
    headers=st.sampled_from(HEADERS),
    x_request_id=st.sampled_from([None, "mine"]),
    stream=st.booleans(),
    n=st.sampled_from([None, 1, 3]),
    max_tokens=st.sampled_from([None, 0, 7]),
)
tokens = st.one_of(st.none(), st.integers(0, 40))
answers = st.one_of(
    st.none(),
    st.sampled_from([GOOD, AnswerFacts()]),
    st.builds(
        AnswerFacts,
        usage=st.sampled_from([Usage(), Usage(input_tokens=0), Usage(output_tokens=2), GOOD.usage]),
        response_id=st.sampled_from([None, "id"]),
        finish_reason=st.sampled_from([None, "stop"]),
        backend_finish_reason=st.sampled_from([None, "end_turn"]),
        tool_calls=st.sampled_from([(), (ToolCall(id="c", name="Bash"),)]),
        token_ids=st.sampled_from([(), (1, 2, 3)]),
        prompt_token_ids=st.sampled_from([(), (1, 2)]),
        error=st.sampled_from([None, "x"]),
        complete=st.booleans(),
        data_lines=st.integers(0, 4),
    ),
)
attempts = st.integers(0, 1)
happenings: st.SearchStrategy[events.Event] = st.one_of(
    st.builds(counted, st.just(R), tokens),
    st.just(events.PromptCounted(request_id=R, skipped="media", media=Media(("image",), 1, 9))),
    st.builds(held, st.just(R), attempts),
    st.builds(refused, st.just(R), attempts),
    st.builds(granted, st.just(R), st.sampled_from(["w1", "w2"]), attempts, hold_ms=st.sampled_from([0, 30])),
    st.builds(
        events.AdmitFailed, request_id=st.just(R), attempt=attempts, reason=st.sampled_from(get_args(AdmitFailure))
    ),
    st.builds(events.FirstByte, request_id=st.just(R), attempt=attempts, status=st.sampled_from([200, 404, 500, 503])),
    st.builds(events.AnswerEnded, request_id=st.just(R), attempt=attempts, answer=answers.map(lambda one: one or GOOD)),
    st.builds(
        events.AnswerFailed,
        request_id=st.just(R),
        attempt=attempts,
        reason=st.sampled_from(get_args(AnswerFailure)),
        answer=answers,
    ),
    st.builds(events.ClientGone, request_id=st.just(R), answer=answers),
    st.builds(events.RequestFailed, request_id=st.just(R), answer=answers),
    st.just(events.Tick()),
)
clocks = st.sampled_from([0.0, 0.001, 0.5, 20.0, -3.0])


def leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Every leaf of a document under the name of its member."""
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, key)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item, name)]
    return [(name, value)]


CHECKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "a time of the prefill only where there was a dispatch": lambda row: (
        "prefill_time_ms" not in row or "worker" in row
    ),
    "a first byte only where there was a dispatch": lambda row: "ttft_ms" not in row or "prefill_time_ms" in row,
    "output is always said": lambda row: row["output_tokens"] >= 0,
    "an end": lambda row: bool(row["outcome"]) and row["total_time_ms"] >= 0,
    "a replay has the right number of hashes": lambda row: (
        "replay" not in row
        or len(row["replay"]["input_sequence_hashes"])
        == -(-row["replay"]["input_length"] // row["replay"]["trace_block_size"])
    ),
    "replayable only with what it takes": lambda row: (
        not row["replayable"] or ("replay" in row and "choices" not in row)
    ),
    "media are never replayable": lambda row: not (row.get("modalities") and row["replayable"]),
}


@pytest.mark.long
@given(arrivals, st.lists(st.tuples(happenings, clocks), max_size=10))
def test_one_row_whatever_happens(arrival: events.RequestReceived, happened: list[tuple[events.Event, float]]) -> None:
    """Valid by the schema, no null, no negative time, and nothing that contradicts itself; a client that went is marked
    where the peer's rows say nothing (§8.3)."""
    scene = Scene("w1", "w2", rules=IngressRules(trace_fine_tokens=20))
    scene.play(arrival)
    for event, after_s in happened:
        scene.play(event, after_s=after_s)
    scene.play(events.Stopped())
    (published,) = [effect for effect in scene.effects if isinstance(effect, PublishRow)]
    assert published.message_id == R
    payload = to_json(published.row)
    assert from_json(payload, TraceRow) == published.row
    row = json.loads(payload)
    found = leaves(row)
    assert [name for name, value in found if value is None] == []
    assert [name for name, value in found if name.endswith("_ms") and value < 0] == []
    assert [text for text, holds in CHECKS.items() if not holds(row["request"])] == []
    went = any(isinstance(event, events.ClientGone) for event, _ in happened)
    assert row["request"]["outcome"] != "client_disconnect" or went
    assert ("agent_context" in row) == bool(arrival.resolved.identity.key.family != "request")
    assert len([effect for effect in scene.effects if isinstance(effect, Answer)]) <= 1

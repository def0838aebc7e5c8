"""Mooncake lines that hold only what is new: adding them up gives the recorded prompts again."""

from __future__ import annotations

from pathlib import Path

from tests.unit.tidegate.trace.making import SAMPLE, request_row, trace_of
from tidegate.trace.mooncake_deltas import mooncake_deltas
from tidegate.trace.reading import read_trace
from tidegate.trace.replayable import playable, prompt

RUN = SAMPLE.with_name("agents.jsonl.gz")


def test_later_lines_are_what_is_new(tmp_path: Path) -> None:
    """Behind prompt and answer of the line before, with ids of its own; sub-agents and requests without a session begin
    with their whole prompt, and share what it shares."""
    rows = [
        request_row("a", 1_000, 1_100, "s", hashes=[11, 12]),
        request_row("alone", 1_200, 1_250, hashes=[11, 99]),
        request_row("b", 1_300, 1_350, "s", hashes=[11, 12, 13, 14, 15]),
    ]
    first, alone, second = mooncake_deltas(playable(trace_of(tmp_path, *rows)))
    session = {"session_id": "s", "output_length": 2}
    assert first == {"request_id": "a", "timestamp": 0, "input_length": 8, "hash_ids": [0, 1], **session}
    assert (alone["session_id"], alone["hash_ids"], alone["timestamp"]) == ("alone", [0, 2], 200)
    assert second == {"request_id": "b", "delay": 200, "input_length": 10, "hash_ids": [3, 4, 5], **session}


def test_what_does_not_go_on_begins_anew(tmp_path: Path) -> None:
    """Another history, a shorter one, one that overlaps: a conversation of its own, at its own time."""
    rows = [
        request_row("a", 1_000, 1_100, "s", hashes=[11, 12]),
        request_row("other", 1_200, 1_300, "s", hashes=[21, 22, 23]),
        request_row("shorter", 1_400, 1_500, "s", hashes=[21]),
        request_row("longer", 1_600, 1_900, "s", hashes=[21, 22, 23]),
        request_row("overlaps", 1_700, 1_800, "s", hashes=[21, 22, 23, 24, 25]),
    ]
    lines = list(mooncake_deltas(playable(trace_of(tmp_path, *rows))))
    assert [(line["session_id"], line.get("timestamp"), line.get("delay")) for line in lines] == [
        ("s", 0, None),
        ("s#2", 200, None),
        ("s#3", 400, None),
        ("s#3", None, 100),
        ("s#4", 700, None),
    ]


def test_a_run_adds_up() -> None:
    """A recording of ours: per conversation, lines and answers so far are the recorded prompt, to the token."""
    source = playable(read_trace([RUN]))
    recorded = {request.request_id: request for request in source.trace.requests}
    lines = list(mooncake_deltas(source))
    assert len(lines) == len(recorded)
    held: dict[str, int] = {}
    for line in lines:
        request = recorded[line["request_id"]]
        held[line["session_id"]] = held.get(line["session_id"], 0) + line["input_length"]
        assert held[line["session_id"]] == prompt(request).input_length
        assert len(line["hash_ids"]) == -(-line["input_length"] // source.block_size)
        held[line["session_id"]] += line["output_length"]
    assert sorted(held) == sorted(source.trace.sessions())

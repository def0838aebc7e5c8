"""What players are given: one shape for all formats, mixed block sizes, what answers hold, hostile agentic files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tidegate.trace.making import SAMPLE, Row, problems_of, request_row, tool_row, write
from tidegate.trace.agentic_mooncake import agentic_mooncake_lines
from tidegate.trace.errors import TraceFileError
from tidegate.trace.plays import PlayNode, Plays, plays_of, read_plays
from tidegate.trace.reading import read_trace
from tidegate.trace.replayable import playable

FIXTURES = SAMPLE.parent
HEADER: Row = {
    "schema": "dynamo.agentic_mooncake",
    "version": 2,
    "block_size": 4,
    "hash_id_scope": "local",
    "source": {"format": "other", "digest": "x"},
}


def nodes_of(plays: Plays) -> dict[str, PlayNode]:
    return {node.request_id: node for node in plays.nodes}


def waits(node: PlayNode) -> list[tuple[str, str, str, float]]:
    return [(each.request_id, each.trigger, each.relation, each.delay_ms) for each in node.dependencies]


def line(name: str, *dependencies: dict[str, Any], **said: Any) -> Row:
    """A row of agentic Mooncake."""
    usual = {"play_id": "p", "session_id": "s", "model": "m", "input_length": 4, "output_length": 2, "hash_ids": [1]}
    return {"request_id": name, **usual, "not_before_ms": 0, "dependencies": list(dependencies), **said}


def after(name: str, **said: Any) -> dict[str, Any]:
    return {"request_id": name, "trigger": "completion", "delay_ms": 0, "relation": "sequence", **said}


def test_the_peers_agentic_file() -> None:
    """A sub-agent that goes 5 ms after its parent's dispatch, and a join on both (spec §8.4)."""
    plays = read_plays([FIXTURES / "peer_agentic_mooncake.jsonl"])
    assert (plays.format, plays.block_size) == ("agentic-mooncake", 4)
    nodes = nodes_of(plays)
    assert list(nodes) == ["agent-root", "agent-child", "agent-join"]
    assert waits(nodes["agent-child"]) == [("agent-root", "dispatch", "spawn", 5)]
    assert waits(nodes["agent-join"]) == [
        ("agent-root", "completion", "sequence", 1),
        ("agent-child", "completion", "join", 1),
    ]
    assert (nodes["agent-child"].session, nodes["agent-child"].parent) == ("child", "root")
    assert {(node.play, node.model, node.input_tokens, node.output_tokens) for node in plays.nodes} == {
        ("agent-play", "tiny-model", 4, 2)
    }


def test_the_peers_rows() -> None:
    """A tool that names its sub-agent's requests; rows without identity are plays of their own (spec §8.4)."""
    nodes = nodes_of(read_plays([FIXTURES / "peer_dynamo_agentic.jsonl"]))
    assert waits(nodes["child-first"]) == [("parent-source", "completion", "spawn", 10.0)]
    assert [each[0] for each in waits(nodes["child-last"])] == ["child-first"]
    assert {each[0] for each in waits(nodes["parent-consumer"])} == {"parent-source", "child-last"}
    assert nodes["child-first"].parent == "parent"
    plays = read_plays([FIXTURES / "peer_dynamo_standard.jsonl"])
    assert [(node.is_single, node.not_before_ms) for node in plays.nodes] == [(True, 0.0), (True, 20.0)]


def test_an_export_of_ours_is_the_same_graph(tmp_path: Path) -> None:
    """Rows, and what is written of them as agentic Mooncake and read again: equal requests, waits and prefixes."""
    rows = plays_of(playable(read_trace([SAMPLE])))
    path = write(tmp_path / "run.jsonl", agentic_mooncake_lines(playable(read_trace([SAMPLE]))))
    again = read_plays([path])
    ours, theirs = nodes_of(rows), nodes_of(again)
    assert set(ours) == set(theirs)
    number: dict[int, int] = {}
    for name, node in ours.items():
        other = theirs[name]
        assert (node.play, node.session, node.input_tokens) == (other.play, other.session, other.input_tokens)
        assert sorted(waits(node)) == sorted(waits(other))
        assert tuple(number.setdefault(each, len(number)) for each in node.sequence_hashes) == other.sequence_hashes
    assert len(set(number.values())) == len(number)


def test_mooncake_lines(tmp_path: Path) -> None:
    """Closed loops of sessions, open loop of the rest; a name that comes twice is named."""
    usual = {"input_length": 8, "output_length": 3, "hash_ids": [1, 2]}
    lines: list[Row] = [
        {**usual, "session_id": "a", "timestamp": 100},
        {**usual, "session_id": "a", "delay": 40},
        {**usual, "timestamp": 70, "request_id": "lone"},
    ]
    path = write(tmp_path / "m.jsonl", lines)
    plays = read_plays([path], mooncake_block=4)
    assert plays.format == "mooncake"
    lone, first, second = plays.nodes
    assert (lone.is_single, lone.not_before_ms, first.not_before_ms) == (True, 0.0, 30.0)
    assert waits(second) == [(first.request_id, "completion", "sequence", 40)]
    assert (second.recorded, second.sequence_hashes) == (None, (1, 2))
    twice = tmp_path / "twice.jsonl"
    twice.write_text(f"\n{json.dumps(lines[2])}\n\n{json.dumps(lines[2])}\n")
    with pytest.raises(TraceFileError) as error:
        read_plays([twice], mooncake_block=4)
    assert problems_of(error.value) == [("twice.jsonl", 4, "duplicate_request_id")]


def test_an_empty_prompt_is_left_out(tmp_path: Path) -> None:
    """Nobody can send it; the next turn of its session waits for the one before it."""
    usual = {"input_length": 4, "output_length": 3, "hash_ids": [1], "session_id": "a"}
    empty = {**usual, "input_length": 0, "hash_ids": [], "delay": 5}
    path = write(tmp_path / "m.jsonl", [{**usual, "timestamp": 0}, empty, {**usual, "delay": 7}])
    plays = read_plays([path], mooncake_block=4)
    first, second = plays.nodes
    assert waits(second) == [(first.request_id, "completion", "sequence", 12)]
    assert plays.left_out == {"empty prompt": 1}


def test_files_of_two_formats_are_not_played_together(tmp_path: Path) -> None:
    """Else the rows of one would be left aside without a word."""
    rows = write(tmp_path / "a.jsonl", [request_row("r", 0, 1)])
    agentic = write(tmp_path / "b.jsonl", [HEADER, line("a")])
    with pytest.raises(TraceFileError, match=r"this is agentic-mooncake, and .*a\.jsonl is rows") as error:
        read_plays([tmp_path])
    assert problems_of(error.value) == [("b.jsonl", 1, "fields")]
    assert len(read_plays([rows]).nodes) == len(read_plays([agentic]).nodes) == 1


def test_ids_and_sessions_of_others_hold_within_a_play(tmp_path: Path) -> None:
    """The same id in two plays is other content, and a session's name another session; prompts without ids share
    nothing. Of our own exports, ids hold over the file."""
    lines = [line("a"), line("b", play_id="q"), line("c", hash_ids=None, input_length=8, session_id="t")]
    first, second, third = read_plays([write(tmp_path / "x.jsonl", [HEADER, *lines])]).nodes
    assert len({*first.sequence_hashes, *second.sequence_hashes, *third.sequence_hashes}) == 4
    assert [first.session, second.session, third.session] == ["p/s", "q/s", "t"]
    ours = {**HEADER, "source": {"format": "tidegate.request.trace.v1"}}
    first, second, third = read_plays([write(tmp_path / "y.jsonl", [ours, *lines])]).nodes
    assert first.sequence_hashes == second.sequence_hashes
    assert not set(first.sequence_hashes) & set(third.sequence_hashes)


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        ([{**HEADER, "version": 1}, line("a")], "fields"),
        ([{**HEADER, "block_size": 0}, line("a")], "block_size"),
        ([HEADER], "nothing_to_write"),
        ([HEADER, line("a"), line("a")], "duplicate_request_id"),
        ([HEADER, line("a", after("b"))], "unknown_request"),
        ([HEADER, line("a"), line("b", after("a"), play_id="q")], "unknown_request"),
        ([HEADER, line("a", after("b")), line("b", after("a"))], "cycle"),
        ([HEADER, line("a", after("a"))], "cycle"),
        ([HEADER, line("a", hash_ids=[1, 2])], "hash_count"),
        ([HEADER, line("a", hash_ids=[-1])], "hash_range"),
        ([HEADER, line("a"), line("b", after("a", delay_ms=-1))], "times"),
        ([HEADER, line("a", not_before_ms=1e300)], "times"),
        ([HEADER, line("a"), line("b", after("a", trigger="first_token"))], "fields"),
        ([HEADER, line("a", output_length=None)], "fields"),
        ([HEADER, line("a", input_length=-4)], "fields"),
        ([HEADER, line("a", input_length=0, hash_ids=[])], "fields"),
        ([HEADER, line("a", input_length=1 << 30, hash_ids=None)], "hash_count"),
        ([HEADER, ["a"]], "fields"),
    ],
)
def test_a_wrong_agentic_file_is_named(tmp_path: Path, lines: list[Any], rule: str) -> None:
    """Unique ids, known references, no cycle, counts and times: file, line and rule."""
    path = write(tmp_path / "bad.jsonl", lines)
    with pytest.raises(TraceFileError) as error:
        read_plays([path])
    assert [problem.rule for problem in error.value.problems] == [rule]
    assert error.value.problems[0].place.file in (str(path), "the trace")


def test_a_cut_agentic_file_is_read_up_to_there(tmp_path: Path) -> None:
    """Half a last line is told as damage, not as an error."""
    path = tmp_path / "cut.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in (HEADER, line("a"), line("b")))[:-9])
    plays = read_plays([path])
    assert [node.request_id for node in plays.nodes] == ["a"]
    assert [problem.rule for problem in plays.damaged] == ["file"]


def fine(name: str, start_ms: int, hashes: list[int], length: int, size: int, **said: Any) -> Row:
    block = {"trace_block_size": size, "input_length": length, "input_sequence_hashes": hashes}
    return request_row(name, start_ms, start_ms + 1, "s", replay=block, **said)


def test_a_mixture_is_brought_to_the_largest_block(tmp_path: Path) -> None:
    """Long prompts have every k-th hash of the same chain and the tail: rows of one session agree there."""
    rows = [
        fine("a", 0, [1, 2, 3, 4, 5], 18, 4),
        fine("b", 10, [2, 4, 60], 20, 8),
        fine("c", 20, [1, 2, 3], 12, 4),
        fine("d", 30, [4], 16, 16),
        fine("e", 40, [7, 8], 8, 4),
    ]
    source = playable(read_trace([write(tmp_path / "rows.jsonl", rows)]))
    plays = plays_of(source)
    assert plays.block_size == 16
    assert [node.sequence_hashes for node in plays.nodes] == [(4, 5), (4, 60), (3,), (4,), (8,)]
    assert all(len(node.sequence_hashes) == -(-node.input_tokens // 16) for node in plays.nodes)


def test_what_answers_hold(tmp_path: Path) -> None:
    """The next turn tells what the answer was, as far as the engine found it; completion hashes do where no turn does;
    a title in between is no next turn."""
    rows = [
        fine("a", 0, [1, 2], 8, 4, output_tokens=20),
        fine("title", 10, [90, 91], 8, 4, output_tokens=2),
        fine("b", 20, [1, 2, *range(3, 9)], 32, 4, output_tokens=40, cached_tokens=24),
        fine("c", 30, [1, 2, *range(3, 9), *range(9, 21)], 80, 4, output_tokens=4, cached_tokens=32),
    ]
    block = rows[3]["request"]["replay"]
    block["completion_sequence_hashes"] = [*block["input_sequence_hashes"], 77]
    nodes = nodes_of(plays_of(playable(read_trace([write(tmp_path / "rows.jsonl", rows)]))))
    assert (nodes["a"].content_tokens, nodes["a"].content_hashes) == (28, (1, 2, 3, 4, 5, 6, 7))
    assert (nodes["title"].content_tokens, nodes["title"].content_hashes) == (8, (90, 91))
    assert (nodes["b"].content_tokens, len(nodes["b"].content_hashes)) == (32, 8)
    assert (nodes["c"].content_tokens, nodes["c"].content_hashes[-1]) == (84, 77)


def test_what_was_held_is_no_wait_for_a_decision(tmp_path: Path) -> None:
    """Rows of ours say nothing of a hold where there was none; others' say nothing at all."""
    rows = [
        request_row("held", 0, 1, admission_wait_ms=52.5, hold_ms=50),
        request_row("let", 2, 3, admission_wait_ms=2.5),
        request_row("unknown", 4, 5),
    ]
    nodes = nodes_of(read_plays([write(tmp_path / "rows.jsonl", rows)]))
    holds = {name: node.recorded.hold_ms for name, node in nodes.items() if node.recorded is not None}
    assert holds == {"held": 50, "let": 0, "unknown": None}


def test_no_more_is_known_than_there_are_hashes(tmp_path: Path) -> None:
    """An answer whose ids were told in part: what follows them is nobody's (a block of it would be shared by all who
    begin so)."""
    row = fine("a", 0, [1, 2], 8, 4, output_tokens=100)
    row["request"]["replay"]["completion_sequence_hashes"] = [1, 2, 3]
    (node,) = plays_of(playable(read_trace([write(tmp_path / "rows.jsonl", [row])]))).nodes
    assert (node.content_tokens, node.content_hashes) == (12, (1, 2, 3))


def test_completion_hashes_begin_with_the_prompt(tmp_path: Path) -> None:
    """Else the row contradicts itself."""
    row = fine("a", 0, [1, 2], 8, 4)
    row["request"]["replay"]["completion_sequence_hashes"] = [1, 9, 3]
    with pytest.raises(TraceFileError) as error:
        read_trace([write(tmp_path / "rows.jsonl", [row])])
    assert problems_of(error.value) == [("rows.jsonl", 1, "hash_count")]


def contradicting() -> list[Row]:
    """Session ``s`` names two parents; ``t`` is its sub-agent, ``u`` has nothing to do with them."""
    return [
        request_row("a", 0, 1, "s", "p"),
        request_row("b", 2, 3, "s", "q"),
        request_row("c", 4, 5, "t", "s"),
        request_row("d", 6, 7, "u"),
        request_row("e", 8, 9, "u"),
    ]


def test_sessions_that_contradict_themselves_are_left_out_on_demand(tmp_path: Path) -> None:
    """Counted by what is wrong; their sub-agents play by themselves, the others as ever. Without the wish nothing is
    played, and what to do is said."""
    path = write(tmp_path / "rows.jsonl", contradicting())
    with pytest.raises(TraceFileError, match=r"conflicting_parents\]\n--skip-unplayable") as refused:
        read_plays([path])
    assert problems_of(refused.value) == [("rows.jsonl", 2, "conflicting_parents")]
    plays = read_plays([path], skip_unplayable=True)
    assert [(node.request_id, node.session, node.play) for node in plays.nodes] == [
        ("c", "t", "t"),
        ("d", "u", "u"),
        ("e", "u", "u"),
    ]
    assert plays.left_out == {"its session names two parents": 2}


def test_tools_of_what_is_left_out_are_no_errors(tmp_path: Path) -> None:
    """Neither those of its session, nor one elsewhere that says it began it."""
    link = {"source_request_id": "d", "child_session_id": "s", "execution_mode": "background"}
    begun = tool_row("u", "call-1", 7, claude=link)
    own = tool_row("s", "call-2", 4, claude=link | {"source_request_id": "nobody"})
    plays = read_plays([write(tmp_path / "rows.jsonl", [*contradicting(), begun, own])], skip_unplayable=True)
    assert [node.request_id for node in plays.nodes] == ["c", "d", "e"]


@pytest.mark.parametrize("mode", ["blocking", "sideways"])
def test_other_contradictions_are_left_out_too(tmp_path: Path, mode: str) -> None:
    """A link of a tool that leads nowhere, or is of no kind that we know."""
    link = {"source_request_id": "nobody", "child_session_id": "t", "execution_mode": mode}
    rows = [*contradicting()[2:], tool_row("t", "call", 6, claude=link)]
    plays = read_plays([write(tmp_path / "rows.jsonl", rows)], skip_unplayable=True)
    assert [node.request_id for node in plays.nodes] == ["d", "e"]
    assert plays.left_out.total() == 1


def test_a_recording_of_contradictions_alone_has_nothing_to_play(tmp_path: Path) -> None:
    """Said as such."""
    path = write(tmp_path / "rows.jsonl", contradicting()[:2])
    with pytest.raises(TraceFileError, match="no session can be played again"):
        read_plays([path], skip_unplayable=True)

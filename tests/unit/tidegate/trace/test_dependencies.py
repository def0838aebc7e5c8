"""What each request waited for. Oracles: spec identity-and-traces §8.4."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tidegate.trace.making import Row, problems_of, request_row, tool_row, trace_of
from tidegate.trace.dependencies import dependency_graph, edges
from tidegate.trace.errors import TraceFileError
from tidegate.trace.reading import Trace

Edge = tuple[str, str, str, float]


def graph(trace: Trace) -> dict[str, list[Edge]]:
    """By request: (who is waited for, trigger, relation, delay in ms)."""
    return {
        node.request.request_id: [
            (each.request_id, each.trigger, each.relation, each.delay_ms) for each in node.dependencies
        ]
        for node in dependency_graph(trace)
    }


CLAUDE = {
    "source_request_id": "parent-source",
    "consumer_request_id": "consumer",
    "child_session_id": "child",
    "execution_mode": "blocking",
}
AGENTIC = [
    request_row("parent-source", 100, 110, "parent"),
    request_row("child-first", 120, 130, "child", "parent"),
    request_row("child-last", 150, 160, "child", "parent"),
    request_row("consumer", 200, 210, "parent"),
]


@pytest.mark.parametrize("linked", [True, False])
def test_a_sub_agent_that_is_waited_for(tmp_path: Path, linked: bool) -> None:
    """The peer's fixture dynamo-agentic.jsonl: the same by the tool that says so and by time."""
    tool = tool_row("parent", "call", 170, started_at_unix_ms=115, ended_at_unix_ms=170, claude=CLAUDE)
    assert graph(trace_of(tmp_path, *AGENTIC, *([tool] if linked else []))) == {
        "parent-source": [],
        "child-first": [("parent-source", "completion", "spawn", 10)],
        "child-last": [("child-first", "completion", "sequence", 20)],
        "consumer": [("parent-source", "completion", "sequence", 40), ("child-last", "completion", "join", 40)],
    }


def test_a_sub_agent_that_overlaps_its_parent(tmp_path: Path) -> None:
    """The peer's fixture agentic-mooncake.jsonl: begun 5 ms after its parent's dispatch; both are waited for.

    User report (the peer's issue 13477): dependencies on completion alone cannot say this.
    """
    rows = [
        request_row("root", 0, 20, "main"),
        request_row("child", 5, 15, "sub", "main"),
        request_row("join", 21, 30, "main"),
    ]
    assert graph(trace_of(tmp_path, *rows)) == {
        "root": [],
        "child": [("root", "dispatch", "spawn", 5)],
        "join": [("root", "completion", "sequence", 1), ("child", "completion", "join", 1)],
    }


def test_requests_of_a_session_that_overlap(tmp_path: Path) -> None:
    """A title that is asked for while the first turn runs overlaps it again; the next turn waits for both."""
    rows = [request_row("turn", 0, 50, "s"), request_row("title", 3, 9, "s"), request_row("next", 60, 70, "s")]
    found = graph(trace_of(tmp_path, *rows))
    assert found["title"] == [("turn", "dispatch", "sequence", 3)]
    assert found["next"] == [("turn", "completion", "sequence", 10), ("title", "completion", "sequence", 10)]


def test_plays(tmp_path: Path) -> None:
    """A run with its sub-agents is one play; who has no session, or a parent that is not there, is one alone."""
    rows = [*AGENTIC, request_row("alone", 105, 106), request_row("far", 107, 109, "far", "not-here")]
    nodes = dependency_graph(trace_of(tmp_path, *rows))
    assert {node.request.request_id: (node.session, node.play) for node in nodes} == {
        "parent-source": ("parent", "parent"),
        "child-first": ("child", "parent"),
        "child-last": ("child", "parent"),
        "consumer": ("parent", "parent"),
        "alone": ("request:alone", "request:alone"),
        "far": ("far", "far"),
    }
    assert [(a.request_id, b.request_id) for a, b in edges(nodes, "spawn")] == [("parent-source", "child-first")]


def _linked(**changes: str | None) -> Row:
    claude = {key: value for key, value in {**CLAUDE, **changes}.items() if value is not None}
    return tool_row("parent", "call", 170, claude=claude)


BAD_LINKS: list[tuple[list[Row], str]] = [
    ([_linked(source_request_id="nobody")], "unknown_request"),
    ([_linked(consumer_request_id="nobody")], "unknown_request"),
    ([_linked(child_session_id="nobody")], "unknown_request"),
    ([_linked(source_request_id="child-first")], "wrong_session"),
    ([_linked(execution_mode="sideways")], "execution_mode"),
    ([_linked(), _linked()], "child_named_twice"),
]


@pytest.mark.parametrize(("tools", "rule"), BAD_LINKS, ids=[rule for _, rule in BAD_LINKS])
def test_links_that_lead_nowhere(tmp_path: Path, tools: list[Row], rule: str) -> None:
    """Named with the tool's line."""
    with pytest.raises(TraceFileError) as error:
        graph(trace_of(tmp_path, *AGENTIC, *tools))
    assert problems_of(error.value) == [("trace.jsonl", len(AGENTIC) + len(tools), rule)]


def test_conflicting_parents(tmp_path: Path) -> None:
    rows = [request_row("a", 0, 1, "s", "p"), request_row("b", 2, 3, "s", "q")]
    with pytest.raises(TraceFileError, match=r"trace\.jsonl:1") as error:
        graph(trace_of(tmp_path, *rows))
    assert problems_of(error.value) == [("trace.jsonl", 2, "conflicting_parents")]


def test_a_cycle(tmp_path: Path) -> None:
    """A tool whose answer was taken before it was asked for."""
    with pytest.raises(TraceFileError) as error:
        graph(trace_of(tmp_path, *AGENTIC, _linked(source_request_id="consumer", consumer_request_id="parent-source")))
    assert [problem.rule for problem in error.value.problems] == ["cycle"]


_times = st.tuples(st.integers(0, 60), st.integers(0, 30))
_requests = st.lists(st.tuples(_times, st.integers(0, 3)), min_size=1, max_size=14)


def test_moments_make_no_cycle(tmp_path: Path) -> None:
    """Parents of each other, all at once and over at once: the order of the trace decides."""
    rows = [request_row("a", 5, 5, "s", "t"), request_row("b", 5, 5, "t", "s")]
    assert graph(trace_of(tmp_path, *rows)) == {"a": [], "b": [("a", "completion", "join", 0)]}


@given(_requests, st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_a_graph_played_back_is_the_recording(
    tmp_path_factory: pytest.TempPathFactory, requests: list[tuple[tuple[int, int], int]], parents: list[int]
) -> None:
    """Without cycles, and, with the recorded durations, every request begins when it did."""
    rows = [
        request_row(str(number), start, start + length, f"s{session}", f"s{parents[session]}")
        for number, ((start, length), session) in enumerate(requests)
    ]
    nodes = dependency_graph(trace_of(tmp_path_factory.mktemp("graph"), *rows))
    at: dict[str, tuple[float, float]] = {}
    left = list(nodes)
    while left:
        ready = [node for node in left if all(each.request_id in at for each in node.dependencies)]
        assert ready
        for node in ready:
            fired = [at[each.request_id][each.trigger == "completion"] + each.delay_ms for each in node.dependencies]
            start_ms = max(fired) if fired else node.request.start_ms
            at[node.request.request_id] = (start_ms, start_ms + node.request.end_ms - node.request.start_ms)
        left = [node for node in left if node.request.request_id not in at]
    assert at == {node.request.request_id: (node.request.start_ms, node.request.end_ms) for node in nodes}

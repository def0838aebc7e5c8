"""The seeded plan of agent sessions."""

from __future__ import annotations

import pytest

from load.workload.sessions import WorkloadShape, plan


def test_equal_arguments_give_equal_plans_and_seeds_differ() -> None:
    """A plan is a function of its arguments, so that a run can be repeated."""
    assert plan(WorkloadShape(), seed=3) == plan(WorkloadShape(), seed=3)
    assert plan(WorkloadShape(), seed=3) != plan(WorkloadShape(), seed=4)


def test_the_default_plan_is_what_the_demo_promises() -> None:
    """At least 12 sessions of 6 turns, sub-agents and tool gaps among them, both header families in use."""
    whole = plan(WorkloadShape())
    assert len(whole.roots) == 12
    assert all(len(session.turns) == 6 for session in whole.roots)
    assert whole.requests == 12 * 6 + 4 * 6
    children = [session for session in whole.sessions if session.parent_session_id is not None]
    assert len(children) == 4
    assert {session.headers for session in whole.sessions} == {"dynamo", "tidegate"}
    assert all(turn.gap_s > 0 for session in whole.sessions for turn in session.turns[1:])


def test_a_sub_agent_runs_in_one_gap_of_its_parent() -> None:
    """Each child is joined by exactly one turn of the session that it names as its parent."""
    whole = plan(WorkloadShape(sessions=5, sub_agents=3))
    joined = {child: session.session_id for session in whole.sessions for turn in session.turns for child in turn.joins}
    assert joined == {s.session_id: s.parent_session_id for s in whole.sessions if s.parent_session_id is not None}
    assert len(joined) == 3


def test_sessions_of_one_app_share_their_system_prompt_only() -> None:
    """The shared prefix ends where the session's own text begins."""
    whole = plan(WorkloadShape(sessions=4, apps=2, sub_agents=0))
    first, second, third, fourth = whole.sessions
    assert first.system_prompt == third.system_prompt != second.system_prompt == fourth.system_prompt
    texts = [turn.text for session in whole.sessions for turn in session.turns]
    assert len(set(texts)) == len(texts)


def test_headers_name_the_session_its_parent_and_its_end() -> None:
    """Identity headers of one family; only the last turn says that the session is final."""
    whole = plan(WorkloadShape(sessions=3, turns=2, sub_agents=1, sub_agent_turns=1))
    root, child, _, third = whole.sessions
    assert root.request_headers(0) == {"x-dynamo-session-id": root.session_id}
    assert root.request_headers(1)["x-dynamo-session-final"] == "true"
    assert child.request_headers(0) == {
        "x-dynamo-session-id": child.session_id,
        "x-dynamo-parent-session-id": root.session_id,
        "x-dynamo-session-final": "true",
    }
    assert third.request_headers(0) == {"x-tidegate-session-id": third.session_id}


def test_more_sub_agents_than_sessions_is_refused() -> None:
    """A shape that cannot be planned says so."""
    with pytest.raises(ValueError, match="sub-agent"):
        plan(WorkloadShape(sessions=1, sub_agents=2))


def test_an_unknown_session_is_a_key_error() -> None:
    """Asking for a session that the plan does not hold."""
    with pytest.raises(KeyError):
        plan(WorkloadShape()).session("nobody")

"""Which sub-agents are over, though nobody says so."""

from __future__ import annotations

from services.admission.sub_agents import SubAgents


def test_an_answer_without_a_tool_ends_a_sub_agent_that_called_tools_before() -> None:
    known = SubAgents()
    assert known.began("child", "parent") == []
    assert not known.ended("child", "bash", completed=True)
    known.began("child", "parent")
    assert known.of("parent") == ("child",)
    assert known.ended("child", None, completed=True)


def test_one_that_never_called_a_tool_is_over_when_its_parent_goes_on() -> None:
    """Its tools may be plain text: an answer alone says nothing."""
    known = SubAgents()
    known.began("child", "parent")
    assert not known.ended("child", None, completed=True)
    assert known.began("parent", None) == ["child"]
    assert (known.of("parent"), len(known)) == ((), 0)


def test_one_that_runs_calls_a_tool_or_failed_is_not_over() -> None:
    known = SubAgents()
    for name in ("runs", "acts", "failed"):
        known.began(name, "parent")
    known.ended("acts", "bash", completed=True)
    known.ended("failed")
    assert known.began("parent", None) == []
    assert known.of("parent") == ("runs", "acts", "failed")


def test_parallel_turns_of_a_sub_agent_end_with_the_last() -> None:
    known = SubAgents()
    known.began("child", "parent")
    known.began("child", "parent")
    assert not known.ended("child", "bash", completed=True)
    assert known.ended("child", None, completed=True)


def test_sub_agents_have_a_bound_and_move_with_their_parent() -> None:
    known = SubAgents(limit=2)
    for name in ("a", "b", "c"):
        known.began(name, "parent")
    assert known.of("parent") == ("b", "c")
    known.began("b", "other")
    assert (known.of("parent"), known.of("other")) == (("c",), ("b",))
    known.forget("b")
    known.forget("nobody")
    assert known.of("other") == ()
    known.ended("nobody", None, completed=True)
    assert known.began("self", "self") == []

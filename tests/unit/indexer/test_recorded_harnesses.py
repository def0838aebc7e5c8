"""Requests of real harnesses without their headers: turns that go on from a known prompt are given to the right
conversation, and nothing is given to a wrong one.

Issue "beyond one GPU's memory": of the turns whose canonical content extends a known chain, at least 95 % attributed
and none wrong; harnesses that rewrite their history, side requests and re-sends apart (spec: harness.md §6.6).
"""

from __future__ import annotations

import pytest

from tests.support.recognition import Evaluation, apart, forked, interleaved, recorded

REQUESTS = recorded()


@pytest.mark.parametrize("order", ["apart", "one_house", "interleaved"])
def test_turns_go_to_their_conversation(order: str) -> None:
    """Scenario by scenario; all into one house, one after the other; and as if all had begun at once."""
    if order == "apart":
        evaluation = apart(REQUESTS)
    else:
        evaluation = Evaluation().replay(interleaved(REQUESTS) if order == "interleaved" else REQUESTS)
    assert evaluation.wrong == []
    assert evaluation.missed == []
    counts = evaluation.counts
    assert (counts["extending_right"], counts["extending"]) == (122, 122)
    assert (counts["resent_right"], counts["resent"]) == (67, 67)
    assert (counts["sub_agents_told_apart"], counts["sub_agents"]) == (15, 15)
    assert (counts["first_turns_told_apart"], counts["first_turns"]) == (49, 49)
    assert (counts["rewritten_right"], counts["rewritten"]) == (0, 6)


def test_a_fork_at_the_end_is_that_conversation_until_it_goes_on() -> None:
    """Two harnesses repeat the whole conversation under a new id (``--fork-session``, ``fork``): nothing in the content
    tells them from a continuation. Once the original goes on as well, the two are apart."""
    counts = apart(REQUESTS).counts
    assert (counts["forks_at_the_end"], counts["forks_at_the_end_taken_as_continuing"]) == (2, 2)


def test_forks_in_the_middle_are_told_apart() -> None:
    """Every recorded conversation is forked behind its first answer, before each of its turns: no fork is taken for
    it, each names it as its parent and goes on as itself, and the conversation goes on as if nothing had happened; but
    for two turns of mini-swe-agent, which drops an answer that it cannot use: beside a fork that has all answers but
    that one, they are nobody's."""
    forks = forked(REQUESTS)
    assert forks.made == 120
    assert (forks.told_apart, forks.parent_named, forks.forks_continued) == (120, 120, 120)
    assert forks.originals_right == 120


def test_headerless_harnesses_are_among_them() -> None:
    """What the figures are about: those that send nothing at all (Qwen's chat, Pi's default, mini-swe-agent, aider,
    SDKs), and those whose headers were taken away."""

    def extending(name: str) -> tuple[int, int]:
        counts = apart([request for request in REQUESTS if request.harness.startswith(name)]).counts
        return counts["extending_right"], counts["extending"]

    names = ("mini-swe", "aider", "openai-agents", "langgraph", "qwen", "pi-", "claude", "codex", "opencode")
    assert {name: extending(name) for name in names} == {
        "mini-swe": (3, 3),
        "aider": (0, 0),  # its two runs rewrite the history
        "openai-agents": (8, 8),
        "langgraph": (10, 10),
        "qwen": (10, 10),  # -c rewrites the first message: two turns are new
        "pi-": (12, 12),
        "claude": (36, 36),
        "codex": (25, 25),
        "opencode": (18, 18),
    }


def test_the_recordings_are_whole() -> None:
    """The fixture has every request for an answer of every scenario."""
    assert len(REQUESTS) == 277
    assert len({(request.harness, request.scenario) for request in REQUESTS}) == 48
    assert all(request.hashes for request in REQUESTS)

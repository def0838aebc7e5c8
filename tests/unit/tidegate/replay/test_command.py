"""The command line of ``tidegate replay`` before anything is sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.tidegate.replay.making import node
from tidegate.cli import main
from tidegate.commands.replay import choose_model
from tidegate.replay.endpoint import EndpointError
from tidegate.replay.run import first_plays, last_of_sessions, sessions_of

TRACE = Path(__file__).parents[3] / "fixtures" / "recorded_traces" / "peer_dynamo_agentic.jsonl"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "TRACE"),
        ([str(TRACE), "--vocabulary", "5"], 2, "LOWEST..HIGHEST"),
        ([str(TRACE), "--speed", "0"], 2, "--speed"),
        ([str(TRACE), "--speed", "nan"], 2, "nan is no finite number"),
        ([str(TRACE), "--url", "ftp://10.0.0.5"], 2, "write http://HOST:PORT"),
        ([str(TRACE), "-o", "no/such/report.json"], 2, "there is no folder no/such"),
        (["no-such-file"], 1, "no-such-file: there is no such file [file]"),
        (["n" * 5_000], 1, "File name too long [file]"),
    ],
)
def test_wrong_use_is_said_before_anything_is_sent(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence, no traceback."""
    assert main(["replay", *arguments]) == code
    assert said in capsys.readouterr().err


def test_the_model_is_the_wished_the_recorded_or_the_only_one() -> None:
    """Where it is not clear or not served, the message says which there are."""
    assert choose_model("a", "b", ["a", "b"], "u") == "b"
    assert choose_model("a", None, ["a", "b"], "u") == "a"
    assert choose_model("gone", None, ["a"], "u") == "a"
    for recorded, wished in (("gone", None), (None, None), ("a", "gone")):
        with pytest.raises(EndpointError, match="name one of a, b"):
            choose_model(recorded, wished, ["a", "b"], "u")


def test_the_first_plays_are_whole_and_sessions_end_once() -> None:
    """--limit counts runs with their sub-agents; the last request of each session says that it is over."""
    nodes = [
        node("p1", play="p"),
        node("q1", play="q", session="r"),
        node("p2", play="p"),
        node("c1", play="p", session="child"),
        replace(node("title", play="p"), kind="title"),
    ]
    assert [each.request_id for each in first_plays(nodes, 1)] == ["p1", "p2", "c1", "title"]
    assert last_of_sessions(nodes) == {1, 2, 3}


def test_who_is_sent_with_which_session() -> None:
    """A turn with its session's name and its parent's; what stands beside a session, or alone, with none."""
    turn = node("a", session="s")
    assert sessions_of(turn, "@1") == ("s@1", None)
    assert sessions_of(replace(turn, parent="p", kind="final"), "@1") == ("s@1", "p@1")
    for kind in ("title", "compaction"):
        assert sessions_of(replace(turn, parent="p", kind=kind), "@1") == (None, None)
    assert sessions_of(node("b", session="request:b"), "@1") == (None, None)

"""The doctor's judgements."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from schemas.index import MatchReply, PoolMatch, WorkerMatch
from schemas.worker import RankStream, WorkerProfile, WorkerState
from tidegate.doctor import checks
from tidegate.doctor.checks import Check


def worker(
    name: str = "w1", block_size: int | None = 16, streams: tuple[RankStream, ...] = (), **fields: Any
) -> WorkerState:
    known: dict[str, Any] = {"health": "ready", "incarnation": "1"}
    profile = WorkerProfile(url="http://h:8000", model="m", engine="vllm", block_size=block_size)
    return WorkerState(
        source="b", epoch=1, seq=0, at_ms=0, worker=name, profile=profile, streams=streams, **{**known, **fields}
    )


def verdicts(found: list[Check]) -> list[str]:
    return [check.verdict for check in found]


def test_whatever_is_not_ok_says_what_to_do() -> None:
    """Every warning and failure carries its fix; what is ok needs none."""
    states = {
        "a": worker("a", health="unhealthy", reason="connect_error"),
        "b": worker("b", health="mismatch"),
        "c": worker("c", block_size=64, streams=(RankStream(rank=0, incarnation="1", state="blind"),)),
    }
    found = [
        *checks.check_workers({}, 2.5),
        *checks.check_workers(states, 2.5),
        *checks.check_models(states),
        *checks.check_streams(states),
        *checks.check_index("m", None),
        *checks.check_index("m", MatchReply(indexer="i")),
        *checks.check_services([]),
        *checks.check_holding(["commit"], states),
        *checks.check_holding(["kv", "commit"], states),
        checks.check_stream({"error": {"description": "stream not found"}}, None),
        checks.check_stream({"state": {"messages": 9}}, checks.LATE_ROWS + 1),
        checks.check_tokenizer("m", False, "404"),
        checks.check_ready("ingress", "http://h", "no worker"),
    ]
    assert [check.name for check in found if (check.verdict == "ok") == bool(check.fix)] == []
    assert checks.failed(found)


def test_engines_that_salt_otherwise_are_said_to_differ_in_that() -> None:
    """Equal block sizes are not called different."""
    other = worker("b")
    other = msgspec.structs.replace(other, profile=msgspec.structs.replace(other.profile, salt_rule="all_blocks"))
    (check,) = checks.check_models({"a": worker("a"), "b": other})
    assert check.verdict == "warning"
    assert "block sizes" not in check.found
    assert "salt" in check.found


def test_a_stream_that_does_not_answer_is_not_a_stream_without_a_recorder() -> None:
    """Only JetStream's own word that there is no such consumer says so; a late answer is a warning."""
    info = {"state": {"messages": 3}}
    nobody = checks.check_stream(info, None)
    unknown = checks.check_stream(info, None, "no answer within 2 s")
    assert (nobody.verdict, unknown.verdict) == ("ok", "warning")
    assert "no recorder" not in unknown.found


@pytest.mark.parametrize(
    ("health", "verdict"),
    [("ready", "ok"), ("starting", "warning"), ("left", "warning"), ("unhealthy", "failed"), ("mismatch", "failed")],
)
def test_a_workers_health_decides(health: str, verdict: str) -> None:
    """Loading and leaving are warnings; not answering and contradicting itself are failures."""
    assert verdicts(checks.check_workers({"w1": worker(health=health)}, 2.5)) == [verdict]


def test_workers_of_a_model_must_agree() -> None:
    """Different block sizes in one pool, or none known, are warnings that name the model (report A10)."""
    agreeing = {"a": worker("a"), "b": worker("b")}
    assert verdicts(checks.check_models(agreeing)) == ["ok"]
    (differing,) = checks.check_models({"a": worker("a"), "b": worker("b", block_size=64)})
    assert (differing.name, differing.verdict) == ("model m", "warning")
    assert "16, 64" in differing.found
    assert verdicts(checks.check_models({"a": worker("a", block_size=None)})) == ["warning"]
    assert checks.check_models({"a": worker("a", health="left")}) == []


def test_event_streams_by_rank() -> None:
    """Each rank has its line; a worker without any stream is a warning."""
    streams = (
        RankStream(rank=0, incarnation="1", seq=5),
        RankStream(rank=1, incarnation="1", state="catching_up", reason="gap"),
        RankStream(rank=2, incarnation="1", state="blind", reason="no_events"),
    )
    assert verdicts(checks.check_streams({"w1": worker(streams=streams)})) == ["ok", "warning", "failed"]
    assert verdicts(checks.check_streams({"w1": worker()})) == ["warning"]


def test_the_index_by_source() -> None:
    """A synced source is ok; any other health is a warning with its reason."""
    matches = (WorkerMatch(worker="a", rank=0), WorkerMatch(worker="b", rank=0, health="blind", reason="no_snapshot"))
    found = checks.check_index("m", MatchReply(indexer="i", matches=matches))
    assert verdicts(found) == ["ok", "warning"]
    assert "no_snapshot" in found[1].found


def test_findings_read_as_sentences() -> None:
    """One of a kind is singular, and a rank that has published nothing is not synced at minus one."""
    silent = worker(streams=(RankStream(rank=0, incarnation="1", seq=-1),))
    one = worker(streams=(RankStream(rank=0, incarnation="1", seq=4, gaps=1, rejected=1),))
    (nothing_yet,) = checks.check_streams({"w1": silent})
    assert nothing_yet.found == "rank 0 synced, nothing published yet, 0 gaps, 0 rejected"
    (some,) = checks.check_streams({"w1": one})
    assert some.found == "rank 0 synced at 4, 1 gap, 1 rejected"
    assert "1 row, 1 byte" in checks.check_stream({"state": {"messages": 1, "bytes": 1}}, 0).found
    (known,) = checks.check_index(
        "m", MatchReply(indexer="i", matches=(WorkerMatch(worker="a", rank=0, resident_blocks=1),))
    )
    assert known.found == "a rank 0: synced, 1 block"


def test_whether_turns_may_be_held() -> None:
    """All admission services have one policy; one that holds needs engines whose memory is known."""
    told = worker("a")
    sized = msgspec.structs.replace(told, profile=msgspec.structs.replace(told.profile, kv_tokens=1000))
    assert verdicts(checks.check_holding(["commit", "commit"], {"a": sized})) == ["ok"]
    assert verdicts(checks.check_holding(["kv"], {"a": told})) == ["ok"]
    (unsized,) = checks.check_holding(["commit"], {"a": sized, "b": worker("b")})
    assert (unsized.verdict, "but b does not say" in unsized.found) == ("warning", True)
    (differing,) = checks.check_holding(["kv", "commit"], {"a": sized})
    assert (differing.verdict, "commit, kv" in differing.found) == ("warning", True)
    assert checks.check_holding([], {"a": told}) == []


def test_a_route_policy_that_nobody_serves_is_a_warning() -> None:
    """Admission asks it for every decision and goes on by itself: the doctor says so, by name."""
    (absent,) = checks.check_policies({"tenant-home": False})
    assert (absent.name, absent.verdict) == ("policy tenant-home", "warning")
    assert "does not answer; the built-in choice stands" in absent.found
    assert absent.fix
    assert verdicts(checks.check_policies({"tenant-home": True})) == ["ok"]


def test_a_missing_service_says_what_is_missing_without_it() -> None:
    """The front door and the bridges are needed; the rest is a warning."""
    found = {check.name: check.verdict for check in checks.check_services(["tidegate-ingress", "tidegate-ingress"])}
    assert found["service ingress"] == "ok"
    assert found["service bridge"] == "failed"
    assert found["service hints"] == "warning"


def test_shared_pools_by_name() -> None:
    """A pool that is not trusted in full is a warning that says what its pages count for; without pools nothing is
    said."""
    pools = (
        PoolMatch(pool="p", age_ms=12_400),
        PoolMatch(pool="q", health="blind", reason="layouts_disagree"),
        PoolMatch(pool="r", health="approximate", reason="no_matching_keys"),
    )
    found = checks.check_pools("m", MatchReply(indexer="i", pools=pools))
    assert [(check.name, check.verdict) for check in found] == [
        ("pool p", "ok"),
        ("pool q", "warning"),
        ("pool r", "warning"),
    ]
    assert found[0].found == "m: synced, reconciled 12 s ago"
    assert [("nothing" in (check.fix or ""), "less" in (check.fix or "")) for check in found[1:]] == [
        (True, False),
        (False, True),
    ]
    assert checks.check_pools("m", MatchReply(indexer="i")) == checks.check_pools("m", None) == []

"""Two admissions lead for a while (docs/adr/0032): whose decision is in the books of who follows, and of each other."""

from __future__ import annotations

import msgspec
import pytest

from schemas.decision import Decision
from schemas.request import RequestDispatched, RequestEnd
from services.admission.events import Decided, Dispatched, LeadershipChanged, Tick
from tests.unit.admission.build import MODEL, Driven, accepted, ask, check_books, driven, end, facts, in_flight


def decided(worker: str, epoch: int, *, attempt: int = 0) -> Decision:
    """What a leader of that epoch decided about ``r1``."""
    leader = driven(lead=False)
    leader.do(LeadershipChanged(epoch))
    leader.workers(worker)
    (decision,) = facts(leader.ask(ask("r1", "s1", attempt=attempt)), Decision)
    return decision


def standby() -> Driven:
    follower = driven(lead=False)
    follower.workers("a", "b")
    follower.accept(accepted("r1", "s1"))
    return follower


def where(core: Driven) -> str:
    """Where ``r1`` is booked, and nowhere else."""
    (entry,) = core.core.state.ledger
    assert entry.grant.request_id == "r1"
    check_books(core.core)
    return entry.grant.worker


def dispatched(core: Driven, worker: str, *, attempt: int = 0) -> None:
    """As an ingress says it: its epoch is of its own life, and greater than any leader's."""
    fact = RequestDispatched(
        source="ingress-1", epoch=1_800_000_000_000, seq=0, at_ms=0, request_id="r1", model=MODEL, worker=worker,
        rank=0, attempt=attempt, mode="policy", grant_id=f"6-{worker}",
    )  # fmt: skip
    core.do(Dispatched(fact))


def test_a_late_decision_of_a_deposed_leader_moves_nothing() -> None:
    """Front doors take no answer of an older epoch after a newer one's, so the turn does not run there."""
    follower = standby()
    follower.do(Decided(decided("b", 6)))
    follower.do(Decided(decided("a", 5)))
    assert where(follower) == "b"
    follower.do(Decided(decided("a", 7)))
    assert where(follower) == "a"


def test_another_attempt_counts_whoever_decided_it() -> None:
    """The older leader's too: the first one failed, and the one that answers the second is the one that is heard."""
    follower = standby()
    follower.do(Decided(decided("b", 6)))
    follower.do(Decided(decided("a", 5, attempt=1)))
    assert where(follower) == "a"


@pytest.mark.parametrize("epoch", [5, 7])
def test_a_decision_that_comes_after_its_turn_was_sent_elsewhere_moves_nothing(epoch: int) -> None:
    """Where its ingress has sent it is where it runs."""
    follower = standby()
    dispatched(follower, "b")
    follower.do(Decided(decided("a", epoch)))
    assert where(follower) == "b"
    assert follower.end(end("r1", "s1")) == []
    check_books(follower.core)


def test_a_decision_that_comes_after_its_dispatch_brings_its_numbers() -> None:
    """Facts of several sources are in no order."""
    follower = standby()
    dispatched(follower, "b")
    decision = decided("b", 6)
    follower.do(Decided(decision))
    account = follower.core.state.ledger.account("b", 0)
    assert (account.requests, account.blocks) == (1, decision.input_tokens // 16)
    follower.do(Decided(decided("a", 7)))
    assert where(follower) == "b"


@pytest.mark.parametrize("leads", [True, False])
def test_a_turn_that_another_leader_sent_elsewhere_is_moved_with_its_dispatch(leads: bool) -> None:
    """Not a second later, with its ingress's next table."""
    core = driven(lead=False)
    core.workers("a")
    core.do(LeadershipChanged(10))
    core.ask(ask("r1", "s1"))
    core.workers("b")
    if not leads:
        core.do(LeadershipChanged(None))
    assert where(core) == "a"
    dispatched(core, "b")
    assert where(core) == "b"
    assert core.core.state.sessions.get(ask("r1", "s1").identity.key).worker == "b"  # type: ignore[union-attr]
    core.state(msgspec.structs.replace(in_flight("r1", "s1", worker="b")), epoch=1_800_000_000_000)
    assert where(core) == "b"
    core.end(end("r1", "s1"))
    check_books(core.core)


def test_a_leader_in_doubt_takes_no_front_door_for_lost() -> None:
    """It may be heard on the other side of a bus that is cut in two, and write its rows itself: a row of ours that says
    ``ingress_lost`` would be in their place."""
    core = driven(ingress_lost_s=5.0, grant_ttl_s=8.0)
    core.workers("a")
    core.ask(ask("r1", "s1"))
    for _ in range(150):
        core.now += 0.1
        assert core.do(Tick(in_doubt=True)) == []
    assert core.core.state.fleet.get("a") is None, "who is silent gets nothing, all the same"
    assert where(core) == "a"
    core.workers("a")
    assert not facts(core.wait(4.0), RequestEnd)
    (lost,) = facts(core.wait(2.0), RequestEnd)
    assert lost.outcome == "ingress_lost"


def test_a_late_dispatch_of_the_first_attempt_moves_nothing() -> None:
    core = driven()
    core.workers("a", "b")
    core.ask(ask("r1", "s1"))
    core.ask(ask("r1", "s1", attempt=1, excluded=("a",)))
    assert where(core) == "b"
    dispatched(core, "a")
    assert where(core) == "b"


def test_a_turn_whose_decision_was_lost_is_booked_with_its_size_when_its_ingress_says_it() -> None:
    """Its dispatch does not: a standby that takes over would let too much run there."""
    follower = standby()
    dispatched(follower, "b")
    assert follower.core.state.ledger.account("b", 0).blocks == 0
    follower.state(in_flight("r1", "s1", worker="b"), epoch=1_800_000_000_000)
    account = follower.core.state.ledger.account("b", 0)
    assert (account.requests, account.blocks, account.prefill_tokens) == (1, 4, 0)
    assert where(follower) == "b"

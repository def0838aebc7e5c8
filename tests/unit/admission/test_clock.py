"""The machine's clock is set back: what was in the future is not waited for, and time goes on."""

from __future__ import annotations

import pytest

from schemas.request import RequestEnd, Usage
from schemas.session import SessionFact
from services.admission.events import Tick
from tests.unit.admission.build import (
    MODEL,
    Driven,
    ask,
    check_books,
    driven,
    end,
    facts,
    granted,
    held,
    in_flight,
    refused,
)

HOUR = 3600.0


def set_back(core: Driven, seconds: float = HOUR) -> None:
    """The next tick comes by another clock."""
    core.now -= seconds
    core.do(Tick())


def test_a_grant_that_nobody_names_lapses_after_its_time_by_the_new_clock() -> None:
    """A grant whose end was lost is not kept until the clock has come back to where it was."""
    core = driven(grant_ttl_s=8.0)
    core.workers("a")
    granted(core.ask(ask("r1")))
    set_back(core)
    core.wait(7.0, ingresses=["ingress-1"])
    assert len(core.core.state.ledger) == 1
    core.wait(2.5, ingresses=["ingress-1"])
    assert len(core.core.state.ledger) == 0
    check_books(core.core)


def test_nobody_is_lost_by_it_and_who_is_silent_then_is_lost_in_time() -> None:
    """A worker that speaks stays; an ingress that falls silent is noticed after 5 s, not after an hour and 5 s."""
    core = driven()
    core.workers("a")
    granted(core.ask(ask("r1")))
    set_back(core)
    assert not facts(core.wait(4.0), RequestEnd)
    (lost,) = facts(core.wait(2.0), RequestEnd)
    assert (lost.request_id, lost.outcome) == ("r1", "ingress_lost")
    assert core.core.state.fleet.get("a") is not None
    core.wait(6.0, heartbeats=False)
    assert core.core.state.fleet.get("a") is None


@pytest.mark.parametrize("policy", ["kv", "commit"])
def test_who_waits_is_told_so_and_refused_in_time(policy: str) -> None:
    """Keep-alives go on, and the deadline is not moved by an hour."""
    core = driven(policy=policy, max_grants_per_rank=1, hold_deadline_s=6.0)
    core.workers("a")
    granted(core.ask(ask("r1", "s1")))
    core.ask(ask("r2", "s2", deadline_ms=int((core.now + 6.0) * 1000)))
    core.wait(1.0, ingresses=["ingress-1"])
    set_back(core)
    assert len(held(core.wait(3.0, ingresses=["ingress-1"]))) >= 2
    core.said.clear()
    core.wait(15.0, ingresses=["ingress-1"])
    assert held(core.said)
    if policy == "kv":
        assert refused(core.said).reason == "hold_deadline"


def test_idle_sessions_are_closed_in_time() -> None:
    core = driven(session_idle_s=60.0)
    core.workers("a")
    granted(core.ask(ask("r1", "s1")))
    core.end(end("r1", "s1"))
    set_back(core)
    effects = core.wait(62.0, ingresses=["ingress-1"])
    assert [fact.state for fact in facts(effects, SessionFact)] == ["closed"]


def test_the_scheduling_policys_time_goes_on() -> None:
    """It is told the time as often as before, and a lease that it gives is told by the new clock."""
    core = driven(policy="commit")
    core.workers("a")
    assert core.core.state.scheduled is not None
    pool = core.core.state.scheduled.pools[MODEL]
    ticked = pool.ticked
    set_back(core)
    core.wait(5.0)
    assert 4.0 < pool.ticked - ticked < 6.0
    granted(core.ask(ask("r1", "s1")))
    effects = core.end(end("r1", "s1", usage=Usage(input_tokens=64, output_tokens=10)))
    (leased,) = [fact.lease for fact in facts(effects, SessionFact) if fact.state == "leased"]
    assert leased is not None
    assert leased.since_ms == int(core.now * 1000)
    assert leased.expires_ms < (core.now + HOUR) * 1000


def test_a_request_that_runs_lives_on() -> None:
    """What its ingress names is no more lost than before."""
    core = driven()
    core.workers("a")
    granted(core.ask(ask("r1")))
    core.dispatched("r1", "a")
    set_back(core)
    for _ in range(30):
        core.state(in_flight("r1", worker="a"))
        core.wait(1.0)
    assert len(core.core.state.ledger) == 1

"""A second sending of a slow request: granted at once or refused, booked beside the first, and given back exactly."""

from __future__ import annotations

import msgspec
import pytest

from schemas.admit import AdmitCancel, AdmitRequest, Granted, Refused
from schemas.ingress import HedgePlace
from schemas.placed import Placed
from schemas.request import RequestFirstToken
from services.admission.effects import Effect
from services.admission.events import AdmitCancelled, FirstToken, LeadershipChanged, MatchAnswered, WorkerStated
from services.admission.state import hedge_id
from services.admission.user_policies import UserPolicy
from tests.unit.admission.build import (
    Driven,
    ask,
    check_books,
    check_conserved,
    driven,
    end,
    facts,
    granted,
    in_flight,
    match_reply,
    refused,
    replies,
    worker_state,
)


def hedge(request_id: str = "r", first: str = "a", **more: object) -> AdmitRequest:
    """May it be sent once more?"""
    question = ask(request_id, attempt=1, excluded=(first,), **more)  # type: ignore[arg-type]
    return msgspec.structs.replace(question, hedge=True)


def running(*names: str, **settings: object) -> Driven:
    """A turn runs at ``a``, and nobody has answered."""
    core = driven(**settings)  # type: ignore[arg-type]
    core.workers("a")
    granted(core.ask(ask("r")))
    core.workers(*names or ("b",))
    core.dispatched("r", "a")
    return core


def first_token(core: Driven, request_id: str = "r") -> list[Effect]:
    fact = RequestFirstToken(source="ingress-1", epoch=1, seq=0, at_ms=0, request_id=request_id, model="m", ttft_ms=1.0)
    return core.do(FirstToken(fact))


def cancel(core: Driven, request_id: str = "r") -> list[Effect]:
    return core.do(
        AdmitCancelled(AdmitCancel(request_id=request_id, ingress="ingress-1", reason="hedge_over", hedge=True))
    )


def books(core: Driven) -> dict[str, tuple[int, int, int]]:
    """Requests, prompt tokens to compute, and blocks, by worker; checked against the open grants."""
    check_books(core.core)
    accounts = core.core.state.ledger.accounts()
    return {name: (one.requests, one.prefill_tokens, one.blocks) for (name, _), one in accounts if one.requests}


@pytest.mark.parametrize("policy", ["kv", "commit"])
def test_it_is_granted_beside_the_first_and_given_back(policy: str) -> None:
    """Both are booked; where the first begins, the second's amounts go, at once, and the first's stay."""
    core = running(policy=policy)
    before = books(core)
    effects = core.ask(hedge())
    reply = granted(effects)
    assert (reply.grant.worker, reply.grant.request_id, reply.request_id) == ("b", "r", "r")
    (placed,) = facts(effects, Placed)
    assert (placed.worker, placed.session, placed.mode) == ("b", None, "policy")
    assert books(core) == {**before, "b": (1, 64, 4)}
    if policy == "commit":
        check_conserved(core)
    first_token(core)
    assert books(core) == {"a": (1, 0, 4)}
    core.end(end("r"))
    assert books(core) == {}
    assert core.core.state.counters.hedges == {"granted": 1}
    if policy == "commit":
        check_conserved(core)
        scheduled = core.core.state.scheduled
        assert scheduled is not None
        assert not scheduled.turns


@pytest.mark.parametrize("policy", ["kv", "commit"])
def test_the_second_becomes_the_request(policy: str) -> None:
    """Its ingress says that it runs there, as attempt 1: the first's booking goes, the second's stays, with its own
    amounts, and the session is where it runs."""
    core = running(policy=policy)
    granted(core.ask(hedge()))
    core.dispatched("r", "b", attempt=1)
    assert books(core) == {"b": (1, 64, 4)}
    if policy == "commit":
        check_conserved(core)
    first_token(core)
    assert books(core) == {"b": (1, 0, 4)}
    core.state(in_flight("r", worker="b", attempt=1))
    assert books(core) == {"b": (1, 0, 4)}
    session = core.core.state.sessions.get(ask("r").identity.key)
    assert session is not None
    assert (session.worker, session.turns) == ("b", 1)
    core.end(end("r", worker="b"))
    assert books(core) == {}
    if policy == "commit":
        check_conserved(core)


def test_a_cancelled_one_goes_alone_and_does_not_come_back() -> None:
    """Its engine failed: the first's booking stays; a table that was made before names it in vain, and it is not
    granted twice."""
    core = running()
    granted(core.ask(hedge()))
    cancel(core)
    assert books(core) == {"a": (1, 64, 4)}
    named = msgspec.structs.replace(in_flight("r", worker="a"), hedge=HedgePlace(worker="b", grant_id="10-h1"))
    core.state(named)
    assert books(core) == {"a": (1, 64, 4)}
    assert refused(core.ask(hedge())).reason == "sent_twice"


def test_what_is_asked_for_too_late_is_refused() -> None:
    """After the first byte, after the end, after a retry; and for a request that nobody granted."""
    core = running()
    first_token(core)
    assert refused(core.ask(hedge())).reason == "sent_twice"
    core.end(end("r"))
    assert refused(core.ask(hedge())).reason == "request_over"
    assert refused(core.ask(hedge("new"))).reason == "not_granted"
    core = running("b", "c")
    granted(core.ask(ask("r", attempt=1, excluded=("a",))))
    assert refused(core.ask(hedge())).reason == "sent_twice"
    assert len(books(core)) == 1


def test_it_is_never_held_and_passes_no_line() -> None:
    """No free place, no other worker, turns that wait: refused at once, and nothing is left waiting."""
    core = running(max_grants_per_rank=1)
    granted(core.ask(ask("other", "s2")))
    assert refused(core.ask(hedge())).reason == "at_limit"
    assert replies(core.ask(ask("third", "s3")), Granted) == []
    assert refused(core.ask(hedge())).reason == "turns_wait"
    core = driven()
    core.workers("a")
    granted(core.ask(ask("r")))
    assert refused(core.ask(hedge())).reason == "no_worker"
    assert len(core.core.deciding) == 0


def test_where_users_policies_decide_nothing_is_sent_twice() -> None:
    """They were asked about one sending."""
    core = driven(policies=(UserPolicy(name="mine", asks=("route",)),))
    core.workers("a", "b")
    core.answer_index = False
    core.ask(ask("r", chain=False))
    core.dispatched("r", "a", mode="fallback")
    assert refused(core.ask(hedge())).reason == "user_policies"


def test_an_answer_of_the_index_that_comes_when_the_race_is_over() -> None:
    """It grants nothing; one that comes twice says nothing."""
    core = running()
    core.answer_index = False
    assert replies(core.ask(hedge()), Refused) == []
    ticket = core.questions[-1].ticket
    cancel(core)
    answer = MatchAnswered(ticket, match_reply({"a": 0, "b": 0}))
    assert refused(core.do(answer)).reason == "sent_twice"
    assert core.do(answer) == []
    assert books(core) == {"a": (1, 64, 4)}


def test_a_new_leader_knows_it_from_the_ingress() -> None:
    """A standby books what the table names beside the request's own, and lets it go with the race; a leader that steps
    down answers no question of before."""
    core = driven(lead=False, policy="commit")
    core.workers("a", "b")
    item = in_flight("r", worker="a")
    named = msgspec.structs.replace(item, hedge=HedgePlace(worker="b", grant_id="9-h1", grant_epoch=9))
    core.state(named)
    core.state(named)
    assert {name: one[0] for name, one in books(core).items()} == {"a": 1, "b": 1}
    core.do(LeadershipChanged(11))
    check_conserved(core)
    assert refused(core.ask(hedge())).reason == "sent_twice"
    first_token(core)
    assert list(books(core)) == ["a"]
    core = running()
    core.answer_index = False
    core.ask(hedge())
    core.do(LeadershipChanged(None))
    assert core.do(MatchAnswered(core.questions[-1].ticket, match_reply({"b": 0}))) == []


@pytest.mark.parametrize("policy", ["kv", "commit"])
def test_it_is_booked_where_its_ingress_says(policy: str) -> None:
    """Two leaders granted it, each elsewhere, and its ingress took the other's answer: its table moves the booking,
    which is given back with the race. After the race a late table moves nothing."""
    core = running("b", "c", policy=policy)
    granted_at = granted(core.ask(hedge())).grant.worker
    other = {"b": "c", "c": "b"}[granted_at]
    there = msgspec.structs.replace(in_flight("r", worker="a"), hedge=HedgePlace(worker=other, grant_id="9-h1"))
    core.state(there)
    core.state(there)
    assert {name: one[0] for name, one in books(core).items()} == {"a": 1, other: 1}
    if policy == "commit":
        check_conserved(core)
    first_token(core)
    core.state(there)
    assert list(books(core)) == ["a"]
    core.end(end("r"))
    if policy == "commit":
        check_conserved(core)


def test_its_policy_hears_of_it_when_its_worker_comes_later() -> None:
    """A table names it before anybody has heard of its worker: once that one is a seat its memory counts there."""
    core = driven(lead=False, policy="commit")
    core.workers("a")
    core.state(msgspec.structs.replace(in_flight("r", worker="a"), hedge=HedgePlace(worker="b", grant_id="9-h1")))
    scheduled = core.core.state.scheduled
    assert scheduled is not None
    assert scheduled.place_of(hedge_id("r")) is None
    core.workers("b")
    assert scheduled.place_of(hedge_id("r")) == ("b", 0)
    check_conserved(core)
    first_token(core)
    assert (scheduled.place_of(hedge_id("r")), list(books(core))) == (None, ["a"])
    check_conserved(core)


def test_it_lapses_where_no_table_names_it() -> None:
    """Its cancellation was lost: it goes alone, and the request's own booking, which is named, stays."""
    core = running(grant_ttl_s=8.0)
    granted(core.ask(hedge()))
    for _ in range(10):
        core.state(in_flight("r", worker="a"))
        core.wait(0.9)
        for name in ("a", "b"):
            core.do(WorkerStated(worker_state(name)))
    assert list(books(core)) == ["a"]
    assert core.core.state.ledger.get(hedge_id("r")) is None


@pytest.mark.parametrize("why", ["end", "cancel", "ingress_lost"])
def test_it_goes_with_its_request(why: str) -> None:
    """However that ends: nothing is left."""
    core = running(policy="commit")
    granted(core.ask(hedge()))
    if why == "end":
        core.end(end("r", outcome="client_disconnect"))
    elif why == "cancel":
        core.cancel("r")
    else:
        core.state(epoch=2)
        core.wait(0.2)
    assert books(core) == {}
    check_conserved(core)

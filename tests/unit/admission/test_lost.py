"""Lost ingresses, lost workers, lapsed grants, and the change of leaders."""

from __future__ import annotations

import pytest

from schemas.admit import Granted
from schemas.decision import Decision
from schemas.ingress import IngressState
from schemas.request import Outcome, RequestEnd, RequestFirstToken, Usage
from schemas.session import SessionFact
from services.admission.effects import Effect
from services.admission.events import Decided, FirstToken, IngressStated, LeadershipChanged, Tick, WorkerStated
from tests.unit.admission.build import (
    START,
    Driven,
    accepted,
    ask,
    check_books,
    driven,
    end,
    facts,
    granted,
    held,
    identity,
    in_flight,
    refused,
    replies,
    rows,
    worker_state,
)


def table(core: Driven, *, at: float | None = None, epoch: int = 1, parts: int = 1) -> IngressStated:
    """What ingress-1 says of its requests when it has none, made at ``at`` (now)."""
    made_ms = round((core.now if at is None else at) * 1000)
    return IngressStated(IngressState(source="i", epoch=epoch, seq=0, at_ms=made_ms, ingress="ingress-1", parts=parts))


def test_a_silent_ingress_loses_its_requests_with_one_end_and_one_row_each() -> None:
    """Accepted, waiting and granted requests of a silent ingress all end once, and free their places."""
    core = driven(max_grants_per_rank=1)
    core.workers("a")
    core.accept(accepted("r1", "s1"))
    core.ask(ask("r1", "s1"))
    core.accept(accepted("r2", "s2"))
    core.ask(ask("r2", "s2"))
    core.accept(accepted("r3", "s3"))
    core.ask(ask("other", "s4", ingress="ingress-2"))
    effects = core.wait(5.5, ingresses=["ingress-2"])
    ends = facts(effects, RequestEnd)
    assert sorted(each.request_id for each in ends) == ["r1", "r2", "r3"]
    assert {(each.outcome, each.reason) for each in ends} == {("ingress_lost", "silence")}
    assert sorted(each.message_id for each in rows(effects)) == ["r1", "r2", "r3"]
    assert granted(effects).request_id == "other"
    assert core.wait(30.0, ingresses=["ingress-2"]) is not None
    assert len(rows(core.said)) == 3
    check_books(core.core)


def test_the_row_of_a_lost_request_is_as_complete_as_admission_can_make_it() -> None:
    """Identity, model, placement, prediction, times and the reason; nothing that only the ingress knew."""
    core = driven()
    core.workers("a")
    core.reach = {"a": 2}
    core.accept(accepted("r1", "s1"))
    core.ask(ask("r1", "s1"))
    first = RequestFirstToken(source="ingress-1", epoch=1, seq=0, at_ms=0, request_id="r1", model="m", ttft_ms=12.5)
    core.do(FirstToken(first))
    (written,) = rows(core.wait(5.5))
    request, context = written.row.request, written.row.agent_context
    assert request is not None
    assert context is not None
    assert (written.model, written.session, written.message_id) == ("m", identity("s1").key.text(), "r1")
    assert (context.session_id, context.session) == ("s1", identity("s1").key)
    assert (request.outcome, request.reason, request.worker) == ("ingress_lost", "silence", request.worker)
    assert request.worker is not None
    assert (request.worker.worker, request.attempts, request.stream, request.x_request_id) == ("a", 1, True, "x-r1")
    assert (request.input_tokens, request.predicted_cached_tokens, request.ttft_ms) == (64, 32, 12.5)
    assert (request.policy, request.decision_mode, request.index_health) == ("kv", "policy", "synced")
    assert request.total_time_ms is not None
    assert 5000 <= request.total_time_ms <= 5500
    assert request.output_tokens is None


def test_a_newer_epoch_of_the_same_ingress_ends_the_older_ones_requests_at_once() -> None:
    """A restarted ingress: its first fact is enough; the requests of its new life are untouched."""
    core = driven()
    core.workers("a")
    core.accept(accepted("old", "s1"))
    core.ask(ask("old", "s1"))
    core.accept(accepted("new", "s2", epoch=2))
    effects = core.wait(0.2)
    (lost,) = facts(effects, RequestEnd)
    assert (lost.request_id, lost.reason) == ("old", "newer_epoch")
    assert core.core.state.requests.get("new") is not None


def test_late_facts_of_a_lost_ingress_revive_nothing() -> None:
    """Its own end, its heartbeat and its ask may still be under way: no second end, no grant."""
    core = driven()
    core.workers("a")
    core.accept(accepted("r1", "s1"))
    core.wait(5.5)
    assert core.end(end("r1", "s1")) == []
    core.state(in_flight("r1", "s1", worker="a"))
    assert refused(core.ask(ask("r1", "s1"))).reason == "request_over"
    assert len(core.core.state.ledger) == 0
    core.wait(20.0)
    assert len(facts(core.said, RequestEnd)) == 1


def test_nobody_is_lost_while_we_could_not_listen() -> None:
    """Bus away, or this process stopped: silence counts from when facts can reach us again."""
    core = driven()
    core.workers("a")
    core.accept(accepted("r1"))
    for _ in range(100):
        core.now += 0.1
        core.do(Tick(connected=False))
    core.wait(4.5, heartbeats=False)
    assert core.core.state.requests.get("r1") is not None
    assert core.core.state.fleet.get("a") is not None
    core.now += 60.0
    core.do(Tick())
    assert core.core.state.requests.get("r1") is not None
    assert rows(core.wait(5.5))


def test_what_its_ingress_does_not_name_is_over() -> None:
    """Its end was lost with a server of the bus: a table that was made 3 s after its receipt, when nothing had named it
    for as long, would name it. The place is free long before the grant lapses, for who waits."""
    core = driven(max_grants_per_rank=1)
    core.workers("a")
    core.ask(ask("r1", "s1"))
    core.ask(ask("r2", "s2"))
    core.state(in_flight("r1", "s1", worker="a"), in_flight("r2", "s2"))
    effects = core.wait(2.5)
    effects += core.state(in_flight("r2", "s2"))
    assert replies(effects, Granted) == []
    core.wait(1.0)
    assert granted(core.state(in_flight("r2", "s2"))).request_id == "r2"
    assert core.core.state.counters.vanished == 1
    assert core.core.state.requests.get("r1") is None


def test_a_table_that_says_less_than_all_ends_nothing() -> None:
    """A part of a large table, one that was made before the request came, one of another life of its ingress."""
    core = driven(ingress_lost_s=7.0)
    core.workers("a")
    core.ask(ask("r1", "s1"))
    core.wait(4.0)
    core.do(table(core, parts=2))
    core.do(table(core, at=START))
    core.do(table(core, epoch=0))
    assert core.core.state.ledger.get("r1") is not None


def test_a_grant_whose_request_never_shows_up_lapses() -> None:
    """Its ingress lives, has more requests than one message holds, and does not name this one: the place is freed, and
    that is counted."""
    core = driven(max_grants_per_rank=1, grant_ttl_s=6.0)
    core.workers("a")
    core.ask(ask("r1", "s1"))
    core.ask(ask("r2", "s2", deadline_ms=0))
    effects: list[Effect] = []
    for _ in range(8):
        effects += core.do(table(core, parts=2))
        effects += core.wait(1.0)
    assert granted(effects).request_id == "r2"
    assert core.core.state.counters.released["lapsed"] == 1
    assert rows(effects) == []  # its ingress lives: rows are its own


def test_a_named_grant_lives_as_long_as_its_ingress_names_it() -> None:
    """Long answers keep their place: heartbeats renew."""
    core = driven(grant_ttl_s=6.0)
    core.workers("a")
    core.ask(ask("r1", "s1"))
    for _ in range(20):
        core.state(in_flight("r1", "s1", worker="a"))
        core.wait(1.0)
    assert core.core.state.ledger.get("r1") is not None


def test_a_silent_worker_is_lost_and_its_grants_stay_until_their_requests_end() -> None:
    """The ingress will end or retry them; meanwhile nothing is placed there."""
    core = driven()
    core.workers("a")
    core.ask(ask("r1", "s1"))
    core.wait(5.5, heartbeats=False)
    assert core.core.state.fleet.get("a") is None
    assert core.core.state.counters.workers_lost == {"silence": 1}


def test_an_engine_that_began_anew_is_not_preferred_for_what_it_forgot() -> None:
    """A new incarnation has an empty cache: sessions forget it as their previous worker."""
    core = driven()
    core.workers("a")
    core.ask(ask("r1"))
    core.do(WorkerStated(worker_state("a", incarnation="i2")))
    session = core.core.state.sessions.get(identity("s").key)
    assert session is not None
    assert session.worker is None


def test_a_bridge_that_begins_again_loses_nobody() -> None:
    """Until it has read the engine's page it cannot name the engine's process: sessions keep their worker."""
    core = driven()
    core.workers("a")
    core.ask(ask("r1"))
    for incarnation, worker in (("", "a"), ("i1", "a"), ("", "a"), ("i2", None)):
        core.do(WorkerStated(worker_state("a", incarnation=incarnation)))
        session = core.core.state.sessions.get(identity("s").key)
        assert session is not None
        assert session.worker == worker
    assert core.core.state.counters.workers_lost == {"restarted": 1}


# Who leads


def standby_of(leader: Driven) -> Driven:
    """A second core that has seen every fact of the first's world."""
    standby = driven(lead=False)
    standby.reach = leader.reach
    return standby


def test_a_standby_says_nothing_and_knows_the_same() -> None:
    """It follows decisions, dispatches and ends; on taking over, the same ask gets the same grant."""
    leader = driven()
    leader.workers("a", "b")
    standby = standby_of(leader)
    standby.workers("a", "b")
    standby.accept(accepted("r1", "s1"))
    answer = granted(leader.ask(ask("r1", "s1")))
    (decision,) = facts(leader.said, Decision)
    assert standby.ask(ask("r1", "s1")) == []
    standby.do(Decided(decision))
    standby.dispatched("r1", answer.grant.worker)
    assert standby.said == []
    standby.do(LeadershipChanged(11))
    again = granted(standby.ask(ask("r1", "s1")))
    assert again.grant == answer.grant
    assert again.epoch == 11
    mine, theirs = (
        standby.core.state.ledger.account(answer.grant.worker, 0),
        leader.core.state.ledger.account(answer.grant.worker, 0),
    )
    assert (mine.requests, mine.prefill_tokens, mine.blocks) == (theirs.requests, theirs.prefill_tokens, theirs.blocks)
    ended = standby.end(end("r1", "s1", usage=Usage(input_tokens=64)))
    assert [fact.state for fact in facts(ended, SessionFact)] == ["acting"]
    check_books(standby.core)


def test_a_restarted_leader_rebuilds_its_grants_from_heartbeats_alone() -> None:
    """A fresh process that saw nothing: in-flight requests take their places before anything is granted."""
    core = driven(warm=False, max_grants_per_rank=1)
    core.workers("a")
    core.ask(ask("new", "s2"))
    core.state(in_flight("r1", "s1", worker="a"), in_flight("new", "s2"))
    effects = core.wait(2.0)
    assert core.core.state.ledger.account("a", 0).requests == 1
    assert [each.reason for each in held(effects)][-1] == "at_limit"
    assert granted(core.end(end("r1", "s1"))).request_id == "new"


def test_who_loses_the_lead_forgets_its_waiters_and_says_nothing_more() -> None:
    """Two leaders never answer the same ask: the waiter asks the next one."""
    core = driven(max_grants_per_rank=1)
    core.workers("a")
    core.ask(ask("r1", "s1"))
    core.ask(ask("r2", "s2"))
    core.do(LeadershipChanged(None))
    assert core.end(end("r1", "s1")) == []
    assert core.wait(2.0) == []
    assert len(core.core.deciding) == 0


def test_a_standby_leaves_lost_requests_to_the_leader_and_ends_them_when_it_leads() -> None:
    """Leader and ingress die together: the new leader ends what they left, once."""
    core = driven(lead=False)
    core.workers("a")
    core.accept(accepted("r1", "s1"))
    core.accept(accepted("r2", "s2"))
    assert core.wait(6.0) == []
    core.end(end("r1", "s1", outcome="ingress_lost"))
    core.do(LeadershipChanged(11))
    effects = core.wait(0.2)
    assert [each.request_id for each in facts(effects, RequestEnd)] == ["r2"]
    assert [each.message_id for each in rows(effects)] == ["r2"]


def test_an_ingress_that_chose_by_itself_is_accounted_and_its_ask_dropped() -> None:
    """Mode fallback: the request's load counts, it waits no more, and it is granted nothing."""
    core = driven(max_grants_per_rank=1)
    core.workers("a", "b")
    core.ask(ask("r1", "s1"))
    core.ask(ask("r2", "s2"))
    core.accept(accepted("r3", "s3"))
    core.ask(ask("r3", "s3"))
    core.dispatched("r3", "a", mode="fallback")
    assert len(core.core.deciding.holds) == 0
    assert core.core.state.ledger.account("a", 0).requests == 2
    core.end(end("r3", "s3", worker="a"))
    assert core.core.state.ledger.account("a", 0).requests == 1
    check_books(core.core)


def test_a_request_that_ended_before_its_ask_arrived_gets_nothing() -> None:
    """B2: subjects are not ordered among each other: the client was gone before its ask came."""
    core = driven()
    core.workers("a")
    core.end(end("r1"))
    assert refused(core.ask(ask("r1"))).reason == "request_over"
    assert len(core.core.state.ledger) == 0


def test_the_end_alone_tells_where_a_session_ran() -> None:
    """A leader that started meanwhile still learns the session's worker from the end of its turn."""
    core = driven()
    core.workers("a", "b")
    effects = core.end(end("r1", "s1", worker="b", usage=Usage(input_tokens=64)))
    assert [fact.state for fact in facts(effects, SessionFact)] == ["opened", "acting"]
    assert granted(core.ask(ask("r2", "s1"))).grant.worker == "b"


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_heartbeat_corrects_where_a_request_runs_when_the_dispatch_was_not_heard(attempt: int) -> None:
    """The grant's reply and the `dispatched` fact were lost: what the ingress names is where the load is."""
    core = driven()
    core.workers("a", "b")
    core.accept(accepted("r1", "s1"))
    first = granted(core.ask(ask("r1", "s1"))).grant.worker
    other = "b" if first == "a" else "a"
    core.state(in_flight("r1", "s1", worker=other, attempt=attempt))
    assert core.core.state.ledger.account(first, 0).requests == 0
    assert core.core.state.ledger.account(other, 0).requests == 1
    check_books(core.core)
    core.end(end("r1", "s1", worker=other))
    assert granted(core.ask(ask("r2", "s1"))).grant.worker == other
    assert len(core.core.state.ledger) == 1


def test_an_older_heartbeat_does_not_undo_a_second_attempt() -> None:
    """The heartbeat was written before the retry: the newer grant stands, renewed."""
    core = driven()
    core.workers("a", "b")
    first = granted(core.ask(ask("r1", "s1"))).grant.worker
    second = granted(core.ask(ask("r1", "s1", attempt=1, excluded=(first,)))).grant.worker
    core.state(in_flight("r1", "s1", worker=first))
    assert core.core.state.ledger.account(second, 0).requests == 1
    assert core.core.state.ledger.account(first, 0).requests == 0


def test_the_accounts_of_a_lost_worker_go_with_its_last_grant() -> None:
    """No rank is remembered, or shown as a metric, for ever."""
    core = driven()
    core.workers("a")
    core.ask(ask("r1", "s1"))
    core.wait(6.0, heartbeats=False, ingresses=())
    core.state(in_flight("r1", "s1", worker="a"))
    core.end(end("r1", "s1"))
    core.wait(2.0, heartbeats=False)
    assert list(core.core.state.ledger.accounts()) == []


@pytest.mark.parametrize(
    ("outcome", "kept"), [("upstream_lost", False), ("upstream_timeout", False), ("completed", True)]
)
def test_a_session_whose_answer_broke_off_is_placed_anew(outcome: Outcome, kept: bool) -> None:
    """DESIGN §8: an engine that fails after its first byte is not preferred for the session's next turn."""
    core = driven()
    core.workers("a", "b")
    first = granted(core.ask(ask("r1", "s1"))).grant.worker
    core.end(end("r1", "s1", outcome=outcome, worker=first))
    decision = facts(core.ask(ask("r2", "s1")), Decision)[0]
    assert decision.previous_worker == (first if kept else None)

"""The service's core under a scheduling policy that holds turns back (`commit`), and under every other by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from bus.errors import SettingsError
from bus.facts import GapCounter
from bus.settings import load_settings
from schemas.admit import Granted, Refused
from schemas.decision import Decision
from schemas.request import Usage
from schemas.session import SessionFact
from schemas.worker import LOW_FIRST, Engine, WorkerProfile
from services.admission.accounts import SeatAccount
from services.admission.config import AdmissionSettings
from services.admission.effects import AskIndex, Effect
from services.admission.events import Decided, LeadershipChanged, MatchAnswered, WorkerStated
from services.admission.metrics import AdmissionMetrics
from services.admission.policies.commit import Commit
from services.admission.policies.registry import POLICIES
from tests.unit.admission.build import (
    Driven,
    accepted,
    ask,
    check_conserved,
    driven,
    end,
    facts,
    granted,
    held,
    identity,
    in_flight,
    match_reply,
    refused,
    replies,
    worker_state,
)

KV_TOKENS = 16_000


def committing(*workers: str, lead: bool = True, hold_limit_s: float = 300.0, **settings: Any) -> Driven:
    """A core under ``commit``, with workers of 16,000 tokens each; an answer is charged 100 tokens."""
    parameters = {"output_tokens": 100, "hold_limit_s": hold_limit_s}
    core = driven(lead=lead, policy="commit", policy_parameters=parameters, **settings)
    for worker in workers or ("a",):
        core.do(WorkerStated(worker_state(worker)))
    return core


def commit_of(core: Driven) -> Commit:
    assert core.core.state.scheduled is not None
    (pool,) = core.core.state.scheduled.pools.values()
    assert isinstance(pool.policy, Commit)
    return pool.policy


def done(core: Driven, name: str, session: str, tokens: int, *, tool: str | None = "bash") -> list[Effect]:
    """The engine says that it ran to its end."""
    usage = Usage(input_tokens=tokens, output_tokens=50, cached_tokens=0)
    fact = end(name, session, usage=usage, worker=None)
    return core.end(msgspec.structs.replace(fact, tool_names=(tool,) if tool else ()))


# Settings


def test_an_unknown_policy_is_refused_with_the_list() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings("admission", AdmissionSettings, environ={}, overrides={"policy": "fifo"})
    assert "no policy 'fifo'; there are" in str(caught.value)
    assert all(name in str(caught.value) for name in POLICIES)


def test_a_policys_parameters_are_checked_by_its_own_type() -> None:
    override = {"policy": "commit", "policy_parameters": '{"span_s": 0, "lo": 0.5}'}
    settings = load_settings("admission", AdmissionSettings, environ={}, overrides=override)
    assert settings.policy_parameters == {"span_s": 0, "lo": 0.5}
    for wrong in ({"lo": 2.0}, {"spam": 1}, {"span_s": "x"}):
        with pytest.raises(ValueError, match="commit"):
            AdmissionSettings(policy="commit", policy_parameters=wrong)
    with pytest.raises(ValueError, match="policy_parameters"):
        AdmissionSettings(policy="kv", policy_parameters={"lo": 0.5})


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"kv"}))
def test_every_policy_runs_turns_in_the_service(name: str) -> None:
    """Workers come one by one, sessions take turns, one worker goes: every turn is granted in the end."""
    core = driven(policy=name, warm=True)
    core.do(WorkerStated(worker_state("a")))
    core.do(WorkerStated(worker_state("b")))
    open_turns: list[tuple[str, str]] = []
    for turn in range(4):
        for session in ("s1", "s2", "s3"):
            request_id = f"{session}-{turn}"
            effects = core.ask(ask(request_id, session, tokens=1_000 + 200 * turn))
            if not replies(effects, Granted):
                effects = core.wait(30.0, ingresses=("ingress-1",))
            assert [reply.request_id for reply in replies(effects, Granted)] == [request_id]
            open_turns.append((request_id, session))
        while open_turns:
            request_id, session = open_turns.pop()
            done(core, request_id, session, 1_000 + 200 * turn)
            core.now += 0.5
        if turn == 1:
            core.do(WorkerStated(worker_state("b", health="left")))
    assert len(core.core.state.ledger) == 0


def test_what_an_engine_cannot_do_is_counted() -> None:
    """A fixed time-to-live pins blocks inside the engine, which no engine outside the laboratory can be told."""
    core = driven(policy="static_ttl")
    core.do(WorkerStated(worker_state("a")))
    for turn in range(3):
        core.ask(ask(f"r{turn}", "s", tokens=1_000 + turn))
        core.now += 0.5
        done(core, f"r{turn}", "s", 1_000 + turn)
        core.now += 0.5
    page = {metric.name: metric for metric in AdmissionMetrics(core.core, GapCounter()).collect()}
    counted = {sample.labels["what"]: sample.value for sample in page["tidegate_policy_ignored"].samples}
    assert counted["pin"] >= 1


# Holding


def test_a_turn_waits_until_there_is_memory_and_is_told_so() -> None:
    """Two programs of 9,000 tokens do not fit a worker of 16,000: the second is held, and let when the first ends."""
    core = committing()
    assert granted(core.ask(ask("r1", "s1", tokens=9_000))).policy == "commit"
    told = held(core.ask(ask("r2", "s2", tokens=9_000)))
    assert [(each.reason, each.place) for each in told] == [("policy", 1)]
    assert {each.reason for each in held(core.wait(1.0, ingresses=("ingress-1",)))} == {"policy"}
    check_conserved(core)
    core.end(end("r1", identity("s1", final=True), usage=Usage(input_tokens=9_000, output_tokens=10)))
    last = core.said[-50:]
    reply = next(each for each in replies(last, Granted) if each.request_id == "r2")
    assert reply.hold_reason == "policy"
    assert reply.hold_ms >= 900
    check_conserved(core)


def test_what_the_policy_goes_by_is_on_the_page_of_metrics() -> None:
    core = committing("a")
    granted(core.ask(ask("r1", "s1", tokens=4_000)))
    page = {metric.name: metric for metric in AdmissionMetrics(core.core, GapCounter()).collect()}
    values = {sample.labels["name"]: sample.value for sample in page["tidegate_policy_figure"].samples}
    assert values["charged_tokens"] == 4_100
    assert values["committed_tokens"] == KV_TOKENS / 8  # nothing is learned yet
    assert values["kappa"] == 1.3


def test_what_the_index_said_is_asked_again_after_a_long_hold() -> None:
    """A decision says what the index knew when it was made, not when the turn began to wait."""
    core = committing()
    core.ask(ask("r1", "s1", tokens=9_000))
    core.ask(ask("r2", "s2", tokens=9_000))
    asked = len(core.questions)
    core.reach = {"a": 100}
    core.wait(2.0, ingresses=("ingress-1",))
    effects = core.end(end("r1", identity("s1", final=True)))
    assert len(core.questions) == asked + 1
    assert granted(effects).predicted_cached_tokens == 1_600


def test_a_lease_is_told_to_the_bus_with_its_numbers() -> None:
    core = committing()
    core.ask(ask("r1", "s1", tokens=9_000))
    (leased,) = [each for each in facts(done(core, "r1", "s1", 9_000), SessionFact) if each.state == "leased"]
    assert (leased.worker, leased.rank) == ("a", 0)
    assert leased.numbers["tokens"] >= 9_050
    states = [each.state for each in facts(core.ask(ask("r2", "s1", tokens=9_100)), SessionFact)]
    assert "released" in states


def test_a_lease_is_revoked_for_one_that_needs_the_room() -> None:
    core = committing(hold_deadline_s=3_600.0)
    core.ask(ask("r1", "s1", tokens=5_000))
    core.ask(ask("r2", "s2", tokens=5_000))
    done(core, "r1", "s1", 5_000)
    done(core, "r2", "s2", 5_000)
    effects = core.ask(ask("r3", "s1", tokens=13_000))
    effects += core.wait(1.0, ingresses=("ingress-1",))
    assert "revoked" in [each.state for each in facts(effects, SessionFact)]
    assert [each.request_id for each in replies(effects, Granted)] == ["r3"]
    check_conserved(core)


def test_a_turn_that_no_seat_can_hold_is_refused_unless_its_size_is_a_guess() -> None:
    """The engine itself knows better than an estimate."""
    core = committing()
    sure = msgspec.structs.replace(ask("r1", "s1", tokens=20_000), tokens_from="tokenizer")
    reply = refused(core.ask(sure))
    assert (reply.reason, reply.status) == ("oversize", 413)
    assert granted(core.ask(ask("r2", "s2", tokens=20_000))).policy == "kv"
    check_conserved(core)


# Roll-back


def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    core = committing()
    core.ask(ask("r1", "s1", tokens=9_000))
    before = {name: len(each) for name, each in _tables(core).items()}
    core.ask(ask("r2", "s2", tokens=9_000))
    core.cancel("r2")
    assert {name: len(each) for name, each in _tables(core).items()} == before
    check_conserved(core)
    assert not replies(core.end(end("r1", "s1")), Granted)


def _tables(core: Driven) -> dict[str, Any]:
    book, scheduled = commit_of(core).book, core.core.state.scheduled
    assert scheduled is not None
    return {"turns": book.turns, "programs": book.programs, "cold": book.cold, "new": book.new, "asks": scheduled.turns}


def test_a_waiter_that_nobody_lets_in_time_is_refused_and_leaves_nothing() -> None:
    core = committing(hold_deadline_s=5.0, hold_limit_s=2.0)
    core.ask(ask("r1", "s1", tokens=9_000))
    core.ask(ask("r2", "s2", tokens=9_000))
    core.accept(accepted("r1", "s1"))
    effects: list[Effect] = []
    for _ in range(6):
        core.state(in_flight("r1", "s1", worker="a"), in_flight("r2", "s2"))
        effects += core.wait(1.0)
    assert refused(effects).reason == "hold_deadline"
    assert set(commit_of(core).book.turns) == {core.core.state.scheduled.turns["r1"].number}  # type: ignore[union-attr]
    check_conserved(core)


def test_a_full_queue_refuses_with_429() -> None:
    core = committing(hold_queue_limit=1)
    core.ask(ask("r1", "s1", tokens=9_000))
    assert held(core.ask(ask("r2", "s2", tokens=9_000)))
    reply = refused(core.ask(ask("r3", "s3", tokens=9_000)))
    assert (reply.reason, reply.status, reply.retry_after_s) == ("hold_queue_full", 429, 1)
    check_conserved(core)


@pytest.mark.parametrize("block_size", [None, 16])
def test_a_line_for_places_has_the_same_bound(block_size: int | None) -> None:
    """Without a seat, or with all places of a rank taken, as many wait as may, and no more."""
    core = driven(policy="commit", max_grants_per_rank=1, hold_queue_limit=2)
    core.do(WorkerStated(worker_state("a", block_size=block_size)))
    granted(core.ask(ask("r0", "s0", tokens=100)))
    for number in (1, 2):
        assert not replies(core.ask(ask(f"r{number}", f"s{number}", tokens=100)), Refused)
    answer = refused(core.ask(ask("r3", "s3", tokens=100)))
    assert (answer.reason, answer.status) == ("hold_queue_full", 429)
    assert core.core.deciding.held == 2
    assert not core.core.deciding.waits("r3")
    core.end(end("r0", "s0"))
    assert core.core.deciding.held == 1


def test_a_long_line_for_places_costs_one_look_at_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens: where none of the ranks has a place, each of those that wait for any of them need not look."""
    core = driven(policy="commit", max_grants_per_rank=1)
    for number in range(8):
        core.do(WorkerStated(worker_state(f"w{number}", block_size=None)))
    for number in range(60):
        core.ask(ask(f"r{number}", f"s{number}", tokens=100))
    assert core.core.deciding.held == 52
    looks: list[str] = []
    ledger = core.core.state.ledger
    account = ledger.account

    def counted(worker: str, rank: int) -> SeatAccount:
        looks.append(worker)
        return account(worker, rank)

    monkeypatch.setattr(ledger, "account", counted)
    core.do(WorkerStated(worker_state("w0", block_size=None)))
    assert len(looks) <= 3 * 8


def test_facts_that_come_twice_or_late_change_nothing() -> None:
    core = committing()
    core.ask(ask("r1", "s1", tokens=4_000))
    done(core, "r1", "s1", 4_000)
    (seat,) = commit_of(core).book.seats.values()
    load = seat.load
    done(core, "r1", "s1", 4_000)
    core.dispatched("r1", "a")
    core.cancel("r1")
    core.state(in_flight("r1", "s1", worker="a"))
    assert seat.load == load
    check_conserved(core)


def test_a_grant_that_nobody_names_any_more_is_given_back() -> None:
    """Every message about the request is lost: after `grant_ttl_s` its memory is there for the next."""
    core = committing()
    core.ask(ask("r1", "s1", tokens=9_000))
    core.ask(ask("r2", "s2", tokens=9_000, ingress="ingress-2"))
    effects = core.wait(17.0, ingresses=("ingress-1", "ingress-2"))
    assert [each.request_id for each in replies(effects, Granted)] == ["r2"]
    check_conserved(core)


def test_the_requests_of_a_lost_ingress_give_their_memory_back() -> None:
    core = committing()
    core.accept(accepted("r1", "s1"))
    core.ask(ask("r1", "s1", tokens=9_000))
    core.ask(ask("r2", "s2", tokens=9_000, ingress="ingress-2"))
    effects = core.wait(6.5, ingresses=("ingress-2",))
    assert [each.request_id for each in replies(effects, Granted)] == ["r2"]
    check_conserved(core)


# Order, limits, places


def test_turns_of_one_session_are_let_in_the_order_of_their_arrival() -> None:
    core = committing()
    core.ask(ask("big", "other", tokens=9_000))
    core.ask(ask("r1", "s", tokens=9_000))
    core.ask(ask("r2", "s", tokens=9_100))
    core.end(end("big", identity("other", final=True)))
    core.wait(2.0, ingresses=("ingress-1",))
    order = [each.request_id for each in replies(core.said, Granted)]
    assert order[:2] == ["big", "r1"]
    assert "r2" not in order or order.index("r2") > order.index("r1")
    check_conserved(core)


def test_no_rank_has_more_grants_than_it_may_and_a_freed_place_is_used() -> None:
    core = committing(max_grants_per_rank=1)
    granted(core.ask(ask("r1", "s1", tokens=100)))
    assert [each.reason for each in held(core.ask(ask("r2", "s2", tokens=100)))] == ["at_limit"]
    assert not replies(core.wait(2.0, ingresses=("ingress-1",)), Granted)
    assert granted(core.end(end("r1", "s1"))).request_id == "r2"
    check_conserved(core)


def test_a_retry_goes_to_another_worker_at_once_and_is_booked_there() -> None:
    """It has waited its turn once; the policy is told where it runs."""
    core = committing("a", "b")
    first = granted(core.ask(ask("r1", "s1", tokens=4_000))).grant.worker
    second = granted(core.ask(ask("r1", "s1", tokens=4_000, attempt=1, excluded=(first,)))).grant
    assert second.worker != first
    scheduled = core.core.state.scheduled
    assert scheduled is not None
    assert scheduled.place_of("r1") == (second.worker, 0)
    loads = {place: seat.load for seat in commit_of(core).book.seats.values() for place in [seat.number] if seat.load}
    assert loads == {scheduled.pools["m"].seats[second.worker, 0]: 4_100}
    check_conserved(core)


def test_a_retry_waits_for_a_place_on_those_it_has_not_failed_on() -> None:
    core = committing("a", "b", max_grants_per_rank=1)
    first = granted(core.ask(ask("r1", "s1", tokens=100))).grant.worker
    granted(core.ask(ask("r2", "s2", tokens=100)))
    effects = core.ask(ask("r1", "s1", tokens=100, attempt=1, excluded=(first,)))
    assert not replies(effects, Granted)
    effects = core.end(end("r2", "s2"))
    assert granted(effects).grant.worker != first
    check_conserved(core)


def test_a_lost_worker_gives_its_memory_up_and_those_that_waited_go_elsewhere() -> None:
    core = committing("a", "b")
    for name in ("r1", "r2"):
        granted(core.ask(ask(name, name, tokens=9_000)))
    assert held(core.ask(ask("r3", "s3", tokens=9_000)))
    core.do(WorkerStated(worker_state("b", health="left")))
    check_conserved(core)
    assert len(commit_of(core).book.seats) == 1
    core.do(WorkerStated(worker_state("c")))
    assert [each.grant.worker for each in replies(core.said, Granted) if each.request_id == "r3"] == ["c"]
    check_conserved(core)


def test_a_worker_that_was_unwell_for_a_moment_keeps_what_runs_there() -> None:
    core = committing()
    core.ask(ask("r1", "s1", tokens=9_000))
    core.do(WorkerStated(worker_state("a", health="unhealthy")))
    assert not commit_of(core).book.seats
    core.do(WorkerStated(worker_state("a")))
    (seat,) = commit_of(core).book.seats.values()
    assert (seat.running, seat.load) == (1, 9_100)
    check_conserved(core)


def test_workers_of_unknown_size_are_placed_by_cost() -> None:
    """Until an engine has said how much KV it has, there is nothing to share out."""
    core = driven(policy="commit")
    state = worker_state("a")
    profile = WorkerProfile(url="http://a", model="m", block_size=16)
    core.do(WorkerStated(msgspec.structs.replace(state, profile=profile)))
    assert granted(core.ask(ask("r1", "s1"))).policy == "kv"


def test_engines_read_the_order_as_they_sort_it() -> None:
    """vLLM runs the lower number first, SGLang the higher one, or as it was told; an engine that does not sort refuses
    the field."""
    priorities = {}
    engines: tuple[tuple[Engine, tuple[str, ...]], ...] = (("vllm", ()), ("sglang", ()), ("sglang", (LOW_FIRST,)))
    for engine, features in engines:
        core = driven(policy="commit", engine_priorities=True)
        profile = WorkerProfile(
            url="http://a", model="m", block_size=16, kv_tokens=KV_TOKENS, engine=engine, features=features
        )
        core.do(WorkerStated(msgspec.structs.replace(worker_state("a"), profile=profile)))
        first = granted(core.ask(ask("r1", "s1", tokens=100))).priority
        core.now += 60.0
        core.do(WorkerStated(msgspec.structs.replace(worker_state("a"), profile=profile)))
        second = granted(core.ask(ask("r2", "s2", tokens=100))).priority
        assert first is not None
        assert second is not None
        priorities[engine, features] = second - first
    assert priorities == {("vllm", ()): 60, ("sglang", ()): -60, ("sglang", (LOW_FIRST,)): 60}
    assert granted(committing().ask(ask("r1", "s1", tokens=100))).priority is None


# Leader and standby


def follow(leader: Driven, standby: Driven, effects: Sequence[Effect]) -> None:
    for decision in facts(effects, Decision):
        standby.now = leader.now
        standby.do(Decided(decision))


def test_a_standby_knows_what_runs_and_what_is_leased() -> None:
    """It hears decisions and ends only, and its policy's account is the leader's."""
    leader, standby = committing(), committing(lead=False)
    for core in (leader, standby):
        core.accept(accepted("r1", "s1"))
        core.accept(accepted("r2", "s2"))
    follow(leader, standby, leader.ask(ask("r1", "s1", tokens=5_000)))
    follow(leader, standby, leader.ask(ask("r2", "s2", tokens=5_000)))
    for core in (leader, standby):
        done(core, "r1", "s1", 5_000)
    loads = [[seat.load for seat in commit_of(core).book.seats.values()] for core in (leader, standby)]
    assert loads[0] == loads[1] != [0]
    check_conserved(standby)
    leader.do(LeadershipChanged(None))
    standby.do(LeadershipChanged(11))
    assert held(standby.ask(ask("r3", "s3", tokens=9_000)))
    check_conserved(standby)


def test_a_leader_that_steps_down_gives_back_what_waited() -> None:
    core = committing()
    core.ask(ask("r1", "s1", tokens=9_000))
    core.ask(ask("r2", "s2", tokens=9_000))
    core.do(LeadershipChanged(None))
    assert len(commit_of(core).book.turns) == 1
    check_conserved(core)


def test_a_fresh_leader_books_what_ingresses_name() -> None:
    core = committing()
    core.state(in_flight("r1", "s1", worker="a"))
    (seat,) = commit_of(core).book.seats.values()
    assert seat.running == 1
    check_conserved(core)


def test_a_placement_that_its_ingress_made_is_booked() -> None:
    core = committing()
    core.accept(accepted("r1", "s1"))
    core.dispatched("r1", "a", mode="fallback")
    (seat,) = commit_of(core).book.seats.values()
    assert seat.running == 1
    core.end(end("r1", "s1", outcome="client_disconnect"))
    assert (seat.running, seat.load) == (0, 0)
    check_conserved(core)


def test_an_answer_of_the_index_that_comes_after_the_worker_went_is_no_grant_there() -> None:
    core = committing("a", "b")
    core.answer_index = False
    (question,) = [each for each in core.ask(ask("r1", "s1", tokens=9_000)) if isinstance(each, AskIndex)]
    core.do(WorkerStated(worker_state("a", health="left")))
    effects = core.do(MatchAnswered(question.ticket, match_reply({"a": 500})))
    assert granted(effects).grant.worker == "b"
    check_conserved(core)

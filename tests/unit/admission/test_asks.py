"""From ask to answer: grants, repeats, retries, holds, refusals, the index."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from schemas.admit import Granted
from schemas.decision import Decision
from schemas.request import Outcome, Usage
from schemas.session import SessionFact
from schemas.worker import RankLoad
from services.admission.events import LeadershipChanged, MatchAnswered, MatchFailed, WorkerStated
from tests.unit.admission.build import (
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
    match_reply,
    refused,
    replies,
    worker_state,
)


def test_an_ask_is_granted_and_its_decision_published_once_with_all_that_led_to_it() -> None:
    """The grant names owner, epoch, expiry; the decision every candidate, its parts, health, hold and prediction."""
    core = driven()
    core.workers("a", "b")
    core.reach = {"a": 3, "b": 1}
    effects = core.ask(ask("r1", tokens=64))
    answer = granted(effects)
    (decision,) = facts(effects, Decision)
    assert (answer.grant.worker, answer.url, answer.epoch) == ("a", "http://a", 10)
    assert (answer.grant.owner, answer.grant.epoch, answer.predicted_cached_tokens) == ("ingress-1", 10, 48)
    assert (answer.index_health, answer.hold_ms, answer.hold_reason) == ("synced", 0, None)
    assert decision.grant == answer.grant
    assert [(each.worker, each.blocks.device) for each in decision.candidates] == [("a", 3), ("b", 1)]
    assert all(each.parts["decode"] == 4.0 for each in decision.candidates)
    assert [fact.state for fact in facts(effects, SessionFact)] == ["opened"]
    assert facts(core.ask(ask("r1", tokens=64)), Decision) == []


def test_asking_again_returns_the_same_grant() -> None:
    """A reply may be lost: the same request and attempt never books twice."""
    core = driven()
    core.workers("a", "b")
    first = granted(core.ask(ask("r1")))
    again = granted(core.ask(ask("r1")))
    assert again == first
    assert len(core.core.state.ledger) == 1


def test_a_second_attempt_releases_the_first_and_goes_elsewhere() -> None:
    """One retry before the first byte: the first grant is gone, another worker has the second, the turn counts once."""
    core = driven()
    core.workers("a", "b")
    first = granted(core.ask(ask("r1")))
    other = "b" if first.grant.worker == "a" else "a"
    effects = core.ask(ask("r1", attempt=1, excluded=(first.grant.worker,)))
    second = granted(effects)
    assert second.grant.worker == other
    assert second.grant.grant_id != first.grant.grant_id
    assert facts(effects, Decision)[0].attempt == 1
    assert core.core.state.ledger.account(first.grant.worker, 0).requests == 0
    session = core.core.state.sessions.get(identity("s").key)
    assert session is not None
    assert (session.turns, session.in_flight, session.worker) == (1, 1, other)
    assert refused(core.ask(ask("r1", attempt=0))).reason == "stale_attempt"
    check_books(core.core)


def test_a_granted_worker_that_left_before_dispatch_is_decided_anew() -> None:
    """B1: the same ask after its worker left gets another one at once, and no binding to the lost one stays."""
    core = driven()
    core.workers("a", "b")
    first = granted(core.ask(ask("r1"))).grant.worker
    other = "b" if first == "a" else "a"
    core.do(WorkerStated(worker_state(first, health="left")))
    session = core.core.state.sessions.get(identity("s").key)
    assert session is not None
    assert session.worker is None
    second = granted(core.ask(ask("r1")))
    assert second.grant.worker == other
    check_books(core.core)


def test_no_worker_is_503_with_retry_after_and_an_unknown_model_404() -> None:
    """B7 and bad input: an empty fleet may fill; a model that nobody ever served is the client's mistake."""
    core = driven()
    empty = refused(core.ask(ask("r1")))
    assert (empty.status, empty.reason, empty.retry_after_s) == (503, "no_worker", 1)
    core.workers("a")
    unknown = refused(core.ask(ask("r2", model="other")))
    assert (unknown.status, unknown.reason, unknown.retry_after_s) == (404, "unknown_model", None)
    core.do(WorkerStated(worker_state("a", health="left")))
    gone = refused(core.ask(ask("r3")))
    assert (gone.status, gone.reason) == (503, "no_worker")
    only = refused(core.ask(ask("r4", excluded=("a",))))
    assert only.reason == "no_worker"


def test_a_burst_spreads_by_our_own_grants() -> None:
    """D1: 100 simultaneous asks against a scrape that says all idle: each worker gets a quarter."""
    core = driven()
    core.workers("a", "b", "c", "d")
    for number in range(100):
        core.ask(ask(f"r{number}", session=f"s{number}", tokens=640))
    counts = Counter(answer.grant.worker for answer in replies(core.said, Granted))
    assert counts == {"a": 25, "b": 25, "c": 25, "d": 25}


def test_a_stale_scrape_does_not_move_the_burst() -> None:
    """D1: the scrape that repeats what we sent ourselves adds nothing to it."""
    core = driven()
    core.workers("a", "b")
    for number in range(10):
        core.ask(ask(f"r{number}", session=f"s{number}", tokens=640))
    ours = core.core.state.ledger.account("a", 0)
    loads = [RankLoad(rank=0, running=ours.requests, kv_usage=ours.blocks * 16 / 16_000)]
    core.do(WorkerStated(worker_state("a", loads=loads)))
    for number in range(10, 20):
        core.ask(ask(f"r{number}", session=f"s{number}", tokens=640))
    counts = Counter(answer.grant.worker for answer in replies(core.said, Granted))
    assert counts == {"a": 10, "b": 10}


def test_a_session_stays_with_its_worker_and_a_child_starts_with_its_parents() -> None:
    """With equal costs the previous worker is taken every time, and the parent's for a child's first turn."""
    core = driven()
    core.workers("a", "b", "c", "d")
    first = granted(core.ask(ask("r0"))).grant.worker
    core.end(end("r0", usage=Usage(input_tokens=64, output_tokens=10)))
    for number in range(1, 10):
        effects = core.ask(ask(f"r{number}"))
        assert granted(effects).grant.worker == first
        (decision,) = facts(effects, Decision)
        assert decision.previous_worker == first
        core.end(end(f"r{number}"))
        child = granted(core.ask(ask(f"c{number}", session=f"child-{number}", parent="s"))).grant.worker
        assert child == first
        core.end(end(f"c{number}", f"child-{number}"))


def test_a_side_request_neither_prefers_nor_moves_its_sessions_worker() -> None:
    """A title request goes where it is cheapest, and the session's next turn goes where its prefix is."""
    core = driven()
    core.workers("a", "b")
    home = granted(core.ask(ask("r0"))).grant.worker
    other = "b" if home == "a" else "a"
    core.ask(ask("filler", session="filler", tokens=16, excluded=(other,)))
    side = core.ask(ask("t", kind="title"))
    assert granted(side).grant.worker == other
    assert facts(side, Decision)[0].previous_worker is None
    core.end(end("t", kind="title"))
    session = core.core.state.sessions.get(identity("s").key)
    assert session is not None
    assert (session.worker, session.turns, session.in_flight) == (home, 1, 1)


@pytest.mark.parametrize("reason", ["index_late", "index_absent"])
def test_without_an_index_decisions_go_on_by_affinity_and_load(reason: str) -> None:
    """Failure mode: the indexer is away: the session's worker is kept, the decision says blind and why."""
    core = driven()
    core.workers("a", "b")
    home = granted(core.ask(ask("r0"))).grant.worker
    core.end(end("r0", usage=Usage(input_tokens=64, output_tokens=16)))
    core.answer_index = False
    core.ask(ask("r1", tokens=96))
    effects = core.do(MatchFailed(core.questions[-1].ticket, reason))
    answer = granted(effects)
    assert answer.grant.worker == home
    assert (answer.index_health, answer.index_reason, answer.predicted_cached_tokens) == ("blind", reason, 0)


def test_an_answer_to_a_question_that_is_not_open_changes_nothing() -> None:
    """A late index answer after the cancel, or a second answer, grants nothing."""
    core = driven()
    core.workers("a")
    core.answer_index = False
    core.ask(ask("r1"))
    ticket = core.questions[-1].ticket
    core.cancel("r1")
    assert core.do(MatchAnswered(ticket, match_reply({"a": 4}))) == []
    core.ask(ask("r2"))
    ticket = core.questions[-1].ticket
    assert granted(core.do(MatchAnswered(ticket, match_reply({"a": 4})))).request_id == "r2"
    assert core.do(MatchAnswered(ticket, match_reply({"a": 4}))) == []
    assert core.do(MatchFailed(ticket, "index_late")) == []


def test_an_ask_without_a_chain_does_not_ask_the_index() -> None:
    """No tokenizer, no chain: placed by affinity and load at once."""
    core = driven()
    core.workers("a")
    answer = granted(core.ask(ask("r1", chain=False)))
    assert (answer.index_health, answer.index_reason) == ("blind", "no_chain")
    assert core.questions == []


# Holds


def test_a_turn_waits_only_when_every_eligible_rank_is_full_and_runs_when_one_is_free() -> None:
    """D4: held with its place, told at least once a second, granted in order when a grant is released."""
    core = driven(max_grants_per_rank=1)
    core.workers("a", "b")
    granted(core.ask(ask("r1", "s1")))
    granted(core.ask(ask("r2", "s2")))
    (first,) = held(core.ask(ask("r3", "s3")))
    (second,) = held(core.ask(ask("r4", "s4")))
    assert [(each.reason, each.place) for each in (first, second)] == [("at_limit", 1), ("at_limit", 2)]
    for _ in range(3):
        told = Counter(each.request_id for each in held(core.wait(1.0)))
        assert told["r3"] >= 1
        assert told["r4"] >= 1
    effects = core.end(end("r1", "s1"))
    answer = granted(effects)
    assert (answer.request_id, answer.hold_reason) == ("r3", "at_limit")
    assert 2900 <= answer.hold_ms <= 3100
    assert granted(core.end(end("r2", "s2"))).request_id == "r4"


def test_a_full_queue_refuses_with_429_and_a_deadline_with_503() -> None:
    """D4: fill + 1 is told to come back; who waited too long is told so; both with Retry-After and a reason."""
    core = driven(max_grants_per_rank=1, hold_queue_limit=2, hold_deadline_s=3.0)
    core.workers("a")
    core.ask(ask("r0", "s0"))
    core.ask(ask("r1", "s1"))
    core.ask(ask("r2", "s2", deadline_ms=int((core.now + 1.5) * 1000)))
    full = refused(core.ask(ask("r3", "s3")))
    assert (full.status, full.reason, full.retry_after_s) == (429, "hold_queue_full", 2)
    early = refused(core.wait(1.6))
    assert (early.request_id, early.status, early.reason, early.retry_after_s) == ("r2", 503, "hold_deadline", 4)
    late = refused(core.wait(1.6))
    assert (late.request_id, late.reason) == ("r1", "hold_deadline")
    assert len(core.core.deciding.holds) == 0


def test_a_cancelled_waiter_leaves_the_line_and_a_cancelled_grant_is_released() -> None:
    """D3: no ghost is woken; the place goes to the next."""
    core = driven(max_grants_per_rank=1)
    core.workers("a")
    core.ask(ask("r1", "s1"))
    core.ask(ask("r2", "s2"))
    core.ask(ask("r3", "s3"))
    core.cancel("r2")
    assert granted(core.cancel("r1")).request_id == "r3"
    assert refused(core.ask(ask("r2", "s2"))).reason == "cancelled"
    check_books(core.core)


def test_only_the_owner_may_cancel() -> None:
    """A cancel from another ingress releases nothing and is counted."""
    core = driven()
    core.workers("a")
    core.ask(ask("r1"))
    core.cancel("r1", ingress="ingress-2")
    assert len(core.core.state.ledger) == 1
    assert core.core.state.counters.cancels["not_its_owner"] == 1


def test_turns_of_one_session_are_granted_in_order_even_when_the_index_answers_out_of_order() -> None:
    """D4: FIFO inside a session: the second turn is not even begun before the first is placed."""
    core = driven()
    core.workers("a")
    core.answer_index = False
    core.ask(ask("r1"))
    core.ask(ask("r2"))
    core.ask(ask("other", "other"))
    assert len(core.questions) == 2  # r1 and other
    (r1, other) = (question.ticket for question in core.questions)
    assert granted(core.do(MatchAnswered(other, match_reply({"a": 0})))).request_id == "other"
    assert granted(core.do(MatchAnswered(r1, match_reply({"a": 0})))).request_id == "r1"
    assert granted(core.do(MatchAnswered(core.questions[-1].ticket, match_reply({"a": 0})))).request_id == "r2"


def test_open_questions_never_exceed_the_free_places() -> None:
    """Two places free: two questions; the third waits, and is asked when a place stays free."""
    core = driven(max_grants_per_rank=2)
    core.workers("a")
    core.answer_index = False
    for number in range(4):
        core.ask(ask(f"r{number}", f"s{number}"))
    assert len(core.questions) == 2
    assert len(core.core.deciding.holds) == 2
    for question in core.questions[:2]:
        core.do(MatchAnswered(question.ticket, match_reply({"a": 0})))
    assert len(core.questions) == 2
    core.end(end("r0", "s0"))
    assert len(core.questions) == 3


def test_a_waiter_whose_only_worker_is_full_does_not_block_others() -> None:
    """The retried turn may not use a; b is full; a newcomer takes a."""
    core = driven(max_grants_per_rank=1)
    core.workers("a", "b")
    core.ask(ask("on-b", "s0", excluded=("a",)))
    assert held(core.ask(ask("retry", "s1", excluded=("a",))))
    assert granted(core.ask(ask("new", "s2"))).grant.worker == "a"


def test_an_avoided_worker_gets_nothing_while_there_is_another() -> None:
    """An ingress says that everything fails there: the turn waits for room elsewhere, and nobody behind it does."""
    core = driven(max_grants_per_rank=2)
    core.workers("a", "b")
    for number in range(2):
        assert granted(core.ask(ask(f"r{number}", f"s{number}", avoided=("a",)))).grant.worker == "b"
    assert held(core.ask(ask("r2", "s2", avoided=("a",))))
    assert granted(core.ask(ask("r3", "s3"))).grant.worker == "a"


def test_where_only_avoided_workers_are_left_they_are_tried() -> None:
    core = driven()
    core.workers("a", "b")
    assert granted(core.ask(ask("r1", avoided=("a", "b")))).grant.worker in ("a", "b")
    assert granted(core.ask(ask("r2", excluded=("b",), avoided=("a",)))).grant.worker == "a"


def test_waiters_are_refused_at_once_when_the_last_worker_is_lost() -> None:
    """B1: never wait for ever: nobody can run them, so they are told."""
    core = driven(max_grants_per_rank=1)
    core.workers("a")
    core.ask(ask("r1", "s1"))
    core.ask(ask("r2", "s2"))
    answer = refused(core.do(WorkerStated(worker_state("a", health="left"))))
    assert (answer.request_id, answer.reason, answer.status) == ("r2", "no_worker", 503)


def test_a_fresh_leader_holds_until_it_has_listened() -> None:
    """After a restart nobody is refused for a worker that has not spoken yet, and nothing is granted blindly."""
    core = driven(warm=False)
    (answer,) = held(core.ask(ask("r1")))
    assert answer.reason == "warming_up"
    core.workers("a")
    assert replies(core.said, Granted) == []
    effects = core.wait(1.3)
    assert granted(effects).hold_reason == "warming_up"


def test_what_a_client_says_of_its_turn_counts_where_nobody_remembers_it() -> None:
    """A new leader: the client's signed turn state names the worker; a session that is known decides."""
    core = driven()
    core.workers("a", "b", "c")
    for number, name in enumerate("abcabc"):
        fresh = msgspec.structs.replace(ask(f"r{number}", f"s{number}", tokens=640), sticky=name)
        assert granted(core.ask(fresh)).grant.worker == name
    core.end(end("r0", "s0"))
    again = msgspec.structs.replace(ask("again", "s0", tokens=640), sticky="b")
    assert granted(core.ask(again)).grant.worker == "a"


@pytest.mark.parametrize("outcome", ["upstream_error", "upstream_lost", "client_disconnect", "upstream_timeout"])
def test_a_turn_that_is_sent_again_is_the_same_turn(outcome: Outcome) -> None:
    """Harnesses send a failed turn again, up to 30 times, the same to the byte and without a word (harness.md §6)."""
    core = driven()
    core.workers("a")
    for number in range(5):
        core.ask(msgspec.structs.replace(ask(f"r{number}", "s"), digest=b"one"))
        core.end(end(f"r{number}", "s", outcome=outcome))
    session = core.core.state.sessions.get(identity("s").key)
    assert session is not None
    assert (session.turns, session.in_flight, core.core.state.counters.resends) == (1, 0, 4)
    core.ask(msgspec.structs.replace(ask("next", "s"), digest=b"two"))
    assert session.turns == 2


def test_a_turn_that_is_sent_again_while_the_first_is_open_is_the_same_turn() -> None:
    core = driven()
    core.workers("a")
    for number in range(2):
        core.ask(msgspec.structs.replace(ask(f"r{number}", "s"), digest=b"one"))
    session = core.core.state.sessions.get(identity("s").key)
    assert session is not None
    assert (session.turns, session.in_flight) == (1, 2)
    core.end(end("r0", "s", outcome="client_disconnect"))
    core.end(end("r1", "s"))
    assert (session.turns, session.in_flight) == (1, 0)


@pytest.mark.parametrize("digest", [b"one", b""])
def test_the_same_words_after_an_answer_are_another_turn(digest: bytes) -> None:
    """And where nobody tells bodies apart every turn counts, as ever."""
    core = driven()
    core.workers("a")
    outcome: Outcome = "completed" if digest else "upstream_error"
    for number in range(3):
        core.ask(msgspec.structs.replace(ask(f"r{number}", "s"), digest=digest))
        core.end(end(f"r{number}", "s", outcome=outcome))
    session = core.core.state.sessions.get(identity("s").key)
    assert session is not None
    assert (session.turns, core.core.state.counters.resends) == (3, 0)


@pytest.mark.parametrize("heard", ["accepted", "ingress.state"])
def test_a_new_leader_knows_a_turn_that_is_sent_again(heard: str) -> None:
    """A standby heard that the first was accepted, a restarted leader that it is in flight: either counts it once."""
    core = driven(lead=False)
    core.workers("a")
    digest = "0123456789abcdef"
    if heard == "accepted":
        core.accept(accepted("r0", digest=digest))
        core.dispatched("r0", "a")
    else:
        core.state(in_flight("r0", worker="a", digest=digest))
    core.do(LeadershipChanged(2))
    core.end(end("r0", outcome="upstream_lost", worker="a"))
    granted(core.ask(msgspec.structs.replace(ask("r1"), digest=bytes.fromhex(digest))))
    session = core.core.state.sessions.get(identity("s").key)
    assert session is not None
    assert (session.turns, session.in_flight, core.core.state.counters.resends) == (1, 1, 1)

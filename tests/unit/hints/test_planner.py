"""What is planned when: one rule a test."""

from __future__ import annotations

import msgspec
import pytest

from schemas.hint import HintOutcome
from schemas.index import SessionResidency, TierBlocks, WorkerMatch
from schemas.worker import RankLoad
from services.hints.events import NotSent, SessionAnswered
from services.hints.sessions import MAX_ON_DEVICE, KnownPrefix
from services.hints.wishes import Place
from tests.unit.hints.support import START, Driven, decided, ended, key, pool, reasons, session, told, tool, worker

# Keeping


def test_the_end_of_a_turn_retains_and_the_close_lets_go() -> None:
    """Whose KV, in which order of eviction, for how long, until when it may be carried out."""
    driven = Driven(retain_ttl_s=30.0, retain_priority=7, result_deadline_s=4.0)
    (retain,) = driven.do(session("s", "acting"))
    assert (retain.worker, retain.rank, retain.session, retain.action_type) == ("a", 0, key("s"), "retain")
    assert (retain.payload.target.session_id, retain.payload.target.session) == ("s", key("s").text())
    assert (retain.payload.priority, retain.payload.ttl_ms) == (7, 30_000)
    assert retain.payload.expires_ms == int((START + 4) * 1000)
    (close,) = driven.do(session("s", "closed"))
    assert (close.action_type, close.payload.reason, close.payload.cancels) == (
        "dereference", "closed", retain.action_id,
    )  # fmt: skip


def test_who_is_recognised_by_content_is_retained_from_the_second_turn_on() -> None:
    """Every nameless request begins a session then: single questions must not take the room of those that come back."""
    driven = Driven()
    assert driven.do(session("s", "acting", family="prefix")) == []
    assert told(driven.do(session("s", "acting", family="prefix", turns=2))) == [("a", "s", "retain")]


def test_what_never_ran_or_has_no_identity_gets_no_hint() -> None:
    """No worker, nobody to ask; an anonymous request leaves nothing that somebody comes back to."""
    driven = Driven()
    assert driven.do(session("s", "acting", None)) == []
    assert driven.do(session("s", "closed", None)) == []
    assert driven.do(session("r", "acting", family="request"), session("r", "closed", family="request")) == []
    assert driven.do(session("s", "opened")) == []


def test_sessions_that_come_back_sooner_are_retained_better() -> None:
    """One step for each halving of the usual time away, by the tool that was called (scheduling §5.2); a person is
    another kind of waiting (§5.5)."""
    driven = Driven()
    away = {"quick": 1.0, "usual": 4.0, "too": 4.0, "slow": 16.0, "": 300.0}
    for number in range(10):
        for name, seconds in away.items():
            driven.do(session(f"{name}{number}", "acting"))
            driven.do(ended(f"{name}{number}", *([name] if name else [])))
            driven.now += seconds
            driven.do(decided(f"{name}{number}"))
    priority = {}
    for name in away:
        driven.do(session(f"new-{name}", "opened"), ended(f"new-{name}", *([name] if name else [])))
        (retain,) = driven.do(session(f"new-{name}", "acting"))
        priority[name] = retain.payload.priority
    assert priority == {"quick": 6, "usual": 4, "too": 4, "slow": 2, "": 0}


def test_a_lease_is_pinned_for_as_long_as_it_lasts_and_renewed() -> None:
    """A pin is never long at once, so that it ends soon when nobody renews it; the last one ends with the lease."""
    driven = Driven(pin_ttl_s=20.0)
    driven.settle(driven.do(session("s", "acting")))
    (pin,) = driven.do(session("s", "leased", tokens=1500, lease_until=START + 50))
    assert (pin.action_type, pin.payload.tokens, pin.payload.ttl_ms) == ("pin", 1500, 20_000)
    driven.answer(pin)
    renewed = []
    for _ in range(49):
        hints = driven.wait(1.0)
        driven.settle(hints)
        renewed += [(driven.now - START, hint.payload.ttl_ms) for hint in hints if hint.action_type == "pin"]
    assert renewed[0] == (15.0, 20_000)
    assert all(at + (ttl or 0) / 1000 <= 50 for at, ttl in renewed)
    assert any(at + (ttl or 0) / 1000 == 50 for at, ttl in renewed)


def test_a_pin_goes_with_its_lease() -> None:
    """Revoked or expired: at once; revoked for others' room, the KV goes below rather than nowhere. Back at work: the
    turn refers to its blocks by itself, and the next lease pins again; without a next lease the pin is taken back."""
    for state in ("revoked", "expired"):
        driven = Driven()
        driven.settle(driven.do(session("s", "acting")))
        (pin,) = driven.do(session("s", "leased", lease_until=START + 500))
        driven.answer(pin)
        hints = driven.do(session("s", state))
        assert reasons(hints) == [("dereference", "unpinned"), *([("demote", "revoked")] if state == "revoked" else [])]
        assert hints[0].payload.cancels == pin.action_id
    driven = Driven()
    driven.settle(driven.do(session("s", "acting")))
    driven.settle(driven.do(session("s", "leased", lease_until=START + 500)))
    assert driven.do(session("s", "released"), decided("s")) == []
    driven.settle(driven.do(session("s", "acting", turns=2)))
    assert reasons(driven.wait(3.0)) == [("dereference", "unpinned")]


def test_a_pin_that_is_under_way_is_taken_back_when_the_lease_goes() -> None:
    """The fact changed before the answer came: cancelled by name, and the late answer changes nothing."""
    driven = Driven(sees=False)
    driven.do(worker("a"))
    driven.settle(driven.do(session("s", "acting")))
    (pin,) = driven.do(session("s", "leased", lease_until=START + 500))
    (taken_back,) = driven.do(session("s", "revoked"))
    assert taken_back.payload.cancels == pin.action_id
    driven.answer(pin)
    driven.answer(taken_back)
    assert driven.planner.gate.pins.seats() == {}


def test_without_capacity_or_lease_nothing_is_pinned() -> None:
    driven = Driven(sees=False)
    driven.do(session("s", "acting"))
    assert driven.do(session("s", "leased", lease_until=START + 50)) == []
    driven.do(worker("a"))
    assert driven.do(session("s", "leased", lease_until=START - 1)) == []
    assert driven.not_sent == {("retain", "worker_unusable"): 1, ("pin", "worker_unusable"): 1}
    driven.do(worker("a", kv_tokens=0))
    assert driven.do(session("s", "leased", lease_until=START + 50)) == []
    assert driven.not_sent["pin", "no_capacity"] == 1


# Moving


def test_a_session_that_moves_is_let_go_where_it_was() -> None:
    """A turn elsewhere makes the kept prefix useless; a turn on the same worker, or a side request, does not."""
    driven = Driven()
    driven.settle(driven.do(session("s", "acting", "a")))
    assert driven.do(decided("s", "a")) == []
    assert driven.do(decided("s", "b", kind="title")) == []
    moved = driven.do(decided("s", "b"))
    assert (told(moved), reasons(moved)) == ([("a", "s", "dereference")], [("dereference", "moved")])
    assert told(driven.do(session("s", "acting", "b"))) == [("b", "s", "retain")]


def test_a_long_tool_demotes_and_the_predicted_return_brings_up() -> None:
    """Only where there is a lower tier; before the return by the lead and the move itself."""
    driven = Driven(demote_after_s=5.0, prefetch_lead_s=1.0, prefetch_s_per_mtoken=1000.0)
    for number in range(20):
        driven.settle(driven.do(session(f"x{number}", "acting")))
        driven.now += 40.0
        driven.do(decided(f"x{number}"))
    began = driven.now
    driven.settle(driven.do(session("s", "acting")))
    hints = driven.wait(6.0)
    assert reasons(hints) == [("demote", "long_tool")]
    assert (hints[0].payload.to, hints[0].payload.ttl_ms) == ("host", 600_000)
    driven.settle(hints)
    up = driven.wait(34.0)
    assert reasons(up) == [("prefetch", "predicted_return")]
    assert up[0].payload.to == "device"
    assert up[0].payload.deadline_ms == int((began + 40.0) * 1000)  # a second of lead, and one for 1000 tokens


def test_where_there_is_room_nothing_is_demoted() -> None:
    """A free device is in nobody's way; it is looked at again. Requests that wait, or use, are others' need."""
    for waiting, usage, found in ((0, 0.1, []), (1, 0.1, ["demote"]), (0, 0.6, ["demote"])):
        driven = Driven(demote_after_s=3.0)
        free, crowded = (
            worker("a", "tier:host", loads=(RankLoad(rank=0, waiting=each, kv_usage=used),))
            for each, used in ((0, 0.0), (waiting, usage))
        )
        driven.do(free)
        driven.settle(driven.do(session("s", "acting")))
        assert driven.wait(4.0) == []
        driven.do(crowded)
        assert [hint.action_type for hint in driven.wait(4.0)] == found


def test_a_session_that_is_back_soon_is_not_demoted() -> None:
    """Down and up again takes longer than it stays away."""
    driven = Driven(demote_after_s=5.0, prefetch_lead_s=2.0)
    for number in range(20):
        driven.settle(driven.do(session(f"x{number}", "acting")))
        driven.now += 7.0
        driven.do(decided(f"x{number}"))
    driven.settle(driven.do(session("s", "acting")))
    assert driven.wait(6.5) == []


def test_nothing_is_demoted_without_a_lower_tier_or_with_a_lease() -> None:
    driven = Driven(sees=False, demote_after_s=3.0)
    driven.do(worker("a"), worker("b", "tier:disk"))
    driven.settle(driven.do(session("s", "acting", "a"), session("t", "acting", "b"), session("u", "acting", "b")))
    driven.settle(driven.do(session("u", "leased", "b", lease_until=START + 30)))
    hints = driven.wait(10.0)
    assert told(hints) == [("b", "t", "demote")]
    assert hints[0].payload.to == "disk"


def test_a_paused_session_goes_down_and_a_resumed_one_comes_up_where_it_will_run() -> None:
    """On the same worker from its host memory; on another one only through a pool that both read and can trust."""
    driven = Driven()
    driven.settle(driven.do(session("s", "acting")))
    driven.settle(driven.do(session("s", "leased", lease_until=START + 500)))
    down = driven.do(session("s", "paused"))
    assert reasons(down) == [("dereference", "unpinned"), ("demote", "paused")]
    driven.settle(down)
    up = driven.do(session("s", "resumed", "a"))
    assert reasons(up) == [("prefetch", "resumed")]
    assert up[0].payload.cancels == down[1].action_id
    driven.settle(up)
    driven.do(session("s", "paused"))
    assert driven.do(session("s", "resumed", "b")) == []
    driven.do(worker("a", "tier:host", pool="p"), worker("b", pool="p"), pool("p", "blind"))
    assert driven.do(session("s", "resumed", "b")) == []
    driven.do(pool("p"))
    assert told(driven.do(session("s", "resumed", "b"))) == [("b", "s", "prefetch")]


def test_what_has_gone_down_when_its_lease_was_revoked_is_not_sent_down_again() -> None:
    """An engine answers that with ``missing``, and what it has below would be taken for gone: nothing came up again."""
    driven = Driven()
    driven.settle(driven.do(session("s", "acting")))
    driven.settle(driven.do(session("s", "leased", lease_until=START + 500)))
    down = driven.do(session("s", "revoked", lease_until=START + 500))
    assert ("demote", "revoked") in reasons(down)
    driven.settle(down)
    assert driven.do(session("s", "paused")) == []
    up = driven.do(session("s", "resumed", "a"))
    assert reasons(up) == [("prefetch", "resumed")]
    driven.settle(up)
    assert reasons(driven.do(session("s", "paused"))) == [("demote", "paused")]


def test_what_is_on_the_device_is_not_brought_up() -> None:
    """An indexer says so, and nothing went down since."""
    driven = Driven()
    driven.do(worker("a", pool="p"), worker("b", pool="p"), pool("p"))
    driven.settle(driven.do(session("s", "acting", "a")))
    match = WorkerMatch(worker="b", rank=0, blocks=TierBlocks(device=62))
    driven.do(SessionAnswered(key("s"), SessionResidency(session=key("s"), depth=62, block_size=16, resident=(match,))))
    driven.do(session("s", "paused", "a"))
    driven.planner.sessions.all()[0].kept = None
    assert driven.do(session("s", "resumed", "b")) == []


def test_the_end_of_all_tools_or_children_brings_up() -> None:
    """Both say that the next turn is near, whatever the history says."""
    driven = Driven(demote_after_s=2.0)
    driven.settle(driven.do(session("s", "acting")))
    driven.do(tool("s", "start", "1"), tool("s", "start", "2"))
    driven.settle(driven.wait(4.0))
    assert driven.do(tool("s", "end", "1")) == []
    assert driven.do(tool("s", "end", "2", inferred=True)) == []  # its next turn is here already
    up = driven.do(tool("s", "error", "2"))
    assert reasons(up) == [("prefetch", "tools_ended")]
    assert driven.do(tool("s", "end", "2")) == []  # once

    driven = Driven(demote_after_s=2.0)
    driven.settle(driven.do(session("s", "acting")))
    driven.do(session("c1", "opened", parent="s"), session("c2", "opened", parent="s"))
    driven.settle(driven.wait(4.0))
    assert told(driven.do(session("c1", "closed", "b"))) == [("b", "c1", "dereference")]
    assert reasons(driven.do(session("c2", "closed", "b")))[-1] == ("prefetch", "children_closed")


def test_only_what_nobody_shares_is_demoted_where_that_is_known() -> None:
    """The shared part is others' as well: it stays."""
    driven = Driven(demote_after_s=2.0)
    driven.settle(driven.do(session("s", "acting")))
    driven.do(SessionAnswered(key("s"), SessionResidency(depth=60, block_size=16, shared_blocks=40, unique_blocks=20)))
    (demote,) = driven.wait(4.0)
    assert (demote.payload.target.first, demote.payload.target.last, demote.payload.target.block_size) == (40, None, 16)


def test_a_parents_prefix_is_put_into_the_pool_for_its_child() -> None:
    """By the worker that has it, where the index saw it neither at the child's worker nor in the pool; once for all
    children."""
    driven = Driven(sees=False, share_min_tokens=160)
    driven.do(worker("a", pool="p"), worker("b", pool="p"), worker("c"), pool("p"))
    driven.settle(driven.do(session("p", "acting", "a")))
    assert driven.do(decided("c0", "b", cached=900, parent="p", reach={"a": 60})) == []  # nearly all there
    assert driven.do(decided("c1", "a", cached=0, parent="p", reach={"a": 60})) == []
    assert driven.do(decided("c2", "c", cached=0, parent="p", reach={"a": 60})) == []  # it reads no pool
    (share,) = driven.do(decided("c3", "b", cached=32, parent="p", reach={"a": 60}))
    assert (share.worker, share.session_id, share.action_type) == ("a", "p", "share")
    assert (share.payload.source, share.payload.parent, share.payload.to) == ("a", "p", "pool")
    assert (share.payload.target.last, share.payload.target.block_size) == (60, 16)
    assert driven.do(decided("c4", "b", cached=0, parent="p", reach={"a": 60})) == []  # under way
    assert driven.answer(share) == []
    assert driven.do(decided("c5", "b", cached=0, parent="p", reach={"a": 60})) == []  # done
    assert len(driven.do(decided("c6", "b", cached=0, parent="p", reach={"a": 70}))) == 1


# Letting go


def test_a_compacted_prompt_drops_the_old_one_at_once() -> None:
    """A prompt that only grows cannot become shorter: when the turn is placed, before the new one needs the room."""
    driven = Driven()
    driven.do(decided("s", tokens=1500))
    driven.settle(driven.do(session("s", "acting", tokens=1600)))
    (pin,) = driven.do(session("s", "leased", tokens=1600, lease_until=START + 500))
    driven.answer(pin)
    (drop,) = driven.do(decided("s", tokens=400, cached=160))
    assert (drop.worker, drop.payload.reason, drop.payload.cancels) == ("a", "superseded", pin.action_id)
    assert (drop.payload.target.first, drop.payload.target.last, drop.payload.target.block_size) == (10, 100, 16)
    driven.answer(drop)
    assert driven.planner.gate.pins.seats() == {}
    assert driven.planner.superseded == {"shorter": 1}


def test_an_estimate_is_no_rewrite() -> None:
    """Prompts are estimated at four bytes a token where nobody counts them, and answers are counted: of code or JSON
    every prompt would look as if it were far shorter than what was there before."""
    driven = Driven()
    for turn in range(3):
        driven.settle(driven.do(decided("s", tokens=1000 + 10 * turn)))
        driven.settle(driven.do(session("s", "acting", tokens=1700 + 20 * turn, turns=turn + 1)))
    assert driven.planner.superseded == {}


def test_a_prompt_that_was_pinned_and_not_cached_was_rewritten() -> None:
    """The cache had promised to keep it: a miss says that it kept something else. Without a promise it may be lost."""
    for outcome, found in (
        ("accepted", [("dereference", "superseded"), ("retain", None)]),
        ("rejected", [("retain", None)]),
    ):
        driven = Driven()
        driven.settle(driven.do(session("s", "acting", tokens=1600)))
        driven.settle(driven.do(session("s", "leased", tokens=1600, lease_until=START + 50)), outcome)  # type: ignore[arg-type]
        driven.do(decided("s", tokens=1700, cached=1600))
        hints = driven.do(session("s", "acting", tokens=1800, turns=2, input_tokens=1700.0, cached_tokens=320.0))
        assert reasons(hints) == found


def test_a_chain_that_became_shorter_in_the_index_was_rewritten() -> None:
    driven = Driven()
    driven.settle(driven.do(session("s", "acting", tokens=1600)))
    driven.do(SessionAnswered(key("s"), SessionResidency(depth=100, block_size=16)))
    driven.do(decided("s", tokens=1650))
    driven.settle(driven.do(session("s", "acting", tokens=1700, turns=2)))
    (drop,) = driven.do(SessionAnswered(key("s"), SessionResidency(depth=20, block_size=16)))
    assert (drop.payload.reason, drop.payload.target.last) == ("superseded", 100)


def test_of_an_indexers_answer_only_numbers_are_remembered() -> None:
    """It may name two hundred sessions and every rank there is, and there may be tens of thousands of sessions."""
    driven = Driven()
    driven.do(session("s", "acting"))
    names = tuple(key(f"other-{number}") for number in range(100))
    everywhere = tuple(
        WorkerMatch(worker=f"w{number}", rank=0, blocks=TierBlocks(device=60 - number % 2)) for number in range(100)
    )
    answer = SessionResidency(depth=60, block_size=16, shared_blocks=40, sharing=names, children=names)
    driven.do(SessionAnswered(key("s"), msgspec.structs.replace(answer, resident=everywhere)))
    (known,) = [each.known for each in driven.planner.sessions.all()]
    places = tuple(Place(f"w{2 * number}", 0) for number in range(MAX_ON_DEVICE))
    assert known == KnownPrefix(depth=60, shared=40, block_size=16, on_device=places)


def test_nothing_is_sent_to_a_worker_that_has_left() -> None:
    """Its session's turn ended there a moment before; letting go is said all the same, as nobody minds."""
    driven = Driven()
    driven.do(worker("a", health="left"))
    assert driven.do(session("s", "acting")) == []
    assert driven.not_sent == {("retain", "worker_unusable"): 1}
    assert driven.planner.gate.retained.seats() == {}


def test_what_a_lost_or_restarted_worker_kept_is_nothing_any_more() -> None:
    """Neither on the budget nor in a hint: its cache is empty."""
    for event in (worker("a", incarnation="2"), worker("a", health="left")):
        driven = Driven()
        driven.settle(driven.do(session("s", "acting")))
        driven.settle(driven.do(session("s", "leased", lease_until=START + 50)))
        driven.do(event)
        assert driven.planner.gate.pins.seats() == {}
        assert driven.planner.gate.retained.seats() == {}
        assert driven.do(decided("s", "b")) == []


def test_a_close_lets_go_once_and_what_comes_late_is_not_sent() -> None:
    """A wish that waited for an action under way, or for an indexer, finds its session closed."""
    driven = Driven()
    driven.do(session("s", "acting"))
    driven.do(decided("s"), session("s", "acting", turns=2))  # the second retain waits for the first one's answer
    assert driven.planner.gate.flights.waiting == 1
    closed = driven.do(session("s", "closed"))
    assert told(closed) == [("a", "s", "dereference")]
    assert driven.wait(10.0) == []
    assert driven.do(SessionAnswered(key("s"), SessionResidency(depth=3)), tool("s", "end")) == []
    assert driven.planner.gate.flights.waiting == 0


@pytest.mark.parametrize("state", ["released", "revoked", "expired"])
def test_the_end_of_a_lease_opens_no_session(state: str) -> None:
    """It may be told after the close of the session that had it: nobody would ever close it again."""
    driven = Driven()
    driven.settle(driven.do(session("s", "acting"), session("s", "closed")))
    assert driven.do(session("s", state)) == []
    assert len(driven.planner.sessions) == 0


def test_of_too_many_sessions_the_oldest_is_let_go() -> None:
    driven = Driven(max_sessions=2)
    driven.settle(driven.do(session("s1", "acting"), session("s2", "acting")))
    hints = driven.do(session("s3", "acting"))
    assert (told(hints[:1]), reasons(hints[:1])) == ([("a", "s1", "dereference")], [("dereference", "forgotten")])
    assert len(driven.planner.sessions) == 2


# Results


@pytest.mark.parametrize(
    ("outcome", "kept"),
    [("accepted", 1), ("clipped", 1), ("deferred", 1), ("rejected", 0), ("missing", 0), ("unsupported", 0)],
)
def test_results_are_counted_by_outcome_and_engine(outcome: HintOutcome, kept: int) -> None:
    """Each action is answered once; a second answer, one of another worker or of nobody's action is counted apart."""
    driven = Driven()
    (retain,) = driven.do(session("s", "acting"))
    driven.answer(retain, outcome)
    assert driven.planner.gate.outcomes == {("retain", outcome, "simulated"): 1}
    assert driven.planner.gate.retained.of("a") == kept
    driven.answer(retain, outcome)
    assert driven.planner.unknown_results == 1


def test_what_is_unsupported_is_not_asked_again_for_a_while() -> None:
    """Of this worker and this action only; a new incarnation may be able to."""
    driven = Driven(unsupported_s=60.0)
    driven.settle(driven.do(session("s1", "acting")), "unsupported")
    assert driven.do(session("s2", "acting")) == []
    assert told(driven.do(session("s3", "acting", "b"))) == [("b", "s3", "retain")]
    assert driven.not_sent == {("retain", "unsupported"): 1}
    driven.now += 60.0
    driven.settle(driven.do(session("s4", "acting")), "unsupported")
    assert driven.do(session("s5", "acting")) == []
    driven.do(worker("a", incarnation="2"))
    assert told(driven.do(session("s6", "acting"))) == [("a", "s6", "retain")]


def test_an_action_without_an_answer_is_given_up_at_its_deadline() -> None:
    """It may have been carried out all the same: it weighs until it ends by itself; what could not be sent does not."""
    driven = Driven(result_deadline_s=3.0, retain_ttl_s=8.0)
    driven.do(session("s", "acting"))
    driven.wait(2.0)
    assert len(driven.planner.gate.flights) == 1
    driven.wait(1.0)
    assert len(driven.planner.gate.flights) == 0
    assert driven.planner.gate.outcomes == {("retain", "unanswered", "simulated"): 1}
    assert driven.planner.gate.retained.of("a") == 1
    driven.wait(5.0)
    assert driven.planner.gate.retained.of("a") == 0
    (hint,) = driven.do(session("t", "acting"))
    driven.do(NotSent(hint.action_id))
    assert driven.planner.gate.retained.of("a") == 0


# Bounds


def test_a_worker_is_never_asked_beyond_its_budget() -> None:
    """Pins: a share of a rank's KV. A refusal makes room, or the answer of a dereference: sending that does not."""
    driven = Driven(pin_share=0.3, pin_ttl_s=50.0)
    for name in ("s1", "s2", "s3"):
        driven.settle(driven.do(session(name, "acting")))
    (first,) = driven.do(session("s1", "leased", tokens=2000, lease_until=START + 50))
    driven.answer(first)
    assert driven.do(session("s2", "leased", tokens=2000, lease_until=START + 50)) == []
    assert driven.not_sent == {("pin", "over_budget"): 1}
    (second,) = driven.do(session("s2", "leased", tokens=1000, lease_until=START + 50))
    driven.answer(second, "rejected")
    (drop,) = driven.do(session("s1", "closed"))
    assert driven.do(session("s3", "leased", tokens=2000, lease_until=START + 50)) == []
    driven.answer(drop)
    assert len(driven.do(session("s3", "leased", tokens=2000, lease_until=START + 50))) == 1


def test_a_worker_is_asked_no_more_often_than_it_may() -> None:
    """Letting go is: there is no more of it than of what was kept."""
    driven = Driven(actions_per_s=1.0, actions_burst=2)
    hints = driven.do(*(session(f"s{number}", "acting") for number in range(5)))
    assert len(hints) == 2
    assert driven.not_sent == {("retain", "rate"): 3}
    assert len(driven.do(*(session(f"s{number}", "closed") for number in range(5)))) == 5
    driven.now += 1.0
    assert len(driven.do(session("t1", "acting"), session("t2", "acting"))) == 1


def test_one_action_of_a_kind_is_under_way_and_the_last_wish_waits() -> None:
    """Two retains of one session would overtake each other; of those that wait only the last is of use."""
    driven = Driven()
    (first,) = driven.do(session("s", "acting"))
    for turns in (2, 3):
        assert driven.do(decided("s"), session("s", "acting", turns=turns)) == []
    (second,) = driven.answer(first)
    assert second.action_type == "retain"
    assert driven.answer(second) == []

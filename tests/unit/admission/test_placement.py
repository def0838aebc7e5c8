"""Policy ``kv``: candidates, exclusions, own grants before the scrape, ties, stickiness."""

from __future__ import annotations

import random
from collections import Counter

from schemas.admit import Grant
from schemas.index import MatchReply, TierBlocks, WorkerMatch
from schemas.worker import RankLoad, WorkerHealth
from services.admission.cost import CostWeights, Load, Prompt
from services.admission.grants import Ledger, OpenGrant
from services.admission.placement import NO_PREFERENCE, IndexView, Placement, Preference, place
from services.admission.workers import Fleet, load_of
from tests.unit.admission.build import MODEL, START, match_reply, worker_state

PROMPT = Prompt(160, 16)


def fleet(*names: str, **health: WorkerHealth) -> Fleet:
    built, ledger = Fleet(2048), Ledger()
    for name in names:
        built.stated(worker_state(name, health=health.get(name, "ready")), ledger, START)
    return built


def book(ledger: Ledger, request_id: str, worker: str, *, prefill: int = 0, blocks: int = 0) -> None:
    grant = Grant(request_id=request_id, grant_id=request_id, worker=worker, rank=0, owner="i", epoch=1, expires_ms=0)
    ledger.open(OpenGrant(grant, 0, prefill, blocks, START + 10))


def run(
    built: Fleet,
    ledger: Ledger | None = None,
    index: IndexView | None = None,
    preference: Preference = NO_PREFERENCE,
    *,
    excluded: tuple[str, ...] = (),
    limit: int = 8,
    seed: int = 1,
) -> Placement:
    return place(
        built.serving(MODEL),
        ledger or Ledger(),
        PROMPT,
        index or IndexView.of(match_reply({worker.name: 0 for worker in built})),
        weights=CostWeights(),
        max_grants_per_rank=limit,
        choose=random.Random(seed).randrange,
        preference=preference,
        excluded=excluded,
    )


def test_the_longest_prefix_wins_on_an_idle_fleet() -> None:
    """With equal load the rank that holds most of the prompt costs least."""
    placement = run(fleet("a", "b", "c"), index=IndexView.of(match_reply({"a": 2, "b": 9, "c": 4})))
    assert placement.chosen.worker == "b"
    assert [candidate.cost for candidate in placement.candidates()] == [18.0, 11.0, 16.0]


def test_load_outweighs_a_short_prefix() -> None:
    """Queued prefill of 8 blocks costs more than 3 cached blocks save."""
    ledger = Ledger()
    book(ledger, "r", "a", prefill=128)
    placement = run(fleet("a", "b"), ledger, IndexView.of(match_reply({"a": 3, "b": 0})))
    assert placement.chosen.worker == "b"


def test_equal_costs_are_drawn_uniformly_and_repeatably() -> None:
    """Spec §4.1: ties are uniform: 300 tied choices over 3 workers give about 100 each; one seed, one sequence."""
    built, ledger = fleet("a", "b", "c"), Ledger()

    def draw(seed: int) -> list[str]:
        choose = random.Random(seed).randrange
        index = IndexView.of(match_reply({"a": 0, "b": 0, "c": 0}))
        return [
            place(
                built.serving(MODEL), ledger, PROMPT, index, weights=CostWeights(), max_grants_per_rank=8, choose=choose
            ).chosen.worker
            for _ in range(300)
        ]

    counts = Counter(draw(5))
    assert set(counts) == {"a", "b", "c"}
    assert all(70 <= count <= 130 for count in counts.values())
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


def test_every_candidate_is_listed_with_the_reason_it_was_excluded() -> None:
    """Failed before, unhealthy, starting and at its limit are all said; the rest are scored."""
    ledger = Ledger()
    book(ledger, "r", "d")
    placement = run(fleet("a", "b", "c", "d", "e", b="unhealthy", c="starting"), ledger, excluded=("a",), limit=1)
    assert {each.worker: each.excluded for each in placement.candidates()} == {
        "a": "failed_before",
        "b": "unhealthy",
        "c": "starting",
        "d": "at_limit",
        "e": None,
    }
    assert placement.chosen.worker == "e"


def test_nothing_to_choose_says_whether_waiting_helps() -> None:
    """A full rank comes free; a fleet without a usable rank does not."""
    ledger = Ledger()
    book(ledger, "r", "a")
    assert run(fleet("a"), ledger, limit=1).reason == "at_limit"
    assert run(fleet("a", a="unhealthy")).reason == "no_worker"
    assert run(fleet("a"), excluded=("a",)).reason == "no_worker"
    assert run(fleet()).reason == "no_worker"


def test_the_previous_worker_is_kept_within_the_margin_and_left_beyond_it() -> None:
    """It holds 4 blocks, which is 4 cheaper; with margin 2 it may be 8 dearer: 12 running blocks keep it, 13 do not."""
    holding = IndexView.of(match_reply({"a": 4, "b": 0}))
    for blocks, winner in ((12, "a"), (13, "b")):
        ledger = Ledger()
        book(ledger, "r", "a", blocks=blocks)
        placement = run(fleet("a", "b"), ledger, holding, Preference("a", 0, margin=2))
        assert placement.chosen.worker == winner
        assert [each.sticky for each in placement.candidates()] == [True, False]


def test_a_previous_worker_that_lost_the_session_is_no_better_than_another() -> None:
    """Nothing held, nothing preferred: one block more of load and the turn goes elsewhere, whatever the margin."""
    ledger = Ledger()
    book(ledger, "r", "a", blocks=1)
    assert run(fleet("a", "b"), ledger, preference=Preference("a", 0, margin=100)).chosen.worker == "b"


def test_a_hasty_turn_is_not_moved_because_its_events_are_late() -> None:
    """The last turn has just ended on it: what it left there counts as held although the index does not show it yet."""
    ledger = Ledger()
    book(ledger, "r", "a", blocks=1)
    fresh = Preference("a", 0, margin=3, affinity_blocks=9, fresh=True)
    assert run(fleet("a", "b"), ledger, preference=fresh).chosen.worker == "a"


def test_a_preferred_worker_that_cannot_take_it_is_only_a_preference() -> None:
    """B1: a sticky target that is gone, full, or has failed before never blocks the choice."""
    preference = Preference("a", 0, margin=100)
    assert run(fleet("b"), preference=preference).chosen.worker == "b"
    assert run(fleet("a", "b"), preference=preference, excluded=("a",)).chosen.worker == "b"
    ledger = Ledger()
    book(ledger, "r", "a")
    assert run(fleet("a", "b"), ledger, preference=preference, limit=1).chosen.worker == "b"


def test_a_blind_index_leaves_session_affinity_and_load() -> None:
    """What the session left on its previous worker is credited where the index says nothing, and only there."""
    ledger = Ledger()
    book(ledger, "r", "a", prefill=64)
    preference = Preference("a", 0, affinity_blocks=9)
    blind = run(fleet("a", "b"), ledger, IndexView.blind("index_late"), preference)
    assert blind.chosen.worker == "a"
    assert (blind.chosen.health, blind.chosen.health_reason) == ("blind", "index_late")
    seeing = run(fleet("a", "b"), ledger, IndexView.of(match_reply({"a": 0, "b": 0})), preference)
    assert seeing.chosen.worker == "b"
    heavy = Ledger()
    book(heavy, "r", "a", prefill=1600)
    assert run(fleet("a", "b"), heavy, IndexView.blind("index_late"), preference).chosen.worker == "b"


def test_a_worker_of_another_block_size_is_blind_and_placed_by_load() -> None:
    """A10: whatever the index says of it, another block size is no match; it stays eligible."""
    built, ledger = Fleet(2048), Ledger()
    built.stated(worker_state("a", block_size=64), ledger, START)
    built.stated(worker_state("b"), ledger, START)
    placement = run(built, index=IndexView.of(match_reply({"a": 9, "b": 1})))
    a, b = placement.seats
    assert (a.health, a.health_reason, a.blocks.reach) == ("blind", "block_size", 0)
    assert placement.chosen is b


def test_ranks_are_candidates_of_their_own_and_rank_zero_is_a_rank() -> None:
    """A13: each (worker, rank) has its own blocks and load; 0 is a value."""
    built, ledger = Fleet(2048), Ledger()
    built.stated(worker_state("a", ranks=2), ledger, START)
    matches = (
        WorkerMatch(worker="a", rank=0, blocks=TierBlocks(device=4)),
        WorkerMatch(worker="a", rank=1, blocks=TierBlocks(device=2)),
    )
    placement = run(built, index=IndexView.of(MatchReply(indexer="i", matches=matches)))
    assert [(each.worker, each.rank) for each in placement.candidates()] == [("a", 0), ("a", 1)]
    assert placement.chosen.rank == 0


def test_own_grants_come_first_and_the_scrape_adds_only_what_they_do_not_explain() -> None:
    """D1: load is our open grants plus what the last scrape showed beyond the most we had open since the one before."""
    built, ledger = fleet("a"), Ledger()
    for number in range(3):
        book(ledger, f"r{number}", "a", prefill=100, blocks=10)
    ledger.release("r0")
    worker = built.get("a")
    assert worker is not None
    # 16,000 KV tokens in blocks of 16 are 1,000 blocks: .05 are 50, of which 30 are explained; of 5 requests, 3 are.
    scrape = RankLoad(rank=0, running=1, waiting=4, kv_usage=0.05)
    built.stated(worker_state("a", loads=[scrape]), ledger, START)
    assert load_of(worker, 0, ledger) == Load(2 + 2, 200 + 2048, 20 + 20)
    # The same scrape again, with only two open since: one more request is foreign. Releases show at once.
    built.stated(worker_state("a", loads=[scrape]), ledger, START)
    ledger.release("r1")
    assert load_of(worker, 0, ledger) == Load(1 + 3, 100 + 2 * 2048, 10 + 30)

"""What pages of a shared pool do to a placement: the seeds' rule, ours beside it, and where they differ (adr/0015)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest

from schemas.admit import Granted
from schemas.decision import Decision
from schemas.index import MatchReply, PoolMatch, SourceHealth, TierBlocks, WorkerMatch
from schemas.worker import WorkerState
from services.admission.config import AdmissionSettings
from services.admission.core import Core
from services.admission.cost import CostWeights, Prompt, booked_prefill_tokens, predicted_shared_tokens
from services.admission.effects import AskIndex, Effect, PublishDecision
from services.admission.events import Accepted, AdmitAsked, Decided, LeadershipChanged, MatchAnswered, WorkerStated
from services.admission.grants import Ledger
from services.admission.outcomes import Place
from services.admission.placement import NO_PREFERENCE, IndexView, Placement, Preference, place
from services.admission.policies.commit import Commit, CommitParameters
from services.admission.policies.kv import Kv
from services.admission.pools import Pool
from services.admission.scheduling.interface import Admission, ProgramFacts, TurnFacts, WorkerFacts
from services.admission.scheduling.interface import Fleet as SeatFleet
from services.admission.workers import Fleet
from tests.unit.admission.build import MODEL, START, accepted, ask, replies, worker_state
from tests.unit.admission.scheduling.test_commit import learned

Ranges = tuple[tuple[int, int], ...]
SIZE = 16
WEIGHTS = CostWeights()


def seeds_rule(ranges: Ranges, device: int) -> int:
    """The peer's ``shared_beyond(D)``: every page of the pool at a position of ``device`` or later (spec: §4.1)."""
    return sum(max(0, end - max(start, device)) for start, end in ranges)


def reply(
    held: dict[str, TierBlocks],
    pools: dict[str, Ranges],
    reads: dict[str, str | None],
    *,
    health: SourceHealth = "synced",
    worker_health: SourceHealth = "synced",
) -> MatchReply:
    """``held``: by worker; ``pools``: ranges by pool, all of one ``health``; ``reads``: the pool of each worker."""
    return MatchReply(
        indexer="index",
        matches=tuple(
            WorkerMatch(worker=name, rank=0, blocks=blocks, health=worker_health, pool=reads.get(name))
            for name, blocks in held.items()
        ),
        pools=tuple(PoolMatch(pool=name, ranges=ranges, health=health) for name, ranges in pools.items()),
    )


def placed(
    answer: MatchReply, blocks: int, *, weights: CostWeights = WEIGHTS, preference: Preference = NO_PREFERENCE
) -> Placement:
    """The placement of a prompt of ``blocks`` blocks among all workers of the answer, on idle ranks."""
    fleet, ledger = Fleet(2048), Ledger()
    for match in answer.matches:
        fleet.stated(worker_state(match.worker), ledger, START)
    return place(
        fleet.serving(MODEL),
        ledger,
        Prompt(blocks * SIZE, SIZE),
        IndexView.of(answer, weights.shared_unsure_multiplier),
        weights=weights,
        max_grants_per_rank=8,
        choose=random.Random(1).randrange,
        preference=preference,
    )


CASES = [
    # blocks, own tiers, ranges in the pool; the seeds' pages and adjusted prefill; ours
    pytest.param(4, TierBlocks(device=2), ((0, 4),), 2, 1.0, 2, 1.0, id="worked example, half on the device"),
    pytest.param(4, TierBlocks(), ((0, 4),), 4, 2.0, 4, 2.0, id="worked example, nothing on the device"),
    pytest.param(8, TierBlocks(), ((0, 3), (4, 8)), 7, 4.5, 3, 6.5, id="a hole in the pool ends the run"),
    pytest.param(8, TierBlocks(device=3), ((0, 2), (5, 8)), 3, 3.5, 0, 5.0, id="a hole behind the device"),
    pytest.param(8, TierBlocks(device=2, host=2), ((0, 8),), 6, 1.5, 4, 2.5, id="pages that are on the host too"),
    pytest.param(
        8, TierBlocks(device=1, host=1, disk=1, external=1), ((0, 8),), 7, 2.25, 4, 3.75, id="pages in every tier too"
    ),
    pytest.param(6, TierBlocks(device=2, host=2, disk=2), ((0, 6),), 4, 0.0, 0, 2.0, id="§2.5: gpu 2, cpu 4, disk 6"),
    pytest.param(6, TierBlocks(device=6), ((0, 6),), 0, 0.0, 0, 0.0, id="all of it on the device"),
    pytest.param(6, TierBlocks(device=2), (), 0, 4.0, 0, 4.0, id="nothing in the pool"),
    pytest.param(6, TierBlocks(device=1, host=2), ((2, 5),), 3, 2.0, 2, 2.5, id="§2.5: the run goes on inside a range"),
]


@pytest.mark.parametrize(("blocks", "own", "ranges", "seeds_pages", "seeds", "pages", "ours"), CASES)
def test_both_rules_on_the_fixed_table(
    blocks: int, own: TierBlocks, ranges: Ranges, seeds_pages: int, seeds: float, pages: int, ours: float
) -> None:
    """Spec §2.5, §4.1, §5.4: adjusted prefill in blocks by both rules. The seeds' counts pages that the rank has itself
    below the device twice, and pages behind a hole, which no engine loads; ours is never below it."""
    weights, lower = WEIGHTS, WEIGHTS.host_cache_hit_weight * own.host
    lower += WEIGHTS.disk_cache_hit_weight * (own.disk + own.external)
    theirs = max(0.0, blocks - own.device - lower - weights.shared_cache_multiplier * seeds_rule(ranges, own.device))
    assert (seeds_rule(ranges, own.device), theirs) == (seeds_pages, seeds)
    (seat,) = placed(reply({"a": own}, {"p": ranges}, {"a": "p"}), blocks).candidates()
    assert (seat.parts["shared_credit"], seat.parts["adjusted_prefill"]) == (0.5 * pages, ours)
    assert ours >= theirs


def test_each_worker_is_credited_by_the_pool_that_it_reads() -> None:
    """Two pools, and a worker without one: only what its own pool holds counts for a rank."""
    empty = TierBlocks()
    answer = reply(
        {"a": empty, "b": empty, "c": empty},
        {"p": ((0, 2),), "q": ((0, 6),)},
        {"a": "p", "b": "q", "c": None},
    )
    placement = placed(answer, 8)
    assert [seat.shared_blocks for seat in placement.seats] == [2, 6, 0]
    assert placement.chosen.worker == "b"


def test_a_pool_that_nobody_answers_for_gives_no_credit() -> None:
    """A worker reads a pool that the index says nothing of (another replica's, one beyond the bound)."""
    (seat,) = placed(reply({"a": TierBlocks()}, {}, {"a": "p"}), 8).seats
    assert (seat.shared_blocks, seat.cost) == (0, 16.0)


@pytest.mark.parametrize(
    ("health", "credit"), [("synced", 4.0), ("catching_up", 2.0), ("approximate", 2.0), ("blind", 0.0)]
)
def test_a_page_counts_as_much_as_the_picture_of_its_pool_is_sure(health: SourceHealth, credit: float) -> None:
    """Decision 0015: all of m where the pool's bridge has agreed with its key list, half while it is known to lack
    something, nothing while it is blind."""
    answer = reply({"a": TierBlocks()}, {"p": ((0, 8),)}, {"a": "p"}, health=health)
    (seat,) = placed(answer, 8).candidates()
    assert seat.parts["shared_credit"] == credit
    weights = CostWeights(shared_unsure_multiplier=0.0)
    (unsure,) = placed(answer, 8, weights=weights).candidates()
    assert unsure.parts["shared_credit"] == (4.0 if health == "synced" else 0.0)


def test_a_rank_whose_own_cache_is_not_known_can_read_the_pool_all_the_same() -> None:
    """Its events are off: what it holds itself is unknown, what it can load from the pool is not. What the session left
    there stands in first, and the pool only beyond it."""
    answer = reply(
        {"a": TierBlocks(), "b": TierBlocks()}, {"p": ((0, 8),)}, {"a": "p", "b": "p"}, worker_health="blind"
    )
    stuck = Preference("a", 0, margin=1.0, affinity_blocks=5)
    seats = placed(answer, 8, preference=stuck).seats
    assert [(seat.affinity_blocks, seat.shared_blocks) for seat in seats] == [(5, 3), (0, 8)]


def test_the_least_cost_weighs_shared_pages_against_a_queue() -> None:
    """A rank that holds 6 of 8 blocks itself wins over one that loads all 8; with 4 blocks queued there it loses."""
    answer = reply({"a": TierBlocks(device=6), "b": TierBlocks()}, {"p": ((0, 8),)}, {"b": "p"})
    assert placed(answer, 8).chosen.worker == "a"
    assert placed(answer, 8, weights=CostWeights(shared_cache_multiplier=0.9)).chosen.worker == "b"


@pytest.mark.parametrize(
    ("reach", "pages", "tokens", "predicted"), [(2, 2, 65, 32), (2, 2, 64, 16), (0, 4, 64, 48), (4, 0, 99, 0)]
)
def test_what_is_promised_of_the_pool_leaves_the_last_token_to_compute(
    reach: int, pages: int, tokens: int, predicted: int
) -> None:
    """What is promised of the rank's own tiers and of its pool is together no more than the prompt less one token."""
    assert predicted_shared_tokens(reach, pages, tokens, SIZE) == predicted


@pytest.mark.parametrize(("pages", "credit", "booked"), [(0, 0.0, 96), (4, 2.0, 64), (6, 3.0, 48), (6, 6.0, 16)])
def test_pages_that_must_be_loaded_take_their_weight_off_the_booked_prefill(
    pages: int, credit: float, booked: int
) -> None:
    """Decision 0015: a page of the pool is prefill that is saved, by its weight; the last token is always computed."""
    assert booked_prefill_tokens(WEIGHTS, TierBlocks(device=2), 8 * SIZE, SIZE, pages, credit) == booked


def _grant(core: Core, request: object, answer: MatchReply) -> tuple[Granted, Decision, list[Effect]]:
    effects = core.handle(request, START)  # type: ignore[arg-type]
    for effect in list(effects):
        if isinstance(effect, AskIndex):
            assert effect.question.pages == b"0123456789abcdef" * 8
            assert effect.question.page_size == SIZE
            effects += core.handle(MatchAnswered(effect.ticket, answer), START)
    (granted,) = replies(effects, Granted)
    decision = next(
        msgspec.structs.replace(effect.decision, candidates=effect.placement.candidates())
        for effect in effects
        if isinstance(effect, PublishDecision)
    )
    return granted, decision, effects


def _core(lead: bool, *states: WorkerState) -> Core:
    core = Core(AdmissionSettings(warmup_s=0.0, policy="kv"), "admission-1", random.Random(3).randrange, START)
    for state in states:
        core.handle(WorkerStated(state), START)
    if lead:
        core.handle(LeadershipChanged(1), START)
    return core


def test_a_grant_says_what_the_pool_is_to_save_and_a_standby_books_the_same() -> None:
    """The question carries the prompt's pages; grant and decision name the tokens; leader and standby book alike, also
    while the pool's picture is not complete."""
    leader, standby = _core(True, worker_state("a")), _core(False, worker_state("a"))
    request = msgspec.structs.replace(
        ask("r", "s", tokens=8 * SIZE, block_size=SIZE), pages=b"0123456789abcdef" * 8, page_size=SIZE
    )
    answer = reply({"a": TierBlocks(device=2)}, {"p": ((0, 8),)}, {"a": "p"}, health="approximate")
    for core in (leader, standby):
        core.handle(Accepted(accepted("r")), START)
    granted, decision, _ = _grant(leader, AdmitAsked(request, "inbox"), answer)
    assert (granted.predicted_cached_tokens, granted.predicted_shared_tokens) == (2 * SIZE, 5 * SIZE)
    assert decision.predicted_shared_tokens == 5 * SIZE
    standby.handle(Decided(decision), START)
    books = [core.state.ledger.account("a", 0).prefill_tokens for core in (leader, standby)]
    assert books == [8 * SIZE - (2 * SIZE + SIZE * 6 // 4)] * 2


def _pool(places: Sequence[Place]) -> Pool:
    pool = Pool("m", learned=None, ticked=0.0)  # type: ignore[arg-type]
    for each in places:
        pool.open_seat(each)
    return pool


def test_pages_of_a_pool_are_no_memory_of_a_seat() -> None:
    """Decision 0015: a scheduling policy hears of them as work that is saved, and not as blocks that are resident."""
    answer = reply({"a": TierBlocks(device=2), "b": TierBlocks()}, {"p": ((0, 8),)}, {"a": "p"}, health="catching_up")
    pool = _pool([("a", 0), ("b", 0)])
    view = IndexView.of(answer)
    assert (pool.residency(view), pool.loadable(view)) == ([2, 0], [3.0, 0.0])
    assert pool.loadable(IndexView.of(reply({"a": TierBlocks()}, {}, {}))) is None
    assert pool.loadable(None) is None


def _fleet(loadable: Sequence[float] | None) -> SeatFleet:
    """Two seats: the first holds 10 blocks of any prompt, the second none, and may load some."""
    return SeatFleet((WorkerFacts(100_000, SIZE),) * 2, lambda _: [10, 0], lambda _: loadable)


@pytest.mark.parametrize(
    ("loadable", "seat", "prefill"),
    [(None, 0, 1000 - 160), ([0.0, 20.0], 0, 1000 - 160), ([0.0, 30.0], 1, 1000 - 240), ([0.0, 80.0], 1, 1000 - 640)],
)
def test_policies_that_place_by_cost_weigh_what_can_be_loaded(
    loadable: Sequence[float] | None, seat: int, prefill: int
) -> None:
    """Decision 0015: 10 blocks on the device are worth 20 that must be loaded; what can be loaded is off the prefill
    that the turn brings, by its weight, and not off what it is charged for."""
    turn = TurnFacts(0, "p", 0, 1000)
    kv = Kv()
    kv.begin(_fleet(loadable))
    kv.program_arrives(0.0, ProgramFacts("p", "agent", None))
    (placed_by_kv,) = kv.turn_ready(0.0, turn)
    assert isinstance(placed_by_kv, Admission)
    commit = Commit(CommitParameters(output_tokens=250), learned())
    commit.begin(_fleet(loadable))
    commit.program_arrives(0.0, ProgramFacts("p", "agent", None))
    (placed_by_commit,) = (action for action in commit.turn_ready(0.0, turn) if isinstance(action, Admission))
    assert [placed_by_kv.seat, placed_by_commit.seat] == [seat, seat]
    assert kv._accounts.of(seat).prefill_tokens == prefill
    booked = commit.book.seats[seat]
    assert booked.prefill == prefill
    assert booked.load == commit.book.turns[0].running[0].charge == 1000 + 250

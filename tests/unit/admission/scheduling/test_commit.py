"""Policy ``commit`` by the clauses and vectors of spec policy §4."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from services.admission.estimators.class_key import class_key
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.policies.commit import Commit, CommitParameters
from services.admission.scheduling.interface import (
    Action,
    Actions,
    Admission,
    Fleet,
    LeaseChange,
    ProgramFacts,
    Refusal,
    TurnFacts,
    TurnUsage,
    WorkerFacts,
)

KEY = class_key(agent_type="agent", is_sub_agent=False, model="")
QUICK, SLOW = "quick", "slow"


def learned(finals: Sequence[int] = (), tools: bool = False) -> LearnedPool:
    """Programs of one turn that ended with these contexts; ``tools``: the distribution of vector 6, and a slow one."""
    pool = LearnedPool()
    for number, final in enumerate(finals):
        pool.turn_finished(number, KEY, prompt_tokens=final - 1, output_tokens=1)
        pool.program_finished(number)
    if tools:
        for seconds in [0.1] * 50 + [0.5] * 30 + [2.0] * 15 + [30.0] * 5:
            for _ in range(2):
                pool.tool_returned(QUICK, seconds)
                pool.tool_returned(SLOW, 500.0 + seconds)
    return pool


class Driver:
    """One policy, and the shortest way to tell it things."""

    def __init__(
        self,
        pool: LearnedPool | None = None,
        *,
        capacities: Sequence[int] = (100_000,),
        residency: Sequence[int] | None = (0, 0, 0),
        **parameters: object,
    ) -> None:
        typed = msgspec.convert({"output_tokens": 250, **parameters}, CommitParameters)
        self.policy = Commit(typed, learned() if pool is None else pool)
        self.residency = residency
        workers = tuple(WorkerFacts(capacity, 16) for capacity in capacities)
        self.policy.begin(Fleet(workers, lambda turn: self.residency))
        self.turns = 0
        self.prompts: dict[int, tuple[str, int]] = {}

    def new(
        self, now: float, name: str, prompt: int = 1000, parent: str | None = None, single: bool = False
    ) -> Actions:
        self.policy.program_arrives(now, ProgramFacts(name, "agent", parent, single=single))
        return self.turn(now, name, prompt, index=0)

    def turn(self, now: float, name: str, prompt: int, index: int = 1) -> Actions:
        self.prompts[self.turns] = (name, prompt)
        self.turns += 1
        return self.policy.turn_ready(now, TurnFacts(self.turns - 1, name, index, prompt))

    def end(
        self,
        now: float,
        turn: int,
        *,
        output: int = 0,
        cached: int | None = 0,
        tool: str | None = QUICK,
        final: bool = False,
        spawned: tuple[str, ...] = (),
    ) -> Actions:
        name, prompt = self.prompts[turn]
        return self.policy.turn_finished(
            now, TurnUsage(turn, name, 0, prompt, cached, output, tool, final, spawned=spawned)
        )

    @property
    def kappa(self) -> float:
        return self.policy.book.seats[0].steering.value


def admitted(actions: Actions) -> list[int]:
    return [action.turn for action in actions if isinstance(action, Admission)]


def revoked(actions: Actions) -> list[str]:
    return [action.program for action in actions if isinstance(action, LeaseChange) and action.state == "revoked"]


@pytest.mark.parametrize(("kappa", "goes"), [(1.2, False), (1.35, True)])
def test_vector_5(kappa: float, goes: bool) -> None:
    """Final contexts {20k,40k,60k,80k}: running 70k, leased 50k and 30k are promised 80k, 70k and 60k; a new program
    would need 50k more."""
    driver = Driver(learned([20_000, 40_000, 60_000, 80_000] * 5), capacities=(200_000,), span_s=0.0)
    seat = driver.policy.book.seats[0]
    for number, context in enumerate((70_000, 50_000, 30_000)):
        driver.new(0.0, f"p{number}", context)
        driver.end(0.0, number, tool=QUICK)
    driver.turn(0.0, "p0", 70_000)
    promised = [entry.committed[2] for entry in driver.policy.book.programs if entry.committed is not None]
    assert sorted(promised) == [60_000, 70_000, 80_000]
    seat.steering.steered = kappa
    actions = driver.new(1.0, "new", 2_500)
    assert (admitted(actions) == [4]) == goes


def test_predicted_final_contexts() -> None:
    """Vector 5, by itself."""
    pool = learned([20_000, 40_000, 60_000, 80_000] * 5)
    for context, final in ((0, 50_000), (30_000, 60_000), (50_000, 70_000), (70_000, 80_000)):
        assert pool.final_context(KEY, context, 200_000) == final


def test_order_by_arrival_and_predicted_work() -> None:
    """Vector 4's D: a = 100, S = 80, V = 3.6667 s makes 393.33."""
    pool = LearnedPool()
    estimator = pool.classes.use(KEY).work
    for total in (4.0, 6.0, 10.0) * 7:
        estimator.enter(total)
        estimator.complete(total)
    for _ in range(7):
        estimator.enter(5.0)
        estimator.enter(8.0)
    estimator.refresh()
    driver = Driver(pool, span_s=80.0)
    driver.new(100.0, "p")
    program = driver.policy.book.programs.get("p")
    assert program is not None
    program.work = 5.0
    driver.policy.book.predict(program)
    assert program.rank == pytest.approx(393.33, abs=0.01)


def test_short_programs_overtake_long_ones_that_wait() -> None:
    """Rank-limited: a newcomer is tested only against who outranks it."""
    pool = learned(tools=True)
    short, long = (class_key(agent_type=name, is_sub_agent=False, model="") for name in ("short", "long"))
    for number in range(20):
        for key, final in ((short, 5_000), (long, 60_000)):
            pool.turn_finished((key, number), key, prompt_tokens=final, output_tokens=0)
            pool.program_finished((key, number))
    driver = Driver(pool)
    policy = driver.policy

    def arrives(now: float, name: str, label: str) -> list[int]:
        policy.program_arrives(now, ProgramFacts(name, label, None))
        return admitted(driver.turn(now, name, 1_000, index=0))

    assert arrives(0.0, "long-0", "long") == [0]
    assert arrives(1.0, "long-1", "long") == [1]
    assert arrives(2.0, "long-2", "long") == []
    assert arrives(3.0, "short-0", "short") == [3]
    conservative = Driver(pool, span_s=0.0, steering={"start": 1.2})
    policy, driver = conservative.policy, conservative
    arrives(0.0, "long-0", "long")
    arrives(1.0, "long-1", "long")
    arrives(2.0, "long-2", "long")
    assert arrives(3.0, "short-0", "short") == [], "first come, first served: everybody counts"


def test_without_predictions_programs_are_let_in_by_arrival_and_charged_an_eighth() -> None:
    """(v): S = 0 and nothing known; kappa 1.2 lets in nine eighths."""
    for span in (0.0, 80.0):
        driver = Driver(span_s=span, bypass_s=0.0, steering={"start": 1.2})
        let_in = [admitted(driver.new(float(second), f"p{second}")) for second in range(12)]
        assert let_in == [[turn] for turn in range(9)] + [[], [], []]
        assert admitted(driver.end(20.0, 4, final=True)) == [9]
        assert admitted(driver.end(21.0, 0, final=True)) == [10]


def test_a_blocked_new_head_is_overtaken_for_ten_seconds_only() -> None:
    driver = Driver()
    assert admitted(driver.new(0.0, "a", 80_000)) == [0]
    assert admitted(driver.new(1.0, "b", 70_000)) == []
    assert admitted(driver.new(11.0, "c", 100)) == [2]
    assert admitted(driver.new(11.5, "d", 100)) == []
    assert admitted(driver.end(12.0, 0, final=True)) == [1, 3]


def test_leased_turns_go_first_up_to_the_upper_band() -> None:
    driver = Driver(learned(tools=True))
    driver.new(0.0, "a", 40_000)
    driver.end(1.0, 0)
    driver.new(1.0, "b", 42_500)  # L = 42,000 + 42,750: the lower band is full
    assert admitted(driver.new(1.0, "c", 300)) == []
    assert admitted(driver.turn(1.1, "a", 48_000)) == [3]
    assert driver.policy.book.seats[0].load == 48_250 + 42_750


def test_leases_below_the_floor_are_given_up_for_a_newcomer_and_others_are_not() -> None:
    """Vector 6's tool: kept at first, revocable when it has run for 2.5 s."""
    for elapsed, goes in ((0.05, False), (2.5, True)):
        driver = Driver(learned(tools=True))
        driver.new(0.0, "a", 40_000)
        driver.end(0.0, 0)
        driver.new(0.0, "b", 40_000)
        actions = driver.new(elapsed, "c", 5_000)
        assert (admitted(actions) == [2]) == goes
        assert (revoked(actions) == ["a"]) == goes


def test_a_leased_turn_may_take_any_lease_the_least_worth_first() -> None:
    driver = Driver(learned(tools=True))
    for number, (name, prompt, tool) in enumerate((("a", 30_000, QUICK), ("b", 25_000, SLOW), ("c", 25_000, QUICK))):
        driver.new(0.0, name, prompt)
        driver.end(0.0, number, tool=tool)
    actions = driver.turn(0.05, "a", 60_000)
    assert revoked(actions) == ["b"]
    assert admitted(actions) == [3]


def test_too_much_after_a_turn_is_shed_but_not_the_oldest() -> None:
    driver = Driver(learned(tools=True), hi=0.9, lo=0.8)
    for number in range(2):
        driver.new(float(number), f"p{number}", 27_000)
        driver.end(float(number), number, output=3_000, tool=SLOW)
    driver.new(2.0, "p2", 14_000)
    actions = driver.end(2.0, 2, output=16_000)
    assert revoked(actions) == ["p1"], "32,000 tokens each: one is enough, and the oldest stays"


def test_a_program_without_its_lease_is_gated_and_counts_while_it_waits() -> None:
    driver = Driver(learned([90_000] * 8, tools=True))
    driver.new(0.0, "a", 30_000)
    driver.end(0.0, 0, tool=SLOW)
    actions = driver.new(1.0, "b", 60_000)
    assert (revoked(actions), admitted(actions)) == (["a"], [1])
    assert admitted(driver.turn(2.0, "a", 31_000)) == []
    assert driver.policy.book.seats[0].committed.total == 180_000
    assert admitted(driver.end(3.0, 1, tool=SLOW)) == [2], "nothing runs: progress"


def test_a_parent_that_waits_for_sub_agents_is_not_counted() -> None:
    driver = Driver(learned([60_000] * 8))
    driver.new(0.0, "main", 20_000)
    driver.end(1.0, 0, spawned=("one", "two"))
    assert driver.policy.book.seats[0].committed.total == 0
    assert admitted(driver.new(1.0, "one", 2_000, parent="main")) == [1]
    assert admitted(driver.new(1.0, "two", 2_000, parent="main")) == [2], "60k + 60k <= 1.2 * 100k"
    driver.end(2.0, 1, final=True)
    driver.end(3.0, 2, final=True)
    assert driver.policy.book.seats[0].committed.total == 60_000, "it is to return"
    assert driver.policy.book.programs.get("main") is not None


def test_the_safety_net_forces_one_turn_at_a_time() -> None:
    driver = Driver(learned([95_000] * 8, tools=True), hold_limit_s=300.0, idle_expiry_s=1e6)
    for number in range(3):
        driver.new(float(number), f"p{number}", 20_000)
        driver.end(float(number), number, tool=SLOW)
    assert admitted(driver.new(4.0, "big", 80_000)) == [3]
    assert [admitted(driver.turn(5.0, f"p{number}", 20_500)) for number in range(3)] == [[], [], []]
    assert admitted(driver.policy.tick(304.9)) == []
    assert len(forced := admitted(driver.policy.tick(305.0))) == 1
    assert admitted(driver.policy.tick(400.0)) == []
    assert len(admitted(driver.end(401.0, forced[0], tool=SLOW))) >= 1


def test_what_no_seat_can_hold_is_refused_at_once_and_what_only_an_empty_one_can_goes_alone() -> None:
    driver = Driver(capacities=(100_000, 50_000))
    assert driver.new(0.0, "a", 100_000) == [Refusal(0, "oversize")]
    assert admitted(driver.new(0.0, "b", 99_000)) == [1]
    assert driver.policy.book.turns
    assert driver.policy.turn_aborted(1.0, 1) == []
    assert not driver.policy.book.turns


def test_a_turn_without_a_session_goes_at_once_and_counts() -> None:
    driver = Driver()
    driver.new(0.0, "a", 84_000)
    assert admitted(driver.new(0.0, "b", 30_000, single=True)) == [1]
    assert driver.policy.book.seats[0].load == 84_250 + 30_250
    driver.end(1.0, 1, tool=None)
    assert driver.policy.book.programs.get("b") is None
    assert driver.policy.book.seats[0].load == 84_250


def test_parallel_turns_share_the_context() -> None:
    driver = Driver()
    driver.new(0.0, "a", 40_000)
    driver.end(1.0, 0, output=100)
    driver.turn(1.1, "a", 40_500)
    driver.turn(1.2, "a", 40_300)
    assert driver.policy.book.seats[0].load == 40_750 + 40_300 + 250 - 40_100
    driver.policy.turn_aborted(2.0, 1)
    driver.policy.turn_aborted(2.0, 2)
    assert driver.policy.book.seats[0].load == 0


def test_a_cancelled_waiter_leaves_everything_as_it_was() -> None:
    driver = Driver(learned([60_000] * 8, tools=True))
    driver.new(0.0, "a", 60_000)
    driver.new(0.0, "b", 20_000)
    driver.end(0.0, 1, tool=QUICK)
    seat = driver.policy.book.seats[0]
    before = (seat.load, seat.revocable, seat.committed.total, len(seat.leases))
    assert admitted(driver.turn(0.01, "b", 70_000)) == []
    driver.policy.turn_aborted(0.02, 2)
    assert (seat.load, seat.revocable, seat.committed.total, len(seat.leases)) == before


def test_rewritten_prefixes_are_no_recomputation() -> None:
    """Compaction: all of a prompt that shrank, or that found almost nothing where everything must have been, is new."""
    for prompt in (15_000, 41_000):
        driver = Driver(tools := learned(tools=True))
        del tools
        driver.new(0.0, "a", 40_000)
        driver.end(1.0, 0)
        driver.turn(1.1, "a", prompt)
        driver.end(2.0, 1, cached=500)
        seat = driver.policy.book.seats[0]
        seat.steering.step(0.0, True)
        seat.steering.step(10.0, True)
        assert seat.steering.recomputed <= 0
        assert driver.policy.book.programs.get("a").context == prompt  # type: ignore[union-attr]


def test_evicted_leases_are_recomputation() -> None:
    """The same where others wrote so much since that it may have been evicted."""
    driver = Driver(learned(tools=True))
    driver.new(0.0, "a", 40_000)
    driver.end(1.0, 0)
    for number in range(4):
        driver.new(1.0, f"b{number}", 20_000)
        driver.end(1.0, 1 + number, final=True)
    driver.turn(1.1, "a", 41_000)
    driver.end(2.0, 5, cached=500)
    seat = driver.policy.book.seats[0]
    seat.steering.step(0.0, True)
    seat.steering.step(10.0, True)
    assert seat.steering.recomputed > 0.3


@pytest.mark.parametrize("blind", [True, False])
def test_programs_return_to_where_their_blocks_are(blind: bool) -> None:
    """By the index; where it is blind, by stack distance."""
    driver = Driver(learned(tools=True), capacities=(100_000, 100_000), residency=None)
    driver.new(0.0, "a", 30_000)
    driver.end(1.0, 0, tool=SLOW)
    seat = driver.policy.book.programs.get("a").seat  # type: ignore[union-attr]
    assert seat is not None
    other = 1 - seat
    if not blind:
        driver.residency = [0, 0]
        driver.residency[other] = 2_000
    driver.policy.book.lose_lease(driver.policy.book.programs.get("a"))  # type: ignore[arg-type]
    (action,) = driver.turn(2.0, "a", 32_000)
    assert isinstance(action, Admission)
    assert action.seat == (seat if blind else other)


def test_a_seat_that_is_gone_takes_nothing_with_it() -> None:
    driver = Driver(capacities=(100_000, 100_000))
    for number in range(4):
        driver.new(0.0, f"p{number}", 20_000)
    driver.end(1.0, 0)
    driver.end(1.0, 1)
    lost = {program.facts.name for program in driver.policy.book.programs if program.seat == 0}
    actions: list[Action] = list(driver.policy.worker_changed(2.0, 0, None))
    assert set(revoked(actions)) < lost
    assert len(revoked(actions)) == 1
    for number in range(4):
        assert driver.policy.turn_aborted(2.0, number) == [] or number
    assert driver.policy.worker_changed(3.0, 1, None) is not None
    assert driver.new(3.0, "q") == [Refusal(4, "no_seat")]
    driver.policy.worker_changed(4.0, 7, WorkerFacts(50_000, 16))
    (action,) = driver.turn(4.0, "p3", 20_500)
    assert isinstance(action, Admission)
    assert action.seat == 7


def test_idle_programs_expire() -> None:
    driver = Driver(learned(tools=True), idle_expiry_s=600.0)
    driver.new(0.0, "a", 30_000)
    driver.end(1.0, 0)
    assert driver.policy.tick(600.0) == []
    (action,) = driver.policy.tick(601.0)
    assert isinstance(action, LeaseChange)
    assert (action.state, driver.policy.book.seats[0].load, len(driver.policy.book.programs)) == ("expired", 0, 0)


def test_a_parent_does_not_wait_for_ever_for_sub_agents_that_never_arrive() -> None:
    """Their first requests were lost, or they had ended before their parent named them: its lease expires."""
    driver = Driver()
    driver.new(0.0, "parent")
    driver.end(1.0, 0, spawned=("lost-1", "lost-2"))
    seat = driver.policy.book.seats[0]
    assert seat.load > 0
    actions = driver.policy.tick(602.0)
    assert [action.state for action in actions if isinstance(action, LeaseChange)] == ["expired"]
    assert (seat.load, len(driver.policy.book.programs)) == (0, 0)


def test_programs_that_wait_for_each_other_expire() -> None:
    """What clients say of their sub-agents may go round in a circle."""
    driver = Driver()
    driver.new(0.0, "a", parent="b")
    driver.end(1.0, 0, spawned=("a", "b"))
    driver.new(2.0, "b", parent="a")
    driver.end(3.0, 1, spawned=("a",))
    for tick in range(604, 3_000, 300):
        driver.policy.tick(float(tick))
    assert not len(driver.policy.book.programs)
    assert driver.policy.book.seats[0].load == 0


def test_bad_parameters() -> None:
    with pytest.raises(ValueError, match="lo"):
        CommitParameters(lo=0.9, hi=0.8)
    with pytest.raises(ValueError, match="span_s"):
        CommitParameters(span_s=-1.0)
    with pytest.raises(ValueError, match="floor"):
        CommitParameters(floor=float("nan"))

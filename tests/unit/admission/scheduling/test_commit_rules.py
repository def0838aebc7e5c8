"""Policy ``commit``: what the study left open, and what others may say to it."""

from __future__ import annotations

import pytest

from services.admission.policies.commit import CommitParameters
from services.admission.scheduling.interface import (
    Admission,
    LeaseChange,
    ProgramFacts,
    Refusal,
    TurnFacts,
    WorkerFacts,
)
from services.admission.scheduling.seat import Seat
from tests.unit.admission.scheduling.test_commit import QUICK, Driver, admitted, learned, revoked

NEVER = 1e9


def seat_of(driver: Driver) -> Seat:
    return driver.policy.book.seats[0]


def keeps_leases() -> Driver:
    """Two leases that are worth keeping, on a seat on which nothing runs and which is promised to them."""
    driver = Driver(learned([90_000] * 20, tools=True), progress_s=2.0)
    driver.new(0.0, "a", 1_000)
    driver.policy.turn_runs(0.0, TurnFacts(100, "b", 0, 1_000), 0)
    driver.prompts[100] = ("b", 1_000)
    driver.end(1.0, 0)
    driver.end(1.0, 100)
    assert not seat_of(driver).running
    return driver


def test_progress_waits_for_those_who_are_to_return() -> None:
    """A seat that waits for its tools is not idle; but nobody is parked for longer than ``progress_s``."""
    driver = keeps_leases()
    assert admitted(driver.new(1.1, "new", 1_000)) == []
    assert admitted(driver.policy.tick(2.9)) == []
    assert admitted(driver.policy.tick(3.0)) == [1]


def test_progress_is_at_once_where_nobody_is_counted_on() -> None:
    driver = keeps_leases()
    driver.policy.program_closed(1.1, "a")
    driver.policy.program_closed(1.1, "b")
    assert admitted(driver.new(1.2, "new", 1_000)) == [1]


def test_who_returns_makes_the_seat_busy_again() -> None:
    """The wait begins anew when the seat stands idle anew."""
    driver = keeps_leases()
    driver.new(1.1, "new", 1_000)
    assert admitted(driver.turn(2.0, "a", 1_100)) == [2]
    driver.end(4.0, 2)
    assert admitted(driver.policy.tick(5.9)) == []
    assert admitted(driver.policy.tick(6.0)) == [1]


@pytest.mark.parametrize(("credit", "load"), [(True, 12_250), (False, 20_250)])
def test_a_shared_prefix_is_charged_once(credit: bool, load: int) -> None:
    """8,000 of 10,000 tokens are there before the second program comes."""
    driver = Driver(learned([30_000] * 20), capacities=(400_000,), residency=(0,), shared_credit=credit)
    driver.new(0.0, "first", 10_000)
    driver.residency = (500,)
    driver.new(1.0, "second", 10_000)
    assert seat_of(driver).load - 10_250 == load - 10_000
    second = driver.policy.book.programs.get("second")
    assert second is not None
    assert second.committed is not None
    assert second.committed[2] == (22_000 if credit else 30_000)


def test_what_ended_sessions_left_is_not_taken_for_shared() -> None:
    """Unless it is asked for: the index cannot say that nobody is charged for it."""
    driver = Driver(learned([30_000] * 20), capacities=(400_000,), residency=(500,))
    driver.new(0.0, "again", 10_000)
    assert seat_of(driver).load == 10_250


def test_credit_for_a_shared_prefix_ends_with_the_program_and_leaves_nothing() -> None:
    driver = Driver(learned([30_000] * 20), capacities=(400_000,), residency=(500,), shared_credit=True)
    driver.new(0.0, "p", 10_000)
    driver.end(1.0, 0, output=100)
    assert seat_of(driver).load < 10_100 - 8_000 + 5_000
    driver.turn(2.0, "p", 11_000)
    assert seat_of(driver).load == 11_000 - 8_000 + 250
    driver.end(3.0, 1, final=True)
    assert seat_of(driver).load == 0
    assert seat_of(driver).committed.total == 0


def test_a_program_that_shares_goes_in_where_another_is_too_large() -> None:
    """COMMIT counts what a program adds."""
    for blocks, goes in ((0, []), (4_000, [2])):
        driver = Driver(
            learned([70_000] * 20), capacities=(170_000,), residency=(0,), bypass_s=NEVER, shared_credit=True
        )
        driver.new(0.0, "a", 65_000)
        driver.new(0.0, "b", 65_000)
        driver.residency = (blocks,)
        assert admitted(driver.new(1.0, "c", 65_000)) == goes


def test_a_rewritten_context_gives_back_what_it_held() -> None:
    """A prompt of less than half the context: its harness compacted. The lease shrinks, and what is promised."""
    driver = Driver(learned([80_000, 90_000] * 10), capacities=(400_000,))
    driver.new(0.0, "keeper", 1_000)
    driver.new(0.0, "p", 60_000)
    driver.end(1.0, 1)
    before = seat_of(driver).committed.total
    assert admitted(driver.turn(2.0, "p", 29_000)) == [2]
    program = driver.policy.book.programs.get("p")
    assert program is not None
    assert program.context == 29_000
    assert seat_of(driver).load == 29_250 + 1_250
    assert seat_of(driver).committed.total <= before
    driver.end(3.0, 2)
    assert admitted(driver.turn(4.0, "p", 28_000)) == [3], "half of it is not a rewritten one"
    assert program.context == 29_000


def test_load_that_is_not_ours_leaves_less_room() -> None:
    driver = Driver(learned([40_000] * 20), capacities=(100_000,), bypass_s=NEVER)
    driver.policy.worker_changed(0.0, 0, WorkerFacts(100_000, 16, foreign_tokens=70_000))
    driver.new(0.0, "a", 20_000)
    assert admitted(driver.new(1.0, "b", 20_000)) == []
    assert admitted(driver.policy.worker_changed(2.0, 0, WorkerFacts(100_000, 16))) == [1]


def test_load_that_is_not_ours_makes_nothing_oversize() -> None:
    """It comes and goes: a busy moment refuses nobody, and an idle seat takes whom it can ever hold."""
    driver = Driver(capacities=(100_000,))
    driver.policy.worker_changed(0.0, 0, WorkerFacts(100_000, 16, foreign_tokens=150_000))
    assert admitted(driver.new(0.0, "a", 90_000)) == [0]
    assert [action for action in driver.new(1.0, "b", 100_000) if isinstance(action, Refusal)] == [
        Refusal(1, "oversize")
    ]


def test_who_waits_for_a_seat_that_shrinks_goes_in_if_its_prompt_fits() -> None:
    """Its answer takes what is left."""
    driver = Driver(capacities=(100_000,))
    driver.new(0.0, "runs", 90_000)
    assert admitted(driver.new(1.0, "waits", 9_900)) == []
    driver.policy.worker_changed(2.0, 0, WorkerFacts(10_000, 16))
    assert admitted(driver.policy.turn_aborted(3.0, 0)) == [1]


def test_more_of_other_load_sheds_leases() -> None:
    driver = Driver(learned([40_000] * 20, tools=True), capacities=(100_000,))
    for number, name in enumerate(("a", "b")):
        driver.new(0.0, name, 30_000)
        driver.end(1.0, number)
    actions = driver.policy.worker_changed(2.0, 0, WorkerFacts(100_000, 16, foreign_tokens=50_000))
    assert revoked(actions) == ["b"], "the oldest keeps its lease"


def ready(driver: Driver, now: float, turn: TurnFacts) -> list[int]:
    driver.policy.program_arrives(now, ProgramFacts(turn.program, "agent", None))
    return admitted(driver.policy.turn_ready(now, turn))


@pytest.mark.parametrize(("bias", "order"), [(0.0, [1, 2]), (-10.0, [2, 1]), (float("nan"), [1, 2])])
def test_order_bias_moves_the_arrival(bias: float, order: list[int]) -> None:
    """What is no number is no opinion."""
    driver = Driver(learned([90_000] * 20), bypass_s=NEVER)
    assert ready(driver, 0.0, TurnFacts(0, "runs", 0, 50_000)) == [0]
    assert ready(driver, 1.0, TurnFacts(1, "older", 0, 50_000)) == []
    assert ready(driver, 2.0, TurnFacts(2, "younger", 0, 50_000, order_bias_s=bias)) == []
    assert admitted(driver.policy.turn_aborted(3.0, 0)) == order[:1]
    assert driver.policy.place(order[1]) == 0


def test_seat_bias_decides_between_seats() -> None:
    for bias, seat in ({}, 0), ({0: 2_000.0}, 1), ({1: -1e12}, 1):
        driver = Driver(capacities=(100_000, 100_000), residency=(50, 0))
        facts = TurnFacts(0, "p", 0, 1_000, seat_bias=bias)
        driver.policy.program_arrives(0.0, ProgramFacts("p", "agent", None))
        actions = driver.policy.turn_ready(0.0, facts)
        assert [action.seat for action in actions if isinstance(action, Admission)] == [seat]


def leased(driver: Driver, *names: str, tokens: int) -> None:
    for name in names:
        driver.new(0.0, name, tokens)
        driver.end(1.0, driver.turns - 1, tool=QUICK)


def test_advice_to_give_a_lease_up() -> None:
    driver = Driver(learned([30_000] * 20, tools=True))
    leased(driver, "p", tokens=20_000)
    actions = driver.policy.lease_advice(2.0, "p", False, None)
    assert revoked(actions) == ["p"]
    assert seat_of(driver).load == 0
    assert driver.policy.lease_advice(2.0, "p", False, None) == []
    assert driver.policy.lease_advice(2.0, "nobody", False, None) == []


def test_advice_to_keep_a_lease_holds_until_it_is_over() -> None:
    """At 2.5 s of its tool the lease is below the floor (vector 6), and would go to who needs the room."""
    for until, goes in ((None, False), (6.0, False), (3.0, True)):
        driver = Driver(learned([20_000] * 20, tools=True), capacities=(100_000,), hi=0.85, bypass_s=NEVER)
        leased(driver, "kept", tokens=20_000)
        driver.new(1.0, "runs", 60_000)
        driver.policy.lease_advice(2.0, "kept", True, until)
        seat = seat_of(driver)
        assert (seat.advised, seat.revocable) == (driver.policy.book.programs.get("kept").lease_charge, 0)  # type: ignore[union-attr]
        actions = driver.new(4.5, "new", 20_000)
        assert (revoked(actions) == ["kept"]) == goes
        assert bool(admitted(actions)) == goes


def test_no_more_than_a_quarter_is_kept_for_advice() -> None:
    driver = Driver(learned([20_000] * 20, tools=True), capacities=(200_000,))
    leased(driver, "a", "b", "c", tokens=20_000)
    for name in ("a", "b", "c"):
        driver.policy.lease_advice(2.0, name, True, 50.0)
    seat = seat_of(driver)
    assert 0 < seat.advised <= 50_000
    kept = [program.facts.name for program in seat.leases.values() if program.advised]
    assert kept == ["a", "b"]
    driver.policy.lease_advice(3.0, "a", None, None)
    driver.policy.program_closed(3.0, "b")
    assert seat.advised == 0


def test_who_has_its_kv_is_not_outranked_by_as_much_as_it_would_compute_again() -> None:
    """The newcomer has less to do than who runs by one GPU second, and would make it compute two."""
    for sunk, goes in ((0.0, [1]), (1.0, [])):
        driver = Driver(learned([60_000] * 20), span_s=40.0, sunk=sunk, bypass_s=NEVER, steering={"start": 1.0})
        driver.new(0.0, "large", 55_000)
        book = driver.policy.book
        program = book.programs.get("large")
        assert program is not None
        program.context = 40_000
        program.order_bias = 40.0  # one GPU second of work
        book.settle(program)
        again = driver.policy.learned.reload_cost.seconds(40_000)
        assert again > 1.5
        assert book.claim(program) == pytest.approx(program.rank - sunk * 40.0 * again)
        assert admitted(driver.new(0.0, "new", 2_500)) == goes


@pytest.mark.parametrize("wrong", [{"progress_s": -1.0}, {"sunk": -1.0}, {"keep_s": -1.0}, {"rewritten_below": 1.5}])
def test_parameters_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="commit"):
        CommitParameters(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tool", "completions"), [(None, 1), (QUICK, 0)])
def test_who_answered_its_user_and_never_came_back_has_finished(tool: str | None, completions: int) -> None:
    """Harnesses hardly ever say that a session is over; without this nothing would ever be learned of theirs. It is
    learned at once, and once."""
    driver = Driver(idle_expiry_s=60.0)
    driver.new(0.0, "p", 5_000)
    driver.end(1.0, 0, tool=tool)
    context = driver.policy.learned.pooled.context
    assert (context.completions, context.in_flight) == (completions, 1 - completions)
    driver.policy.tick(62.0)
    assert driver.policy.book.programs.get("p") is None
    assert (context.completions, context.in_flight) == (completions, 0)


def test_who_answered_and_comes_back_is_in_flight_again() -> None:
    """While its next turn waits nothing is different; one that is given up in the middle is no answer."""
    driver = Driver(idle_expiry_s=60.0)
    context = driver.policy.learned.pooled.context
    driver.new(0.0, "p", 5_000)
    driver.end(1.0, 0, tool=None)
    driver.new(1.0, "parent", 1_000)
    driver.end(2.0, 1, tool=None, spawned=("child",))
    assert (context.completions, context.in_flight) == (1, 1)
    assert admitted(driver.turn(3.0, "p", 5_100)) == [2]
    assert (context.completions, context.in_flight) == (1, 2)
    driver.policy.turn_aborted(4.0, 2)
    driver.policy.tick(65.0)
    assert driver.policy.book.programs.get("p") is None
    assert (context.completions, context.in_flight) == (0, 0)
    assert len(context.to_state().abandoned) == 2


@pytest.mark.parametrize(("capacity", "at_once"), [(412_000, 10), (4_000_000, 39)])
def test_a_house_that_has_seen_nothing_fills_after_a_few_answers(capacity: int, at_once: int) -> None:
    """64 small chats that never say that they are over: each is charged an eighth of the seat, or 128k tokens, until
    five have answered; then all of them run."""
    driver = Driver(capacities=(capacity,))
    for number in range(64):
        driver.new(0.0, f"chat{number}", 1_000)
    assert seat_of(driver).running == at_once
    for turn in range(4):
        driver.end(1.0 + turn, turn, tool=None)
        assert seat_of(driver).running < 60
    driver.end(5.0, 4, tool=None)
    assert seat_of(driver).running == 59
    for turn in range(5, 64):
        driver.end(6.0, turn, tool=None)
    for round_trip in range(1, 4):
        turns = [
            admitted(driver.turn(10.0 * round_trip, f"chat{number}", 1_000 + 200 * round_trip)) for number in range(64)
        ]
        assert turns == [[64 * round_trip + number] for number in range(64)]
        for (turn,) in turns:
            driver.end(10.0 * round_trip + 5.0, turn, tool=None)
    assert driver.policy.learned.pooled.context.completions == 64


def test_a_lease_that_is_given_up_says_why() -> None:
    driver = Driver(learned([30_000] * 20, tools=True))
    leased(driver, "p", tokens=20_000)
    (change,) = [
        action for action in driver.policy.lease_advice(2.0, "p", False, None) if isinstance(action, LeaseChange)
    ]
    assert change.numbers["advised"] == 1.0

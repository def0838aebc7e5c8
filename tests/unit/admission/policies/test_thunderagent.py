"""ThunderAgent as it is: Dynamo's port against the numbers that its code gave, the paper's code against its vectors."""

from __future__ import annotations

import msgspec
import pytest

from services.admission.policies.pausing import Pausing, Program, Status
from services.admission.policies.thunderagent_dynamo import DynamoParameters, DynamoThunderAgent
from services.admission.policies.thunderagent_paper import PaperThunderAgent
from services.admission.scheduling.interface import (
    Actions,
    Admission,
    Fleet,
    ProgramFacts,
    Refusal,
    TurnFacts,
    TurnUsage,
    WorkerFacts,
)


class Bench:
    """A policy, its seats, and turns by number."""

    def __init__(self, policy: Pausing, *capacities: int) -> None:
        self.policy = policy
        policy.begin(Fleet(tuple(WorkerFacts(size, 16) for size in capacities), lambda turn: None))
        self.turns = 0

    def ready(self, program: str, tokens: int, now: float = 0.0) -> tuple[int, Actions]:
        self.turns += 1
        self.policy.program_arrives(now, ProgramFacts(program, "", None))
        return self.turns, self.policy.turn_ready(now, TurnFacts(self.turns, program, 0, tokens))

    def finish(self, turn: int, program: str, tokens: int, now: float = 0.0, *, final: bool = False) -> Actions:
        usage = TurnUsage(turn, program, 0, tokens, 0, 0, None if final else "tool", final)
        return self.policy.turn_finished(now, usage)

    def put(
        self, name: str, tokens: int, status: Status, *, seat: int | None = 0, paused: bool = False, step: int = 2
    ) -> Program:
        """A program in a state, however it came to it."""
        program = self.policy._add(name)
        program.tokens, program.status, program.step, program.seat = tokens, status, step, seat
        if paused:
            self.policy._pause(program)
        self.policy._recount(program)
        return program

    @property
    def active(self) -> set[str]:
        return {program.name for program in self.policy.programs.values() if not program.paused}

    @property
    def marked(self) -> set[str]:
        return {program.name for program in self.policy.programs.values() if program.marked}


def dynamo(*capacities: int) -> Bench:
    return Bench(DynamoThunderAgent(), *capacities)


def seats(actions: Actions) -> list[tuple[int, int]]:
    return [(action.turn, action.seat) for action in actions if isinstance(action, Admission)]


def test_p1_pauses_acting_programs_smallest_first_down_to_the_target() -> None:
    """P1 (spec thunderagent-and-hints §8.2): used 10,400 of 10,000; 1,000 and 2,000 pause, 7,200 stay, none marked."""
    bench = dynamo(10_000)
    for tokens in (1000, 2000, 3000):
        bench.put(f"a{tokens}", tokens, "acting")
    bench.put("r4000", 4000, "reasoning")
    assert bench.policy.seat_used(0) == 10_400
    bench.policy.tick(0.0)
    assert list(bench.policy.paused) == ["a1000", "a2000"]
    assert bench.policy.seat_used(0) == 7200
    assert bench.marked == set()


def test_p2_the_threshold_itself_is_not_above_it() -> None:
    """P2: used exactly 9,500 of 10,000: nothing is paused; nor demoted (§4.9, 11)."""
    bench = dynamo(10_000)
    program = bench.put("a", 9400, "acting")
    bench.policy.tick(0.0)
    assert bench.active == {"a"}
    assert program.soft_demoted_until == 0.0


def test_s1_demotes_from_the_soft_threshold_on() -> None:
    """S1: used exactly 8,000: soft-demoted for 1.5 intervals, and the next decision's jump is -2.0 s, which the
    router's queue takes for none (§4.9, 2); a resumed program's boost is lost to it."""
    policy = DynamoThunderAgent()
    bench = Bench(policy, 10_000)
    program = bench.put("a", 7900, "acting")
    policy.tick(0.0)
    assert policy.priority_jump(7.0, program, was_paused=False) == -2.0
    assert policy.priority_jump(7.0, program, was_paused=True) == -1.0
    assert policy.priority_jump(7.5, program, was_paused=False) == 0.0
    _, actions = bench.ready("a", 7900, 5.0)
    assert actions == [Admission(1, 0, 5000)]


def test_m1_marks_every_reasoning_program_and_never_takes_it_back() -> None:
    """M1: four of 300 on 1,000 (used 1,600): all four are marked; with a hundred times the capacity they still are, and
    the first completion pauses."""
    bench = dynamo(1000)
    turns = []
    for name in "abcd":
        bench.put(name, 300, "acting")
        turns.append(bench.ready(name, 300)[0])
    assert bench.policy.seat_used(0) == 1600
    bench.policy.tick(0.0)
    assert bench.marked == set("abcd")
    bench.policy.worker_changed(1.0, 0, WorkerFacts(100_000, 16))
    bench.policy.tick(5.0)
    assert bench.marked == set("abcd")
    bench.finish(turns[0], "a", 300, 6.0)
    assert list(bench.policy.paused) == ["a"]
    assert bench.marked == set("bcd")


def test_r1_resumes_largest_first_and_never_what_exceeds_the_ceiling() -> None:
    """R1: two idle seats of 10,000; 7,000 to the first, 4,000, 2,000 and 1,000 to the second, 9,000 stays."""
    bench = dynamo(10_000, 10_000)
    for tokens in (1000, 2000, 4000, 7000, 9000):
        bench.put(str(tokens), tokens, "acting", seat=None, paused=True)
    for tick in range(3):
        bench.policy.tick(5.0 * tick)
    places = {name: program.seat for name, program in bench.policy.programs.items() if not program.paused}
    assert places == {"7000": 0, "4000": 1, "2000": 1, "1000": 1}
    assert list(bench.policy.paused) == ["9000"]


def test_r2_waiting_continuations_before_new_ones_before_idle_ones() -> None:
    """R2: ceiling 4,250; a continuation of 3,000 and a new one of 1,000 resume (4,200), an acting one of 500 stays."""
    bench = dynamo(5000)
    bench.put("acting", 500, "acting", seat=None, paused=True)
    bench.put("new", 1000, "reasoning", seat=None, paused=True, step=1)
    bench.put("continues", 3000, "reasoning", seat=None, paused=True, step=4)
    bench.policy.tick(0.0)
    assert bench.active == {"new", "continues"}
    assert bench.policy.seat_used(0) == 4200


def test_a1_admission_looks_at_all_of_the_capacity() -> None:
    """A1: a new program of 900 on 1,000 is admitted, at a use of 1.0; no threshold counts (§4.5)."""
    bench = dynamo(1000)
    turn, actions = bench.ready("a", 900)
    assert seats(actions) == [(turn, 0)]
    assert bench.policy.seat_used(0) == 1000


def test_a2_and_f1_one_that_never_fits_blocks_all_new_ones_until_the_timeout() -> None:
    """A2: 5,000 on 1,000 waits and is forced after 1,800 s. F1: meanwhile a new program of 10 tokens waits too, and
    between ticks nothing but its own timeout releases it."""
    bench = dynamo(1000)
    large, actions = bench.ready("large", 5000, 0.0)
    assert actions == []
    small, actions = bench.ready("small", 10, 100.0)
    assert actions == []
    policy = bench.policy
    assert isinstance(policy, DynamoThunderAgent)
    assert list(policy._force(1799.0)) == []
    assert list(policy._force(1800.0)) == [Admission(large, 0, 1799_000)]
    assert policy.counters.forced_resumes == 1
    assert list(policy._force(1899.0)) == []
    assert seats(list(policy._force(1900.0))) == [(small, 0)]


def test_w1_a_paused_program_waits_for_the_tick_of_an_idle_cluster() -> None:
    """W1: paused, nothing else runs: it waits for the next tick, and then has the boost of 1 s."""
    policy = DynamoThunderAgent(DynamoParameters(scheduler_interval_seconds=0.3))
    bench = Bench(policy, 10_000)
    bench.put("a", 500, "acting", seat=None, paused=True)
    turn, actions = bench.ready("a", 500, 10.0)
    assert actions == []
    assert policy.tick_s == 0.3
    assert policy.tick(10.3) == [Admission(turn, 0, 9300)]


def test_c1_the_first_of_two_concurrent_turns_to_end_flips_the_program() -> None:
    """C1: it acts, with that turn's own tokens, while the second is still in flight."""
    bench = dynamo(10_000)
    first, _ = bench.ready("a", 500)
    second, actions = bench.ready("a", 700)
    assert seats(actions) == [(second, 0)]
    bench.finish(first, "a", 550, 1.0)
    program = bench.policy.programs["a"]
    assert (program.status, program.tokens) == ("acting", 550)


def test_k1_a_place_is_left_only_when_its_worker_is_known_to_be_gone() -> None:
    """K1: kept without a capacity card, and while no worker is known at all (there the turn is refused: it has nowhere
    to go); moved once others live and it does not, past the fairness gate."""
    bench = dynamo(10_000, 10_000)
    first, _ = bench.ready("a", 500)
    bench.finish(first, "a", 500)
    program = bench.policy.programs["a"]
    bench.policy.worker_changed(1.0, 0, WorkerFacts(0, 16))
    turn, actions = bench.ready("a", 500, 1.0)
    assert seats(actions) == [(turn, 0)]
    bench.finish(turn, "a", 500, 1.0)
    for seat in (0, 1):
        bench.policy.worker_changed(2.0, seat, None)
    turn, actions = bench.ready("a", 500, 2.0)
    assert actions == (Refusal(turn, "no_seat"),)
    assert program.seat == 0
    bench.policy.worker_changed(3.0, 1, WorkerFacts(10_000, 16))
    bench.put("waits", 50_000, "reasoning", seat=None, paused=True)
    turn, actions = bench.ready("a", 500, 3.0)
    assert seats(actions) == [(turn, 1)]
    assert program.seat == 1


def test_k2_cancelling_a_queued_turn_restores_the_paused_program() -> None:
    """K2: step, tokens (110, not the estimate of 500), acting since; it stays paused, and the next turn waits."""
    bench = dynamo(1000)
    program = bench.put("a", 110, "acting", seat=None, paused=True, step=3)
    program.acting_since = 7.0
    turn, _ = bench.ready("a", 500, 9.0)
    assert (program.status, program.tokens, program.step) == ("reasoning", 500, 4)
    assert bench.policy.turn_aborted(10.0, turn) == []
    assert (program.status, program.tokens, program.step, program.acting_since) == ("acting", 110, 3, 7.0)
    assert list(bench.policy.paused) == ["a"]
    assert bench.ready("a", 500, 11.0)[1] == []


def test_k3_the_second_of_two_queued_turns_starts_the_program_anew() -> None:
    """K3: the first is cancelled: a fresh program of step 1 waits; both are cancelled: nothing is left of it."""
    bench = dynamo(1000)
    policy = bench.policy
    assert isinstance(policy, DynamoThunderAgent)
    first, _ = bench.ready("a", 5000)
    second, _ = bench.ready("a", 6000)
    before = policy.programs["a"]
    policy.turn_aborted(1.0, first)
    after = policy.programs["a"]
    assert after is not before
    assert (after.step, after.tokens) == (1, 6000)
    policy.turn_aborted(2.0, second)
    assert (policy.programs, policy.paused, policy._waiting, policy._gates) == ({}, {}, {}, {})


def test_k3_a_turn_behind_the_gate_is_cancelled_alone() -> None:
    """The one that waits before it goes on waiting."""
    bench = dynamo(1000)
    policy = bench.policy
    assert isinstance(policy, DynamoThunderAgent)
    bench.ready("a", 5000)
    second, _ = bench.ready("a", 6000)
    policy.turn_aborted(1.0, second)
    assert policy.programs["a"].tokens == 5000
    assert (list(policy._waiting), policy._gates) == (["a"], {})


def test_k4_cancelling_twice_rolls_back_once() -> None:
    """K4: a second cancellation while the first is rolled back changes nothing more."""
    bench = dynamo(1000)
    turn, _ = bench.ready("a", 5000)
    assert bench.policy.turn_aborted(1.0, turn) == []
    assert bench.policy.turn_aborted(1.0, turn) == ()
    assert bench.policy.counters.cancelled == 1
    assert bench.policy.programs == {}


def test_an_existing_program_is_never_parked() -> None:
    """§4.5, 7: without room it is sent without a place; the engine that answers becomes it."""
    bench = dynamo(1000, 1000)
    program = bench.put("a", 500, "acting", seat=1)
    bench.policy.worker_changed(1.0, 1, None)
    turn, actions = bench.ready("a", 5000, 2.0)
    assert seats(actions) == [(turn, 0)]
    assert (program.seat, bench.policy.counters.unpinned_turns) == (None, 1)
    bench.policy.first_token(3.0, turn)
    assert program.seat == 0


def test_a_closed_program_sends_what_waits() -> None:
    """§4.7: released without an account; use returns to nothing."""
    bench = dynamo(1000)
    turn, _ = bench.ready("a", 5000)
    assert seats(bench.policy.program_closed(1.0, "a")) == [(turn, 0)]
    assert bench.policy.programs == bench.policy.paused == {}
    assert bench.finish(turn, "a", 5000, 2.0) == ()
    assert bench.policy.seat_used(0) == 0


def test_the_papers_code_pauses_and_marks_all() -> None:
    """Vector of scheduling §2.4: 1,700 of 1,000; 100 and 300 pause, and both 400 and 500 are marked (400 would do)."""
    bench = Bench(PaperThunderAgent(), 1000)
    for tokens, status in ((100, "acting"), (300, "acting"), (400, "reasoning"), (500, "reasoning")):
        bench.put(str(tokens), tokens, "acting" if status == "acting" else "reasoning")
    assert bench.policy.seat_used(0) == 1700
    bench.policy.tick(0.0)
    assert list(bench.policy.paused) == ["100", "300"]
    assert bench.marked == {"400", "500"}


def test_the_papers_code_places_best_fit_decreasing() -> None:
    """Vector of scheduling §2.4: rooms 1,000 and 700; 600 to the first, 500 to the second, the new 300 nowhere."""
    bench = Bench(PaperThunderAgent(), 1000, 700)
    bench.put("600", 600, "reasoning", seat=None, paused=True)
    bench.put("500", 500, "reasoning", seat=None, paused=True)
    bench.put("300", 300, "reasoning", seat=None, paused=True, step=1)
    bench.policy.tick(0.0)
    assert {name: program.seat for name, program in bench.policy.programs.items()} == {"600": 0, "500": 1, "300": None}


def test_the_papers_code_forwards_a_returning_turn_without_a_check() -> None:
    """§2.3: capacity is looked at for new programs and at ticks only; a queued one stops all new ones."""
    bench = Bench(PaperThunderAgent(), 1000)
    first, _ = bench.ready("a", 500)
    bench.finish(first, "a", 500)
    turn, actions = bench.ready("a", 5000)
    assert seats(actions) == [(turn, 0)]
    assert bench.ready("b", 10)[1] == ()
    assert bench.ready("c", 10)[1] == ()


def test_the_papers_code_keeps_an_aborted_turn_reasoning() -> None:
    """§2.8, 9: the program counts in full until somebody releases it."""
    bench = Bench(PaperThunderAgent(), 1000)
    turn, _ = bench.ready("a", 500)
    bench.policy.turn_aborted(1.0, turn)
    assert bench.policy.programs["a"].status == "reasoning"
    bench.policy.program_closed(2.0, "a")
    assert bench.policy.seat_used(0) == 0


def test_use_is_what_a_full_count_gives() -> None:
    """The counters kept incrementally agree with a sum over all programs, after a history of everything."""
    bench = dynamo(3000, 2000)
    policy = bench.policy
    open_turns: list[tuple[int, str]] = []
    for step in range(400):
        name = f"p{step * 7 % 23}"
        turn, _ = bench.ready(name, 100 + step * 37 % 900, float(step))
        open_turns.append((turn, name))
        if step % 3:
            ended, whose = open_turns.pop(step * 5 % len(open_turns))
            if step % 11 == 0:
                policy.turn_aborted(float(step), ended)
            else:
                bench.finish(ended, whose, 150 + step * 31 % 900, float(step), final=step % 13 == 0)
        if step % 5 == 0:
            policy.tick(float(step))
        for seat in (0, 1):
            placed = [each for each in policy.programs.values() if each.seat == seat and not each.paused]
            assert policy.seat_used(seat) == sum(policy._charge(each) for each in placed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pause_threshold": 1.5},
        {"pause_target": 0.99},
        {"resume_hysteresis": 0.96},
        {"resume_timeout_seconds": 0.0},
        {"buffer_per_program": -1},
        {"pause_treshold": 0.9},
    ],
)
def test_parameters_are_checked(wrong: dict[str, object]) -> None:
    """Ranges of §4.2; unknown keys are refused."""
    with pytest.raises((ValueError, msgspec.ValidationError)):
        msgspec.convert(wrong, DynamoParameters)

"""What a pool learns from the events of its programs, and what a restart keeps of it (spec policy §4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.admission.estimators.class_key import ClassKey, class_key
from services.admission.estimators.errors import BadStateError
from services.admission.estimators.learned_pool import Attained, LearnedPool, LeaseStanding, Prediction
from services.admission.estimators.learned_state import (
    ClassState,
    LearnedState,
    decode,
    encode,
    encode_within,
    from_state,
    to_state,
)
from services.admission.estimators.order_correlation import OrderCorrelationState
from services.admission.estimators.queueing import QueueingDelayState
from services.admission.estimators.residual import ResidualState
from services.admission.estimators.tool_times import ToolState, ToolTimes, ToolTimesState
from services.admission.estimators.work import WorkCost
from services.admission.pools import Pool
from services.admission.remembered import Remembered, Stored

UNIT = WorkCost(per_token=1, per_pair=0, per_context_token=0, floor=0)
"""A new token is a second of work: totals are easy to see."""

CODER = class_key(agent_type="coder", is_sub_agent=False, model="m")
SCOUT = class_key(agent_type="scout", is_sub_agent=True, model="m")


def run(pool: LearnedPool, program: str, key: ClassKey, *prompts: int) -> None:
    """A whole program: one turn per prompt, without output."""
    for prompt in prompts:
        pool.turn_finished(program, key, prompt_tokens=prompt, output_tokens=0)
    pool.program_finished(program)


def assert_prediction(found: Prediction | None, value: float, source: str) -> None:
    assert found is not None
    assert found.source == source
    assert found.value == pytest.approx(value)


def test_a_program_attains_work_and_context() -> None:
    """Each turn adds its new tokens and its answer; the answer is part of the next turn's known context."""
    pool = LearnedPool(work_cost=UNIT)
    assert pool.turn_finished("p", CODER, prompt_tokens=100, output_tokens=20) == Attained(120, 120, 1)
    assert pool.turn_finished("p", CODER, prompt_tokens=150, output_tokens=10) == Attained(160, 160, 2)
    assert (pool.attained("p"), pool.attained("q"), len(pool)) == (Attained(160, 160, 2), None, 1)
    pool.program_finished("p")
    assert (pool.attained("p"), len(pool)) == (None, 0)


def test_a_class_answers_once_it_knows_enough_and_the_pool_until_then() -> None:
    """Spec policy §4: context from 5 completions on, work from 20; else pooled; else no prediction."""
    pool = LearnedPool(work_cost=UNIT)
    assert (pool.residual_work(CODER), pool.residual_context(CODER)) == (None, None)
    for at in range(4):
        run(pool, f"c{at}", CODER, 100)
    run(pool, "s", SCOUT, 600)
    assert_prediction(pool.residual_context(CODER), 200, "pooled")
    assert pool.residual_work(CODER) is None
    run(pool, "c4", CODER, 100)
    assert_prediction(pool.residual_context(CODER), 100, "class")
    assert_prediction(pool.residual_context(SCOUT), 200, "pooled")
    for at in range(15):
        run(pool, f"c{5 + at}", CODER, 100)
    assert_prediction(pool.residual_work(CODER), 100, "class")
    assert_prediction(pool.residual_work(SCOUT), 125, "pooled")
    never_seen = class_key(agent_type="new", is_sub_agent=False, model="m")
    assert pool.residual_work(never_seen) == pool.residual_work(SCOUT)


def test_final_contexts_of_the_spec_by_events() -> None:
    """Spec policy §4, vector 5, through whole programs; then the class's past is not what another class is charged."""
    pool = LearnedPool()
    assert pool.final_context(CODER, 0, 400_000) == 50_000
    assert pool.final_context(CODER, 60_000, 400_000) == 62_000
    for at, final in enumerate((20_000, 40_000, 60_000, 80_000) * 5):
        run(pool, f"p{at}", CODER, 2000, final)
    charged = {c: pool.final_context(CODER, c, 412_000) for c in (0, 30_000, 50_000, 70_000, 90_000)}
    assert charged == pytest.approx({0: 50_000, 30_000: 60_000, 50_000: 70_000, 70_000: 80_000, 90_000: 180_000})


def test_a_compacted_program_counts_by_its_largest_context() -> None:
    """Memory is needed for the largest; and a context that shrank is no growth."""
    pool = LearnedPool()
    for at in range(5):
        run(pool, f"p{at}", CODER, 50_000, 90_000, 10_000)
    assert pool.final_context(CODER, 0, 412_000) == pytest.approx(90_000)
    assert pool.growth(CODER) > 2000


def test_growth_and_outputs_of_a_class_need_twenty_turns() -> None:
    """Until then the pool's speak: its prior first."""
    pool = LearnedPool()
    assert (pool.growth(CODER), pool.output_p90(CODER)) == (2000, 250)
    for turn in range(30):
        pool.turn_finished("p", CODER, prompt_tokens=1000 * turn, output_tokens=40)
    for turn in range(10):
        pool.turn_finished("q", SCOUT, prompt_tokens=10 * turn, output_tokens=10)
    assert pool.output_p90(CODER) == 40
    assert pool.growth(SCOUT) == pool.pooled.growth.mean != pool.growth(CODER)
    assert 1000 < pool.growth(CODER) < 2000


def test_a_lease_stands_as_in_the_vector_of_the_spec() -> None:
    """Spec policy §4, vector 6, from the tool's returns on: kept, revocable from the 2 s mark, kept again near 30 s."""
    pool = LearnedPool(tools=ToolTimes(threshold=99))
    for seconds in [0.1] * 50 + [0.5] * 30 + [2.0] * 15 + [30.0] * 5:
        pool.tool_returned("bash", seconds)
    floor = 1 / 412_000
    standing = [pool.lease_standing("bash", elapsed, 40_000, floor) for elapsed in (0, 1, 2.5, 5, 25)]
    assert [found.index for found in standing] == pytest.approx(
        [2.34e-4, 3.51e-5, 1.704e-6, 1.874e-6, 9.37e-6], rel=0.01
    )
    assert [found.worth_keeping for found in standing] == [True, True, False, False, True]
    assert [found.until for found in standing] == pytest.approx([2, 2, 10.7, 10.7, 30], abs=0.1)
    assert pool.lease_standing("bash", 31, 40_000, floor) == LeaseStanding(0, False, math.inf)
    assert pool.lease_standing("bash", 1, 40_000, floor, 40_000) == LeaseStanding(0, False, math.inf)


def test_a_lease_spares_the_reload_and_the_queue() -> None:
    """Spec scheduling §5.2: B = R + max(0, eta)*T, with what survives taken off."""
    pool = LearnedPool()
    pool.unleased_return(4.0)
    assert pool.lease_benefit(40_000) == pytest.approx(1.872 + 4)
    assert pool.lease_benefit(40_000, 40_000) == 4


def test_programs_that_end_otherwise_are_no_completions() -> None:
    """Abandoned ones stay censored, those seen from the middle or without a turn are forgotten, ends count once."""
    pool = LearnedPool(work_cost=UNIT)
    for at in range(20):
        run(pool, f"p{at}", CODER, 100)
    pool.turn_finished("lost", CODER, prompt_tokens=300, output_tokens=0)
    pool.program_abandoned("lost")
    pool.program_started("late", CODER, from_start=False)
    run(pool, "late", CODER, 5000)
    pool.program_started("none", CODER)
    pool.program_finished("none")
    pool.program_finished("none")
    pool.program_abandoned("p3")
    pool.pooled.work.refresh()
    assert (pool.pooled.work.completions, pool.pooled.work.in_flight, len(pool.order_correlation)) == (20, 0, 20)
    assert pool.pooled.work.mean_residual(0) == pytest.approx((20 * 100 + 200) / 21)


def test_who_answers_is_one_sample_its_latest() -> None:
    """Whether it is over nobody says. A chat of a hundred questions weighs as much as one of one."""
    pool = LearnedPool(work_cost=UNIT)
    for at in range(100):
        pool.program_returned("chat")
        pool.turn_finished("chat", CODER, prompt_tokens=100 + at, output_tokens=0)
        pool.program_answered("chat")
        pool.program_answered("chat")
        assert (pool.pooled.work.completions, pool.pooled.work.in_flight, len(pool)) == (1, 0, 1)
    assert to_state(pool).classes[0].context.completed == (199,)
    pool.program_returned("chat")
    assert (pool.pooled.context.completions, pool.pooled.context.in_flight) == (1, 1)
    pool.turn_finished("chat", SCOUT, prompt_tokens=500, output_tokens=0)
    pool.program_answered("chat")
    assert [each.context.completed for each in to_state(pool).classes] == [(), (500,)]
    pool.program_finished("chat")
    assert [each.context.completed for each in to_state(pool).classes] == [(), (500,)]
    assert (pool.pooled.work.completions, pool.pooled.work.in_flight, len(pool)) == (1, 0, 0)
    assert to_state(pool).order_correlation == OrderCorrelationState(turns=(101,))


@pytest.mark.parametrize("goes_on", [True, False])
def test_who_answered_and_is_given_up(goes_on: bool) -> None:
    """Without another turn it has finished, and was learned already. With one that called a tool, its last answer was
    no end, and its totals are only known to be no less."""
    pool = LearnedPool(work_cost=UNIT)
    pool.turn_finished("p", CODER, prompt_tokens=100, output_tokens=0)
    pool.program_answered("p")
    if goes_on:
        pool.turn_finished("p", CODER, prompt_tokens=300, output_tokens=0)
    pool.program_abandoned("p")
    context = pool.pooled.context.to_state()
    assert (context.completed, context.abandoned) == (((), ((0, 300),)) if goes_on else ((100,), ()))
    assert (pool.pooled.context.in_flight, len(pool.order_correlation)) == (0, 0 if goes_on else 1)


def test_an_answer_of_a_program_whose_beginning_is_not_known_is_no_sample() -> None:
    pool = LearnedPool()
    pool.program_answered("nobody")
    pool.program_started("late", CODER, from_start=False)
    pool.program_answered("late")
    pool.turn_finished("late", CODER, prompt_tokens=100, output_tokens=0)
    pool.program_answered("late")
    pool.program_abandoned("late")
    assert (pool.pooled.context.completions, pool.pooled.context.in_flight) == (0, 0)


def test_usage_that_makes_no_sense_is_counted_and_changes_nothing() -> None:
    """An engine's wrong numbers end no decision and spoil no estimate."""
    pool = LearnedPool()
    pool.turn_finished("p", CODER, prompt_tokens=100, output_tokens=5)
    before = pool.attained("p")
    assert pool.turn_finished("p", CODER, prompt_tokens=-1, output_tokens=5) is None
    assert pool.turn_finished("p", CODER, prompt_tokens=10**30, output_tokens=5) is None
    assert pool.turn_finished("q", CODER, prompt_tokens=1 << 49, output_tokens=1 << 40) is None
    pool.tool_returned("bash", math.nan)
    pool.unleased_return(-3.0)
    assert (pool.attained("p"), pool.attained("q"), len(pool)) == (before, None, 1)
    assert pool.refused == {"negative": 2, "too_large": 2, "not_a_number": 1}


def test_invented_classes_are_bounded_and_running_programs_find_back() -> None:
    """A class that was forgotten while its program ran is known again when the program goes on or ends."""
    pool = LearnedPool(work_cost=UNIT, max_classes=2)
    pool.turn_finished("p", CODER, prompt_tokens=100, output_tokens=0)
    for at in range(100):
        label = class_key(agent_type=f"x{at}", is_sub_agent=False, model="m")
        pool.turn_finished(f"x{at}", label, prompt_tokens=10, output_tokens=0)
        assert len(pool.classes) <= 2
    assert pool.classes.peek(CODER) is None
    pool.turn_finished("p", CODER, prompt_tokens=150, output_tokens=0)
    again = pool.classes.peek(CODER)
    assert again is not None
    assert again.work.in_flight == 1
    pool.turn_finished("y", SCOUT, prompt_tokens=1, output_tokens=0)
    pool.turn_finished("x0", SCOUT, prompt_tokens=1, output_tokens=0)
    pool.turn_finished("x1", SCOUT, prompt_tokens=1, output_tokens=0)
    pool.program_finished("p")
    ended = pool.classes.peek(CODER)
    assert ended is not None
    assert (ended.work.completions, ended.work.in_flight) == (1, 0)


def test_a_full_table_drops_its_oldest_program() -> None:
    """Ends that never came must not grow for ever."""
    pool = LearnedPool(max_programs=3)
    for at in range(10):
        pool.turn_finished(at, CODER, prompt_tokens=10, output_tokens=0)
    assert (len(pool), pool.programs_dropped, pool.pooled.work.in_flight) == (3, 7, 3)
    assert [pool.attained(at) is not None for at in (6, 7)] == [False, True]


@dataclass
class Event:
    what: int
    program: int
    label: int
    tokens: int


EVENTS = st.lists(
    st.builds(Event, st.integers(0, 9), st.integers(0, 7), st.integers(0, 4), st.integers(-5, 500)), max_size=120
)


@given(EVENTS)
def test_any_history_keeps_its_books(events: list[Event]) -> None:
    """Duplicates, ends without start, labels that change, classes that are forgotten, answers: whoever runs is censored
    exactly once in the pool, at most once in the classes; when all ended nobody is left."""
    pool = LearnedPool(work_cost=UNIT, max_classes=3, max_programs=5)
    whole: dict[int, bool] = {}
    answered: set[int] = set()
    for event in events:
        key = class_key(agent_type=f"a{event.label}", is_sub_agent=False, model="m")
        if event.what == 0:
            pool.program_finished(event.program)
        elif event.what == 1:
            pool.program_abandoned(event.program)
        elif event.what == 3:
            pool.program_answered(event.program)
            had = pool.attained(event.program)
            if had is not None and had.turns and whole[event.program]:
                answered.add(event.program)
        elif event.what == 4:
            pool.program_returned(event.program)
            answered.discard(event.program)
        elif event.what == 2:
            if pool.attained(event.program) is None:
                whole[event.program] = bool(event.tokens % 2)
            pool.program_started(event.program, key, from_start=bool(event.tokens % 2))
        else:
            if pool.attained(event.program) is None:
                whole[event.program] = True
            if pool.turn_finished(event.program, key, prompt_tokens=event.tokens, output_tokens=1) is not None:
                answered.discard(event.program)
        answered = {program for program in answered if pool.attained(program) is not None}
        counted = sum(whole[each] for each in range(8) if pool.attained(each) is not None and each not in answered)
        assert pool.pooled.work.in_flight == pool.pooled.context.in_flight == counted
        assert sum(estimators.work.in_flight for _, estimators in pool.classes.items()) <= counted
        assert (len(pool) <= 5, len(pool.classes) <= 3) == (True, True)
    for program in range(8):
        pool.program_finished(program)
    assert pool.pooled.work.in_flight == len(pool) == 0
    assert [estimators.context.in_flight for _, estimators in pool.classes.items()] == [0] * len(pool.classes)


def learned_pool() -> LearnedPool:
    pool = LearnedPool()
    for at in range(40):
        run(pool, f"p{at}", (CODER, SCOUT)[at % 2], 1000, 3000 + 100 * at, 9000 + 200 * at)
        pool.tool_returned(("bash", "user_turn")[at % 2], at / 7)
        pool.unleased_return(at / 3)
    pool.turn_finished("lost", CODER, prompt_tokens=30_000, output_tokens=100)
    pool.program_abandoned("lost")
    return pool


def test_a_restart_does_not_forget() -> None:
    """All estimates are the same after bytes in a store; only programs that ran are gone."""
    pool = learned_pool()
    pool.turn_finished("running", SCOUT, prompt_tokens=10, output_tokens=1)
    state, unread = decode(encode(to_state(pool)))
    again = LearnedPool()
    assert (unread, from_state(state, again)) == ([], [])
    assert to_state(again) == to_state(pool)
    assert again.output_p90(CODER) == pool.output_p90(CODER)
    assert again.growth(SCOUT) == pool.growth(SCOUT)
    assert again.order_correlation.value == pool.order_correlation.value
    assert again.queueing_delay.mean == pool.queueing_delay.mean
    pool.classes.use(CODER).work.refresh()
    assert again.residual_work(CODER, 0.1) == pool.residual_work(CODER, 0.1) is not None
    assert (len(again), again.pooled.work.in_flight) == (0, 0)


def test_a_damaged_part_costs_that_part_alone() -> None:
    """A part of another version, of wrong numbers, of the wrong type: named and left out, all others are used."""
    state = to_state(learned_pool())
    broken = msgspec.structs.replace(
        state,
        classes=(*state.classes, ClassState(agent_type="bad", work=ResidualState(completed=(math.nan,)))),
        tools=ToolTimesState(version=3),
        queueing_delay=QueueingDelayState(delays=(-1.0,)),
    )
    raw = msgspec.msgpack.decode(encode(broken))
    raw["order_correlation"]["turns"] = "seven"
    raw["classes"].append({"role": "neither"})
    raw["added_later"] = 1
    read, unread = decode(msgspec.msgpack.encode(raw))
    pool = LearnedPool()
    refused = from_state(read, pool)
    assert [(error.part, error.reason) for error in unread] == [
        ("class", "undecodable"),
        ("order correlation", "undecodable"),
    ]
    assert [(error.part, error.reason) for error in refused] == [
        ("work", "bad_value"),
        ("tool times", "foreign_version"),
        ("queueing delay", "bad_value"),
    ]
    assert to_state(pool) == msgspec.structs.replace(
        state,
        tools=ToolTimesState(),
        queueing_delay=QueueingDelayState(),
        order_correlation=OrderCorrelationState(),
    )


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "undecodable"),
        (b"\xc1", "undecodable"),
        (b"\x91" * 100_000, "undecodable"),
        (msgspec.msgpack.encode([1, 2]), "undecodable"),
        (msgspec.msgpack.encode({"version": "1"}), "undecodable"),
        (msgspec.msgpack.encode({"version": 1, "classes": [1] * 5000}), "undecodable"),
        (msgspec.msgpack.encode({"version": 2}), "foreign_version"),
    ],
)
def test_a_foreign_payload_is_refused_by_name(payload: bytes, reason: str) -> None:
    """The pool then starts as if nothing had been stored."""
    with pytest.raises(BadStateError) as caught:
        decode(payload)
    assert caught.value.reason == reason
    memory, learned = taken_over(payload)
    assert (memory.refused, len(learned.classes), learned.samples) == ({reason: 1}, 0, 0)


def taken_over(payload: bytes) -> tuple[Remembered, LearnedPool]:
    """The pool ``m``, begun with these bytes stored."""
    memory = Remembered()
    memory.read({"m": payload})
    learned, refused = memory.begun("m")
    assert sum(memory.refused.values()) == len(refused)
    return memory, learned


@given(st.binary(max_size=200), st.integers(0, 3000), st.integers(0, 20))
def test_torn_and_overwritten_states_never_raise_anything_else(patch: bytes, at: int, cut: int) -> None:
    """Any damage: parts are refused or the whole is, and what was taken over can be asked and written again."""
    payload = bytearray(STORED)
    payload[at : at + len(patch)] = patch
    _, pool = taken_over(bytes(payload[: len(payload) - cut]))
    run(pool, "p", CODER, 100, 200)
    pool.tool_returned("bash", 1.0)
    assert pool.final_context(CODER, 0, 400_000) >= 0
    stored = encode_within(pool, "m", 1 << 20)
    assert stored is not None
    again, _ = taken_over(stored)
    assert not again.refused


STORED = encode(to_state(learned_pool(), "m"))


def test_what_is_stored_is_of_one_pool_and_has_a_bound() -> None:
    """Another pool's value is refused; of tools the latest durations are kept where there is no room for all."""
    pool = LearnedPool()
    for number in range(3000):
        pool.tool_returned("bash", float(number))
    whole, half = encode_within(pool, "m", 1 << 20), encode_within(pool, "m", 25_000)
    assert whole is not None
    assert half is not None
    assert len(half) <= 25_000 < len(whole)
    assert decode(half)[0].tools == ToolTimesState(
        tools=(ToolState(name="bash", durations=tuple(map(float, range(1976, 3000)))),),
        pooled=tuple(map(float, range(1976, 3000))),
    )
    assert encode_within(pool, "m", 100) is None
    memory = Remembered()
    memory.read({"other": whole})
    assert [error.reason for error in memory.begun("other")[1]] == ["foreign_pool"]


def test_a_pool_is_stored_when_it_has_learned_something_and_not_too_often() -> None:
    """Never before it is known what is stored; a value that was not taken comes again."""
    memory, pool = Remembered(), Pool("m", LearnedPool(), 0.0)
    pool.learned.tool_returned("bash", 1.0)

    def due(now: float) -> list[Stored]:
        return memory.due([pool], now, every_s=30.0)

    assert due(100.0) == []
    memory.read({})
    assert due(100.0) == []
    (stored,) = due(130.0)
    assert stored.key == "m"
    assert taken_over(stored.payload)[1].tools.samples == 1
    assert due(200.0) == []
    memory.unwritten("m")
    assert [each.key for each in due(200.0)] == ["m"]
    pool.learned.tool_returned("bash", 2.0)
    assert due(229.0) == []
    assert len(due(230.0)) == 1


def test_all_that_is_learned_has_a_bound_in_the_store() -> None:
    """Every window full, every class and tool there: the bytes fit a message of the bus with room to spare."""
    third = 1 / 3
    window = ResidualState(completed=(third,) * 256, abandoned=((255, third),) * 256)
    full = ClassState(agent_type="x" * 128, model="y" * 128, work=window, context=window)
    state = LearnedState(
        classes=tuple(msgspec.structs.replace(full, agent_type=f"{at:0128}") for at in range(64)),
        pooled=full,
        tools=ToolTimesState(
            tools=tuple(ToolState(name=f"{at:0128}", durations=(third,) * 256) for at in range(256)),
            pooled=(third,) * 4096,
        ),
        order_correlation=OrderCorrelationState(turns=(1 << 20,) * 256),
        queueing_delay=QueueingDelayState(delays=(third,) * 100),
    )
    pool = LearnedPool(tools=ToolTimes())
    assert from_state(state, pool) == []
    assert pool.tools.samples == 1 << 16
    assert len(encode(to_state(pool))) < 2 << 20

"""Policies that act inside the engine: their priorities, their pins, what they learn."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest

from services.admission.estimators.reload_cost import ReloadCost
from services.admission.policies.concur import Concur, ConcurParameters
from services.admission.policies.continuum import Continuum, ContinuumParameters
from services.admission.policies.engine_rules import EngineRules
from services.admission.policies.in_engine import InEngine, Running
from services.admission.policies.infercept import Infercept, InferceptParameters, discard_waste
from services.admission.policies.plas import Plas, PlasParameters
from services.admission.policies.program_fcfs import ProgramFcfs
from services.admission.policies.static_ttl import StaticTtl, StaticTtlParameters
from services.admission.scheduling.interface import (
    Actions,
    Admission,
    Fleet,
    Pin,
    Policy,
    ProgramFacts,
    Refusal,
    TurnFacts,
    TurnUsage,
    Unpin,
    WorkerFacts,
)

KV_TOKENS = 100_000


class Bench:
    """A policy and its seats; turns by number."""

    def __init__(self, policy: Policy, seats: int = 1) -> None:
        self.policy = policy
        policy.begin(Fleet((WorkerFacts(KV_TOKENS, 16),) * seats, lambda turn: None))
        self.turns = 0

    def ready(self, program: str, now: float, tokens: int = 1000, parent: str | None = None) -> tuple[int, Actions]:
        self.turns += 1
        self.policy.program_arrives(now, ProgramFacts(program, "", parent))
        return self.turns, self.policy.turn_ready(now, TurnFacts(self.turns, program, 0, tokens))

    def finish(
        self,
        turn: int,
        program: str,
        now: float,
        *,
        seat: int = 0,
        tokens: int = 1000,
        cached: int = 0,
        tool: str | None = "tool",
        final: bool = False,
    ) -> Actions:
        return self.policy.turn_finished(
            now, TurnUsage(turn, program, seat, tokens, cached, 0, None if final else tool, final)
        )

    def run(self, program: str, times: list[float], tokens: int = 1000) -> Actions:
        """Turns that begin and end at ``times``, in pairs; the answer to the last one."""
        answer: Actions = ()
        for begin, end in zip(times[::2], times[1::2], strict=True):
            turn, _ = self.ready(program, begin, tokens)
            answer = self.finish(turn, program, end, tokens=tokens)
        return answer


def priority(actions: Actions) -> int:
    [admission] = actions
    assert isinstance(admission, Admission)
    return admission.priority


def test_program_fcfs_orders_by_the_programs_arrival() -> None:
    """A later turn of the older program goes before the first one of the younger; ids start anew after the end."""
    bench = Bench(ProgramFcfs())
    turn, first = bench.ready("old", 0.0)
    _, second = bench.ready("young", 1.0)
    assert priority(first) < priority(second)
    bench.finish(turn, "old", 2.0)
    turn, again = bench.ready("old", 3.0)
    assert priority(again) == priority(first)
    bench.finish(turn, "old", 4.0, final=True)
    assert priority(bench.ready("old", 5.0)[1]) > priority(second)


@pytest.mark.parametrize("make", [ProgramFcfs, Plas, Infercept, StaticTtl, Continuum])
def test_a_program_keeps_its_seat_until_the_seat_is_gone(make: Callable[[], InEngine]) -> None:
    """Programs spread over seats, stay, and move when theirs goes; without any seat a turn is refused."""
    bench = Bench(make(), seats=2)
    first, actions = bench.ready("a", 0.0)
    assert actions[0] == Admission(first, 0, priority(actions))
    second, actions = bench.ready("b", 0.0)
    assert actions[0] == Admission(second, 1, priority(actions))
    bench.finish(second, "b", 1.0, seat=1)
    third, actions = bench.ready("b", 2.0)
    assert actions[0] == Admission(third, 1, priority(actions))
    bench.policy.worker_changed(3.0, 1, None)
    turn, actions = bench.ready("b", 4.0)
    assert actions[0] == Admission(turn, 0, priority(actions))
    bench.policy.worker_changed(5.0, 0, None)
    turn, actions = bench.ready("a", 6.0)
    assert actions == (Refusal(turn, "no_seat"),)


@pytest.mark.parametrize("make", [ProgramFcfs, Plas, Infercept, StaticTtl, Continuum, Concur])
def test_nothing_is_left_of_programs_that_ended_or_failed(make: Callable[[], InEngine | Concur]) -> None:
    """Final turns, aborts, closing twice, usage told twice, turns that nobody knows."""
    policy = make()
    bench = Bench(policy)
    for number in range(20):
        name = f"p{number}"
        turn, _ = bench.ready(name, float(number))
        policy.first_token(number + 0.1, turn)
        if number % 3 == 0:
            policy.turn_aborted(number + 0.2, turn)
        bench.finish(turn, name, number + 0.3, final=number % 2 == 0)
        bench.finish(turn, name, number + 0.3, final=number % 2 == 0)
        policy.program_closed(number + 0.5, name)
        policy.program_closed(number + 0.5, name)
    policy.turn_aborted(30.0, 999)
    policy.first_token(30.0, 999)
    assert (policy._programs, getattr(policy, "_turns", {}), getattr(policy, "_waiting", {})) == ({}, {}, {})
    assert policy._running in ({}, {0: Running()})


def test_an_oversize_turn_is_refused() -> None:
    """No seat can ever hold it (spec scheduling §5.3.15)."""
    turn, actions = Bench(Continuum()).ready("a", 0.0, tokens=KV_TOKENS + 1)
    assert actions == (Refusal(turn, "oversize"),)


def test_static_ttl_pins_for_two_seconds_but_not_for_slow_tools() -> None:
    """The preview's rule (spec scheduling §1.7): unknown tool 2.0 s; a running mean above 2.0 s: none."""
    bench = Bench(StaticTtl())
    assert bench.run("a", [0.0, 1.0]) == (Pin("a", 0, 3.0),)
    assert bench.run("a", [2.5, 4.0]) == (Pin("a", 0, 6.0),)
    assert bench.run("a", [10.0, 11.0]) == ()
    constant = Bench(StaticTtl(StaticTtlParameters(skip_slow_tools=False)))
    assert constant.run("a", [0.0, 1.0, 10.0, 11.0]) == (Pin("a", 0, 13.0),)


def test_a_turn_without_a_tool_is_not_pinned_and_the_last_one_drops_pins() -> None:
    """No tool: pin length 0 (spec scheduling §1.5); final or closed: the program's pin goes."""
    bench = Bench(StaticTtl())
    turn, _ = bench.ready("a", 0.0)
    assert bench.finish(turn, "a", 1.0, tool=None) == ()
    bench.run("a", [2.0, 3.0])
    assert bench.policy.program_closed(4.0, "a") == [Unpin("a", 0)]
    bench.run("b", [2.0, 3.0])
    assert bench.policy.program_closed(9.0, "b") == []


def test_parallel_turns_pin_when_the_last_one_ends() -> None:
    """Of two turns of one program at once the first to end changes nothing."""
    bench = Bench(StaticTtl())
    first, _ = bench.ready("a", 0.0)
    second, _ = bench.ready("a", 0.0)
    assert bench.finish(first, "a", 1.0) == ()
    assert bench.finish(second, "a", 2.0) == (Pin("a", 0, 4.0),)


def feed(policy: Continuum, durations: list[tuple[int, float]], tool: str = "tool") -> None:
    for count, seconds in durations:
        for _ in range(count):
            policy.tools.record(tool, seconds)


VECTOR = [(50, 0.1), (30, 0.5), (15, 2.0), (5, 30.0)]


def test_continuum_chooses_the_published_time_to_live() -> None:
    """Vector of scheduling §1.4: B=5 gives 0.5 s. At K=100 samples the cold start still answers, one more and the
    distribution does (comparisons are <=)."""
    policy = Continuum(ContinuumParameters(reload_cost=_constant(5.0)))
    feed(policy, VECTOR)
    assert policy.time_to_live("tool", 1000) == pytest.approx(math.log(5.0))
    feed(policy, [(1, 30.0)])
    assert policy.time_to_live("tool", 1000) == 0.5
    assert policy.time_to_live("another", 1000) == 0.5


def test_continuum_adds_queueing_by_eta() -> None:
    """B = T*eta + PR (spec scheduling §1.2): programs of 2 and 4 turns give eta 0.4545; none gives 0; fixed lengths 1.
    The cold start takes eta for 1."""
    policy = Continuum(ContinuumParameters(reload_cost=_constant(1.0), history_threshold=0))
    policy.queueing_delay.record(9.0)
    assert policy.time_to_live("tool", 1) == pytest.approx(math.log(10.0))
    policy = Continuum(ContinuumParameters(reload_cost=_constant(1.0), history_threshold=0))
    policy.queueing_delay.record(9.0)
    feed(policy, [(1, 0.9), (1, 4.6)])
    for turns in ([], [2, 4], [7, 7, 7]):
        for each in turns:
            policy.order_correlation.record(each)
        eta = max(0.0, policy.order_correlation.raw or 0.0)
        benefit = 9.0 * eta + 1.0
        best = max((0.0, 0.9, 4.6), key=lambda tau: ((tau >= 0.9) + (tau >= 4.6)) / 2 * benefit - tau)
        assert policy.time_to_live("tool", 1) == best
    assert policy.order_correlation.raw is not None
    alone = Continuum()
    for each in (2, 4):
        alone.order_correlation.record(each)
    assert alone.order_correlation.raw == pytest.approx(0.4545, abs=1e-4)


def test_continuum_measures_the_queue_of_evicted_returns_only() -> None:
    """T counts requests whose KV was evicted (spec scheduling §1.2): until the first token, less computing."""
    policy = Continuum(ContinuumParameters(reload_cost=_constant(1.0)))
    bench = Bench(policy)
    for program, cached in (("kept", 9984), ("lost", 0)):
        turn, _ = bench.ready(program, 0.0, 10_000)
        bench.finish(turn, program, 1.0, tokens=10_000)
        turn, _ = bench.ready(program, 2.0, 11_000)
        policy.first_token(8.0, turn)
        bench.finish(turn, program, 9.0, tokens=11_000, cached=cached)
    assert len(policy.queueing_delay) == 1
    assert policy.queueing_delay.mean == 5.0


def _constant(seconds: float) -> ReloadCost:
    return ReloadCost(quadratic=0.0, linear=0.0, constant=seconds)


def test_infercept_weighs_token_seconds() -> None:
    """Vector of scheduling §3: 10k context, 100 query tokens, 50k running: 18.6k token-seconds, 1.86 s of holding."""
    assert discard_waste(10_000, 100, 50_000) == pytest.approx(18_622, abs=1)
    assert discard_waste(0, 0, 50_000) == 0.0


def test_infercept_preserves_until_the_tool_returns_or_not_at_all() -> None:
    """An unknown tool is preserved; one that takes longer than computing again costs is not."""
    bench = Bench(Infercept())
    assert bench.run("a", [0.0, 1.0], 10_000) == (Pin("a", 0, math.inf),)
    assert bench.run("a", [1.1, 2.0], 10_000) == (Pin("a", 0, math.inf),)
    assert bench.run("a", [90.0, 91.0], 10_000) == ()
    elapsed = Bench(Infercept(InferceptParameters(remaining="elapsed")))
    [pin] = elapsed.run("a", [0.0, 1.0], 10_000)
    assert isinstance(pin, Pin)
    assert pin.until == pytest.approx(1.0 + discard_waste(10_000, 0, 0) / 10_000)


def test_plas_prefers_the_least_attained_service() -> None:
    """Doubling queues by attained service; a sub-agent begins with its parent's, which takes its longest over."""
    bench = Bench(Plas(PlasParameters(first_queue_s=1.0, queues=4)))
    for program, seconds, expected in (("a", 0.5, 0), ("b", 1.5, 1), ("c", 3.0, 2), ("d", 500.0, 3)):
        turn, actions = bench.ready(program, 0.0)
        assert priority(actions) == 0
        bench.policy.first_token(10.0, turn)
        bench.finish(turn, program, 10.0 + seconds, cached=1000)
        assert priority(bench.ready(program, 600.0)[1]) == expected
    child, actions = bench.ready("child", 700.0, parent="b")
    assert priority(actions) == 1
    bench.policy.first_token(700.0, child)
    bench.finish(child, "child", 703.0, cached=1000, final=True)
    assert priority(bench.ready("b", 710.0)[1]) == 3


def test_plas_promotes_who_waited_too_long() -> None:
    """(wait)/(service) >= beta goes to the first queue (spec scheduling §3)."""
    bench = Bench(Plas(PlasParameters(starvation=2.0)))
    for wait, expected in ((1.0, 2), (20.0, 0)):
        name = f"waited {wait}"
        turn, _ = bench.ready(name, 0.0)
        bench.policy.first_token(wait, turn)
        bench.finish(turn, name, wait + 3.0, cached=1000)
        assert priority(bench.ready(name, 100.0)[1]) == expected


def test_concur_grows_where_memory_is_free_and_somebody_waits() -> None:
    """Additive: one place more per interval; whole programs wait, in the order of their arrival."""
    policy = Concur(ConcurParameters(initial=1.0))
    bench = Bench(policy)
    first, actions = bench.ready("a", 0.0)
    assert actions == [Admission(first, 0)]
    second, actions = bench.ready("b", 1.0)
    assert actions == []
    third, actions = bench.ready("c", 1.0)
    assert policy.tick(5.0) == [Admission(second, 0)]
    assert bench.finish(first, "a", 6.0, final=True) == [Admission(third, 0)]
    assert policy.windows() == {0: 2.0}
    policy.tick(10.0)
    assert policy.windows() == {0: 2.0}


def test_concur_cuts_where_memory_is_full_and_hits_fall() -> None:
    """Multiplicative: halved; those that entered last leave when their next turn comes."""
    policy = Concur(ConcurParameters(initial=2.0))
    bench = Bench(policy)
    for round_, cached in ((0, 0), (1, 48_000), (2, 20_000)):
        now = 10.0 * round_
        a, _ = bench.ready("a", now, 48_000)
        b, _ = bench.ready("b", now, 48_000)
        bench.finish(a, "a", now + 1, tokens=48_000, cached=cached)
        bench.finish(b, "b", now + 1, tokens=48_000, cached=cached)
        policy.tick(now + 5.0)
    assert policy.windows() == {0: 1.0}
    assert bench.ready("b", 40.0)[1] == []
    assert [action.turn for action in bench.ready("a", 40.0)[1] if isinstance(action, Admission)] == [bench.turns]


def test_concur_lets_sub_agents_in_with_their_parent() -> None:
    """Or a window of one would wait for itself for ever."""
    bench = Bench(Concur(ConcurParameters(initial=1.0)))
    bench.ready("main", 0.0)
    turn, actions = bench.ready("sub", 1.0, parent="main")
    assert actions == [Admission(turn, 0)]


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (StaticTtlParameters, {"ttl_s": 0.0}),
        (StaticTtlParameters, {"pressure": "D"}),
        (ContinuumParameters, {"history_threshold": 5000}),
        (ContinuumParameters, {"reload_cost": {"quadratic": -1, "linear": 0}}),
        (InferceptParameters, {"saturation": 1}),
        (PlasParameters, {"queues": 0}),
        (ConcurParameters, {"decrease": 1.0}),
        (ConcurParameters, {"initial": 0.5}),
        (ConcurParameters, {"windw": 1}),
    ],
)
def test_parameters_are_checked(kind: type[msgspec.Struct], wrong: dict[str, object]) -> None:
    """Ranges and names."""
    with pytest.raises((ValueError, msgspec.ValidationError)):
        msgspec.convert(wrong, kind)


def test_rules_that_need_priorities_say_so() -> None:
    """An engine that goes by arrival has no place for pins first."""
    with pytest.raises(ValueError, match="priorities"):
        EngineRules(pinned_first=True)

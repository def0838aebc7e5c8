"""eta, T, growth, output lengths, work and class keys: each against its formula and the spec's numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import correlation, mean

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.admission.estimators.class_key import ClassKey, class_key
from services.admission.estimators.errors import BadSampleError, BadStateError, EstimatorError
from services.admission.estimators.growth import ContextGrowth, GrowthState, OutputLength, OutputLengthState
from services.admission.estimators.least_recent import LeastRecentlyUsed
from services.admission.estimators.order_correlation import OrderCorrelation, OrderCorrelationState
from services.admission.estimators.queueing import QueueingDelay, QueueingDelayState
from services.admission.estimators.windows import BLOCK, SortedMultiset, SortedWindow
from services.admission.estimators.work import H100_8B, H100_70B, WorkCost


def eta(*lengths: int, window: int = 256) -> OrderCorrelation:
    made = OrderCorrelation(window=window)
    for turns in lengths:
        made.record(turns)
    return made


@pytest.mark.parametrize(
    ("lengths", "raw"), [((2, 4), 0.4545), ((7, 7, 7), 1.0), ((), None), ((1, 1), None), ((2, 2), None)]
)
def test_eta_of_the_spec(lengths: tuple[int, ...], raw: float | None) -> None:
    """Spec scheduling §1.4: {2,4} is 0.4545 and {7,7,7} is 1; without two different pairs it is undefined."""
    assert eta(*lengths).raw == (raw if raw is None else pytest.approx(raw, abs=1e-4))


@given(st.lists(st.integers(1, 40), min_size=2, max_size=30))
def test_eta_is_minus_the_correlation_of_its_pairs(lengths: list[int]) -> None:
    """Against the definition, over the pairs k = 1..N-1 of the window."""
    pairs = [(k, n - k) for n in lengths[-20:] for k in range(1, n)]
    found = eta(*lengths, window=20).raw
    if len({k for k, _ in pairs}) < 2:
        assert found is None
    else:
        assert found == pytest.approx(-correlation([float(k) for k, _ in pairs], [float(r) for _, r in pairs]))


def test_eta_is_shrunk_to_one_and_never_negative() -> None:
    """Spec scheduling §5.4: prior 1 with the weight of 20 programs, clip at 0; the raw value stays to be seen."""
    assert eta().value == 1
    assert eta(*[2, 4] * 10).value == pytest.approx(0.5 * 0.45454545 + 0.5)
    heavy = eta(*([2] * 200 + [400] * 3))
    assert heavy.raw is not None
    assert heavy.raw < 1
    geometric = eta(*[n for n in range(1, 12) for _ in range(2 ** (11 - n) // 8)])
    assert geometric.raw is not None
    steep = eta(*([3] * 250 + [60] * 3))
    assert steep.raw is not None
    assert 0 <= steep.value <= 1
    two_modes = eta(*([2] * 3000 + [30]), window=4000)
    assert two_modes.raw is not None
    assert two_modes.raw < -0.2
    assert two_modes.value == 0


def test_eta_bounds_what_it_takes_in() -> None:
    """A program of endless turns counts as a long one; one of no sense as none."""
    endless = eta(10**15)
    assert endless.to_state().turns == (1 << 20,)
    with pytest.raises(BadSampleError):
        endless.record(-1)
    assert len(eta(*[3] * 1000)) == 256


def test_the_queueing_delay_is_a_sliding_mean() -> None:
    """Spec scheduling §1.2, §5.4: 0 at first, then the mean of the last 100."""
    delay = QueueingDelay()
    assert delay.mean == 0
    for seconds in range(150):
        delay.record(seconds)
    assert (len(delay), delay.mean) == (100, mean(range(50, 150)))
    with pytest.raises(BadSampleError):
        delay.record(math.nan)
    assert delay.mean == mean(range(50, 150))


def test_growth_is_an_exponential_mean_from_its_prior() -> None:
    """Spec policy §4: weight .05; spec scheduling §5.4: 2,000 tokens at first."""
    growth = ContextGrowth()
    assert growth.mean == 2000
    growth.record(4000)
    assert growth.mean == 2100
    growth.record(100)
    assert (growth.mean, growth.turns, growth.is_ready) == (2000, 2, False)
    with pytest.raises(BadSampleError):
        growth.record(math.inf)
    assert growth.mean == 2000


def test_output_p90_is_a_nearest_rank_after_its_prior() -> None:
    """Spec scheduling §5.2, §5.4: 250 until enough is known, then the quantile of a bounded window."""
    output = OutputLength(window=100)
    for tokens in range(1, 20):
        output.record(tokens)
    assert output.p90 == 250
    output.record(20)
    assert output.p90 == 18
    for tokens in range(500):
        output.record(tokens)
    assert (len(output), output.p90) == (100, 489)


def test_work_of_the_spec() -> None:
    """Spec policy §4: b*q + p*(n^2-m^2)/2 + out*(b + k*n + floor/8), by hand."""
    cost = WorkCost(per_token=2, per_pair=3, per_context_token=5, floor=8)
    assert cost.seconds(10, 4, 6) == 2 * 4 + 3 * (100 - 36) / 2 + 4 * (2 + 5 * 10 + 1)


@pytest.mark.parametrize(
    ("cost", "tokens", "seconds"),
    [(H100_8B, 40_000, 1.874), (H100_8B, 10_000, 0.31), (H100_70B, 40_000, 3.8), (H100_70B, 70_000, 8.1)],
)
def test_work_of_a_prefill_equals_the_calibrated_reload(cost: WorkCost, tokens: int, seconds: float) -> None:
    """Spec scheduling §4.2: PR(n) of both models."""
    assert cost.seconds(tokens, 0) == pytest.approx(seconds, rel=0.02)


def test_a_rewritten_prompt_is_all_new() -> None:
    """Compaction: a prompt shorter than the context before it shares nothing with it for sure."""
    assert H100_8B.seconds(5000, 10, 60_000) == H100_8B.seconds(5000, 10, 0)
    assert H100_8B.seconds(5000, 10, 5000) < H100_8B.seconds(5000, 10, 0)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_work_costs_are_finite_and_not_negative(value: float) -> None:
    """A wrong constant is refused with a sentence that names it."""
    with pytest.raises(ValueError, match="per_pair"):
        WorkCost(per_token=1, per_pair=value, per_context_token=1, floor=1)
    with pytest.raises(BadSampleError):
        H100_8B.seconds(-1, 5)


def test_labels_of_a_class_are_cut_and_cleaned() -> None:
    """Labels are a stranger's: any length, any characters, or none."""
    assert class_key(agent_type=None, is_sub_agent=False, model="m") == ClassKey("", "main", "m")
    assert class_key(agent_type="e" * 10**6, is_sub_agent=True, model="\udfff") == ClassKey("e" * 128, "sub", "?")


def test_the_least_recently_used_entry_makes_room() -> None:
    """Using keeps, looking does not; who leaves is told."""
    left: list[str] = []
    table: LeastRecentlyUsed[str, list[int]] = LeastRecentlyUsed(2, list, lambda key, value: left.append(key))
    table.use("a").append(1)
    table.use("b")
    table.peek("b")
    assert table.use("a") == [1]
    table.use("c")
    assert (left, [key for key, _ in table.items()], table.evictions) == (["b"], ["a", "c"], 1)
    table.put("a", [2])
    table.put("d", [])
    assert (left, table.peek("a"), table.peek("c")) == (["b", "c"], [2], None)


@given(st.lists(st.integers(0, 9)), st.integers(1, 8))
def test_a_sorted_window_holds_the_last_ones(samples: list[int], size: int) -> None:
    """In their order, and ascending."""
    window = SortedWindow(size)
    for value in samples:
        window.add(value)
    assert window.ordered() == tuple(samples[-size:])
    assert list(window.ascending) == sorted(samples[-size:])


@pytest.mark.parametrize(
    ("read", "state"),
    [
        (OrderCorrelation.from_state, OrderCorrelationState(turns=(3, 5, 8))),
        (QueueingDelay.from_state, QueueingDelayState(delays=(0.5, 2.0))),
        (ContextGrowth.from_state, GrowthState(mean=123.5, turns=30)),
        (OutputLength.from_state, OutputLengthState(tokens=(5.0, 1.0))),
    ],
)
def test_states_come_back_as_they_were_written(read: Callable[[msgspec.Struct], object], state: msgspec.Struct) -> None:
    """Through MessagePack, as a store holds them."""
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=type(state))
    assert read(stored).to_state() == state  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("read", "state", "reason"),
    [
        (OrderCorrelation.from_state, OrderCorrelationState(version=0), "foreign_version"),
        (OrderCorrelation.from_state, OrderCorrelationState(turns=(-1,)), "bad_value"),
        (OrderCorrelation.from_state, OrderCorrelationState(turns=(1 << 60,)), "bad_value"),
        (OrderCorrelation.from_state, OrderCorrelationState(turns=(1,) * 70_000), "too_large"),
        (QueueingDelay.from_state, QueueingDelayState(version=2), "foreign_version"),
        (QueueingDelay.from_state, QueueingDelayState(delays=(math.inf,)), "bad_value"),
        (ContextGrowth.from_state, GrowthState(version=2), "foreign_version"),
        (ContextGrowth.from_state, GrowthState(mean=math.nan), "bad_value"),
        (ContextGrowth.from_state, GrowthState(turns=-5), "bad_value"),
        (OutputLength.from_state, OutputLengthState(version=2), "foreign_version"),
        (OutputLength.from_state, OutputLengthState(tokens=(-1.0,)), "bad_value"),
    ],
)
def test_foreign_states_are_refused(
    read: Callable[[msgspec.Struct], object], state: msgspec.Struct, reason: str
) -> None:
    """Each with its reason."""
    with pytest.raises(BadStateError) as caught:
        read(state)
    assert caught.value.reason == reason
    assert isinstance(caught.value, EstimatorError)


def test_a_multiset_of_several_blocks_counts_as_a_sorted_list_does() -> None:
    """Equal numbers count as often as they were added; what is not there is not taken out, wherever it would be."""
    source = random.Random(5)
    values = [float(source.randrange(900)) for _ in range(5 * BLOCK)]
    kept = SortedMultiset()
    for value in values:
        kept.add(value)
    for value in values[: 3 * BLOCK]:
        kept.remove(value)
    left = sorted(values[3 * BLOCK :])
    asked = [float(value) for value in range(-1, 902, 7)]
    assert kept.counts_from(asked) == [sum(each >= value for each in left) for value in asked]
    assert len(kept) == len(left)
    for missing in (-1.0, 0.5, 1000.0):
        with pytest.raises(KeyError):
            kept.remove(missing)
    for value in left:
        kept.remove(value)
    assert kept.counts_from([0.0]) == [0]

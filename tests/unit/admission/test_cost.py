"""The cost formula against the spec's numbers (index-and-routing §4.1, §4.4, §5.4, corrections of §9)."""

from __future__ import annotations

import math

import pytest

from schemas.index import TierBlocks
from services.admission.cost import (
    CostWeights,
    Load,
    Pricing,
    Prompt,
    booked_prefill_tokens,
    joined,
    predicted_cached_tokens,
    shared_run,
)

WEIGHTS = CostWeights()


def cost(
    weights: CostWeights,
    prompt: Prompt,
    load: Load,
    *,
    blocks: TierBlocks,
    shared_blocks: int = 0,
    affinity_blocks: int = 0,
    least_prefill_tokens: int = 0,
) -> tuple[float, dict[str, float]]:
    """The cost and its terms, which say the same."""
    pricing = Pricing(weights, prompt, least_prefill_tokens)
    parts = pricing.parts(load, blocks, shared_blocks, affinity_blocks)
    total = pricing.total(load, blocks, shared_blocks, affinity_blocks)
    assert total == weights.prefill_load_scale * parts["adjusted_prefill"] + parts["decode"] + parts["requests"]
    return total, parts


@pytest.mark.parametrize(("depth", "adjusted"), [(2, 1.0), (0, 2.0)])
def test_the_worked_example_of_the_shared_pool(depth: int, adjusted: float) -> None:
    """Spec §5.4: 4 blocks, m = .5, all 4 in the pool: depth 2 leaves 4-2-1 = 1, depth 0 leaves 4-0-2 = 2."""
    _, parts = cost(
        WEIGHTS,
        Prompt(64, 16),
        Load(),
        blocks=TierBlocks(device=depth),
        shared_blocks=shared_run(((0, 4),), depth),
    )
    assert parts["adjusted_prefill"] == adjusted


def test_cost_is_prefill_less_credit_plus_decode_plus_requests() -> None:
    """Spec §4.1 by hand: B 16, 100 tokens, 320 queued, 2 device, 2 host, 1 disk, 1 external, 30 blocks, 3 requests."""
    weights = CostWeights(prefill_load_scale=2.0, decode_active_request_weight=0.5)
    value, parts = cost(
        weights,
        Prompt(100, 16),
        Load(requests=3, prefill_tokens=320, blocks=30),
        blocks=TierBlocks(device=2, host=2, disk=1, external=1),
    )
    prefill = (320 + 100) / 16
    credit = 2 + 0.75 * 2 + 0.25 * 2
    assert parts == {
        "prefill": prefill,
        "device_credit": 2.0,
        "host_credit": 1.5,
        "disk_credit": 0.5,
        "shared_credit": 0.0,
        "affinity_credit": 0.0,
        "adjusted_prefill": prefill - credit,
        "decode": 36.0,
        "requests": 1.5,
    }
    assert value == 2 * (prefill - credit) + 36 + 1.5


def test_decode_counts_full_blocks_only() -> None:
    """Spec §4.4: 18 tokens at block size 4 are 4 tracked blocks, while the prefill touches 4.5."""
    _, parts = cost(WEIGHTS, Prompt(18, 4), Load(), blocks=TierBlocks())
    assert (parts["decode"], parts["prefill"]) == (4.0, 4.5)


def test_credit_never_makes_prefill_negative() -> None:
    """A prompt that is cached further than it is long costs no prefill, and no less than none."""
    value, parts = cost(WEIGHTS, Prompt(32, 16), Load(), blocks=TierBlocks(device=9))
    assert parts["adjusted_prefill"] == 0.0
    assert value == 2.0


def test_decay_takes_device_credit_from_a_backlogged_rank() -> None:
    """Spec §4.1: delta = 1/(1 + decay * backlog/R): 8 blocks behind the least, R 4, decay 1: a third of the credit."""
    weights = CostWeights(overlap_score_credit_decay=1.0)
    _, parts = cost(
        weights,
        Prompt(64, 16),
        Load(prefill_tokens=160),
        blocks=TierBlocks(device=3, host=1),
        least_prefill_tokens=32,
    )
    assert math.isclose(parts["device_credit"], 3 / 3)
    assert parts["host_credit"] == 0.75


def test_affinity_stands_in_for_the_index_at_the_device_weight() -> None:
    """Where the index is blind, blocks that the session left behind count like device blocks."""
    seen, _ = cost(WEIGHTS, Prompt(64, 16), Load(), blocks=TierBlocks(device=3))
    guessed, parts = cost(WEIGHTS, Prompt(64, 16), Load(), blocks=TierBlocks(), affinity_blocks=3)
    assert guessed == seen
    assert parts["affinity_credit"] == 3.0


@pytest.mark.parametrize(
    ("shared", "reach", "pages"),
    [
        (((0, 4),), 0, 4),
        (((0, 4),), 2, 2),
        (((0, 4),), 4, 0),
        (((0, 4),), 6, 0),
        (((0, 2), (3, 6)), 0, 2),
        (((0, 2), (3, 6)), 3, 3),
        (((3, 6), (0, 3)), 1, 5),
        (((5, 9),), 4, 0),
        ((), 3, 0),
    ],
)
def test_shared_pages_count_only_in_the_run_that_continues_the_reach(
    shared: tuple[tuple[int, int], ...], reach: int, pages: int
) -> None:
    """Correction of §4.1: pages after a hole, and pages the rank has itself, are worth nothing."""
    assert shared_run(joined(shared), reach) == pages


@pytest.mark.parametrize(
    ("reach", "tokens", "size", "predicted"),
    [
        (0, 100, 16, 0),
        (3, 100, 16, 48),
        (9, 100, 16, 96),
        (4, 64, 16, 48),
        (4, 65, 16, 64),
        (1, 0, 16, 0),
        (1, 9, 0, 0),
    ],
)
def test_predicted_tokens_leave_the_last_token_to_compute(reach: int, tokens: int, size: int, predicted: int) -> None:
    """min(reach, (tokens - 1) // size) * size: a prompt cached to its end still computes its last block."""
    assert predicted_cached_tokens(reach, tokens, size) == predicted


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_weight_must_be_finite_and_not_negative(value: float) -> None:
    """A wrong weight is refused with a sentence that names it."""
    with pytest.raises(ValueError, match=r"weights\.host_cache_hit_weight"):
        CostWeights(host_cache_hit_weight=value)


def test_a_rank_that_is_out_of_the_comparison_never_breaks_the_decay() -> None:
    """An unhealthy rank may have less to do than the least of the others: it has no backlog, and no negative one."""
    weights = CostWeights(overlap_score_credit_decay=1.0)
    _, parts = cost(weights, Prompt(160, 16), Load(), blocks=TierBlocks(device=10), least_prefill_tokens=160)
    assert parts["device_credit"] == 10.0


@pytest.mark.parametrize(
    ("blocks", "tokens", "booked"),
    [
        (TierBlocks(), 64, 64),
        (TierBlocks(device=3), 64, 16),
        (TierBlocks(device=4), 64, 16),
        (TierBlocks(device=1, host=2), 64, 24),
        (TierBlocks(device=1, host=1, disk=1, external=1), 80, 80 - 36),
        (TierBlocks(device=9), 0, 0),
    ],
)
def test_a_block_of_a_lower_tier_takes_only_its_weight_off_the_booked_prefill(
    blocks: TierBlocks, tokens: int, booked: int
) -> None:
    """Spec §4.1: round(B*(D + wh*H + wd*K)) is taken off what is booked; the last token is always computed."""
    assert booked_prefill_tokens(WEIGHTS, blocks, tokens, 16) == booked

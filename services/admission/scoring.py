"""Which seat takes a prompt, by cost: the one rule of the service's placement and of the policies that place by cost.

The least cost wins; equal costs are drawn. The preferred seat (where the session ran before) is taken instead while it
costs at most ``margin`` times what it holds of the prompt more: one that has lost the session's blocks is preferred to
nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from schemas.index import TierBlocks
from services.admission.cost import CostWeights, Load, Pricing, Prompt

Choose = Callable[[int], int]
"""A number below n, drawn uniformly (a seeded generator's ``randrange``)."""

EQUAL = 1e-9
"""Costs closer than this, in blocks, are equal."""

EVENT_LAG_S = 1.0
"""An engine's events of a turn that ended less than this ago may not have reached the index yet (measured with a real
vLLM: a few ms, tail 100 ms)."""

Scored = tuple[float, int]
"""Cost in blocks, seat."""

_NO_AFFINITY: Mapping[int, int] = {}
_NO_SHARED: Mapping[int, float] = {}


def first(count: int) -> int:
    """The first of ``count`` equal ones."""
    del count
    return 0


def cheapest(
    eligible: Sequence[Scored], preferred: Sequence[Scored], slack: Callable[[int], float], choose: Choose
) -> int:
    """The seat to take of ``eligible`` (at least one), of which ``preferred`` are where the session ran before.
    ``slack``: by how much dearer, in blocks, a preferred one may be."""
    best = min(eligible)[0]
    if preferred:
        least, seat = min(preferred)
        if least <= best + slack(seat) + EQUAL:
            eligible, best = preferred, least
    tied = [seat for cost, seat in eligible if cost <= best + EQUAL]
    return tied[0] if len(tied) == 1 else tied[choose(len(tied))]


def held_blocks(reach: int, affinity: int, *, blind: bool, trusted: bool, request_blocks: int) -> int:
    """Blocks of the prompt on the preferred seat: what the index says, else what the session left there
    (``affinity``). ``blind``: the index says nothing. ``trusted``: what the session left counts although the index does
    not show it (it cannot know yet, or not everything)."""
    if blind:
        return affinity or request_blocks
    return max(reach, affinity if trusted else 0)


def placement_costs(
    weights: CostWeights,
    prompt_tokens: int,
    block_sizes: Mapping[int, int],
    loads: Mapping[int, Load],
    reach: Mapping[int, int],
    affinity: Mapping[int, int] = _NO_AFFINITY,
    shared: Mapping[int, float] = _NO_SHARED,
) -> dict[int, float]:
    """The cost in blocks of a prompt on each seat, which holds ``reach`` blocks of it as a prefix. ``block_sizes``: in
    tokens, of the seats to compare. ``affinity``: blocks that stand in where nobody knows what is cached. ``shared``:
    blocks beyond the reach that the seat's shared pool has, each as much as it is sure."""
    least = min(loads[seat].prefill_tokens for seat in block_sizes)
    pricing = {size: Pricing(weights, Prompt(prompt_tokens, size), least) for size in set(block_sizes.values())}
    return {
        seat: pricing[size].total(
            loads[seat], TierBlocks(device=reach[seat]), shared.get(seat, 0.0), affinity.get(seat, 0)
        )
        for seat, size in block_sizes.items()
    }

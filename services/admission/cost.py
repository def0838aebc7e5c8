"""The cost of placing one prompt on one rank, in blocks; lower wins.

Source: spec index-and-routing §4.1 with its two corrections (§9): each position of the prompt counts once, at its best
tier (the index answers that way), and pages of the shared pool count only in the run that continues the rank's own
reachable prefix, by how sure they are (docs/adr/0015). Where the index is blind, what the session left on its previous
worker stands in (``affinity``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from schemas.index import TierBlocks


class CostWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights of the cost, with the names and defaults of the spec (§4.1).

    ``overlap_score_credit`` c, ``overlap_score_credit_decay`` decay, ``prefill_load_scale`` s,
    ``host_cache_hit_weight`` wh, ``disk_cache_hit_weight`` wd (disk and external), ``shared_cache_multiplier`` m,
    ``decode_active_request_weight`` a. Ours: ``shared_unsure_multiplier``, what m is multiplied by while the picture of
    the pool is not `synced` (of a `blind` one nothing counts).
    """

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    shared_cache_multiplier: float = 0.5
    shared_unsure_multiplier: float = 0.5
    decode_active_request_weight: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"weights.{name} must be a finite number, not negative")


class Load(msgspec.Struct, frozen=True, gc=False):
    """What one rank has to do already: requests, prompt tokens not prefilled yet, blocks of running prompts."""

    requests: int = 0
    prefill_tokens: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt to place. ``input_tokens`` in tokens, ``block_size`` in tokens a block (at least 1)."""

    input_tokens: int
    block_size: int

    @property
    def request_blocks(self) -> int:
        """R: blocks that the prompt touches, the partial tail included."""
        return -(-self.input_tokens // self.block_size)

    @property
    def full_blocks(self) -> int:
        """Blocks that have an identity."""
        return self.input_tokens // self.block_size


Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of positions in a prompt."""


def joined(ranges: Ranges) -> Ranges:
    """The same positions in order, with a hole between any two ranges."""
    if len(ranges) < 2:
        return ranges
    result = [sorted(ranges)[0]]
    for first, last in sorted(ranges):
        before, end = result[-1]
        if first > end:
            result.append((first, last))
        else:
            result[-1] = (before, max(end, last))
    return tuple(result)


def shared_run(shared: Ranges, reach: int) -> int:
    """Pages of the shared pool in the run that continues a reach of ``reach`` blocks without a hole. ``shared``: as
    `joined` gives them."""
    for first, last in shared:
        if last > reach:
            return last - reach if first <= reach else 0
    return 0


class Pricing:
    """The cost of one prompt on any rank. ``least_prefill_tokens``: the smallest prefill load among the ranks compared,
    for the decay of the credit.

    Source: spec index-and-routing §4.1::

        prefill  = (prefill_tokens + input_tokens) / B
        delta    = 1 / (1 + decay * ((prefill_tokens - least_prefill_tokens) / B) / R)
        credit   = c*delta*device + wh*host + wd*(disk + external) + m*shared + c*delta*affinity
        cost     = s * max(0, prefill - credit) + decode + a * requests

    ``shared``: pages beyond the rank's own reach, in blocks, each as much as it is sure (`shared_run`).
    """

    __slots__ = (
        "_decay",
        "_disk",
        "_full_blocks",
        "_host",
        "_input_tokens",
        "_least",
        "_near",
        "_request",
        "_request_blocks",
        "_scale",
        "_shared",
        "_size",
    )

    def __init__(self, weights: CostWeights, prompt: Prompt, least_prefill_tokens: int = 0) -> None:
        self._near = weights.overlap_score_credit
        self._decay = weights.overlap_score_credit_decay
        self._host = weights.host_cache_hit_weight
        self._disk = weights.disk_cache_hit_weight
        self._shared = weights.shared_cache_multiplier
        self._scale = weights.prefill_load_scale
        self._request = weights.decode_active_request_weight
        self._size = prompt.block_size
        self._input_tokens = prompt.input_tokens
        self._request_blocks = max(prompt.request_blocks, 1)
        self._full_blocks = prompt.full_blocks
        self._least = least_prefill_tokens

    def total(self, load: Load, blocks: TierBlocks, shared_blocks: float, affinity_blocks: int) -> float:
        """The cost in blocks. ``affinity_blocks`` stands in for ``blocks`` where the index is blind."""
        prefill = (load.prefill_tokens + self._input_tokens) / self._size
        near = self._near_of(load) if self._decay else self._near
        adjusted = prefill - near * blocks.device
        below = blocks.host or blocks.disk or blocks.external
        if below or shared_blocks or affinity_blocks:
            adjusted -= self._host * blocks.host
            adjusted -= self._disk * (blocks.disk + blocks.external)
            adjusted -= self._shared * shared_blocks
            adjusted -= near * affinity_blocks
        # Without the chains of running prompts their common prefixes cannot be told apart: each counts its own blocks.
        decode = load.blocks + self._full_blocks
        return self._scale * (adjusted if adjusted > 0.0 else 0.0) + decode + self._request * load.requests

    def parts(self, load: Load, blocks: TierBlocks, shared_blocks: float, affinity_blocks: int) -> dict[str, float]:
        """The terms of the cost by name, in blocks."""
        prefill = (load.prefill_tokens + self._input_tokens) / self._size
        near = self._near_of(load) if self._decay else self._near
        device = near * blocks.device
        host = self._host * blocks.host
        disk = self._disk * (blocks.disk + blocks.external)
        shared = self._shared * shared_blocks
        affinity = near * affinity_blocks
        return {
            "prefill": prefill,
            "device_credit": device,
            "host_credit": host,
            "disk_credit": disk,
            "shared_credit": shared,
            "affinity_credit": affinity,
            "adjusted_prefill": max(0.0, prefill - device - host - disk - shared - affinity),
            "decode": float(load.blocks + self._full_blocks),
            "requests": self._request * load.requests,
        }

    def _near_of(self, load: Load) -> float:
        # A rank that is out of the comparison (unhealthy) may have less than the least of those that are in it.
        backlog = max(0, load.prefill_tokens - self._least) / self._size / self._request_blocks
        return self._near / (1 + self._decay * backlog)


def booked_prefill_tokens(
    weights: CostWeights,
    blocks: TierBlocks,
    input_tokens: int,
    block_size: int,
    shared_blocks: int = 0,
    shared_credit: float = 0.0,
) -> int:
    """Prompt tokens that a grant books as prefill, in tokens: what is cached in a lower tier, or in the shared pool
    beyond all of them (``shared_blocks``, worth ``shared_credit`` blocks together), must be loaded, and takes only its
    weight off. Never less than what is surely computed.

    Source: spec index-and-routing §4.1 (``eff_cached_tokens``, which leaves the shared pool out) and §4.4;
    docs/adr/0015.
    """
    host = weights.host_cache_hit_weight * blocks.host
    disk = weights.disk_cache_hit_weight * (blocks.disk + blocks.external)
    effective = round(block_size * (blocks.device + host + disk + shared_credit))
    reach = blocks.reach + shared_blocks
    return input_tokens - min(effective, predicted_cached_tokens(reach, input_tokens, block_size))


def predicted_cached_tokens(reach: int, input_tokens: int, block_size: int) -> int:
    """Prompt tokens that the engine should find in its cache, in tokens.

    ``reach``: blocks of the contiguous prefix the chosen rank holds. The last token is always computed, so a prompt
    that is cached to its end loses its last block.
    """
    if block_size <= 0 or input_tokens <= 0:
        return 0
    return min(reach, (input_tokens - 1) // block_size) * block_size


def predicted_shared_tokens(reach: int, shared_blocks: int, input_tokens: int, block_size: int) -> int:
    """Prompt tokens that the engine should find in its shared pool beyond its own tiers' ``reach``, in tokens."""
    own = predicted_cached_tokens(reach, input_tokens, block_size)
    return predicted_cached_tokens(reach + shared_blocks, input_tokens, block_size) - own

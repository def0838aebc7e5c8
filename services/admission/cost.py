"""The cost of placing one prompt on one rank, in blocks; lower wins.

Source: spec index-and-routing §4.1 with its two corrections (§9): each position of the prompt counts once, at its best
tier (the index answers that way), and pages of the shared pool count only in the run that continues the rank's own
reachable prefix. Where the index is blind, what the session left on its previous worker stands in (``affinity``).
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
    ``decode_active_request_weight`` a.
    """

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    shared_cache_multiplier: float = 0.5
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


def shared_run(shared: tuple[tuple[int, int], ...], reach: int) -> int:
    """Pages of the shared pool in the run that continues a reach of ``reach`` blocks without a hole."""
    end = reach
    for first, last in sorted(shared):
        if first > end:
            break
        end = max(end, last)
    return end - reach


class Pricing:
    """The cost of one prompt on any rank. ``least_prefill_tokens``: the smallest prefill load among the ranks compared,
    for the decay of the credit.

    Source: spec index-and-routing §4.1::

        prefill  = (prefill_tokens + input_tokens) / B
        delta    = 1 / (1 + decay * ((prefill_tokens - least_prefill_tokens) / B) / R)
        credit   = c*delta*device + wh*host + wd*(disk + external) + m*shared + c*delta*affinity
        cost     = s * max(0, prefill - credit) + decode + a * requests
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

    def total(self, load: Load, blocks: TierBlocks, shared_blocks: int, affinity_blocks: int) -> float:
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

    def parts(self, load: Load, blocks: TierBlocks, shared_blocks: int, affinity_blocks: int) -> dict[str, float]:
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


def booked_prefill_tokens(weights: CostWeights, blocks: TierBlocks, input_tokens: int, block_size: int) -> int:
    """Prompt tokens that a grant books as prefill, in tokens: what is cached in a lower tier must be loaded, and takes
    only its tier's weight off. Never less than what is surely computed.

    Source: spec index-and-routing §4.1 (``eff_cached_tokens``) and §4.4.
    """
    host = weights.host_cache_hit_weight * blocks.host
    disk = weights.disk_cache_hit_weight * (blocks.disk + blocks.external)
    effective = round(block_size * (blocks.device + host + disk))
    return input_tokens - min(effective, predicted_cached_tokens(blocks.reach, input_tokens, block_size))


def predicted_cached_tokens(reach: int, input_tokens: int, block_size: int) -> int:
    """Prompt tokens that the engine should find in its cache, in tokens.

    ``reach``: blocks of the contiguous prefix the chosen rank holds. The last token is always computed, so a prompt
    that is cached to its end loses its last block.
    """
    if block_size <= 0 or input_tokens <= 0:
        return 0
    return min(reach, (input_tokens - 1) // block_size) * block_size

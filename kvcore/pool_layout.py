"""Which objects one page of a deployment consists of, and what its keys have in front.

A page can be used only if every one of its objects is there, of every rank and stage (spec: pool-events §6). Engines
that say their layout themselves (``GET /get_hicache_l3_cache_layout``) are believed; for the others the functions here
compute the components from their parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

ALL_PAGES = "all_pages"
TRAILING_PAGES = "trailing_pages"


class LayoutSet(NamedTuple):
    """Objects that belong together. ``hit_policy``: needed of every page (``all_pages``), or only of the last
    ``trailing_pages`` pages of a match (sliding windows, states)."""

    components: tuple[str, ...]
    hit_policy: str = ALL_PAGES
    trailing_pages: int = 0


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """How one deployment's pages lie in the pool: ``scheme`` and ``key_prefix`` as in `kvcore.pool_keys.PoolKey`."""

    scheme: str
    key_prefix: str
    sets: tuple[LayoutSet, ...]


def hicache_prefix(tag: str = "", model: str = "") -> str:
    """What SGLang's keys have in front: ``extra_backend_tag`` and, since 0.5.17, the served model's name, with ``/`` as
    ``-`` (spec: pool-events §6). Leave out ``model`` for older ones. Special pools and decode-context parallelism put
    more there: only the engine can say what."""
    return "".join(f"{part}_" for part in (tag, model.replace("/", "-")) if part)


def mha_components(tp: int, pp: int = 1, heads_lcm: int | None = None) -> tuple[str, ...]:
    """SGLang, multi-head attention: K and V of every attention-TP rank and stage. ``heads_lcm``: ``tp_lcm_size``, where
    heads are split further than ``tp`` (layout page_head). Spec: pool-events §6 MHA, index-and-routing §5.1."""
    ranks = range(max(tp, heads_lcm or 0))
    stages = [""] if pp == 1 else [f"_{stage}" for stage in range(pp)]
    return tuple(f"_{rank}{stage}_{side}" for stage in stages for rank in ranks for side in "kv")


def mla_components(pp: int = 1, dcp: int = 1, cp: int = 1) -> tuple[str, ...]:
    """SGLang, latent attention: one object a page and stage, whatever the TP size; with decode-context parallelism one
    for each of its ranks. Spec: pool-events §6 MLA."""
    stages = [""] if pp == 1 else [str(stage) for stage in range(pp)]
    if dcp == 1:
        return tuple(f"_{stage}_k" for stage in stages)
    return tuple(
        f"_dcp{rank}_cp{context}{stage and f'_{stage}'}_k"
        for stage in stages
        for rank in range(dcp)
        for context in range(cp)
    )


def vllm_components(
    tp: int, pp: int = 1, pcp: int = 1, dcp: int = 1, groups: int | Iterable[int] = (0,)
) -> tuple[str, ...]:
    """vLLM's MooncakeStoreConnector: one object a TP rank, stage, context rank and cache group. ``tp``: ranks that
    write (no more than there are KV heads); the decode-context rank is ``tp_rank % dcp``, as it shares the TP group.
    ``groups``: their numbers, or one. Spec: pool-events §6 vLLM."""
    numbers = (groups,) if isinstance(groups, int) else tuple(groups)
    return tuple(
        f"@tp_rank:{rank}@pcp{context}@dcp{rank % dcp}@pp_rank:{stage}@group:{group}"
        for group in numbers
        for stage in range(pp)
        for context in range(pcp)
        for rank in range(tp)
    )


def lmcache_components(workers: int, dtype: str) -> tuple[str, ...]:
    """LMCache: one object a worker. ``dtype`` as in its keys (``bfloat16``). Spec: pool-events §6 LMCache."""
    return tuple(f"@{worker}@@{dtype}" for worker in range(workers))

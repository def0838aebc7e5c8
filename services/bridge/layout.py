"""How an engine's pages lie in the shared pool: as configured, as the engine says, or computed from what it is.

SGLang says it itself (``GET /get_hicache_l3_cache_layout``), but only where one scheduler knows every object: for
multi-head attention it answers ``enabled: false``, and the objects follow from its parallelism. vLLM says nothing: its
keys follow from the model's name and its parallelism, which must be configured (spec: pool-events §6, engine-events
§5). What is not sure is a problem said in words, never a guess: with too many objects every page is missed, with too
few pages count that nobody can load.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvcore.pool_layout import hicache_prefix, mha_components, vllm_components
from schemas.base import UNDECODABLE
from schemas.pool import MAX_COMPONENT_SETS, MAX_COMPONENTS, ComponentSet, HitPolicy, SharedLayout
from schemas.worker import Engine
from services.bridge.errors import ScrapeError

MOONCAKE = "mooncake"
MODEL_IN_PREFIX_SINCE = (0, 5, 17)
"""SGLang's release from which on keys have the model's name in front; older ones only the tag."""

_PAIRS = frozenset({"EAGLE", "EAGLE3", "NEXTN"})
_MAX_PAGE_SIZE = 1 << 20
_MAX_PARALLEL = 1024
_MAX_SUFFIX_BYTES = 256
"""No key with a longer one is taken in (`kvcore.pool_keys`)."""

_SPLIT_HEADS = "page_head"
_POLICY = re.compile(r"trailing_pages(?:\((\d{1,6})\))?")


@dataclass(frozen=True, slots=True)
class LayoutPage:
    """What ``/get_hicache_l3_cache_layout`` said. ``key_prefix`` as the engine writes it: no separator behind.
    ``problem``: why it could not be read; ``enabled`` is then ``True``, for nothing else says how pages lie."""

    enabled: bool
    backend: str = ""
    page_size: int | None = None
    key_prefix: str = ""
    sets: tuple[ComponentSet, ...] = ()
    stage: int = 0
    stages: int = 1
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """What ``/server_info`` of SGLang said of how it splits a model. ``tp``: ranks among which attention is split;
    ``tag``, ``heads_lcm``: ``extra_backend_tag`` and ``tp_lcm_size`` of its storage's settings, the latter where it
    splits heads (memory layout page_head)."""

    tp: int | None = None
    pp: int | None = None
    dcp: int = 1
    served_model: str | None = None
    backend: str | None = None
    tag: str | None = None
    heads_lcm: int | None = None
    pairs: bool = False


@dataclass(frozen=True, slots=True)
class SharedRules:
    """As configured (`services.bridge.config.BridgeSettings.shared_pool` and what follows it)."""

    pool: str = ""
    layout: SharedLayout | None = None
    tag: str = ""
    tp: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of an engine. ``page``: ``None`` where it has no such page. ``root``: the model's path or name."""

    engine: Engine
    version: str | None
    model: str
    root: str
    block_size: int | None
    page: LayoutPage | None = None
    parallelism: Parallelism | None = None


class UnknownLayoutError(Exception):
    """What stands in the way, in words; it goes into the worker's profile."""


def layout_of(rules: SharedRules, told: Told) -> tuple[SharedLayout | None, str | None]:
    """(layout, why there is none); both ``None`` for an engine without a shared pool."""
    if not rules.pool:
        return None, None
    if rules.layout is not None:
        return rules.layout, None
    try:
        if told.page is not None and told.page.enabled:
            return _as_told(rules, told, told.page), None
        if told.engine == "sglang" or told.page is not None:
            return _hicache(rules, told), None
        return _vllm(rules, told), None
    except (UnknownLayoutError, ValueError) as problem:
        return None, str(problem)


def _as_told(rules: SharedRules, told: Told, page: LayoutPage) -> SharedLayout:
    if page.problem:
        raise UnknownLayoutError(page.problem)
    if page.backend and page.backend != MOONCAKE:
        raise UnknownLayoutError(f"it stores its pages in {page.backend!r}, not in Mooncake")
    page_size = page.page_size or told.block_size
    if page_size is None:
        raise UnknownLayoutError("its page size is not known")
    sets = tuple(_every_stage(each, page.stage, rules.pp or page.stages) for each in page.sets)
    if not any(each.hit_policy == "all_pages" and each.components for each in sets):
        raise UnknownLayoutError("/get_hicache_l3_cache_layout names no objects that every page has")
    return SharedLayout(
        pool=rules.pool,
        scheme="sglang_hicache",
        page_size=page_size,
        key_prefix=f"{page.key_prefix.removesuffix('_')}_" if page.key_prefix else "",
        sets=sets,
        pairs=told.parallelism.pairs if told.parallelism else False,
    )


def _every_stage(told: ComponentSet, stage: int, stages: int) -> ComponentSet:
    """The objects of all pipeline stages; each stage's scheduler names only its own (``_<stage>_k...``)."""
    if stages == 1:
        return told
    own = f"_{stage}_"
    if any(not component.startswith(own) for component in told.components):
        raise UnknownLayoutError(f"its objects of pipeline stage {stage} do not begin with {own!r}")
    components = [f"_{each}_{component[len(own) :]}" for each in range(stages) for component in told.components]
    return msgspec.structs.replace(told, components=_checked(components))


def _hicache(rules: SharedRules, told: Told) -> SharedLayout:
    """SGLang with multi-head attention: K and V of each rank and stage."""
    split = told.parallelism or Parallelism()
    if split.backend is not None and split.backend != MOONCAKE:
        raise UnknownLayoutError(f"it stores its pages in {split.backend or 'no storage'!r}, not in Mooncake")
    if told.page is None:
        raise UnknownLayoutError("it has no /get_hicache_l3_cache_layout: set shared_layout")
    tp = rules.tp or split.tp
    if tp is None:
        raise UnknownLayoutError("its tensor-parallel size is not known: set shared_tp")
    if split.dcp > 1:
        raise UnknownLayoutError("it splits the context while decoding, and does not say its layout: set shared_layout")
    if told.block_size is None:
        raise UnknownLayoutError("its page size is not known")
    with_model = _release(told.version) >= MODEL_IN_PREFIX_SINCE
    tag = rules.tag or split.tag or ""
    return SharedLayout(
        pool=rules.pool,
        scheme="sglang_hicache",
        page_size=told.block_size,
        key_prefix=hicache_prefix(tag, (split.served_model or told.model) if with_model else ""),
        sets=(ComponentSet(components=_checked(mha_components(tp, rules.pp or split.pp or 1, split.heads_lcm))),),
        pairs=split.pairs,
    )


def _vllm(rules: SharedRules, told: Told) -> SharedLayout:
    """vLLM's MooncakeStoreConnector; its block hashes have to be learned from its events."""
    if told.block_size is None:
        raise UnknownLayoutError("its block size is not known")
    if not rules.tp:
        raise UnknownLayoutError("vLLM does not say its tensor-parallel size: set shared_tp (1 for latent attention)")
    name = told.root.rstrip("/").rpartition("/")[2]
    if not name:
        raise UnknownLayoutError("its model's name is not known")
    return SharedLayout(
        pool=rules.pool,
        scheme="vllm_mooncake",
        page_size=told.block_size,
        key_prefix=f"{rules.tag}@{name}" if rules.tag else name,
        sets=(ComponentSet(components=_checked(vllm_components(rules.tp, rules.pp or 1))),),
        page_hash="engine",
    )


def _checked(components: Sequence[str]) -> tuple[str, ...]:
    if len(components) > MAX_COMPONENTS:
        raise UnknownLayoutError(f"a page of {len(components)} objects: {MAX_COMPONENTS} are the most that is followed")
    return tuple(components)


def _release(version: str | None) -> tuple[int, ...]:
    """``0.5.16.post1`` as (0, 5, 16). An engine that does not say its release is taken for a recent one."""
    found = re.match(r"v?(\d{1,5})\.(\d{1,5})\.(\d{1,5})", version or "")
    return tuple(int(part) for part in found.groups()) if found else MODEL_IN_PREFIX_SINCE


# What the engine's pages say


def parse_layout_page(body: bytes) -> LayoutPage:
    """Read ``/get_hicache_l3_cache_layout``. Raises `ScrapeError`."""
    told = _json(body, "/get_hicache_l3_cache_layout")
    if told.get("enabled") is not True:
        return LayoutPage(False)
    layout = told.get("hicache_object_layout")
    layout = layout if isinstance(layout, dict) else {}
    pools = layout.get("pools")
    if not isinstance(pools, list) or len(pools) > MAX_COMPONENT_SETS:
        raise ScrapeError("bad_answer", "/get_hicache_l3_cache_layout has no pools that can be read")
    prefix = _text({**told, **layout}.get("key_prefix"))
    sets = tuple(_component_set(pool) for pool in pools)
    if sum(len(each.components) for each in sets) > MAX_COMPONENTS:
        raise ScrapeError("bad_answer", f"/get_hicache_l3_cache_layout: a page of more than {MAX_COMPONENTS} objects")
    return LayoutPage(
        enabled=True,
        backend=_text(told.get("backend")),
        page_size=_number(told.get("page_size"), _MAX_PAGE_SIZE),
        key_prefix=prefix,
        sets=sets,
        stage=_rank({**told, **layout}.get("pp_rank")),
        stages=_number({**told, **layout}.get("pp_size"), _MAX_PARALLEL) or 1,
    )


def _component_set(pool: object) -> ComponentSet:
    """One pool of a page's objects. A hit policy that is not known is taken for the strictest."""
    told = pool if isinstance(pool, dict) else {}
    suffixes = told.get("suffixes")
    if not isinstance(suffixes, list) or not all(_is_suffix(suffix) for suffix in suffixes):
        raise ScrapeError("bad_answer", "/get_hicache_l3_cache_layout names no suffixes that a key can have")
    policy: HitPolicy = "all_pages"
    trailing = 0
    if found := _POLICY.fullmatch(_text(told.get("hit_policy"))):
        written = _number(told.get("trailing_pages"), _MAX_PAGE_SIZE)
        trailing = int(found[1]) if found[1] else written or 0
        policy = "trailing_pages" if trailing else "all_pages"
    return ComponentSet(
        pool=_text(told.get("pool")) or "kv",
        components=tuple(suffixes),
        hit_policy=policy,
        trailing_pages=trailing,
    )


def _is_suffix(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value.encode(errors="replace")) <= _MAX_SUFFIX_BYTES


def parse_parallelism(told: dict[str, Any]) -> Parallelism | None:
    """Out of SGLang's ``/server_info`` (its server arguments); ``None`` where it says nothing of it."""
    tp = _number(told.get("tp_size"), _MAX_PARALLEL)
    if tp is None:
        return None
    ranks = _number(told.get("dp_size"), _MAX_PARALLEL) or 1
    if told.get("enable_dp_attention") is True:
        tp = max(1, tp // ranks)
    extra = _storage_settings(told.get("hicache_storage_backend_extra_config"))
    splits_heads = told.get("hicache_mem_layout", _SPLIT_HEADS) == _SPLIT_HEADS
    backend = told.get("hicache_storage_backend", "")
    return Parallelism(
        tp=tp,
        pp=_number(told.get("pp_size"), _MAX_PARALLEL),
        dcp=_number(told.get("dcp_size"), _MAX_PARALLEL) or 1,
        served_model=_text(told.get("served_model_name")) or None,
        backend=None if backend == "" else _text(backend),
        tag=_text(extra.get("extra_backend_tag")) or None,
        heads_lcm=_number(extra.get("tp_lcm_size"), _MAX_PARALLEL) if splits_heads else None,
        pairs=_text(told.get("speculative_algorithm")).upper() in _PAIRS,
    )


def _storage_settings(value: object) -> dict[str, Any]:
    """A table, or one written as JSON; a reference to a file (``@...``) cannot be followed from here."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value.encode())
        except UNDECODABLE:
            return {}
    return value if isinstance(value, dict) else {}


def _json(body: bytes, what: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except UNDECODABLE as error:
        raise ScrapeError("bad_answer", f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ScrapeError("bad_answer", f"{what} is not a JSON object")
    return value


def _text(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= 1024 else ""


def _number(value: object, most: int) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most else None


def _rank(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_PARALLEL else 0

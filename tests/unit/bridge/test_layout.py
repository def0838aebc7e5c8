"""How an engine's pages lie in the shared pool: every release's prefix, every parallelism, and what cannot be known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas.pool import ComponentSet, SharedLayout
from services.bridge.errors import ScrapeError
from services.bridge.layout import (
    LayoutPage,
    Parallelism,
    SharedRules,
    Told,
    layout_of,
    parse_layout_page,
    parse_parallelism,
)

RULES = SharedRules("pool-a")
MODEL = "Qwen/Qwen3-8B"


def page(**layout: Any) -> bytes:
    """As SGLang 0.5.23 answers for latent attention (spec: pool-events §6)."""
    pools = [{"pool": "kv", "suffixes": ["__k"], "hit_policy": "all_pages"}]
    told = {"pools": pools, "key_prefix": "Qwen-Qwen3-8B", "is_mla_backend": True, "pp_rank": 0, "pp_size": 1, **layout}
    return json.dumps({"enabled": True, "backend": "mooncake", "page_size": 64, "hicache_object_layout": told}).encode()


def told(**changes: Any) -> Told:
    """A recent SGLang with multi-head attention over two ranks."""
    values = {
        "engine": "sglang",
        "version": "0.5.23",
        "model": MODEL,
        "root": MODEL,
        "block_size": 64,
        "page": LayoutPage(enabled=False),
        "parallelism": Parallelism(tp=2, backend="mooncake"),
        **changes,
    }
    return Told(**values)


def known(rules: SharedRules, what: Told) -> SharedLayout:
    layout, problem = layout_of(rules, what)
    assert problem is None
    assert layout is not None
    return layout


def test_an_engine_without_a_pool_has_neither_layout_nor_problem() -> None:
    """Nothing is asked of it."""
    assert layout_of(SharedRules(), told()) == (None, None)


def test_what_is_configured_stands_before_what_the_engine_says() -> None:
    """An operator may know better."""
    layout = SharedLayout(pool="pool-a", scheme="lmcache", page_size=256, key_prefix="m@1")
    assert layout_of(SharedRules("pool-a", layout), told(page=None, engine="vllm")) == (layout, None)


def test_latent_attention_says_its_layout_itself() -> None:
    """SGLang #40467: a router that guessed the suffixes missed every page; the engine's own are taken."""
    layout = known(RULES, told(page=parse_layout_page(page())))
    assert layout == SharedLayout(
        pool="pool-a",
        scheme="sglang_hicache",
        page_size=64,
        key_prefix="Qwen-Qwen3-8B_",
        sets=(ComponentSet(components=("__k",)),),
    )


def test_side_pools_keep_their_hit_rule() -> None:
    """SGLang #40467: hybrid models need the window's objects of the last pages only. A rule that we do not know is
    taken for the strictest."""
    pools = [
        {"pool": "kv", "suffixes": ["__k"], "hit_policy": "all_pages"},
        {"pool": "swa", "suffixes": ["__k_swa"], "hit_policy": "trailing_pages", "trailing_pages": 4},
        {"pool": "state", "suffixes": ["__temporal"], "hit_policy": "trailing_pages(1)"},
        {"pool": "new", "suffixes": ["__x"], "hit_policy": "every_other"},
    ]
    assert known(RULES, told(page=parse_layout_page(page(pools=pools)))).sets == (
        ComponentSet(components=("__k",)),
        ComponentSet(pool="swa", components=("__k_swa",), hit_policy="trailing_pages", trailing_pages=4),
        ComponentSet(pool="state", components=("__temporal",), hit_policy="trailing_pages", trailing_pages=1),
        ComponentSet(pool="new", components=("__x",)),
    )


def test_each_stage_names_its_own_objects_and_all_are_needed() -> None:
    """Mooncake #1887: a page counts only when every stage's object is there."""
    pools = [{"pool": "kv", "suffixes": ["_0_k"], "hit_policy": "all_pages"}]
    layout = known(RULES, told(page=parse_layout_page(page(pools=pools, pp_size=2))))
    assert layout.sets == (ComponentSet(components=("_0_k", "_1_k")),)
    odd = parse_layout_page(page(pp_size=2))
    assert layout_of(RULES, told(page=odd)) == (None, "its objects of pipeline stage 0 do not begin with '_0_'")


def test_multi_head_attention_is_computed_from_its_ranks() -> None:
    """It answers ``enabled: false`` (spec: pool-events §6): K and V of each rank, and of each stage."""
    assert parse_layout_page(b'{"enabled":false,"reason":"MHA"}') == LayoutPage(False)
    layout = known(RULES, told())
    assert (layout.key_prefix, layout.page_size) == ("Qwen-Qwen3-8B_", 64)
    assert layout.sets == (ComponentSet(components=("_0_k", "_0_v", "_1_k", "_1_v")),)
    staged = known(SharedRules("pool-a", tp=1, pp=2), told())
    assert staged.sets == (ComponentSet(components=("_0_0_k", "_0_0_v", "_0_1_k", "_0_1_v")),)


@pytest.mark.parametrize(
    ("version", "tag", "prefix"),
    [
        ("0.5.16", "", ""),
        ("0.5.16.post1", "blue", "blue_"),
        ("0.5.17", "", "Qwen-Qwen3-8B_"),
        ("0.5.23", "blue", "blue_Qwen-Qwen3-8B_"),
        (None, "", "Qwen-Qwen3-8B_"),
        ("main", "", "Qwen-Qwen3-8B_"),
    ],
)
def test_the_prefix_is_that_of_the_release(version: str | None, tag: str, prefix: str) -> None:
    """Dynamo #14952: 0.5.17 put the model's name in front, and a router that did not hit nothing, without an error."""
    assert known(SharedRules("pool-a", tag=tag), told(version=version)).key_prefix == prefix


def test_server_info_says_how_a_model_is_split() -> None:
    """Under data-parallel attention each rank's heads are split among tp/dp ranks only, and the dp rank is not in the
    key (spec: pool-events §6); the tag stands in the storage's own settings, as JSON in a text."""
    info = {
        "tp_size": 8,
        "dp_size": 4,
        "enable_dp_attention": True,
        "pp_size": 1,
        "served_model_name": "big/one",
        "hicache_storage_backend": "mooncake",
        "hicache_storage_backend_extra_config": '{"extra_backend_tag": "blue", "tp_lcm_size": 4}',
        "speculative_algorithm": "EAGLE",
    }
    split = parse_parallelism(info)
    assert split == Parallelism(
        tp=2, pp=1, served_model="big/one", backend="mooncake", tag="blue", heads_lcm=4, pairs=True
    )
    layout = known(RULES, told(parallelism=split))
    assert (layout.key_prefix, layout.pairs, len(layout.sets[0].components)) == ("blue_big-one_", True, 8)
    assert parse_parallelism({"version": "0.5.23"}) is None
    assert parse_parallelism({"tp_size": 1, "hicache_storage_backend_extra_config": "@/etc/x.json"}) == Parallelism(
        tp=1
    )


def test_vllms_keys_follow_from_its_model_and_ranks() -> None:
    """Dynamo #14842: the store connector's keys have the model's base name, and an object for every rank."""
    what = told(engine="vllm", page=None, parallelism=None, root="/models/Qwen3-8B/", block_size=16)
    layout = known(SharedRules("pool-a", tp=2, tag="blue"), what)
    assert (layout.scheme, layout.key_prefix, layout.page_hash) == ("vllm_mooncake", "blue@Qwen3-8B", "engine")
    assert layout.sets == (
        ComponentSet(
            components=(
                "@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0",
                "@tp_rank:1@pcp0@dcp0@pp_rank:0@group:0",
            )
        ),
    )


def test_vllm_does_not_say_on_how_many_ranks_it_runs() -> None:
    """Mooncake #1887: taken for one rank, a page of four would count when the first rank's object is all there is."""
    what = told(engine="vllm", page=None, parallelism=None, root="Qwen3-8B", block_size=16)
    problem = "vLLM does not say its tensor-parallel size: set shared_tp (1 for latent attention)"
    assert layout_of(RULES, what) == (None, problem)


def test_heads_are_split_further_in_one_memory_layout_only() -> None:
    """``tp_lcm_size`` counts with page_head (spec: pool-events §6); elsewhere each rank writes its own two objects."""
    info = {"tp_size": 2, "hicache_storage_backend_extra_config": {"tp_lcm_size": 8}}
    for memory, ranks in (("page_head", 8), ("page_first", 2), (None, 2)):
        split = parse_parallelism({**info, "hicache_mem_layout": memory})
        assert len(known(RULES, told(parallelism=split)).sets[0].components) == 2 * ranks


@pytest.mark.parametrize(
    "pools",
    [
        [{"suffixes": ["_k" * 200]}],
        [{"suffixes": ["é" * 129]}],
        [{"suffixes": [""]}],
        [{"suffixes": [f"_{number}_k" for number in range(600)]}] * 2,
    ],
)
def test_a_layout_page_without_end_is_none(pools: list[dict[str, Any]]) -> None:
    """It would go into every `worker.state`, and one that is larger than a message is not said at all."""
    with pytest.raises(ScrapeError, match=r"suffixes that a key can have|more than 1024 objects"):
        parse_layout_page(page(pools=pools))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"block_size": None}, "its page size is not known"),
        ({"parallelism": None}, "its tensor-parallel size is not known: set shared_tp"),
        ({"page": None}, "it has no /get_hicache_l3_cache_layout: set shared_layout"),
        ({"parallelism": Parallelism(tp=1, backend="file")}, "it stores its pages in 'file', not in Mooncake"),
        ({"parallelism": Parallelism(tp=1024)}, "a page of 2048 objects: 1024 are the most that is followed"),
        (
            {"parallelism": Parallelism(tp=2, dcp=2)},
            "it splits the context while decoding, and does not say its layout: set shared_layout",
        ),
        ({"engine": "vllm", "page": None, "block_size": None}, "its block size is not known"),
        ({"page": LayoutPage(True, problem="answer_too_large: of 64 MB")}, "answer_too_large: of 64 MB"),
        ({"page": LayoutPage(True, backend="nixl")}, "it stores its pages in 'nixl', not in Mooncake"),
        ({"page": LayoutPage(True)}, "/get_hicache_l3_cache_layout names no objects that every page has"),
    ],
)
def test_what_is_not_sure_is_a_problem_and_never_a_guess(changes: dict[str, Any], problem: str) -> None:
    """It goes into the worker's profile, in words."""
    assert layout_of(RULES, told(**changes)) == (None, problem)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"enabled":true}',
        page(pools=[{"suffixes": "_k"}]),
        page(pools=[{"suffixes": [1]}]),
        page(pools=[{"suffixes": ["x"] * 1025}]),
        page(pools=[{"suffixes": ["x"]}] * 17),
    ],
)
def test_pages_that_cannot_be_read_are_the_engines_fault(body: bytes) -> None:
    """And never a layout that nobody meant."""
    with pytest.raises(ScrapeError):
        parse_layout_page(body)

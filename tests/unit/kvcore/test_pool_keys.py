"""What is read out of object keys: three writers, their versions, and everything that is no key of theirs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.pool_keys import HICACHE, LMCACHE, VLLM, PoolKey
from kvcore.pool_layout import (
    hicache_prefix,
    lmcache_components,
    mha_components,
    mla_components,
    vllm_components,
)
from tests.unit.kvcore.pool_making import POOL_TWINS, PoolTwin, page_of

pytestmark = pytest.mark.parametrize("twin", POOL_TWINS, ids=str)

HEX = page_of("a page")
OTHER = page_of("another")
HEAD = bytes.fromhex(HEX)[:16]
TAIL = bytes(8) + bytes.fromhex(HEX)[-8:]

KNOWN = [
    (f"Qwen-Qwen3-8B_{HEX}_0_k", HICACHE, "Qwen-Qwen3-8B_", HEAD, "_0_k"),
    (f"{HEX}__k", HICACHE, "", HEAD, "__k"),
    (f"tag_my_model-v1_{HEX}_1_0_v", HICACHE, "tag_my_model-v1_", HEAD, "_1_0_v"),
    (f"m_tp4_dcp2_page64_pp1_cp1_{HEX}_dcp1_cp0_k", HICACHE, "m_tp4_dcp2_page64_pp1_cp1_", HEAD, "_dcp1_cp0_k"),
    (f"m_{HEX}_0_0_swa_k", HICACHE, "m_", HEAD, "_0_0_swa_k"),
    (f"{OTHER}_{HEX}_0_k", HICACHE, f"{OTHER}_", HEAD, "_0_k"),
    (f"{HEX}_ukv1-0123456789abcdef_L0-32", HICACHE, "", HEAD, "_ukv1-0123456789abcdef_L0-32"),
    (f"a@b_{HEX}_0_k", HICACHE, "a@b_", HEAD, "_0_k"),
    (f"ü_{HEX}_é", HICACHE, "ü_", HEAD, "_é"),
    (
        f"rollout2@Qwen3-8B@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{HEX}",
        VLLM,
        "rollout2@Qwen3-8B",
        TAIL,
        "@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0",
    ),
    (
        f"m@store_tp:2@store_pp:1@store_format:x@tp_rank:1@pcp0@dcp1@pp_rank:0@group:3@{HEX}",
        VLLM,
        "m@store_tp:2@store_pp:1@store_format:x",
        TAIL,
        "@tp_rank:1@pcp0@dcp1@pp_rank:0@group:3",
    ),
    (
        f"Qwen/Qwen2.5-7B@tp_rank:0@pcp0@dcp0@pp_rank:0@{HEX}",
        VLLM,
        "Qwen/Qwen2.5-7B",
        TAIL,
        "@tp_rank:0@pcp0@dcp0@pp_rank:0",
    ),
    (f"m@tp_rank:0@pp_rank:0@{HEX[-32:]}", VLLM, "m", TAIL, "@tp_rank:0@pp_rank:0"),
    (f"m@pcp0@dcp0@head_or_tp_rank:2@pp_rank:0@{HEX}", VLLM, "m", TAIL, "@pcp0@dcp0@head_or_tp_rank:2@pp_rank:0"),
    (f"m@pcp0@dcp0@head_or_tp_rank:2@{HEX}@17", VLLM, "m", TAIL, "@pcp0@dcp0@head_or_tp_rank:2@17"),
    (
        f"m@dcp:3@head_or_tp_rank:1@pp_rank:0@group:0@cache_role:kv@cache_family:default@layer_id:4@{HEX}",
        VLLM,
        "m",
        TAIL,
        "@dcp:3@head_or_tp_rank:1@pp_rank:0@group:0@cache_role:kv@cache_family:default@layer_id:4",
    ),
    (f"Qwen/Qwen3-8B@1@0@{HEX}@bfloat16", LMCACHE, "Qwen/Qwen3-8B@1", TAIL, "@0@@bfloat16"),
    (f"m@x@2@1@{HEX}@half@3@tag%value", LMCACHE, "m@x@2", TAIL, "@1@@half@3@tag%value"),
    ("m@1@0@1f2e3d4c@half", LMCACHE, "m@1", bytes(12) + bytes.fromhex("1f2e3d4c"), "@0@@half"),
]

UNKNOWN = [
    "",
    "12345",
    "0xfedcba9876543210",
    "sglang_mooncake_store_warmup_key00000000000000000000000000000000",
    HEX,
    f"m_{HEX}",
    f"m_{HEX}_",
    f"m-{HEX}_0_k",
    f"m_{HEX}0_0_k",
    f"m_{HEX.upper()}_0_k",
    f"m_{HEX[:-1]}_0_k",
    f"m@{HEX}",
    f"m@{HEX}@0",  # vLLM-Ascend's compact form
    f"@tp_rank:0@{HEX}",
    f"m@tp_rank:x@{HEX}",
    f"m@tp_rank:0@tp_rank:1@{HEX}",
    f"m@pcp0@dcp0@pp_rank:0@{HEX}",
    f"m@tp_rank:0@{HEX}@layer",
    f"m@tp_rank:0@{HEX[:7]}",
    f"m@tp_rank:0@{HEX}{HEX}a",
    f"m@tp_rank:٣@{HEX}",
    f"m@1@0@{HEX}",
    f"m@1@0@{HEX}@3",
    f"@1@0@{HEX}@half",
    f"1@0@{HEX}@half",
    f"m@1@w@{HEX}@half",
    f"m_{HEX}_{'x' * 256}",
    f"m@tp_rank:0@cache_role:{'x' * 256}@{HEX}",
    f"{'m' * 4096}_{HEX}_0_k",
    f"\udc80_{HEX}_0_k",
]


@pytest.mark.parametrize(("key", "scheme", "prefix", "page", "component"), KNOWN, ids=range(len(KNOWN)))
def test_known_keys(twin: PoolTwin, key: str, scheme: str, prefix: str, page: bytes, component: str) -> None:
    """Every form of pool-events §6, with names that hold the separators; as text and as bytes."""
    for parsed in (twin.parse_key(key), twin.parse_key(key.encode())):
        assert (parsed.scheme, parsed.prefix, parsed.page, parsed.component) == (scheme, prefix, page, component)
        assert parsed == PoolKey(scheme, prefix, page, component)


@pytest.mark.parametrize("key", UNKNOWN, ids=range(len(UNKNOWN)))
def test_what_is_no_key(twin: PoolTwin, key: str) -> None:
    """Warm-up noise, other people's keys and damaged ones name no page (spec: pool-events §4 rule 8)."""
    assert twin.parse_key(key) is None
    assert twin.parse_key(key.encode("utf-8", "surrogatepass")) is None


def test_bounds(twin: PoolTwin) -> None:
    """A key as long as allowed is read, one byte more is not; the bytes count, not the letters."""
    key = f"ü_{HEX}_0_k"
    assert twin.parse_key(key, max_bytes=len(key.encode())) is not None
    assert twin.parse_key(key, max_bytes=len(key.encode()) - 1) is None
    assert twin.parse_key(key.encode(), max_bytes=len(key.encode()) - 1) is None
    assert twin.parse_key(f"{HEX}_{'é' * 127}x") is not None
    assert twin.parse_key(f"{HEX}_{'é' * 128}") is None
    assert twin.parse_key(b"\xff_" + HEX.encode() + b"_0_k") is None


PIECES = st.sampled_from(
    [
        "@",
        "_",
        HEX,
        OTHER,
        HEX[:16],
        "0",
        "7",
        "tp_rank:0",
        "pcp1",
        "dcp0",
        "pp_rank:0",
        "group:0",
        "m",
        "half",
        "k",
        "é",
    ]
)


@given(st.lists(PIECES, max_size=14))
def test_keys_of_any_pieces(twin: PoolTwin, pieces: list[str]) -> None:
    """Whatever the pieces, both twins read the same, and nothing of a key that is read is lost."""
    key = "".join(pieces)
    parsed = POOL_TWINS[0].parse_key(key)
    assert twin.parse_key(key) == parsed
    if parsed is not None:
        assert len(parsed.page) == 16
        assert key.startswith(parsed.prefix)
        assert len(parsed.prefix) + len(parsed.component.replace("@@", "@")) < len(key)


def test_computed_components(twin: PoolTwin) -> None:
    """What the functions compute is what the keys of such a deployment have (spec: pool-events §6)."""
    assert mha_components(2) == ("_0_k", "_0_v", "_1_k", "_1_v")
    assert mha_components(1, pp=2) == ("_0_0_k", "_0_0_v", "_0_1_k", "_0_1_v")
    assert mha_components(2, heads_lcm=4) == mha_components(4)
    assert mha_components(4, heads_lcm=2) == mha_components(4)
    assert mla_components() == ("__k",)
    assert mla_components(pp=2) == ("_0_k", "_1_k")
    assert mla_components(dcp=2) == ("_dcp0_cp0_k", "_dcp1_cp0_k")
    assert mla_components(pp=2, dcp=2) == ("_dcp0_cp0_0_k", "_dcp1_cp0_0_k", "_dcp0_cp0_1_k", "_dcp1_cp0_1_k")
    assert vllm_components(2, dcp=2) == (
        "@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0",
        "@tp_rank:1@pcp0@dcp1@pp_rank:0@group:0",
    )
    assert vllm_components(1, pp=2, groups=(0, 3)) == (
        "@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0",
        "@tp_rank:0@pcp0@dcp0@pp_rank:1@group:0",
        "@tp_rank:0@pcp0@dcp0@pp_rank:0@group:3",
        "@tp_rank:0@pcp0@dcp0@pp_rank:1@group:3",
    )
    assert lmcache_components(2, "half") == ("@0@@half", "@1@@half")
    for component in (*mha_components(2, pp=2), *mla_components(2, 2, 2)):
        prefix = hicache_prefix("tag", "a/b_c")
        assert twin.parse_key(f"{prefix}{HEX}{component}") == PoolKey(HICACHE, "tag_a-b_c_", HEAD, component)
    for component in vllm_components(2, 2, 2, 2, 1):
        assert twin.parse_key(f"m{component}@{HEX}") == PoolKey(VLLM, "m", TAIL, component)
    assert (hicache_prefix(), hicache_prefix("t"), hicache_prefix(model="a/b")) == ("", "t_", "a-b_")

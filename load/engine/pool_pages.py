"""How this engine's pages lie in a shared pool: their keys, and what it says about that (spec: pool-events §6).

``sglang_hicache``: pages by SGLang's SHA-256 chain over tokens, one object per K and V and rank (MHA) or per page
(MLA). ``vllm_mooncake``: the engine's own block digests, one object per rank. A page is ``page_size`` tokens, a
multiple of the block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvcore import page_digests
from kvcore.pool_layout import hicache_prefix, mha_components, mla_components, vllm_components
from load.engine.kv_cache import BlockContent

PoolScheme = Literal["sglang_hicache", "vllm_mooncake"]
Attention = Literal["mha", "mla"]
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayoutConfig:
    """``tp``, ``pp``: ranks that hold a share of every page. ``tag``: HiCache's ``extra_backend_tag``, or vLLM's
    ``cache_prefix``. ``page_bytes``: of a page's KV, in all."""

    scheme: PoolScheme
    model: str
    block_size: int
    page_size: int
    attention: Attention = "mha"
    tp: int = 1
    pp: int = 1
    tag: str = ""
    page_bytes: int = 1


class PoolPages:
    """Keys of pages."""

    def __init__(self, config: PoolLayoutConfig) -> None:
        self.config = config
        self.page_blocks = config.page_size // config.block_size
        if config.scheme == "vllm_mooncake":
            cache_prefix = f"{config.tag}@" if config.tag else ""
            self.prefix = cache_prefix + config.model.rpartition("/")[2]
            self.components = vllm_components(config.tp, config.pp)
        else:
            self.prefix = hicache_prefix(config.tag, config.model)
            self.components = (
                mla_components(config.pp) if config.attention == "mla" else mha_components(config.tp, config.pp)
            )

    @property
    def object_bytes(self) -> int:
        """Of one object."""
        return max(1, self.config.page_bytes // len(self.components))

    def pages(self, contents: Sequence[BlockContent]) -> list[str]:
        """The hash, in hex, of each full page of a sequence that begins with ``contents``' first block."""
        count = len(contents) // self.page_blocks
        if self.config.scheme == "vllm_mooncake":
            return [contents[(page + 1) * self.page_blocks - 1].digest.hex() for page in range(count)]
        if not count:
            return []
        extra = contents[0].extra
        tokens = b"".join(content.tokens for content in contents[: count * self.page_blocks])
        return self.token_pages(tokens, extra.lora_name, extra.cache_salt)

    def token_pages(self, tokens: bytes, adapter: str | None, salt: str | None) -> list[str]:
        """The same for tokens (u32 little-endian) by SGLang's rule."""
        digests = page_digests(tokens, self.config.page_size, adapter=adapter, salt=salt)
        return [digests[at : at + DIGEST_BYTES].hex() for at in range(0, len(digests), DIGEST_BYTES)]

    def digest_pages(self, digests: Sequence[bytes]) -> list[str]:
        """The same for a sequence's block digests by vLLM's rule."""
        last = self.page_blocks - 1
        return [digest.hex() for digest in digests[last :: self.page_blocks]]

    def keys(self, page: str) -> list[str]:
        """Keys of the objects that one page consists of."""
        if self.config.scheme == "vllm_mooncake":
            return [f"{self.prefix}{component}@{page}" for component in self.components]
        return [f"{self.prefix}{page}{component}" for component in self.components]

    def group_id(self, page: str) -> str:
        """The group that a page's objects are put with."""
        if self.config.scheme == "vllm_mooncake":
            return f"vllm-mooncake-store:{self.prefix}@{page}"
        return f"sglang-hicache:{self.prefix}{page}"

    def describe(self) -> dict[str, Any]:
        """``GET /get_hicache_l3_cache_layout`` as SGLang 0.5.23: MHA is not told."""
        config = self.config
        if config.scheme != "sglang_hicache" or config.attention != "mla":
            return {"enabled": False, "reason": "the layout is known for MLA backends only"}
        return {
            "enabled": True,
            "backend": "mooncake",
            "page_size": config.page_size,
            "hicache_object_layout": {
                "pools": [{"pool": "kv", "suffixes": list(self.components), "hit_policy": "all_pages"}],
                "key_prefix": self.prefix.removesuffix("_"),
                "is_mla_backend": True,
                "pp_rank": 0,
                "pp_size": config.pp,
            },
        }


def reach_of(present: Sequence[bool], components: int) -> int:
    """Pages from the first on of which every object is there. ``present``: by page, then by component."""
    for place, there in enumerate(present):
        if not there:
            return place // components
    return len(present) // components

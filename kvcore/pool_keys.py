"""What an object key of a shared pool says: which page of which deployment, and which of the page's objects.

Three writers are known (spec: pool-events §6). In a key, ``hex`` stands for the page's hash:

- ``sglang_hicache``: ``[prefix_]hex suffix``. ``hex`` is 64 digits, the rightmost such run that stands alone between
  underscores and has something after it: tags and model names hold underscores too. ``prefix`` has its underscore
  (``Qwen-Qwen3-8B_``, or empty before 0.5.17), the component is the suffix (``_0_k``, ``__k``, ``_0_0_swa_k``).
- ``vllm_mooncake``: ``[cache_prefix@]model[namespace]@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@hex``, also without the
  group (older) and as vLLM-Ascend writes it (``head_or_tp_rank``, ``cache_role``, ``cache_family``, ``layer_id``, or
  the layer after the hash). The component is the run of these parts before the hash, the prefix all before them. The
  compact form of vLLM-Ascend (``model@hex@rank``) cannot be told from other keys, and is not read.
- ``lmcache``: ``model@world@worker@hex@dtype[@layer][@tag%value..]``. The prefix is ``model@world``, the component the
  rest without the hash (``@0@@bfloat16``).

Model names are whatever they are: with ``/``, ``@`` and ``_``. Everything else, warm-up keys among it, is no page:
`parse_key` gives ``None``, and whoever asks counts it (spec: pool-events §4 rule 8).

A page is 16 bytes: the first 16 of the digest (HiCache), or 8 zero bytes and the last 8 of the digest: the two others
use the engine's own block hash, of which the engine's events carry the last 8 bytes (spec: pool-events §6 vLLM).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

HICACHE = "sglang_hicache"
VLLM = "vllm_mooncake"
LMCACHE = "lmcache"
SCHEMES = (HICACHE, VLLM, LMCACHE)

MAX_KEY_BYTES = 4096
MAX_COMPONENT_BYTES = 256
_DIGEST_DIGITS = 64
_HASH_DIGITS = range(8, 129)
_TAIL_DIGITS = 16
_ZEROS = bytes(8)
_HEX = frozenset("0123456789abcdef")
_RANKS = ("tp_rank:", "head_or_tp_rank:")
_NUMBERED = (*_RANKS, "pcp", "dcp:", "dcp", "pp_rank:", "group:", "layer_id:")
_NAMED = ("cache_role:", "cache_family:")


class PoolKey(msgspec.Struct, frozen=True, gc=False):
    """One object. ``prefix``: the deployment's, separator included; ``page``: 16 bytes; ``component``: which object of
    the page."""

    scheme: str
    prefix: str
    page: bytes
    component: str


def parse_key(object_key: str | bytes, max_bytes: int = MAX_KEY_BYTES) -> PoolKey | None:
    """What ``object_key`` names; ``None``: nothing that we know, or longer than ``max_bytes``, or not UTF-8."""
    if isinstance(object_key, bytes):
        if len(object_key) > max_bytes:
            return None
        try:
            object_key = object_key.decode("utf-8")
        except UnicodeDecodeError:
            return None
    elif not _fits(object_key, max_bytes):
        return None
    key = (_rank_key(object_key) or _lmcache_key(object_key)) if "@" in object_key else None
    key = key or _hicache_key(object_key)
    return key if key is not None and _fits(key.component, MAX_COMPONENT_BYTES) else None


def _fits(text: str, limit: int) -> bool:
    """Whether it has a UTF-8 form of at most ``limit`` bytes."""
    if len(text) > limit:
        return False
    if text.isascii():
        return True
    try:
        return len(text.encode("utf-8")) <= limit
    except UnicodeEncodeError:  # a lone surrogate
        return False


def _hicache_key(key: str) -> PoolKey | None:
    parts = key.split("_")
    end = len(key)
    for place in range(len(parts) - 1, -1, -1):
        part = parts[place]
        start = end - len(part)
        if len(part) == _DIGEST_DIGITS and _is_hex(part) and len(key.encode()) - len(key[:end].encode()) >= 2:
            return PoolKey(HICACHE, key[:start], bytes.fromhex(part[:32]), key[end:])
        end = start - 1
    return None


def _rank_key(key: str) -> PoolKey | None:
    parts = key.split("@")
    if _is_hash(parts[-1]) and (found := _before_hash(parts, len(parts) - 1)):
        return found
    if len(parts) > 2 and _is_number(parts[-1]) and _is_hash(parts[-2]):
        return _before_hash(parts, len(parts) - 2)
    return None


def _before_hash(parts: Sequence[str], at: int) -> PoolKey | None:
    """The key whose hash is ``parts[at]``, if the parts before it are ranks."""
    first = at
    while first and _is_coordinate(parts[first - 1]):
        first -= 1
    ranks = [part for part in parts[first:at] if part.startswith(_RANKS)]
    prefix = "@".join(parts[:first])
    if len(ranks) != 1 or not prefix:
        return None
    return PoolKey(VLLM, prefix, _tail(parts[at]), "".join(f"@{part}" for part in (*parts[first:at], *parts[at + 1 :])))


def _lmcache_key(key: str) -> PoolKey | None:
    parts = key.split("@")
    for at in range(len(parts) - 2, 2, -1):
        dtype = parts[at + 1][:1]
        if (
            _is_hash(parts[at])
            and _is_number(parts[at - 1])
            and _is_number(parts[at - 2])
            and dtype.isascii()
            and dtype.isalpha()
            and any(parts[: at - 2])
        ):
            component = f"@{parts[at - 1]}@@{'@'.join(parts[at + 1 :])}"
            return PoolKey(LMCACHE, "@".join(parts[: at - 1]), _tail(parts[at]), component)
    return None


def _is_coordinate(part: str) -> bool:
    """Whether it says where in the deployment an object belongs."""
    if any(part.startswith(name) and _is_number(part[len(name) :]) for name in _NUMBERED):
        return True
    return any(part.startswith(name) and len(part) > len(name) for name in _NAMED)


def _is_hex(text: str) -> bool:
    return _HEX.issuperset(text)


def _is_hash(part: str) -> bool:
    return len(part) in _HASH_DIGITS and _is_hex(part)


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit()


def _tail(digits: str) -> bytes:
    """8 zero bytes and the last 8 of the digest."""
    return _ZEROS + bytes.fromhex(digits[-_TAIL_DIGITS:].rjust(_TAIL_DIGITS, "0"))

"""Both twins of `kvcore`, side by side in one process."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, TypeGuard

from kvcore import events, hashing, index
from kvcore.errors import TwinError
from kvcore.twin import choose


@dataclass(frozen=True)
class Twin:
    """What of `kvcore` exists twice. Types are those of the Python twin, as everywhere."""

    name: str
    PrefixIndex: type[index.PrefixIndex]
    decode_batch: Any
    seed_of: Any
    local_hashes: Any
    chain_hashes: Any
    multimodal_hash: Any
    sequence_hashes_with_tail: Any

    def __str__(self) -> str:
        return self.name


def twin_of(name: str, *modules: Any) -> Twin:
    """The names as the first of ``modules`` has them."""

    def named(attribute: str) -> Any:
        return next(getattr(module, attribute) for module in modules if hasattr(module, attribute))

    return Twin(
        name,
        named("PrefixIndex"),
        named("decode_batch"),
        named("seed_of"),
        named("local_hashes"),
        named("chain_hashes"),
        named("multimodal_hash"),
        named("sequence_hashes_with_tail"),
    )


def _missing() -> str | None:
    try:
        choose("native")
    except TwinError as error:
        return str(error)
    return None


NATIVE_MISSING = _missing()
"""Why there is no native twin to test; ``None``: there is one."""
PYTHON = twin_of("python", index, events, hashing)
NATIVE = None if NATIVE_MISSING is not None else twin_of("native", importlib.import_module("tidegate_kvcore"))


def is_stored(event: object) -> TypeGuard[events.Stored]:
    """Whether it is a stored event of either twin."""
    return type(event).__name__ == "Stored"


def is_removed(event: object) -> TypeGuard[events.Removed]:
    """Whether it is a removed event of either twin."""
    return type(event).__name__ == "Removed"


def is_cleared(event: object) -> TypeGuard[events.Cleared]:
    """Whether it is a cleared event of either twin."""
    return type(event).__name__ == "Cleared"

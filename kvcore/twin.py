"""Which of the two twins does the work: the native one where it is installed and fits, else pure Python.

Both have the same names, arguments and results (docs/adr/0006-twins-of-kvcore.md). The choice is made once, when this
module is imported, by the environment's ``TIDEGATE_KVCORE``:

- ``auto`` (the default): native where ``tidegate_kvcore`` is installed and of the API that this version knows;
- ``native``: the same, but anything in the way is an error;
- ``python``: pure Python.

`IMPLEMENTATION` says what was chosen, `WHY` why it is not the native twin. Everybody takes the chosen names from here
or from `kvcore`; the pure-Python twin stays in its modules, and type checkers see its types.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from kvcore import events, hashing, index, page_hash, pool_index
from kvcore.errors import TwinError

Implementation = Literal["native", "python"]

VARIABLE = "TIDEGATE_KVCORE"
NATIVE_MODULE = "tidegate_kvcore"
NATIVE_API = 2
"""What the native module must have as ``API``: raised with every change that one of the two twins alone would not
survive."""
_CHOICES = ("auto", "native", "python")
_BUILD_IT = "build and install it with `make setup` (needs cargo)"


def choose(wanted: str) -> tuple[ModuleType | None, str | None]:
    """The native module, or ``None`` and why not in one sentence. Raises `TwinError`: nobody knows ``wanted``, or it is
    ``native`` and cannot be had."""
    wanted = wanted.strip().lower() or "auto"
    if wanted not in _CHOICES:
        raise TwinError(f"{VARIABLE} must be one of {', '.join(_CHOICES)}, not {wanted!r}")
    if wanted == "python":
        return None, f"{VARIABLE}=python asks for pure Python"
    native, why = _load()
    if native is None and wanted == "native":
        raise TwinError(f"{VARIABLE}=native, but {why}: {_BUILD_IT}, or set {VARIABLE}=auto")
    return native, why


def _load() -> tuple[ModuleType | None, str | None]:
    try:
        native = importlib.import_module(NATIVE_MODULE)
    except ModuleNotFoundError as error:
        if error.name != NATIVE_MODULE:
            return None, f"{NATIVE_MODULE} is damaged ({error})"
        return None, f"{NATIVE_MODULE} is not installed"
    except ImportError as error:
        return None, f"{NATIVE_MODULE} cannot be loaded ({error})"
    api = getattr(native, "API", None)
    if api == NATIVE_API:
        return native, None
    if isinstance(api, int) and api > NATIVE_API:
        return None, f"the installed {NATIVE_MODULE} is too new (API {api}, not {NATIVE_API})"
    return None, f"the installed {NATIVE_MODULE} is too old (API {api or 'unnamed'}, not {NATIVE_API})"


_native, WHY = choose(os.environ.get(VARIABLE, "auto"))
IMPLEMENTATION: Implementation = "python" if _native is None else "native"

if TYPE_CHECKING:
    PoolIndex = pool_index.PoolIndex
    PrefixIndex = index.PrefixIndex
    chain_hashes = hashing.chain_hashes
    decode_batch = events.decode_batch
    local_hashes = hashing.local_hashes
    multimodal_hash = hashing.multimodal_hash
    page_hashes = page_hash.page_hashes
    seed_of = hashing.seed_of
    sequence_hashes_with_tail = hashing.sequence_hashes_with_tail
else:
    PoolIndex = (_native or pool_index).PoolIndex
    PrefixIndex = (_native or index).PrefixIndex
    chain_hashes = (_native or hashing).chain_hashes
    decode_batch = (_native or events).decode_batch
    local_hashes = (_native or hashing).local_hashes
    multimodal_hash = (_native or hashing).multimodal_hash
    page_hashes = (_native or page_hash).page_hashes
    seed_of = (_native or hashing).seed_of
    sequence_hashes_with_tail = (_native or hashing).sequence_hashes_with_tail

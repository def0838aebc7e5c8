"""The twins of kvcore side by side: the one that was chosen, and pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcore import events, hashing, index, twin


@dataclass(frozen=True, slots=True)
class Twin:
    """One implementation: its name and the parts that are measured. Types are those of the Python twin."""

    name: str
    new_index: type[index.PrefixIndex]
    decode_batch: Any
    chain_hashes: Any


PYTHON = Twin("python", index.PrefixIndex, events.decode_batch, hashing.chain_hashes)


def chosen() -> Twin:
    """The twin that the house uses (`kvcore.twin`)."""
    if twin.IMPLEMENTATION == "python":
        return PYTHON
    return Twin(twin.IMPLEMENTATION, twin.PrefixIndex, twin.decode_batch, twin.chain_hashes)


def all_twins() -> list[Twin]:
    """The chosen one first, then pure Python if that is another."""
    first = chosen()
    return [first] if first is PYTHON else [first, PYTHON]

"""What both twins make of the same input, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvcore.errors import KvCoreError
from kvcore.events import Cleared, Removed, Stored
from kvcore.hashing import unpack_chain
from kvcore.index import Content, IndexLimits, IndexStats, PrefixIndex
from tests.unit.kvcore.twins import PYTHON, Twin

_FIELDS: dict[str, tuple[str, ...]] = {
    "Stored": (*Stored.__struct_fields__, "tokens_per_block"),
    "Removed": Removed.__struct_fields__,
    "Cleared": Cleared.__struct_fields__,
}
_STATS = tuple(IndexStats.__dataclass_fields__)
_RESULT = ("stored", "removed", "cleared", "held", "unknown_removed", "other_groups", "dropped", "block_size")


class DifferenceError(Exception):
    """The twins do not agree, or one of them is wrong by itself."""

    reason = "twins_differ"


def same(what: str, python: Any, native: Any) -> None:
    """Raises `DifferenceError` unless both are equal."""
    if python != native:
        raise DifferenceError(f"{what}:\n  python: {shortened(python)}\n  other:  {shortened(native)}")


def hold(what: str, holds: object) -> None:
    """Raises `DifferenceError` unless it holds."""
    if not holds:
        raise DifferenceError(what)


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 2_000 else f"{text[:1_500]} ... {text[-400:]}"


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the class of the error of ours that it raises; anything else goes through."""
    try:
        return call()
    except KvCoreError as error:
        return type(error).__name__


def read_batch(batch: Any) -> Any:
    """A decoded batch of either twin as plain values. A refusal stays the name of its error."""
    if isinstance(batch, str):
        return batch
    events = [(name, *(getattr(event, field) for field in _FIELDS[name])) for event in batch.events
              for name in (type(event).__name__,)]  # fmt: skip
    ts = "nan" if math.isnan(batch.ts) else batch.ts
    return ts, batch.rank, events, dict(batch.rejected), batch.unknown_media, batch.cleared


def read_result(result: Any) -> Any:
    """What a batch did; what it evicted is compared by its bounds only."""
    if isinstance(result, str):
        return result
    return {**{field: getattr(result, field) for field in _RESULT}, "rejected": dict(result.rejected)}


def read_match(index: PrefixIndex, chain: bytes) -> dict[tuple[str, int], tuple[int, int, int, int]]:
    """Device, host, disk, external per (worker, rank)."""
    matches = index.match(chain)
    found = {(one.worker, one.rank): (one.device, one.host, one.disk, one.external) for one in matches}
    hold("a rank matched twice", len(found) == len(matches))
    hold("reach is not the sum of the tiers", all(one.reach == sum(found[one.worker, one.rank]) for one in matches))
    return found


def exact_match(content: Content, chain: bytes) -> dict[tuple[str, int], tuple[int, ...]]:
    """`read_match` as the content says, block by block, of ranks with one group."""
    found: dict[tuple[str, int], tuple[int, ...]] = {}
    for rank, held in content.items():
        blocks = [0, 0, 0, 0]
        for own in unpack_chain(chain):
            if own not in held:
                break
            blocks[min(tier for _, tier, _ in held[own])] += 1
        if any(blocks):
            found[rank] = tuple(blocks)
    return found


@dataclass
class Pair:
    """An index of each twin, told the same."""

    python: PrefixIndex
    native: PrefixIndex
    twin: Twin

    @classmethod
    def new(cls, twin: Twin, limits: IndexLimits | None = None) -> Pair:
        return cls(PYTHON.PrefixIndex(limits), twin.PrefixIndex(limits), twin)

    def apply(self, worker: str, rank: int, payload: bytes) -> Any:
        """Both apply the payload; what it did, alike in both."""
        results = [outcome(partial(index.apply_payload, worker, rank, payload)) for index in self.both]
        same("what a batch did", *(read_result(result) for result in results))
        return results[0]

    def apply_hashes(self, worker: str, rank: int, *given: Any) -> None:
        """Both apply a run of blocks by their hashes; what it did, alike in both."""
        results = [outcome(partial(index.apply_hashes, worker, rank, *given)) for index in self.both]
        same("what given hashes did", *(read_result(result) for result in results))

    @property
    def both(self) -> tuple[PrefixIndex, PrefixIndex]:
        return self.python, self.native

    def check_match(self, chains: Iterable[bytes]) -> None:
        """Both answer alike."""
        for chain in chains:
            same(f"match of {len(chain) // 8} blocks", *(read_match(index, chain) for index in self.both))

    def check_all(self) -> None:
        """Content, counts and ranks are alike."""
        same("ranks", *(sorted(index.ranks()) for index in self.both))
        same("content", *(index.content() for index in self.both))
        same("stats", *({name: getattr(index.stats(), name) for name in _STATS} for index in self.both))
        for worker, rank in self.python.ranks():
            same("resident", *(index.resident(worker, rank) for index in self.both))
            same("block size", *(index.block_size(worker, rank) for index in self.both))

"""Every row of the table of cases that the closest peer was probed with (spec: index-and-routing §2.5), with the right
answer: from raw payloads, in three layouts, in both twins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from kvcore.hashing import unpack_tokens
from kvcore.index import PrefixIndex
from kvcore.stream import Clear, Deliver, Fetch, LiveBatch, ReplayedBatch, ReplayEnded, StateChanged, StreamRecovery
from tests.unit.kvcore.making import BLOCK_SIZE, chain_of_names, tiers, tokens_of
from tests.unit.kvcore.twins import Twin


def store(names: Sequence[int], parent: int | None = None, medium: str = "GPU") -> tuple[Any, ...]:
    return "BlockStored", names, parent, medium


def remove(names: Sequence[int], medium: str = "GPU") -> tuple[Any, ...]:
    return "BlockRemoved", names, None, medium


def as_array(event: tuple[Any, ...]) -> Any:
    """vLLM up to 0.23: positions, hashes as u64."""
    tag, names, parent, medium = event
    hashes = [2**63 + name for name in names]
    if tag == "BlockRemoved":
        return [tag, hashes, medium]
    above = None if parent is None else 2**63 + parent
    tokens = unpack_tokens(tokens_of(names))
    return [tag, hashes, above, tokens, BLOCK_SIZE, None, medium, None, [None] * len(names), 0, "full_attention", None]


def as_map(event: tuple[Any, ...]) -> Any:
    """vLLM from 0.24 on: names, hashes as digests."""
    tag, names, parent, medium = event
    fields = {"type": tag, "block_hashes": [digest(name) for name in names], "medium": medium, "group_idx": 0}
    if tag == "BlockRemoved":
        return fields
    above = None if parent is None else digest(parent)
    tokens = unpack_tokens(tokens_of(names))
    return {**fields, "parent_block_hash": above, "token_ids": tokens, "block_size": BLOCK_SIZE}


def digest(name: int) -> bytes:
    return b"\xab" * 24 + (77 + name).to_bytes(8, "big")


def as_signed(event: tuple[Any, ...]) -> Any:
    """SGLang: positions, hashes as signed numbers, nothing behind the medium."""
    tag, names, parent, medium = event
    hashes = [-1 - name for name in names]
    if tag == "BlockRemoved":
        return [tag, hashes, medium]
    above = None if parent is None else -1 - parent
    return [tag, hashes, above, unpack_tokens(tokens_of(names)), BLOCK_SIZE, None, medium]


LAYOUTS: list[Callable[[tuple[Any, ...]], Any]] = [as_array, as_map, as_signed]


def payload(layout: Callable[[tuple[Any, ...]], Any], *events: tuple[Any, ...]) -> bytes:
    return msgspec.msgpack.encode([1.5, [layout(event) for event in events], 0])


@dataclass(frozen=True)
class Case:
    """``batches``: the events of each. ``answer``: device, host, disk, external of the chain 0, 1, ..., ``asked`` - 1.
    ``holes``: whether the rank's coverage has some then. ``unknown``: removals of what is not there."""

    name: str
    batches: list[list[tuple[Any, ...]]]
    asked: int
    answer: tuple[int, int, int, int]
    holes: bool = False
    unknown: int = 0


CASES = [
    Case("store 0..3, remove 1", [[store([0, 1, 2, 3])], [remove([1])]], 4, (1, 0, 0, 0), holes=True),
    Case(
        "then store 1 again: 2 and 3 never left (the peer says 2)",
        [[store([0, 1, 2, 3])], [remove([1])], [store([1], 0)]],
        4,
        (4, 0, 0, 0),
    ),
    Case(
        "then append 4 under 3 (the peer loses it)",
        [[store([0, 1, 2, 3])], [remove([1])], [store([1], 0)], [store([4], 3)]],
        5,
        (5, 0, 0, 0),
    ),
    Case(
        "append before the hole is filled",
        [[store([0, 1, 2, 3])], [remove([1])], [store([4], 3)], [store([1], 0)]],
        5,
        (5, 0, 0, 0),
    ),
    Case("a child before its parent (the peer says 2)", [[store([2], 1)], [store([0, 1])]], 3, (3, 0, 0, 0)),
    Case(
        "all of it in one batch", [[store([2], 1), store([0, 1]), remove([7]), remove([1])]], 3, (1, 0, 0, 0), True, 1
    ),
    Case(
        "removing what is unknown (the peer raises)",
        [[remove([7])], [store([0, 1])], [remove([8, 9]), remove([1], "CPU_PINNED")]],
        2,
        (2, 0, 0, 0),
        unknown=4,
    ),
    Case("a duplicate store", [[store([0, 1])], [store([0, 1])]], 2, (2, 0, 0, 0)),
    Case(
        "a tier each",
        [[store([0, 1])], [store([2, 3], 1, "CPU_PINNED")], [store([4], 3, "DISK"), store([5], 4, "EXTERNAL")]],
        6,
        (2, 2, 1, 1),
    ),
    Case(
        "GPU {0}, host {2,3}, nobody has 1",
        [[store([0, 1])], [store([2, 3], 1, "CPU_PINNED")], [remove([1])]],
        4,
        (1, 0, 0, 0),
        holes=True,
    ),
    Case(
        "GPU {0,2,3}, host {1} (the peer stops after the host's)",
        [[store([0, 1, 2, 3])], [store([1], 0, "CPU_PINNED"), remove([1])]],
        4,
        (3, 1, 0, 0),
    ),
]


def check(index: PrefixIndex, case: Case) -> None:
    expected = {("w", 0): case.answer}
    assert tiers(index, chain_of_names(range(case.asked))) == expected
    assert index.stats().holed == case.holes
    assert index.stats().held == 0


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.__name__))
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
def test_the_right_answer(twin: Twin, case: Case, layout: Callable[[tuple[Any, ...]], Any]) -> None:
    """Batch after batch applied from its bytes gives the right answer, and so does what a dump of it loads into."""
    index = twin.PrefixIndex()
    unknown = 0
    for events in case.batches:
        result = index.apply_payload("w", 0, payload(layout, *events))
        assert not result.rejected
        unknown += result.unknown_removed
    assert unknown == case.unknown
    check(index, case)
    copy = twin.PrefixIndex()
    copy.load(index.dump())
    check(copy, case)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.__name__))
@pytest.mark.parametrize("remembered", [True, False], ids=["replayed", "history gone"])
def test_a_gap(twin: Twin, layout: Callable[[tuple[Any, ...]], Any], remembered: bool) -> None:
    """A lost batch (the peer's picture is stale from then on, and nobody knows): said at once and resynchronised from
    the engine's replay; where the engine has forgotten it, the rank is cleared and stays suspect."""
    published = [store([0, 1]), store([2], 1), remove([2]), store([3], 1)]
    payloads = [payload(layout, event) for event in published]
    stream, index = StreamRecovery("replay"), twin.PrefixIndex()
    said: list[StateChanged] = []
    asked: list[int] = []

    def feed(*events: LiveBatch | ReplayedBatch | ReplayEnded) -> None:
        for event in events:
            for effect in stream.handle(event, 0.0):
                match effect:
                    case Deliver():
                        index.apply_payload("w", 0, effect.payload)
                    case Clear():
                        index.clear_rank("w", 0)
                    case Fetch():
                        asked.append(effect.from_seq)
                    case StateChanged():
                        said.append(effect)

    def answer(*names: int) -> int:
        return sum(sum(blocks) for blocks in tiers(index, chain_of_names(names)).values())

    feed(LiveBatch(0, payloads[0]), LiveBatch(1, payloads[1]), LiveBatch(3, payloads[3]))
    assert (said[-1], asked) == (StateChanged("catching_up", "gap"), [2])
    assert (answer(0, 1, 2), answer(0, 1, 3)) == (3, 2)
    if remembered:
        feed(ReplayedBatch(1, 2, payloads[2]), ReplayedBatch(1, 3, payloads[3]), ReplayEnded(1))
        assert said[-1] == StateChanged("synced", None)
        assert (answer(0, 1, 2), answer(0, 1, 3)) == (2, 3)
    else:
        feed(ReplayedBatch(1, 3, payloads[3]), ReplayEnded(1))
        assert said[-1] == StateChanged("catching_up", "history_gone")
        assert (answer(0, 1, 2), answer(0, 1, 3)) == (0, 0)

"""A dump of the index: MessagePack around packed columns, 41 bytes a block. Version 1.

A million blocks take seconds to dump or to load, so both are generators: each step is some `SLICE_BLOCKS` blocks, a few
milliseconds, after which whoever runs an event loop may give it a turn.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import TypeVar

import msgspec

from kvcore.errors import BadDumpError
from kvcore.events import Stored
from kvcore.residency import Block, Residency, Waiting

SLICE_BLOCKS = 2048
_VERSION = 1

T = TypeVar("T")
Item = TypeVar("Item")
Steps = Generator[None, None, T]
"""A computation in steps; what it returns is its result."""


class GroupDump(msgspec.Struct):
    """One group. Columns are packed little-endian. Per engine hash: ``engines`` u64 and ``numbers`` u32 (which block).
    Per block ``copies`` u64; the blocks with an identity come first and have ``owns`` u64, ``parents`` u64 (engine
    hash, 0 at a root), ``roots`` u8 and ``seeds`` u32 (place in ``seed_values``)."""

    block_size: int | None
    connector_copies: int
    engines: bytes
    numbers: bytes
    copies: bytes
    owns: bytes
    parents: bytes
    roots: bytes
    seeds: bytes
    seed_values: list[int]
    waiting: list[Stored]
    ambiguous: bool = False


class RankDump(msgspec.Struct):
    """One rank."""

    worker: str
    rank: int
    groups: dict[int, GroupDump]
    other_kinds: dict[int, str]


class IndexDump(msgspec.Struct, tag="tidegate.index", array_like=True):
    """The whole."""

    ranks: list[RankDump]
    version: int = _VERSION


_decoder = msgspec.msgpack.Decoder(IndexDump)
_encoder = msgspec.msgpack.Encoder()


def encode_dump(dump: IndexDump) -> bytes:
    """As bytes."""
    return _encoder.encode(dump)


def decode_dump(data: bytes) -> IndexDump:
    """Decode and check every length; `load_group` checks the rest. Raises `BadDumpError`."""
    try:
        dump = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise BadDumpError(f"not an index dump: {error}") from error
    if dump.version != _VERSION:
        raise BadDumpError(f"index dump of version {dump.version}, not {_VERSION}")
    if len({(rank.worker, rank.rank) for rank in dump.ranks}) != len(dump.ranks):
        raise BadDumpError("a rank stands twice in the dump")
    for rank in dump.ranks:
        if not 0 <= rank.rank < 1 << 32:
            raise BadDumpError(f"{rank.rank} is not a rank")
        for group in rank.groups.values():
            _check(group)
    return dump


def at_once(steps: Steps[T]) -> T:
    """Run ``steps`` to its end and return what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def dump_group(group: Residency) -> Steps[GroupDump]:
    """Everything of one group, the events that wait included. The group must not change before the last step."""
    engines, numbers, copies = array("Q"), array("I"), array("Q")
    owns, parents, seeds, roots = array("Q"), array("Q"), array("I"), bytearray()
    places: dict[int, int] = {}
    seed_places: dict[int, int] = {}
    nameless: list[Block] = []
    nameless_at: list[int] = []
    for part in _sliced(group.blocks.items()):
        for engine, block in part:
            key = id(block)
            engines.append(engine)
            if block.own is None:
                nameless_at.append(len(numbers))
                place = places.setdefault(key, len(nameless))
                if place == len(nameless):
                    nameless.append(block)
            else:
                place = places.setdefault(key, len(owns))
                if place == len(owns):
                    owns.append(block.own)
                    copies.append(block.copies)
                    parents.append(block.parent or 0)
                    roots.append(block.parent is None)
                    seeds.append(seed_places.setdefault(block.seed, len(seed_places)))
            numbers.append(place)
        yield
    for at in nameless_at:
        numbers[at] += len(owns)
    copies.extend(block.copies for block in nameless)
    return GroupDump(
        block_size=group.block_size,
        connector_copies=group.connector_copies,
        engines=_pack(engines),
        numbers=_pack(numbers),
        copies=_pack(copies),
        owns=_pack(owns),
        parents=_pack(parents),
        roots=bytes(roots),
        seeds=_pack(seeds),
        seed_values=list(seed_places),
        waiting=[waiting.event for waiting in group.waiting if not waiting.done],
        ambiguous=group.ambiguous,
    )


def load_group(group: Residency, dump: GroupDump) -> Steps[None]:
    """Fill an empty group, of which nobody knows yet, from a dump that `decode_dump` gave. Raises `BadDumpError`."""
    engines, numbers, copies = _unpack("Q", dump.engines), _unpack("I", dump.numbers), _unpack("Q", dump.copies)
    columns = zip(
        _unpack("Q", dump.owns), _unpack("I", dump.seeds), _unpack("Q", dump.parents), dump.roots, strict=True
    )
    group.block_size = dump.block_size
    group.connector_copies = dump.connector_copies
    group.ambiguous = dump.ambiguous
    blocks: list[Block] = []
    try:
        for part in _sliced(columns):
            blocks += [Block(own, dump.seed_values[seed], None if root else parent) for own, seed, parent, root in part]
            yield
        blocks += [Block(None, 0, None) for _ in range(len(copies) - len(blocks))]
        for pairs in _sliced(zip(engines, numbers, strict=True)):
            group.blocks.update((engine, blocks[number]) for engine, number in pairs)
            yield
    except IndexError as error:
        raise BadDumpError("a column of a group names what another does not have") from error
    if len(group.blocks) != len(engines):
        raise BadDumpError("an engine hash stands twice in a group")
    for pairs in _sliced(zip(engines, numbers, strict=True)):
        for engine, number in pairs:
            group.restore(engine, copies[number])
        yield
    for event in dump.waiting:
        group.hold(Waiting(event))


def _check(group: GroupDump) -> None:
    """The columns' lengths; what they hold is checked while it is loaded."""
    try:
        engines, numbers, copies = _length("Q", group.engines), _length("I", group.numbers), _length("Q", group.copies)
        known, parents, seeds = _length("Q", group.owns), _length("Q", group.parents), _length("I", group.seeds)
    except ValueError as error:
        raise BadDumpError(f"a packed column is cut off: {error}") from error
    right = (
        numbers == engines
        and parents == seeds == len(group.roots) == known <= copies
        and 0 <= group.connector_copies < 1 << 64
        and (group.block_size is None or 0 < group.block_size < 1 << 32)
        and all(0 <= seed < 1 << 64 for seed in group.seed_values)
    )
    if not right:
        raise BadDumpError("the columns of a group contradict each other")
    if not all(_may_wait(event, group.block_size) for event in group.waiting):
        raise BadDumpError("an event that waits is none that could be applied")


def _may_wait(event: Stored, block_size: int | None) -> bool:
    """Whether a group of this block size could have kept the event, so that it can be applied later."""
    numbers = [event.parent or 0, *event.hashes, *(value for values in event.mm.values() for value in values)]
    aligned = not event.tokens or (
        event.tokens_per_block == block_size
        and len(event.tokens) == 4 * (event.tokens_per_block * len(event.hashes) + event.eagle)
    )
    return bool(event.hashes) and aligned and not event.misaligned and all(0 <= value < 1 << 64 for value in numbers)


def _sliced(items: Iterable[Item]) -> Iterator[list[Item]]:
    rest = iter(items)
    while part := list(islice(rest, SLICE_BLOCKS)):
        yield part


def _length(code: str, data: bytes) -> int:
    size = array(code).itemsize
    if len(data) % size:
        raise ValueError(f"{len(data)} bytes are no whole numbers of {size}")
    return len(data) // size


def _pack(values: array[int]) -> bytes:
    if sys.byteorder != "little":
        values.byteswap()
    return values.tobytes()


def _unpack(code: str, data: bytes) -> array[int]:
    unpacked = array(code)
    unpacked.frombytes(data)
    if sys.byteorder != "little":
        unpacked.byteswap()
    return unpacked

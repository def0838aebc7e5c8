"""A dump of the index: MessagePack around packed columns, 41 bytes a block. Version 1."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

import msgspec

from kvcore.errors import BadDumpError
from kvcore.events import Stored
from kvcore.residency import Block, Residency, Waiting

_VERSION = 1


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
    """Decode and check every length and reference. Raises `BadDumpError`."""
    try:
        dump = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise BadDumpError(f"not an index dump: {error}") from error
    if dump.version != _VERSION:
        raise BadDumpError(f"index dump of version {dump.version}, not {_VERSION}")
    for rank in dump.ranks:
        for group in rank.groups.values():
            _check(group)
    return dump


def dump_group(group: Residency) -> GroupDump:
    """Everything of one group, the events that wait included."""
    blocks = {id(block): block for block in group.blocks.values()}
    ordered = sorted(blocks.values(), key=lambda block: block.own is None)
    known = [block for block in ordered if block.own is not None]
    number = {id(block): place for place, block in enumerate(ordered)}
    seeds = {seed: place for place, seed in enumerate(dict.fromkeys(block.seed for block in known))}
    return GroupDump(
        block_size=group.block_size,
        connector_copies=group.connector_copies,
        engines=_pack("Q", group.blocks),
        numbers=_pack("I", (number[id(block)] for block in group.blocks.values())),
        copies=_pack("Q", (block.copies for block in ordered)),
        owns=_pack("Q", (block.own for block in known if block.own is not None)),
        parents=_pack("Q", (block.parent or 0 for block in known)),
        roots=bytes(block.parent is None for block in known),
        seeds=_pack("I", (seeds[block.seed] for block in known)),
        seed_values=list(seeds),
        waiting=[waiting.event for waiting in group.waiting if not waiting.done],
    )


def load_group(group: Residency, dump: GroupDump) -> None:
    """Fill an empty group from a dump that `decode_dump` has checked."""
    engines, copies = _unpack("Q", dump.engines), _unpack("Q", dump.copies)
    blocks = [
        Block(own, dump.seed_values[seed], None if root else parent)
        for own, seed, parent, root in zip(
            _unpack("Q", dump.owns), _unpack("I", dump.seeds), _unpack("Q", dump.parents), dump.roots, strict=True
        )
    ]
    blocks += [Block(None, 0, None) for _ in range(len(copies) - len(blocks))]
    group.block_size = dump.block_size
    group.connector_copies = dump.connector_copies
    numbers = _unpack("I", dump.numbers)
    for engine, number in zip(engines, numbers, strict=True):
        group.blocks[engine] = blocks[number]
    for engine, number in zip(engines, numbers, strict=True):
        group.restore(engine, copies[number])
    for event in dump.waiting:
        group.hold(Waiting(event))


def _check(group: GroupDump) -> None:
    try:
        engines, numbers, copies = _unpack("Q", group.engines), _unpack("I", group.numbers), _unpack("Q", group.copies)
        owns, parents, seeds = _unpack("Q", group.owns), _unpack("Q", group.parents), _unpack("I", group.seeds)
    except ValueError as error:
        raise BadDumpError(f"a packed column is cut off: {error}") from error
    known = len(owns)
    right = (
        len(numbers) == len(engines)
        and len(parents) == len(seeds) == len(group.roots) == known <= len(copies)
        and len(set(engines)) == len(engines)
        and max(numbers, default=-1) < len(copies)
        and max(seeds, default=-1) < len(group.seed_values)
        and 0 <= group.connector_copies < 1 << 64
        and (group.block_size is None or group.block_size > 0)
    )
    if not right:
        raise BadDumpError("the columns of a group contradict each other")


def _pack(code: str, values: Iterable[int]) -> bytes:
    packed = array(code, values)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def _unpack(code: str, data: bytes) -> array[int]:
    unpacked = array(code)
    unpacked.frombytes(data)
    if sys.byteorder != "little":
        unpacked.byteswap()
    return unpacked

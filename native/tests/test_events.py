"""The native decoder against the Python twin: captured bytes, made-up events, damaged and hostile bytes."""

from __future__ import annotations

import resource
import struct
from datetime import UTC
from typing import Any

import msgspec
import pytest
import tidegate_kvcore as native
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore import events as twin
from kvcore.errors import BadBatchError
from tests.unit.kvcore import captured

ROWS = captured.rows("payloads.jsonl")
CAPTURES = [row["payload"] for row in ROWS] + [row["payload"] for row in captured.rows("streams.jsonl")]
HEAD = b"\x93\xcb" + bytes(8)
STORED_FIELDS = (*twin.Stored.__struct_fields__, "tokens_per_block")


def plain(event: Any) -> tuple[Any, ...]:
    """An event of either twin, field by field."""
    fields = {
        "Stored": STORED_FIELDS,
        "Removed": twin.Removed.__struct_fields__,
        "Cleared": (),
    }[type(event).__name__]
    return (type(event).__name__, *((field, getattr(event, field)) for field in fields))


def read(decoder: Any, payload: bytes) -> Any:
    """All that `decoder` makes of the payload; "no batch" where it refuses."""
    try:
        batch = decoder(payload)
    except BadBatchError:
        return "no batch"
    events = [plain(event) for event in batch.events]
    return struct.pack("d", batch.ts), batch.rank, events, batch.rejected, batch.unknown_media


def same(payload: bytes) -> Any:
    """Both twins read the payload alike; what they read."""
    expected = read(twin.decode_batch, payload)
    assert read(native.decode_batch, payload) == expected
    return expected


def test_every_captured_payload() -> None:
    """All 435 captured payloads and all captured streams decode as by the twin (user case A5)."""
    assert len(ROWS) == 435
    refused = sum(same(payload) == "no batch" for payload in CAPTURES)
    assert 0 < refused < len(CAPTURES) // 2


def packed(*events: bytes) -> bytes:
    return HEAD + b"\xdc" + len(events).to_bytes(2, "big") + b"".join(events) + b"\x00"


INTEGERS = st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 300)
TEXTS = st.text(max_size=6) | st.sampled_from(["", "a", "GPU", "full_attention", "sliding_window", "b" * 64])
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats(width=32) | st.floats() | TEXTS | st.binary(max_size=9)
EXT = st.builds(msgspec.msgpack.Ext, st.integers(-128, 127).filter(lambda code: code != -1), st.binary(max_size=18))
KEYS = st.booleans() | st.integers(-1, 2) | st.sampled_from([0.0, 1.0, 1.5, -0.0]) | TEXTS | st.binary(max_size=3)
# No st.dictionaries: inside of st.recursive Hypothesis 6.170 may draw their unique keys otherwise the second time,
# and fails with FlakyStrategyDefinition.
VALUES = st.recursive(
    SCALARS | EXT | st.datetimes(timezones=st.just(UTC)),
    lambda inner: st.lists(inner, max_size=4) | st.lists(st.tuples(KEYS, inner), max_size=4).map(dict),
    max_leaves=8,
)
HASHES = st.lists(INTEGERS | st.binary(max_size=33), max_size=4)
TOKENS = (
    st.lists(st.integers(0, 2**32 - 1), max_size=12)
    | st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), max_size=8)
    | st.lists(st.integers(-1, 2**32) | st.tuples(INTEGERS, INTEGERS), max_size=4)
)
MEDIA = st.sampled_from(
    [None, "", "GPU", "cpu", "Cpu ", "STORAGE", "NVMe", "OBJ", "TAPE", " ", "\x1fdisk", "dıſk", "diſk"]
)
PAIR = st.tuples(TEXTS, INTEGERS | st.booleans())
EXTRA_KEYS = st.lists(st.lists(TEXTS | PAIR | VALUES, max_size=4) | VALUES, max_size=4)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "block_hashes": HASHES,
    "parent_block_hash": st.none() | INTEGERS | st.binary(max_size=9),
    "token_ids": st.none() | TOKENS,
    "block_size": st.none() | st.integers(-1, 5) | INTEGERS,
    "lora_id": st.none() | st.integers(-1, 3) | INTEGERS,
    "medium": MEDIA,
    "lora_name": st.none() | TEXTS,
    "extra_keys": st.none() | EXTRA_KEYS,
}
REMOVED_FIELDS = {"block_hashes": HASHES, "medium": MEDIA, "group_idx": st.none() | INTEGERS}
MAP_ONLY: dict[str, st.SearchStrategy[Any]] = {
    "group_idx": st.none() | INTEGERS,
    "kv_cache_spec_kind": st.none() | TEXTS,
    "cache_salt": st.none() | TEXTS,
    "session_id": st.none() | TEXTS,
}
TAGS = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "BlockMigrated", b"BlockStored", 7, "type"])


@st.composite
def made_events(draw: st.DrawFn) -> bytes:
    """An event as array or map: well-formed, or with one field of another type, fields missing, unknown or twice."""
    tag = draw(st.sampled_from(["BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared"]))
    as_map = draw(st.booleans())
    fields = {"BlockStored": FIELDS, "BlockRemoved": REMOVED_FIELDS, "AllBlocksCleared": {}}[tag]
    if as_map and tag == "BlockStored":
        fields = {**fields, **MAP_ONLY}
    members: list[tuple[Any, Any]] = [(name, draw(values)) for name, values in fields.items()]
    if members and draw(st.integers(0, 5)) == 0:
        place = draw(st.integers(0, len(members) - 1))
        members[place] = (members[place][0], draw(VALUES))
    if not as_map:
        members = members[: draw(st.integers(0, len(members))) if draw(st.integers(0, 3)) == 0 else len(members)]
        tail = draw(st.lists(st.none() | st.booleans() | INTEGERS | TEXTS | VALUES, max_size=5))
        first = draw(TAGS) if draw(st.integers(0, 9)) == 0 else tag
        return encode([first, *(value for _, value in members), *tail])
    members.append(("type", tag))
    members = draw(st.permutations(members))
    if draw(st.integers(0, 3)) == 0:
        members = members[draw(st.integers(0, 2)) :]
    if draw(st.integers(0, 3)) == 0:
        members.append((draw(st.sampled_from([*fields, "type", "future"]) | SCALARS), draw(VALUES | TAGS)))
    if members and draw(st.integers(0, 3)) == 0:
        members.append(draw(st.sampled_from(members)))
    return bytes([0xDE, *len(members).to_bytes(2, "big")]) + b"".join(
        encode(key) + encode(value) for key, value in members
    )


def encode(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


@settings(max_examples=500, deadline=None)
@given(st.lists(made_events(), min_size=1, max_size=4))
def test_made_up_events(events: list[bytes]) -> None:
    """Any mixture of arrays and maps, with any field of any type, is read alike and counted by the same reasons."""
    same(packed(*events))


@settings(max_examples=300, deadline=None)
@given(VALUES, st.lists(st.tuples(KEYS, VALUES), max_size=5))
def test_unknown_extra_keys(value: Any, members: list[tuple[Any, Any]]) -> None:
    """An extra key of a kind that we do not know counts by its shortest encoding, repeated keys of a map included."""
    twice = bytes([0x80 + len(members)]) + b"".join(encode(key) + encode(inner) for key, inner in members)
    for raw in (encode(value), twice):
        head = encode(["BlockStored", [1], 9, [5, 6], 2, None, None, None])[1:]
        same(packed(b"\x99" + head + b"\x91\x91" + raw, b"\x99" + head + b"\x92" + raw + raw))


@settings(max_examples=1_500, deadline=None)
@given(st.sampled_from(CAPTURES), st.data())
def test_damaged_captures(payload: bytes, data: st.DataObject) -> None:
    """A captured payload with changed, added or missing bytes, or a cut end, is read alike."""
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(payload)))
        put = data.draw(
            st.binary(max_size=3) | st.sampled_from([b"\xc0", b"\xa0", b"\x90", b"\x80", b"\xc4\0", b"\xff"])
        )
        payload = payload[:at] + put + payload[at + data.draw(st.sampled_from([0, 1, len(put), len(put)])) :]
    same(payload[: data.draw(st.just(len(payload)) | st.integers(0, len(payload)))])


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=80) | st.binary(max_size=80).map(lambda tail: HEAD + tail))
def test_arbitrary_bytes(payload: bytes) -> None:
    """Whatever the bytes, both twins make the same of them."""
    same(payload)


TIMES = st.builds(
    struct.pack, st.just(">Iq"), st.integers(0, 2**30 - 1), st.integers(-(2**36), 2**38) | st.integers(-9, 9)
)


@given(TIMES | st.binary(min_size=12, max_size=12) | st.binary(max_size=12))
def test_timestamps_among_extra_keys(time: bytes) -> None:
    """MessagePack's own extension type is checked, rounded and written again as by the twin."""
    head = encode(["BlockStored", [1], 9, [5, 6], 2, None, None, None])[1:]
    same(packed(b"\x99" + head + b"\x91\x91\xc7" + bytes([len(time)]) + b"\xff" + time))


@pytest.mark.parametrize(
    "envelope",
    [
        [1, []],
        [1.5, [], None],
        [1.5, [["AllBlocksCleared"]], 3, "more", ["fields"]],
        [1.5, [], -1],
        [1.5, [], 2**32],
        [1.5, [], 2**32 - 1],
        [1.5, [], True],
        [True, []],
        ["ts", []],
        [1.0, {}],
        [1.0],
        [],
        {"events": [["AllBlocksCleared"], 7], "data_parallel_rank": 1, "x": [{}]},
        {"ts": 2, "events": []},
        {"ts": 2},
        {"events": [], 1: 2},
        7,
        None,
    ],
)
def test_envelopes(envelope: Any) -> None:
    """Arrays and maps, fields missing, unknown or wrong."""
    same(encode(envelope))
    same(encode(envelope) + b"\xc0")


def test_repeated_fields_of_a_map_envelope() -> None:
    """The last one counts, its rejected events alone."""
    events = b"\xa6events"
    payload = b"\x83" + events + b"\x92\x07\x91\xb0AllBlocksCleared" + events + b"\x91\x07" + b"\xa2ts\x05"
    assert same(payload)[2:] == ([], {"bad_field": 1}, 0)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        HEAD + b"\xdd\xff\xff\xff\xff",
        HEAD + b"\x91" + b"\x91" * 300_000,
        HEAD + b"\x91" + b"\x81\x01" * 300_000,
        HEAD + b"\x91" + b"\x91" * 300_000 + b"\x90\x00",
        HEAD + b"\x91\xc6\xff\xff\xff\xff",
        HEAD + b"\x91\x92\xabBlockStored\xdd\xff\xff\xff\xff\x01",
        HEAD + b"\x91\x94\xabBlockStored\x90\xc0\xdd\xff\xff\xff\xff\x01",
        HEAD + b"\x91\x94\xabBlockStored\x90\xc0\xdd\xff\xff\xff\xff\x92\x01\x01",
        bytes(33 * 1024 * 1024),
    ],
)
def test_hostile_bytes(payload: bytes) -> None:
    """Claims beyond the bytes at hand, nesting without end and too long a payload cost no memory and no panic."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        with pytest.raises(BadBatchError):
            native.decode_batch(payload)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16_000


def test_deep_nesting_within_an_event() -> None:
    """Two hundred levels are read by both; beyond the bound the native twin refuses the payload."""
    head = encode(["BlockStored", [1], 9, [5, 6], 2, None, None, None])[1:]
    same(packed(b"\x99" + head + b"\x91" * 200 + b"\x90"))
    with pytest.raises(BadBatchError):
        native.decode_batch(packed(b"\x99" + head + b"\x91" * 600 + b"\x90"))


def test_a_large_payload_from_any_buffer() -> None:
    """Above the size at which the GIL is released, and from a memoryview, the result is the same."""
    event = ["BlockStored", list(range(2_000)), None, list(range(32_000)), 16, None, "GPU"]
    payload = encode([1.0, [event], 0])
    assert len(payload) > 64 * 1024
    expected = same(payload)
    assert read(native.decode_batch, memoryview(payload)) == expected  # type: ignore[arg-type]
    assert read(native.decode_batch, bytearray(payload)) == expected  # type: ignore[arg-type]

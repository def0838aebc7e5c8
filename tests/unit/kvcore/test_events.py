"""Decoding of engine payloads: captured bytes, both layouts, and hostile input."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import BadBatchError
from kvcore.events import Stored, Tier
from kvcore.hashing import pack_tokens, unpack_tokens
from tests.unit.kvcore import captured
from tests.unit.kvcore.twins import Twin, is_cleared, is_removed, is_stored

ROWS = captured.rows("payloads.jsonl")


def encode(events: Any, *rest: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, events, *rest])


def decode_one(twin: Twin, event: Any) -> Stored:
    batch = twin.decode_batch(encode([event], 0))
    assert not batch.rejected
    assert is_stored(batch.events[0])
    return batch.events[0]


def stored_map(**fields: Any) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2, **fields}


def test_every_captured_payload_decodes(twin: Twin) -> None:
    """All 435 captured payloads decode with an independent decoder's counts, or are refused as no batch."""
    assert len(ROWS) == 435
    for row in ROWS:
        expect = row["expect"]
        if expect is None:
            with pytest.raises(BadBatchError):
                twin.decode_batch(row["payload"])
            continue
        batch = twin.decode_batch(row["payload"])
        assert batch.rejected == {}, row["path"]
        assert batch.unknown_media == 0, row["path"]
        assert batch.cleared == bool(expect["cleared"]), row["path"]
        stored = [event for event in batch.events if is_stored(event)]
        removed = [event for event in batch.events if is_removed(event)]
        assert {
            "rank": batch.rank,
            "stored": len(stored),
            "removed": len(removed),
            "cleared": sum(is_cleared(event) for event in batch.events),
            "stored_blocks": sum(len(event.hashes) for event in stored),
            "removed_blocks": sum(len(event.hashes) for event in removed),
            "tokens": sum(len(event.tokens) // 4 for event in stored),
        } == expect, row["path"]


@pytest.mark.parametrize("release", ["0.22.0", "0.24.0", "0.30.0"])
def test_array_and_map_releases_say_the_same(twin: Twin, release: str) -> None:
    """The last array releases and the map releases of vLLM decode to the same event (spec: engine-events §2.1)."""
    event = twin.decode_batch(captured.payload(f"encoder/vllm/{release}/stored_lora_salt.bin")).events[0]
    assert is_stored(event)
    assert event.hashes == (1234605616436508552, 17375506680932366216)
    assert (event.adapter, event.salt, event.mm) == ("adapterA", "salt-A", {})
    assert (event.group, event.group_kind, event.block_size, event.tier) == (0, "full_attention", 16, Tier.DEVICE)
    assert unpack_tokens(event.tokens) == list(range(100, 132))
    assert event.tokens_per_block == 16
    assert not event.misaligned


def test_sglang_payload(twin: Twin) -> None:
    """SGLang's signed hashes become u64, its salt is a field of the event."""
    event = twin.decode_batch(captured.payload("encoder/sglang/0.5.20/stored_full.bin")).events[0]
    assert is_stored(event)
    assert event.hashes == (1234605616436508552, -1071237392777185400 + 2**64)
    assert (event.salt, event.session_id) == ("salt-A", "s1")


def test_bytes_hashes_equal_int_hashes(twin: Twin) -> None:
    """Of a digest the last eight bytes count, so that both settings of vLLM give the same hashes."""
    as_bytes = twin.decode_batch(captured.payload("vllm/v0.32.0_sha256_cbor_bytes/01_store__0.bin")).events[0]
    as_int = twin.decode_batch(captured.payload("vllm/v0.32.0_sha256_cbor_int/01_store__0.bin")).events[0]
    assert is_stored(as_bytes)
    assert is_stored(as_int)
    assert as_bytes.hashes == as_int.hashes


def test_hybrid_groups_and_misalignment(twin: Twin) -> None:
    """Sliding-window groups are told by kind, and their tokens may not line up with their hashes (user case A10)."""
    events = [
        event for row in ROWS if "hybrid_swa" in row["path"] for event in twin.decode_batch(row["payload"]).events
    ]
    stored = [event for event in events if is_stored(event)]
    assert {(event.group, event.group_kind) for event in stored} == {(0, "sliding_window"), (1, "full_attention")}
    assert {event.group_kind for event in stored if event.misaligned} == {"sliding_window"}


@pytest.mark.parametrize(
    ("event", "adapter", "salt", "mm"),
    [
        (stored_map(extra_keys=[["s"]]), None, "s", {}),
        (stored_map(extra_keys=[["s"]], parent_block_hash=9), None, None, {0: 1}),
        (stored_map(extra_keys=[["a", "s"]], lora_name="a"), "a", "s", {}),
        (stored_map(extra_keys=[["a", "a"]], lora_name="a"), "a", "a", {}),
        (stored_map(extra_keys=[["a"]], lora_name="a", parent_block_hash=9), "a", None, {}),
        (stored_map(extra_keys=[[["img", 3], ["img2", -1]]]), None, None, {0: 2}),
        (stored_map(extra_keys=[["s", "embeds"]]), None, "s", {0: 1}),
        (stored_map(extra_keys=[[b"embeds"]]), None, None, {0: 1}),
        (stored_map(extra_keys=[{"future": [1]}]), None, None, {0: 1}),
        (stored_map(extra_keys=[None]), None, None, {}),
        (stored_map(lora_id=3), "\0lora_id=3", None, {}),
        (stored_map(lora_id=3, lora_name="a"), "a", None, {}),
        (stored_map(lora_id=0), None, None, {}),
        (stored_map(cache_salt="s"), None, "s", {}),
    ],
)
def test_extra_keys_are_typed(
    twin: Twin, event: Any, adapter: str | None, salt: str | None, mm: dict[int, int]
) -> None:
    """Adapter, multimodal pair, salt and unknown keys are told apart; an unknown key still counts (user case A11)."""
    decoded = decode_one(twin, event)
    assert (decoded.adapter, decoded.salt) == (adapter, salt)
    assert {position: len(values) for position, values in decoded.mm.items()} == mm


def test_an_adapter_is_not_an_image(twin: Twin) -> None:
    """An adapter, a salt, an image and an unknown key of the same text give different identities (user case A11)."""
    image = decode_one(twin, stored_map(extra_keys=[[["x", 0]]]))
    opaque = decode_one(twin, stored_map(extra_keys=[["x"]], parent_block_hash=9))
    assert image.mm[0] == (twin.multimodal_hash("x"),)
    assert opaque.mm[0] != image.mm[0]


@pytest.mark.parametrize(
    ("medium", "tier", "connector"),
    [
        (None, Tier.DEVICE, False),
        ("", Tier.DEVICE, False),
        ("GPU", Tier.DEVICE, False),
        ("gpu", Tier.DEVICE, False),
        ("CPU", Tier.HOST, True),
        ("cpu", Tier.HOST, True),
        ("CPU_PINNED", Tier.HOST, False),
        ("CPU_TIER1", Tier.HOST, False),
        ("CPU_TIER2", Tier.DISK, False),
        ("DISK", Tier.DISK, False),
        ("NVMe", Tier.DISK, False),
        ("STORAGE", Tier.DISK, True),
        ("FS", Tier.DISK, True),
        ("OBJ", Tier.EXTERNAL, True),
        ("EXTERNAL", Tier.EXTERNAL, False),
        ("REMOTE", Tier.EXTERNAL, False),
    ],
)
def test_media(twin: Twin, medium: str | None, tier: Tier, connector: bool) -> None:
    """The medium is free text, compared without case (user case A9)."""
    event = decode_one(twin, stored_map(medium=medium))
    assert (event.tier, event.connector) == (tier, connector)


def test_an_unknown_medium_is_the_lowest_tier_and_counted(twin: Twin) -> None:
    """An unknown medium is kept, not lost (user case A9)."""
    batch = twin.decode_batch(encode([stored_map(medium="TAPE"), ["BlockRemoved", [1], "TAPE"]], 0))
    assert [event.tier for event in batch.events if not is_cleared(event)] == [Tier.EXTERNAL] * 2
    assert batch.unknown_media == 2
    assert batch.rejected == {}


def test_one_bad_event_leaves_the_rest(twin: Twin) -> None:
    """Array, map and junk in one batch: the junk is counted by reason, the order kept (user case A5)."""
    events = [
        ["BlockStored", [1], None, [5, 6], 2],
        stored_map(block_hashes=[2], parent_block_hash=1),
        "junk",
        7,
        [],
        {},
        ["BlockMigrated", [1]],
        {"type": "BlockMigrated"},
        {"type": "BlockStored", "block_hashes": "no"},
        stored_map(block_hashes=[b""]),
        stored_map(token_ids=[-1]),
        stored_map(token_ids=[2**32]),
        stored_map(token_ids=[1, [2, 3]]),
        stored_map(token_ids=[[2, 3], 1]),
        {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU", "future": {"x": 1}},
        ["AllBlocksCleared"],
    ]
    batch = twin.decode_batch(encode(events, 0))
    assert [type(event).__name__ for event in batch.events] == ["Stored", "Stored", "Removed", "Cleared"]
    assert batch.rejected == {"bad_field": 5, "unknown_tag": 2, "bad_hash": 1, "bad_token": 4}


def test_both_shapes_of_the_envelope(twin: Twin) -> None:
    """The batch is an array in every release seen; a map is read as well; the rank may be missing (user case A5)."""
    cleared = [["AllBlocksCleared"]]
    assert twin.decode_batch(encode(cleared)).rank is None
    assert twin.decode_batch(encode(cleared, None)).rank is None
    assert twin.decode_batch(encode(cleared, 0)).rank == 0
    assert twin.decode_batch(encode(cleared, 3, "more", ["fields"])).rank == 3
    as_map = msgspec.msgpack.encode({"ts": 2.5, "events": cleared, "data_parallel_rank": 1, "x": None})
    batch = twin.decode_batch(as_map)
    assert (batch.ts, batch.rank, len(batch.events), batch.rejected, batch.unknown_media) == (2.5, 1, 1, {}, 0)
    assert batch.cleared
    assert not twin.decode_batch(encode([])).cleared


def test_typed_tail_of_array_events(twin: Twin) -> None:
    """Group and kind are recognised by type behind the extra keys, other fields between them ignored."""
    head = ["BlockStored", [1], None, [5, 6], 2, None, "GPU", None, None]
    for tail in (["full_attention"], [1, "full_attention"], [None, 1, "full_attention"], [1, "sliding_window", 64], []):
        event = decode_one(twin, [*head, *tail])
        assert event.group == next((value for value in tail if isinstance(value, int)), None)
        assert event.group_kind == next((value for value in tail if isinstance(value, str)), None)


def test_eagle_bigrams(twin: Twin) -> None:
    """Token pairs become one token more than the blocks hold: the last block's window (spec: engine-events §4)."""
    event = decode_one(twin, stored_map(block_hashes=[1, 2], token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]]))
    assert event.eagle
    assert event.tokens == pack_tokens([1, 2, 3, 4, 5])
    assert event.tokens_per_block == 2
    assert not event.misaligned


@pytest.mark.parametrize(
    ("tokens", "block_size", "kind", "misaligned", "ratio"),
    [
        (4, 2, None, False, 2),
        (4, 0, None, False, 2),
        (4, 1, None, True, 2),
        (4, 1, "full_attention", False, 2),
        (3, 2, "full_attention", True, 1),
        (0, 0, None, False, 0),
        (10, 2, "sliding_window", True, 5),
    ],
)
def test_alignment(twin: Twin, tokens: int, block_size: int, kind: str | None, misaligned: bool, ratio: int) -> None:
    """Tokens over hashes is the block size; a contradiction is believed of a main group only (user case A10)."""
    event = decode_one(
        twin,
        stored_map(block_hashes=[1, 2], token_ids=list(range(tokens)), block_size=block_size, kv_cache_spec_kind=kind),
    )
    assert (event.misaligned, event.tokens_per_block) == (misaligned, ratio)


HEAD = b"\x93\xcb" + bytes(8)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x93",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        HEAD + b"\xdd\xff\xff\xff\xff",
        HEAD + b"\x91" + b"\x91" * 300_000,
        HEAD + b"\x91" + b"\x81\x01" * 300_000,
        HEAD + b"\x91\xc6\xff\xff\xff\xff",
        msgspec.msgpack.encode(["ts", [], 0]),
        msgspec.msgpack.encode([1.0, {}, 0]),
        msgspec.msgpack.encode([1.0, [], -1]),
        msgspec.msgpack.encode([1.0, [], 2**40]),
        msgspec.msgpack.encode({"ts": 1.0}),
        encode([]) + b"trailing",
        bytes(33 * 1024 * 1024),
    ],
)
def test_hostile_envelopes(twin: Twin, payload: bytes) -> None:
    """Truncated, over-claimed, deep and wrong payloads raise the one error and cost no memory."""
    tracemalloc.start()
    try:
        with pytest.raises(BadBatchError):
            twin.decode_batch(payload)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_hostile_extra_keys(twin: Twin) -> None:
    """Deep nesting, unhashable map keys and extension types inside an event reject that event only."""
    prefix = b"\x89"[:0] + msgspec.msgpack.encode(["BlockStored", [1], None, [5, 6], 2, None, None, None])[1:]
    bad = [b"\x91" + b"\x91" * 200 + b"\x90", b"\x91\x81\x80\x01", b"\x91\xd4\x01\x01"]
    events = [b"\x99" + prefix + keys for keys in bad]
    batch = twin.decode_batch(
        HEAD + b"\x94" + b"".join(events) + msgspec.msgpack.encode(["AllBlocksCleared"]) + b"\x00"
    )
    assert is_cleared(batch.events[-1])
    assert len(batch.events) + sum(batch.rejected.values()) == 4


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda tail: HEAD + tail))
def test_arbitrary_bytes(twin: Twin, payload: bytes) -> None:
    """Whatever the bytes, a batch or `BadBatchError` comes out."""
    try:
        batch = twin.decode_batch(payload)
    except BadBatchError:
        return
    assert len(batch.events) + sum(batch.rejected.values()) <= len(payload)


@given(st.sampled_from([row["payload"] for row in ROWS if row["expect"]]), st.data())
def test_damaged_captures(twin: Twin, payload: bytes, data: st.DataObject) -> None:
    """A captured payload with changed bytes or a cut end raises nothing else."""
    at = data.draw(st.integers(0, len(payload) - 1))
    damaged = payload[:at] + data.draw(st.binary(max_size=4)) + payload[at + data.draw(st.integers(0, 4)) :]
    try:
        twin.decode_batch(damaged)
    except BadBatchError:
        return

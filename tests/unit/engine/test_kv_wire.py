"""Encoded batches equal captured ones byte for byte; every form decodes to the same facts."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcore.events import Cleared, Removed, Stored, Tier, decode_batch
from load.engine.block_hash import ExtraKeys
from load.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from load.engine.kv_publisher import rank_endpoint
from load.engine.kv_wire import EventForm, HashForm, KvEncoder

FIXTURES = Path(__file__).parents[2] / "fixtures" / "engine"
FIELDS = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")


def digest_of(published: int | bytes) -> bytes:
    """A 32-byte digest that is published as ``published``."""
    return published if isinstance(published, bytes) else bytes(24) + published.to_bytes(8, "big")


def neutral(wire: Any) -> KvEvent:
    """What the core would have said, given what was captured."""
    fields: dict[str, Any] = dict(zip((*FIELDS, "extra_keys"), wire, strict=False)) if isinstance(wire, list) else wire
    if fields["type"] == "AllBlocksCleared":
        return AllBlocksCleared()
    digests = tuple(digest_of(value) for value in fields["block_hashes"])
    if fields["type"] == "BlockRemoved":
        return BlockRemoved(digests[0])
    parent = fields["parent_block_hash"]
    lora = fields["lora_name"]
    salt = next((key for key in fields["extra_keys"][0] or [] if key != lora), None)
    return BlockStored(
        digests=digests,
        parent=None if parent is None else digest_of(parent),
        token_ids=array("I", fields["token_ids"]),
        first_index=0 if parent is None else 1,
        extra=ExtraKeys(lora, salt),
        session_id=None if isinstance(wire, list) else wire.get("session_id"),
    )


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.glob("*.bin")))
def test_bytes_equal_a_captured_vllm(name: str) -> None:
    """Re-encoding what a real vLLM 0.23 or 0.32 published gives its bytes again."""
    payload = (FIXTURES / name).read_bytes()
    ts, events, rank = msgspec.msgpack.decode(payload)
    form: EventForm = "vllm-array" if "0_23" in name else "vllm-map"
    hash_form: HashForm = "bytes" if "bytes" in name else "int"
    encoder = KvEncoder(form, hash_form, 32, rank, adapters=["adapterA"])
    assert encoder.encode([neutral(event) for event in events], ts) == payload


EXTRA = ExtraKeys("adapter", "salt")
STORED = BlockStored(
    digests=(bytes(range(32)), bytes(range(1, 33))),
    parent=None,
    token_ids=array("I", range(32)),
    first_index=0,
    extra=EXTRA,
    session_id="s",
)
EVENTS: list[KvEvent] = [AllBlocksCleared(), STORED, BlockRemoved(bytes(range(32)))]


@pytest.mark.parametrize("form", ["vllm-map", "vllm-array", "sglang"])
@pytest.mark.parametrize("hash_form", ["int", "bytes"])
def test_every_form_decodes_to_the_same(form: EventForm, hash_form: HashForm) -> None:
    """The project's own decoder reads each form: same tokens, namespace, order and rank."""
    encoder = KvEncoder(form, hash_form, 16, 3, adapters=["adapter"])
    batch = decode_batch(encoder.encode(EVENTS, 1.5))
    assert (batch.ts, batch.rank, batch.rejected) == (1.5, 3, {})
    cleared, stored, removed = batch.events
    assert isinstance(cleared, Cleared)
    assert isinstance(stored, Stored)
    assert isinstance(removed, Removed)
    assert (
        array("I", stored.tokens).tolist() == STORED.token_ids.tolist() or stored.tokens == STORED.token_ids.tobytes()
    )
    assert (stored.adapter, stored.salt, stored.block_size) == ("adapter", "salt", 16)
    assert removed.hashes == stored.hashes[:1]


def test_junk_is_rejected_one_by_one() -> None:
    """A5: malformed and unknown events between good ones are counted, the good ones stand."""
    encoder = KvEncoder("vllm-map", "int", 16, 0)
    batch = decode_batch(encoder.encode(EVENTS, 1.0, junk=True))
    assert len(batch.events) == len(EVENTS)
    assert sum(batch.rejected.values()) == 3


def test_ports_count_up_with_the_rank() -> None:
    """A13: rank r listens on base + r; 0 picks a port; other transports get a suffix."""
    assert rank_endpoint("tcp://*:5557", 0) == "tcp://*:5557"
    assert rank_endpoint("tcp://*:5557", 2) == "tcp://*:5559"
    assert rank_endpoint("tcp://127.0.0.1:0", 2) == "tcp://127.0.0.1:0"
    assert rank_endpoint("ipc:///run/kv", 1) == "ipc:///run/kv_dp1"


TIERED: list[tuple[EventForm, bool, str, str]] = [
    ("vllm-map", False, "CPU", "STORAGE"),
    ("vllm-map", True, "CPU", "STORAGE"),
    ("vllm-array", False, "CPU", "STORAGE"),
    ("sglang", False, "CPU_PINNED", "DISK"),
]


@pytest.mark.parametrize(("form", "described", "host", "disk"), TIERED)
def test_events_of_lower_tiers(form: EventForm, described: bool, host: str, disk: str) -> None:
    """Engine-events §2.7, §4: media by engine; vLLM's connector tells hashes one by one, without tokens."""
    encoder = KvEncoder(form, "int", 4, 0, ["adapter"], describe_tiers=described)
    events: list[KvEvent] = []
    for tier in ("host", "disk"):
        where: Any = {"tier": tier}
        events.append(BlockStored((b"\x01" * 32, b"\x02" * 32), None, array("I", range(8)), 0, ExtraKeys(), **where))
        events.append(BlockRemoved(b"\x01" * 32, **where))
    payload = encoder.encode(events, 1.0)
    assert host.encode() in payload
    assert disk.encode() in payload
    decoded = decode_batch(payload).events
    placeholder = form != "sglang" and not described
    assert [type(event) for event in decoded] == [*([Stored] * (1 + placeholder)), Removed] * 2
    tiers = [event.tier for event in decoded if not isinstance(event, Cleared)]
    assert tiers == [Tier.HOST] * (2 + placeholder) + [Tier.DISK] * (2 + placeholder)
    for event in decoded:
        if isinstance(event, Stored):
            assert len(event.tokens) == (0 if placeholder else 32)
            assert event.connector == (form != "sglang")

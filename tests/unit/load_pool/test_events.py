"""What the simulated pool publishes equals what a real master was captured publishing, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from load.pool.events import EventContext, EventEncoder, PoolEvent

FIXTURES = Path(__file__).parents[2] / "fixtures" / "load_pool"


def frames_of(path: Path) -> list[bytes]:
    raw, frames = path.read_bytes(), []
    while raw:
        size = int.from_bytes(raw[:4], "big")
        frames.append(raw[4 : 4 + size])
        raw = raw[4 + size :]
    return frames


def neutral(fields: dict[str, Any]) -> PoolEvent:
    return PoolEvent(
        fields["event_type"],
        fields["tenant_id"],
        fields.get("object_key"),
        fields["medium"],
        fields.get("group_id"),
        fields.get("session_id"),
    )


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.glob("*.bin")))
def test_bytes_equal_a_captured_master(name: str) -> None:
    """Re-encoding what mooncake_master 0.3.14 published gives its bytes again."""
    topic, seq, payload = frames_of(FIXTURES / name)
    now_ms, maps, dp_rank = msgspec.msgpack.decode(payload)
    first = maps[0]
    context = EventContext(
        backend_id=first["backend_id"],
        model_name=first["model_name"],
        block_size=first["block_size"],
        additional_salt=first["additional_salt"],
        lora_name=first["lora_name"],
        dp_rank=dp_rank,
        legacy_compat="type" in first,
    )
    encoder = EventEncoder(context)
    list(encoder.batches([PoolEvent("cleared", "t")] * (first["event_id"] - 1), now_ms))  # ids count in the process
    assert list(encoder.batches([neutral(fields) for fields in maps], now_ms)) == [payload]
    assert topic == b""
    assert len(seq) == 8


def test_at_most_64_events_a_message() -> None:
    events = [PoolEvent("stored", "default", f"k{number}", "cpu") for number in range(130)]
    batches = [msgspec.msgpack.decode(payload) for payload in EventEncoder(EventContext()).batches(events, 5)]
    assert [len(batch[1]) for batch in batches] == [64, 64, 2]
    assert [fields["event_id"] for batch in batches for fields in batch[1]] == list(range(1, 131))


def test_fixtures_are_there() -> None:
    assert len(list(FIXTURES.glob("*.bin"))) >= 5
    assert json.loads((FIXTURES / "README.json").read_text())["master"].startswith("0.3.14")

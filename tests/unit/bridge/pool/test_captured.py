"""Messages of a real master 0.3.14 through the bridge's core: numbers, restart, overflow, as they were captured."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.bridge.events import EngineBatch, EngineConnected
from tests.unit.bridge.pool.house import Room, event, key_of, payload_of

FOLDER = Path(__file__).parents[3] / "fixtures" / "mooncake"
SETS = ("basic", "ctxflags_nolegacy", "evict", "hicache", "lifecycle", "noobjkey", "offload", "restart")


def messages(name: str) -> list[EngineBatch]:
    """As the socket's thread hands them over."""
    data = (FOLDER / f"{name}.frames").read_bytes()
    frames: list[bytes] = []
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        frames.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return [
        EngineBatch(0, int.from_bytes(seq, "big"), payload)
        for _, seq, payload in zip(frames[::3], frames[1::3], frames[2::3], strict=True)
    ]


@pytest.mark.parametrize("name", SETS)
def test_captured_messages_are_followed(name: str) -> None:
    """Every message is published under a number of its own, none is unreadable, and the receiver has the same picture.
    Only the set `restart` has another process in it: everything of the first is forgotten. Of the set `evict` not all
    messages were kept."""
    room = Room()
    room.handle(EngineConnected(0))
    came = messages(name)
    for message in came:
        room.handle(message)
    restarts, gaps = int(name == "restart"), int(name == "evict")
    assert (room.core.master.restarts, room.core.master.gaps, room.core.counters.bad_batches) == (restarts, gaps, 0)
    assert [reset.reason for reset in room.receiver.resets] == ["bridge_started", *["master_restarted"] * restarts]
    assert room.core.seq == room.receiver.seq == len(came) + restarts
    ours, theirs = room.core.index.stats(), room.receiver.index.stats()
    assert (ours.objects, ours.pages, ours.unparsed) == (theirs.objects, theirs.pages, theirs.unparsed)
    assert ours.backend_id == "pool-a"


def test_an_overflowed_queue_is_a_hole_in_the_numbers() -> None:
    """The master drops its oldest events when 3 × 2,000 puts meet a queue of 8, and skips one number for each (spec:
    pool-events §1): 1, 1994, 3987, 4242 were seen."""
    room = Room()
    room.handle(EngineConnected(0))
    room.settle()
    for number, seq in enumerate((1, 1994, 3987, 4242)):
        room.seq = seq
        room.keys[key_of(number)] = {"cpu"}
        room.handle(EngineBatch(0, seq, payload_of(event("stored", key_of(number)))))
    assert (room.core.master.gaps, room.core.master.restarts) == (3, 0)
    assert room.core.health() == ("approximate", "gap")
    room.keys[key_of(9)] = {"cpu"}
    room.settle()
    assert (room.core.health(), room.known()) == (("synced", None), room.keys)

"""Messages of a Mooncake master as 0.3.14 sends them, made fast: 64 events of 21 keys, of random pages.

Every event is what a real one is (spec: pool-events §1), some 370 bytes; only the digests differ from message to
message, so that ten millions of objects can be told in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import msgspec

PREFIX = "Qwen-Qwen3-8B_"
EVENTS = 64
"""Events that a master puts into one message at most (spec: pool-events §1, batching)."""
DIGEST_BYTES = 32
_ZEROS = "0" * 2 * DIGEST_BYTES


def _event(number: int, component: str) -> dict[str, object]:
    return {
        "event_id": 70_000 + number,
        "timestamp": 1_795_972_783_827,
        "event_type": "stored",
        "type": "BlockStored",
        "model_name": None,
        "block_size": None,
        "additional_salt": None,
        "lora_name": None,
        "tenant_id": "default",
        "backend_id": "pool-a",
        "medium": "cpu",
        "dp_rank": 0,
        "group_id": None,
        "object_key": f"{PREFIX}{_ZEROS}{component}",
        "seq_hashes": [],
        "block_hashes": [],
        "session_id": None,
        "base_block_idx": None,
        "parent_hash": None,
        "token_ids": None,
        "parent_block_hash": None,
    }


class Messages:
    """Messages that store whole pages, every component of each."""

    def __init__(self, components: Sequence[str]) -> None:
        self.components = len(components)
        self.pages = EVENTS // len(components)
        events = [
            _event(number, components[number % len(components)]) for number in range(self.pages * len(components))
        ]
        self._template = msgspec.msgpack.encode([1_795_972_783_827, events, 0])
        self._places: list[int] = []
        at = self._template.find(_ZEROS.encode())
        while at >= 0:
            self._places.append(at)
            at = self._template.find(_ZEROS.encode(), at + len(_ZEROS))

    def of(self, digests: bytes) -> Iterator[bytes]:
        """Messages that store the pages with these digests (32 bytes each), in order; the last is filled up with
        pages from the front."""
        stride = 2 * DIGEST_BYTES
        size = self.pages * DIGEST_BYTES
        for start in range(0, len(digests), size):
            part = digests[start : start + size]
            digits = (part + digests[: size - len(part)]).hex().encode()
            message = bytearray(self._template)
            for number, place in enumerate(self._places):
                at = number // self.components * stride
                message[place : place + stride] = digits[at : at + stride]
            yield bytes(message)


def random_pages(generator: Random, count: int) -> bytes:
    """Digests of so many pages."""
    return generator.randbytes(count * DIGEST_BYTES)


def identities(digests: bytes) -> bytes:
    """What a match is asked with: the first 16 bytes of each."""
    return b"".join(digests[at : at + 16] for at in range(0, len(digests), DIGEST_BYTES))

"""The replay socket of an engine: the question, and both framings of its answers (spec: engine-events §2.5).

A DEALER asks a ROUTER for every batch from one number on; the answers come one message each and end with a mark. Up
to vLLM 0.25 an answer is ``["", seq, payload]``, since 0.26 ``["", topic, seq, payload]``; the mark has all ones for a
number and an empty payload. An engine that has forgotten the start says nothing and begins later: compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.errors import BadReplayError

END_MARK = b"\xff" * 8
_MAX_SEQ = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """One batch of the past: its number and the bytes that were published then."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class ReplayEnd:
    """Nothing follows."""


def request_frames(start: int) -> list[bytes]:
    """The question, exactly as a DEALER must send it: every batch from ``start`` on. Raises `ValueError` below 0."""
    if not 0 <= start <= _MAX_SEQ:
        raise ValueError(f"a replay starts at a sequence number, not at {start}")
    return [b"", start.to_bytes(8, "big")]


def reply_frames(batch: ReplayBatch | ReplayEnd, topic: bytes | None = None) -> list[bytes]:
    """An answer as a DEALER receives it; ``topic`` ``None``: the framing up to 0.25. For engines that we simulate."""
    if isinstance(batch, ReplayEnd):
        return [b"", END_MARK, b""] if topic is None else [b"", b"", END_MARK, b""]
    frames = [batch.seq.to_bytes(8, "big"), batch.payload]
    return [b"", *frames] if topic is None else [b"", topic, *frames]


def parse_reply(frames: Sequence[bytes]) -> ReplayBatch | ReplayEnd:
    """One answer, in either framing, with or without the empty frame in front (user case A6).

    Raises `BadReplayError`.
    """
    if not 2 <= len(frames) <= 4:
        raise BadReplayError(f"a replay answer has 2 to 4 frames, not {len(frames)}")
    number, payload = frames[-2], frames[-1]
    if len(number) != 8:
        raise BadReplayError(f"a sequence number has 8 bytes, not {len(number)}")
    if not payload:
        return ReplayEnd()
    seq = int.from_bytes(number, "big")
    if seq > _MAX_SEQ:
        raise BadReplayError(f"{seq} is not a sequence number")
    return ReplayBatch(seq, bytes(payload))

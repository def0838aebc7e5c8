"""The replay socket's framings, captured and made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import BadReplayError
from kvcore.replay import ReplayBatch, ReplayEnd, parse_reply, reply_frames, request_frames
from tests.unit.kvcore import captured


def test_captured_replays() -> None:
    """vLLM 0.23 answers without a topic, 0.32 with one; both end with the mark (user case A6)."""
    parsed = [
        (row["stream"], len(row["frames"]), getattr(parse_reply(row["frames"]), "seq", "end"))
        for row in captured.rows("replays.jsonl")
    ]
    old, new = "vllm/v0.23.0_sha256_int", "vllm/v0.32.0_sha256_int"
    assert parsed == [
        *((old, 3, number) for number in ("end", 18, "end")),
        *((new, 4, number) for number in ("end", 52, "end")),
    ]


@given(st.integers(0, 2**63 - 1), st.binary(min_size=1), st.none() | st.binary())
def test_round_trip(seq: int, payload: bytes, topic: bytes | None) -> None:
    """What a simulated engine answers is read back, in both framings and without the leading empty frame."""
    batch = ReplayBatch(seq, payload)
    frames = reply_frames(batch, topic)
    assert parse_reply(frames) == parse_reply(frames[1:]) == batch
    assert parse_reply(reply_frames(ReplayEnd(), topic)) == ReplayEnd()


def test_request() -> None:
    """The question is an empty frame and eight bytes big-endian; anything else an engine ignores without a word."""
    assert request_frames(258) == [b"", b"\0\0\0\0\0\0\1\2"]
    with pytest.raises(ValueError, match="-1"):
        request_frames(-1)


@pytest.mark.parametrize(
    "frames", [[], [b"x"], [b"", b"123", b"x"], [b""] * 5, [b"", b"\xff" * 8, b"payload"], [b"", b"\0" * 9, b"x"]]
)
def test_bad_replies(frames: list[bytes]) -> None:
    """A message of another shape is refused by name."""
    with pytest.raises(BadReplayError):
        parse_reply(frames)

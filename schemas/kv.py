"""KV batches on the bus: the engine's own bytes, our facts in headers; and the snapshot question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import BadMessageError, Count, Message, Number, Sequence

Dialect = Literal["vllm", "sglang"]

MAX_RANKS = 1024
"""Ranks of one worker: everybody who hears of a worker walks over them."""

_WORKER = "Tg-Worker"
_RANK = "Tg-Rank"
_INCARNATION = "Tg-Incarnation"
_SEQ = "Tg-Seq"
_DIALECT = "Tg-Dialect"
_PART = "Tg-Part"
_PARTS = "Tg-Parts"
_FIRST = "Tg-First"


class KvHeaders(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Headers of ``tg.v1.kv.<worker>.<rank>``.

    ``seq`` is the engine's own number. Within one ``incarnation`` the bridge forwards without a gap; ``first`` marks
    the first batch of an incarnation, whatever its number, so that a receiver who missed nothing knows it. A batch
    larger than a message goes as ``part`` 0..``parts``-1, all with the same seq.
    """

    worker: str
    rank: Count
    incarnation: str
    seq: Sequence
    dialect: Dialect = "vllm"
    part: Count = 0
    parts: Count = 1
    first: bool = False

    def to_headers(self) -> dict[str, str]:
        """As NATS headers. Worker and incarnation are percent-free ASCII chosen by the bridge."""
        headers = {
            _WORKER: self.worker,
            _RANK: str(self.rank),
            _INCARNATION: self.incarnation,
            _SEQ: str(self.seq),
            _DIALECT: self.dialect,
        }
        if self.parts != 1:
            headers[_PART] = str(self.part)
            headers[_PARTS] = str(self.parts)
        if self.first:
            headers[_FIRST] = "1"
        return headers

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> KvHeaders:
        """Inverse of `to_headers`. Raises `BadMessageError` for a missing header and for numbers that cannot be."""
        try:
            dialect = headers.get(_DIALECT, "vllm")
            if dialect not in ("vllm", "sglang"):
                raise BadMessageError(f"unknown KV dialect {dialect!r}")
            parsed = cls(
                worker=headers[_WORKER],
                rank=int(headers[_RANK]),
                incarnation=headers[_INCARNATION],
                seq=int(headers[_SEQ]),
                dialect=dialect,  # type: ignore[arg-type]
                part=int(headers.get(_PART, "0")),
                parts=int(headers.get(_PARTS, "1")),
                first=headers.get(_FIRST) == "1",
            )
            possible = 0 <= parsed.rank < MAX_RANKS and 0 <= parsed.seq < 1 << 63 and 0 <= parsed.part < parsed.parts
            if not possible:
                raise BadMessageError(f"KV batch headers: numbers that cannot be in {dict(headers)!r}")
            return parsed
        except (KeyError, ValueError) as error:
            raise BadMessageError(f"KV batch headers: {error!r}") from error


class SnapshotRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.kv.snapshot.<worker>``: an indexer asks a bridge for its index of its engine (JSON)."""

    indexer: str


class RankMark(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Up to which batch of which incarnation a snapshot stands for one rank."""

    rank: Count
    incarnation: str
    seq: Sequence


class SnapshotReply(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Object-store ``bucket`` and ``key`` of the dump, its size, and the seq each rank stands for; or ``error``.

    ``digest``: XXH3-64 (hex) of the dump; empty from a bridge that does not say it. ``dump``: a small dump itself (then
    without bucket and key), where the store does not take it.
    """

    worker: str
    bucket: str = ""
    key: str = ""
    size_bytes: Number = 0
    digest: Annotated[str, Meta(pattern="^([0-9a-f]{16})?$")] = ""
    marks: tuple[RankMark, ...] = ()
    error: str | None = None
    dump: bytes = b""

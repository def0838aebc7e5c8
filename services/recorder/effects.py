"""What the recorder's core wants done, in this order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DropReason = Literal["duplicate", "bad_row"]


@dataclass(frozen=True, slots=True)
class WriteMember:
    """Append ``lines`` (uncompressed) as one gzip member to ``segment``, then answer with `MemberWritten`.

    ``rows`` are the bare rows, for sinks that take no envelope.
    """

    number: int
    segment: int
    lines: bytes
    rows: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """These rows need not come again."""

    tokens: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class DropRow:
    """Count a row that is not written, and why. It is acknowledged by an `Acknowledge` where that is right."""

    reason: DropReason
    detail: str


Effect = WriteMember | Acknowledge | DropRow

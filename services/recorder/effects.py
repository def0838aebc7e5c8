"""What the recorder's core wants done, in this order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DropReason = Literal["duplicate", "bad_row"]


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """Give these rows to the sink, then answer with `BatchWritten`. Batches are written in the order of ``number``.

    ``rows``: bare rows of one line each; ``received_s``: Unix time of each.
    """

    number: int
    rows: tuple[bytes, ...]
    received_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """These rows need not come again."""

    tokens: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class DropRow:
    """Count a row that is not written, and why. It is acknowledged by an `Acknowledge` where that is right."""

    reason: DropReason
    detail: str


Effect = WriteBatch | Acknowledge | DropRow

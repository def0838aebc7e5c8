"""What the recorder's core hears."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowsReceived:
    """Rows of the stream, in order. ``tokens``: what the shell needs to acknowledge each."""

    payloads: Sequence[bytes]
    tokens: Sequence[object]


@dataclass(frozen=True, slots=True)
class BatchWritten:
    """The batch with this number is where it belongs (and synced, where that is the setting)."""

    number: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing new; is a flush due?"""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Flush what is there, whatever its size."""


Event = RowsReceived | BatchWritten | TimePassed | StopAsked

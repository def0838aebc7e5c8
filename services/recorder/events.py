"""What the recorder's core hears."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowReceived:
    """One row of the stream. ``token`` is what the shell needs to acknowledge it."""

    payload: bytes
    token: object


@dataclass(frozen=True, slots=True)
class MemberWritten:
    """The member with this number is on disk (and synced, where that is the setting)."""

    number: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing new; is a flush due?"""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Flush what is there, whatever its size."""


Event = RowReceived | MemberWritten | TimePassed | StopAsked

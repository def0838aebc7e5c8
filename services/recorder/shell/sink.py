"""What every sink is: where the rows of one durable consumer go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows to write, at least one, in the order in which they came. ``rows``: each JSON of one line, without its end;
    ``received_s``: Unix time of each."""

    rows: tuple[bytes, ...]
    received_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """A batch is where it belongs. ``bytes``: as they were written or sent; ``refused``: rows that will never be taken
    there, which are counted and do not come again."""

    bytes: int = 0
    refused: int = 0


class Sink(Protocol):
    """One place for rows. The recorder gives it one batch at a time, from one task; other sinks do not wait for it."""

    @property
    def name(self) -> str:
        """Label of its metrics, and the end of its consumer's name."""

    async def open(self) -> tuple[bytes, ...]:
        """Before the first batch. Returns fingerprints of the newest rows that it has from earlier runs, oldest first,
        by which those that come again are known (`services.recorder.recent`); none, where it cannot look.

        Raises `SettingsError` for what its user must change. Reaches nothing remote: who is away at the start may come
        back later.
        """

    async def write(self, batch: Batch) -> Written:
        """The whole batch, in a thread where it blocks. Raises `SinkError`: the same batch is given again, and its rows
        stay in the stream meanwhile. May be cancelled at the stop."""

    async def close(self) -> None:
        """After the last `write` has ended or was cancelled."""

"""What a bridge leaves behind for the one after it: its index in the object store, and what that stands for.

An engine's replay buffer reaches back some thousand batches, its cache much farther. So a bridge that comes back takes
the index that the one before it left, and replays only what followed. That is right only for the same engine process,
told by its start time and by the newest batch, which must come again unchanged; an engine that hides its start is told
by the batch alone, one without a replay socket by its start alone. If the buffer no longer reaches back to that
batch, or the process is another one, the rank is read as far back as it goes, and the stream says what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from kvcore import PreparedRanks
from schemas.base import Count, Message, Sequence
from schemas.kv import RankMark


class RankCheckpoint(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One rank: its blocks are those after batch ``seq`` of ``incarnation``. ``missing``: why its picture is not
    complete, if so. ``fingerprint``: XXH3-64 (hex) of that batch's payload."""

    rank: Count
    incarnation: str
    seq: Sequence
    missing: str | None = None
    fingerprint: Annotated[str, Meta(pattern="^([0-9a-f]{16})?$")] = ""

    @property
    def mark(self) -> RankMark:
        """As a snapshot names it."""
        return RankMark(rank=self.rank, incarnation=self.incarnation, seq=self.seq)

    @property
    def process(self) -> str:
        """The part of the incarnation that names the engine's process."""
        return self.incarnation.rpartition(".")[0]


class Checkpoint(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Where the dump is (JSON, in the object store itself), XXH3-64 (hex) of it, and the ranks that it stands for."""

    worker: str
    key: str
    digest: str
    ranks: tuple[RankCheckpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Restorable:
    """A checkpoint whose dump was fetched and built aside."""

    ranks: dict[int, RankCheckpoint]
    prepared: PreparedRanks

"""What an indexer's core asks of its shell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Publish:
    """One fact on the bus."""

    subject: str
    payload: bytes


IndexerEffect = Publish

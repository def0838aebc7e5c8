"""What happens to an indexer beside its replica (whose events are `replica.events`)."""

from __future__ import annotations

from dataclasses import dataclass

from replica.effects import SourceChanged
from schemas.decision import Decision


@dataclass(frozen=True, slots=True)
class DecisionSeen:
    """A turn was placed."""

    decision: Decision


IndexerEvent = DecisionSeen | SourceChanged

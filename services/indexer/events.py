"""What an indexer's core hears of its replica's feed."""

from __future__ import annotations

from replica.effects import SourceChanged
from replica.events import PromptPlaced

IndexerEvent = PromptPlaced | SourceChanged

"""What an indexer's core hears: of its replica's feed, and of requests."""

from __future__ import annotations

from dataclasses import dataclass

from replica.effects import SourceChanged
from replica.events import PromptPlaced
from schemas.request import RequestAccepted, RequestEnd


@dataclass(frozen=True, slots=True)
class RequestHeard:
    """A request was accepted, and its session is known."""

    fact: RequestAccepted


@dataclass(frozen=True, slots=True)
class EndHeard:
    """A request is over."""

    fact: RequestEnd


IndexerEvent = PromptPlaced | SourceChanged | RequestHeard | EndHeard

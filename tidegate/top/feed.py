"""From the bus into the model: one subscription for each family of facts, bounded; what does not fit is counted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from bus.errors import BusError
from bus.facts import subject_family
from bus.interface import Bus, BusMessage, Subscription
from bus.subjects import ROOT
from schemas.base import BadMessageError, Fact, from_json
from schemas.decision import Decision
from schemas.hint import HintResult
from schemas.index import IndexSource
from schemas.ingress import IngressState
from schemas.request import RequestAccepted, RequestDispatched, RequestEnd, RequestFirstToken
from schemas.session import SessionFact
from schemas.tool import ToolEvent
from schemas.worker import WorkerState
from tidegate.top.model import Model

FACTS: dict[str, type[Fact]] = {
    "worker.state.*": WorkerState,
    "ingress.state.*": IngressState,
    "request.accepted.*": RequestAccepted,
    "request.dispatched.*": RequestDispatched,
    "request.first_token.*": RequestFirstToken,
    "request.end.*": RequestEnd,
    "decision.*": Decision,
    "session.*.*": SessionFact,
    "tool.*.*": ToolEvent,
    "index.source.*.*": IndexSource,
    "hint.result.*": HintResult,
}
"""What is listened to. Not KV events, nor progress: they are many, and say nothing that is shown."""

PENDING_LIMIT = 8_192
"""Facts of one family that wait here."""
FLUSH_S = 5.0


class Feed:
    """Tells ``model`` what comes over one connection. ``clock``: Unix seconds."""

    def __init__(self, model: Model, clock: Callable[[], float]) -> None:
        self._model = model
        self._clock = clock
        self._subscriptions: list[Subscription] = []

    async def start(self, bus: Bus) -> None:
        """What is said after this is heard (where the bus goes away meanwhile: after it has come back)."""
        self._model.begin(self._clock())
        for subject, kind in FACTS.items():
            handler = partial(self._hear, kind)
            self._subscriptions.append(await bus.subscribe(f"{ROOT}.{subject}", handler, pending_limit=PENDING_LIMIT))
        with suppress(BusError):
            await bus.flush(FLUSH_S)

    def count_dropped(self) -> None:
        """Tell the model what this connection dropped."""
        self._model.dropped = sum(subscription.stats().dropped for subscription in self._subscriptions)

    def _hear(self, kind: type[Fact], message: BusMessage) -> None:
        try:
            fact = from_json(message.payload, kind)
        except BadMessageError:
            self._model.unreadable += 1
            return
        self._model.handle(subject_family(message.subject), fact, self._clock())

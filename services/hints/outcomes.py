"""What became of the envelopes: each is answered once, by the bridge or by the deadline."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from schemas.hint import ActionType, HintOutcome, HintResult
from schemas.session import SessionKey

MAX_SENT = 16_384
"""Envelopes remembered until they are answered."""


@dataclass(frozen=True, slots=True)
class Sent:
    """An envelope under way. ``at``: Unix seconds."""

    worker: str
    session: SessionKey
    action_type: ActionType
    at: float


class Outcomes:
    """Envelopes under way, totals, and the last outcome of each action type on each worker."""

    def __init__(self) -> None:
        self._sent: OrderedDict[str, Sent] = OrderedDict()
        self.sent: Counter[ActionType] = Counter()
        self.outcomes: Counter[tuple[ActionType, str]] = Counter()
        self.unknown_results = 0
        self.last: dict[tuple[str, ActionType], HintOutcome] = {}

    @property
    def under_way(self) -> int:
        return len(self._sent)

    def send(self, message_id: str, sent: Sent) -> None:
        """An envelope leaves."""
        self.sent[sent.action_type] += 1
        self._sent[message_id] = sent
        if len(self._sent) > MAX_SENT:
            _, oldest = self._sent.popitem(last=False)
            self.outcomes[oldest.action_type, "unanswered"] += 1

    def answered(self, result: HintResult) -> Sent | None:
        """A bridge answered; the envelope it answers, or ``None`` for one that is not under way."""
        sent = self._sent.pop(result.message_id, None)
        if sent is None:
            self.unknown_results += 1
            return None
        for each in result.results:
            self.outcomes[each.action_type, each.outcome] += 1
            self.last[result.worker, each.action_type] = each.outcome
        if not result.results:
            self.outcomes[sent.action_type, "unreadable"] += 1
        return sent

    def overdue(self, since: float) -> None:
        """Give up on envelopes sent at ``since`` or before."""
        while self._sent:
            message_id, sent = next(iter(self._sent.items()))
            if sent.at > since:
                break
            del self._sent[message_id]
            self.outcomes[sent.action_type, "unanswered"] += 1

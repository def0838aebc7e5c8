"""Hints: what the caches should do next. The one door: ``handle(event, now) -> effects``.

When a session's turn ends, the worker that ran it is asked to retain its prefix while its tools run; when the session
closes, or runs elsewhere, that worker is told to let go (spec: thunderagent-and-hints §5.3). Hints are soft: losing
every one changes timing only. Leader and standby follow the same facts; only the leader sends.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from bus.facts import FactNumbers
from schemas.decision import Decision
from schemas.hint import ActionType, HintAction, HintCommand, HintEnvelope, HintResult
from schemas.session import SessionFact
from services.hints.config import HintsSettings
from services.hints.effects import Effect, SendHint
from services.hints.events import Answered, Decided, Event, LeadershipChanged, SessionChanged, Tick
from services.hints.outcomes import Outcomes, Sent
from services.hints.retained import Retained, RetainedTable

KEEPS = frozenset({"accepted", "clipped", "deferred"})
"""Outcomes of a retain after which the prefix counts as retained."""


class Core:
    """The hints service without I/O. ``instance`` names us in facts and message ids."""

    def __init__(self, settings: HintsSettings, instance: str) -> None:
        self._settings = settings
        self._instance = instance
        self._numbers: FactNumbers | None = None
        self._messages = 0
        self.retained = RetainedTable(settings.max_retained_per_worker, settings.max_sessions)
        self.outcomes = Outcomes()
        self.not_sent: Counter[str] = Counter()

    @property
    def leading(self) -> bool:
        return self._numbers is not None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; ``now`` is Unix seconds."""
        match event:
            case SessionChanged(fact):
                if fact.state == "acting":
                    return self._acting(fact, now)
                return self._closed(fact, now) if fact.state == "closed" else []
            case Decided(decision):
                return self._decided(decision, now)
            case Answered(result):
                self._answered(result)
                return []
            case LeadershipChanged(epoch):
                self._numbers = None if epoch is None else FactNumbers(self._instance, epoch)
                return []
            case Tick():
                self.retained.expire(now)
                self.outcomes.overdue(now - self._settings.result_deadline_s)
                return []

    def _acting(self, fact: SessionFact, now: float) -> list[Effect]:
        """The turn is over and its tools run: keep the prefix where it is."""
        if fact.worker is None:
            return []
        entry = Retained(fact.session, fact.session_id, fact.worker, fact.rank or 0, now + self._settings.retain_ttl_s)
        effects = self._let_go_elsewhere(entry, now)
        if not self.retained.keep(entry):
            self.not_sent["over_budget"] += 1
            return effects
        bounds = {"priority": self._settings.retain_priority, "ttl_ms": int(self._settings.retain_ttl_s * 1000)}
        return effects + self._send("retain", entry, bounds, now)

    def _closed(self, fact: SessionFact, now: float) -> list[Effect]:
        """The session is over: nobody needs its prefix."""
        entry = self.retained.drop(fact.session)
        if entry is None and fact.worker is not None:
            entry = Retained(fact.session, fact.session_id, fact.worker, fact.rank or 0, now)
        if entry is None or fact.session.family == "request":
            return []  # it never ran, or nothing was ever asked to be kept for it
        return self._send("dereference", entry, {"reason": fact.reason or "closed"}, now)

    def _decided(self, decision: Decision, now: float) -> list[Effect]:
        """The session's next turn runs on another rank: what the old one keeps is of no use."""
        if decision.kind not in ("turn", "final"):
            return []
        there = Retained(decision.identity.key, decision.identity.session_id, decision.worker, decision.rank, now)
        return self._let_go_elsewhere(there, now)

    def _let_go_elsewhere(self, there: Retained, now: float) -> list[Effect]:
        known = self.retained.get(there.session)
        if known is None or (known.worker, known.rank) == (there.worker, there.rank):
            return []
        self.retained.drop(there.session)
        return self._send("dereference", known, {"reason": "moved"}, now)

    def _answered(self, result: HintResult) -> None:
        sent = self.outcomes.answered(result) if self.leading else None
        if sent is None or sent.action_type != "retain":
            return
        if not any(each.outcome in KEEPS for each in result.results):
            entry = self.retained.get(sent.session)
            if entry is not None and entry.worker == sent.worker:
                self.retained.drop(sent.session)  # it does not weigh on the budget

    def _send(self, action: ActionType, entry: Retained, bounds: dict[str, Any], now: float) -> list[Effect]:
        if self._numbers is None:
            return []
        self._messages += 1
        message_id = f"{self._instance}-{self._numbers.epoch}-{self._messages}"
        payload = {"session_id": entry.session_id, "session": entry.session.text(), **bounds}
        envelope = HintEnvelope(
            message_id=message_id,
            actions=(HintAction(action_id=f"{message_id}-0", action_type=action, payload=payload),),
        )
        self.outcomes.send(message_id, Sent(entry.worker, entry.session, action, now))
        command = HintCommand(
            **self._numbers.stamp("hint", now),
            worker=entry.worker,
            rank=entry.rank,
            session=entry.session,
            session_id=entry.session_id,
            envelope=envelope,
        )
        return [SendHint(command)]

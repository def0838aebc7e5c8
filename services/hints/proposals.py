"""From wishes to caches: users' policies are asked first, where there are any; then the gate decides."""

from __future__ import annotations

from collections import Counter

from schemas.hint import HintIntent
from schemas.policy import HintQuestion, PlannedAction
from services.hints.agenda import Agenda
from services.hints.config import HintsSettings
from services.hints.consulting import Consulting, Verdict
from services.hints.effects import PlannedHint, PlannerEffect
from services.hints.gate import Gate
from services.hints.rules import Rules
from services.hints.sessions import Session, SessionTable
from services.hints.wishes import Wish

Hints = list[PlannedHint]

RENEW_BEFORE = 0.25
"""A pin is renewed when so much of its time is left."""


class Proposals:
    """What is sent of what is wished. ``intents`` of users' policies are counted by (policy, what became of it)."""

    def __init__(
        self, settings: HintsSettings, sessions: SessionTable, rules: Rules, gate: Gate, agenda: Agenda
    ) -> None:
        self._sessions = sessions
        self._rules = rules
        self._gate = gate
        self._agenda = agenda
        self._policies = {policy.name: policy for policy in settings.policies}
        self.consulting = Consulting(settings)
        self.intents: Counter[tuple[str, str]] = Counter()

    def propose(self, session: Session, trigger: str, wishes: list[Wish | None], now: float) -> list[PlannerEffect]:
        """Send, unless users' policies are asked first."""
        wanted = tuple(wish for wish in wishes if wish is not None)
        if self.consulting.are_there and self._gate.active:
            question = HintQuestion(
                session=session.key,
                session_id=session.session_id,
                trigger=trigger,
                deadline_ms=0,
                model=session.model,
                worker=session.place.worker if session.place is not None else None,
                rank=session.place.rank if session.place is not None else None,
                context_tokens=session.context_tokens,
                builtin=tuple(_as_told(wish) for wish in wanted),
            )
            asks = self.consulting.consult(question, session.generation, wanted, now)
            if asks is not None:
                return [*asks]
        return [*self.send(wanted, session, now)]

    def send(self, wishes: list[Wish | None] | tuple[Wish, ...], session: Session | None, now: float) -> Hints:
        hints: Hints = []
        for wish in wishes:
            if wish is not None:
                sent = self._gate.send(wish, session, now)
                hints += sent
                if sent and wish.action_type == "pin" and not wish.policy and wish.ttl_s is not None:
                    self._agenda.add(now + (1 - RENEW_BEFORE) * wish.ttl_s, "renew", wish.session, wish.generation)
        return hints

    def concluded(self, verdict: Verdict | None, now: float) -> Hints:
        """Users' policies have been heard; what happened meanwhile may have overtaken it all."""
        if verdict is None:
            return []
        consultation = verdict.consultation
        session = self._sessions.get(consultation.session)
        if verdict.policy is None:
            return self.send(consultation.wishes, session, now)
        hints: Hints = []
        for action in (verdict.answer.actions if verdict.answer is not None else None) or ():
            hints += self._of_policy(session, action, verdict.policy.name, consultation.generation, now)
        return hints

    def _of_policy(
        self, session: Session | None, action: PlannedAction, name: str, generation: int, now: float
    ) -> Hints:
        if session is None or session.generation != generation:
            self._gate.policy_refused[name, "closed" if session is None else "overtaken"] += 1
            return []
        wish = self._rules.of_policy(session, action, self._policies[name], now)
        if isinstance(wish, str):
            self._gate.policy_refused[name, wish] += 1
            return []
        return self.send([wish], session, now)

    def intent(self, publisher: str, intent: HintIntent, now: float) -> Hints:
        """What a user's policy says unasked: within its budget as everything else that it says."""
        if intent.policy not in self._policies or publisher != intent.policy:
            self.intents["", "unknown_policy"] += 1
            return []
        session = self._sessions.get(intent.session)
        if session is None or session.place is None:
            closed = session is None and self._sessions.was_closed(intent.session)
            self.intents[intent.policy, "closed" if closed else "unknown_session"] += 1
            return []
        self.intents[intent.policy, "taken"] += 1
        action = PlannedAction(
            action_type=intent.action_type,
            worker=intent.worker if intent.worker is not None else session.place.worker,
            rank=intent.rank if intent.rank is not None else session.place.rank,
            ttl_ms=intent.ttl_ms,
            priority=intent.priority,
            reason=intent.reason,
        )
        return self._of_policy(session, action, intent.policy, session.generation, now)


def _as_told(wish: Wish) -> PlannedAction:
    """As a policy reads it."""
    return PlannedAction(
        action_type=wish.action_type,
        worker=wish.place.worker,
        rank=wish.place.rank,
        ttl_ms=int(wish.ttl_s * 1000) if wish.ttl_s is not None else None,
        priority=wish.priority,
        reason=wish.reason,
    )

"""Users' hint policies: what they are asked, and what their answers come to.

All that are asked about one thing are asked at once; meanwhile the planner's own actions wait, at most as long as the
longest deadline. A question ends in exactly one way: its answer, or why there is none; without an opinion the planner's
own actions stand. Letting go waits for nobody.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from schemas.policy import HintAnswer, HintQuestion
from schemas.session import SessionKey
from services.hints.config import HintsSettings
from services.hints.effects import AskPolicy
from services.hints.user_policies import HintPolicy
from services.hints.wishes import Wish

RESTS_AFTER = 5
"""So many late answers in a row, and a policy is left alone for a while."""
REST_S = 10.0


@dataclass(eq=False, slots=True)
class Consultation:
    """All questions about one thing that happened. ``wishes``: what the planner would have sent at ``generation``."""

    session: SessionKey
    generation: int
    wishes: tuple[Wish, ...]
    open: int = 0
    answers: list[tuple[HintPolicy, HintAnswer]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``policy`` ``None``: nobody has an opinion, the planner's own ``wishes`` stand; else ``answer`` is its."""

    consultation: Consultation
    policy: HintPolicy | None = None
    answer: HintAnswer | None = None


class Consulting:
    """Open questions. ``counts``: by (policy, outcome): ``used``, ``no_opinion``, ``overruled``, ``late``, ``absent``,
    ``malformed``, ``failed``, ``unsent``, ``busy``, ``resting``."""

    def __init__(self, settings: HintsSettings) -> None:
        asked = [policy for policy in settings.policies if policy.asked]
        self._policies = sorted(asked, key=lambda policy: policy.order)
        self._limit = settings.policy_questions
        self._tickets = 0
        self._open: dict[int, tuple[Consultation, HintPolicy, float]] = {}
        self._open_of: Counter[str] = Counter()
        self._late: Counter[str] = Counter()
        self._rests_until: dict[str, float] = {}
        self.counts: Counter[tuple[str, str]] = Counter()

    @property
    def open_questions(self) -> int:
        return len(self._open)

    @property
    def are_there(self) -> bool:
        """Whether anybody is asked at all."""
        return bool(self._policies)

    def consult(
        self, question: HintQuestion, generation: int, wishes: tuple[Wish, ...], now: float
    ) -> list[AskPolicy] | None:
        """Ask; the deadlines are written here. ``None``: there is nobody to ask now, the wishes stand."""
        consultation = Consultation(question.session, generation, wishes)
        asks = []
        for policy in self._policies:
            if self._open_of[policy.name] >= self._limit:
                self.counts[policy.name, "busy"] += 1
                continue
            if now < self._rests_until.get(policy.name, float("-inf")):
                self.counts[policy.name, "resting"] += 1
                continue
            self._tickets += 1
            self._open[self._tickets] = (consultation, policy, now + policy.deadline_ms / 1000)
            self._open_of[policy.name] += 1
            consultation.open += 1
            dated = msgspec.structs.replace(question, deadline_ms=int(now * 1000) + policy.deadline_ms)
            asks.append(AskPolicy(self._tickets, policy.name, dated, policy.deadline_ms))
        return asks or None

    def answered(self, ticket: int, answer: HintAnswer) -> Verdict | None:
        """An answer. Returns what all come to, when it was the last one."""
        entry = self._close(ticket)
        if entry is None:
            return None
        consultation, policy = entry
        self._late[policy.name] = 0
        consultation.answers.append((policy, answer))
        return self._verdict(consultation)

    def failed(self, ticket: int, cause: str, now: float) -> Verdict | None:
        """No answer. Returns as `answered` does."""
        entry = self._close(ticket)
        if entry is None:
            return None
        consultation, policy = entry
        self.counts[policy.name, cause] += 1
        self._late[policy.name] = self._late[policy.name] + 1 if cause == "late" else 0
        if self._late[policy.name] >= RESTS_AFTER:
            self._late[policy.name] = 0
            self._rests_until[policy.name] = now + REST_S
        return self._verdict(consultation)

    def overdue(self, now: float) -> list[Verdict]:
        """Give up every question whose deadline has passed by our own clock: a lost timer stalls nothing."""
        late = [ticket for ticket, (_, _, due) in self._open.items() if due <= now]
        verdicts = [self.failed(ticket, "late", now) for ticket in late]
        return [verdict for verdict in verdicts if verdict is not None]

    def _close(self, ticket: int) -> tuple[Consultation, HintPolicy] | None:
        entry = self._open.pop(ticket, None)
        if entry is None:
            return None
        consultation, policy, _ = entry
        self._open_of[policy.name] -= 1
        consultation.open -= 1
        return consultation, policy

    def _verdict(self, consultation: Consultation) -> Verdict | None:
        """The first in order with an opinion counts."""
        if consultation.open:
            return None
        verdict = Verdict(consultation)
        for policy, answer in sorted(consultation.answers, key=lambda each: self._policies.index(each[0])):
            if answer.actions is None:
                self.counts[policy.name, "no_opinion"] += 1
            elif verdict.policy is not None:
                self.counts[policy.name, "overruled"] += 1
            else:
                self.counts[policy.name, "used"] += 1
                verdict = Verdict(consultation, policy, answer)
        return verdict

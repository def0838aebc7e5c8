"""Users' policies on the bus: who is asked what, and what their answers come to.

All that is asked about one turn is asked at the same time, so that it costs the longest deadline at most. A question
ends in exactly one way: its answer, or why there is none (late, absent, malformed, failed, busy, resting). Whatever it
is, the turn goes on; what nobody has an opinion on is decided by the built-in policy alone. A policy has one open
question at most about one turn, and ``limit`` in all; beyond that it is not asked, which is counted too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from schemas.decision import PolicyAsk, PolicyAsked
from schemas.policy import (
    ANSWERS,
    MAX_HOLD_MS,
    MAX_ORDER_BIAS_S,
    POLICY_ASKS,
    AdmitAnswer,
    LeaseAnswer,
    PolicyAnswer,
    PolicyQuestion,
    RouteAnswer,
)
from services.admission.effects import AskPolicy
from services.admission.user_policies import UserPolicy

HOLD_MS = 500
"""Of a hold that does not say for how long."""
MIN_HOLD_MS = 50
"""No hold is shorter: a policy would be asked again and again."""

LEASE_TTL_S = 60.0
"""Of a lease that is to be kept, where the answer does not say for how long, in seconds."""
MAX_LEASE_TTL_S = 3600.0

MAX_REASON = 200
"""Characters of a policy's own words that travel on."""

NO_OPINION = "no_opinion"

RESTS_AFTER = 5
"""So many late answers in a row, and a policy is left alone for a while: each costs a turn its whole deadline."""
MAX_REST_S = 30.0


@dataclass(eq=False, slots=True)
class Asked:
    """One question to one policy. ``outcome`` is ``None`` while it is open, and while what became of its answer is not
    known (`Weighed`). Times are Unix seconds."""

    policy: UserPolicy
    ask: PolicyAsk
    at: float
    due: float
    answer: PolicyAnswer | None = None
    outcome: str | None = None
    took_s: float = 0.0


@dataclass(slots=True)
class _Standing:
    """A policy as it has been lately: ``late`` answers in a row, after which it rested ``rests`` times. It is not asked
    before ``rests_until`` (Unix seconds).
    """

    late: int = 0
    rests: int = 0
    rests_until: float = 0.0

    def is_late(self, now: float) -> None:
        """After the fifth time it rests for 1 s, after the next one for 2 s, 4 s, ...: those of one rest count once."""
        self.late += 1
        if self.late >= RESTS_AFTER and now >= self.rests_until:
            self.rests_until = now + min(MAX_REST_S, 2.0 ** min(self.rests, 5))
            self.rests += 1


@dataclass(eq=False, slots=True)
class Consultation:
    """All questions that are asked at once about ``subject``: a request's id, or a session. ``open``: unanswered ones.
    ``forgotten``: nobody wants to know any more."""

    subject: str
    asked: list[Asked] = field(default_factory=list)
    open: int = 0
    forgotten: bool = False

    @property
    def finished(self) -> bool:
        return not self.open


@dataclass(frozen=True, slots=True)
class Preferred:
    """A route policy's choice. ``blocks``: added to the cost of the ranks that it means (negative)."""

    asked: Asked
    worker: str
    rank: int | None
    blocks: float

    def means(self, worker: str, rank: int) -> bool:
        return worker == self.worker and self.rank in (None, rank)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the answers about a turn come to. ``hold_s``: hold it for so long; ``refuse``: do not run it, for
    ``reason``; both are ``policy``'s. Else it goes on, with its bias in the queue and the choices of route policies in
    their order."""

    policy: str = ""
    hold_s: float | None = None
    refuse: bool = False
    reason: str | None = None
    order_bias_s: float = 0.0
    preferred: tuple[Preferred, ...] = ()

    def bias(self, worker: str, rank: int) -> float:
        """What route policies add to the cost of the rank, in blocks."""
        return sum(each.blocks for each in self.preferred if each.means(worker, rank))


NO_VERDICT = Verdict()


@dataclass(frozen=True, slots=True)
class LeaseVerdict:
    """``keep`` ``None``: nobody has an opinion. ``ttl_s``: for so long, where it is kept."""

    keep: bool | None = None
    ttl_s: float = 0.0


class Consulting:
    """Every open question to users' policies. ``counts``: questions by (policy, ask, outcome)."""

    def __init__(self, policies: Sequence[UserPolicy], limit: int, counts: Counter[tuple[str, str, str]]) -> None:
        in_order = sorted(policies, key=lambda policy: policy.order)
        self._by_ask = {ask: tuple(each for each in in_order if ask in each.asks) for ask in POLICY_ASKS}
        self._limit = limit
        self._counts = counts
        self._tickets = 0
        self._open: dict[int, tuple[Consultation, Asked]] = {}
        self._open_of: Counter[str] = Counter()
        self._keys: set[tuple[str, PolicyAsk, str]] = set()
        self._standing = {policy.name: _Standing() for policy in policies}

    @property
    def open_questions(self) -> int:
        return len(self._open)

    def asks(self, ask: PolicyAsk) -> bool:
        """Whether any policy is asked this."""
        return bool(self._by_ask[ask])

    # Asking

    def consult(
        self, subject: str, questions: Mapping[PolicyAsk, PolicyQuestion], now: float
    ) -> tuple[Consultation, list[AskPolicy]]:
        """Put these questions to all policies that want them; their deadlines are written here.

        Nobody to be asked: the consultation is finished.
        """
        consultation = Consultation(subject)
        effects = []
        for ask, question in questions.items():
            for policy in self._by_ask[ask]:
                asked = Asked(policy, ask, now, now + policy.deadline_ms / 1000)
                consultation.asked.append(asked)
                key = (policy.name, ask, subject)
                if key in self._keys or self._open_of[policy.name] >= self._limit:
                    self._count(asked, "busy")
                    continue
                if now < self._standing[policy.name].rests_until:
                    self._count(asked, "resting")
                    continue
                self._tickets += 1
                self._keys.add(key)
                self._open_of[policy.name] += 1
                self._open[self._tickets] = (consultation, asked)
                consultation.open += 1
                dated = msgspec.structs.replace(question, deadline_ms=int(now * 1000) + policy.deadline_ms)
                effects.append(AskPolicy(self._tickets, policy.name, dated, policy.deadline_ms, ask))
        return consultation, effects

    def set_back(self, seconds: float) -> None:
        """The clock was set back by so much: questions and rests end as soon as before."""
        for _, asked in self._open.values():
            asked.at -= seconds
            asked.due -= seconds
        for standing in self._standing.values():
            standing.rests_until -= seconds

    def answered(self, ticket: int, answer: PolicyAnswer, now: float) -> Consultation | None:
        """The answer to question ``ticket``. Returns its consultation when that was the last one that it waited for."""
        entry = self._close(ticket, now)
        if entry is None:
            return None
        consultation, asked = entry
        self._standing[asked.policy.name] = _Standing()
        if not isinstance(answer, ANSWERS[asked.ask]):
            self._count(asked, "malformed")
        elif consultation.forgotten:
            self._count(asked, "unneeded")
        else:
            asked.answer = answer
        return self._if_finished(consultation)

    def failed(self, ticket: int, cause: str, now: float) -> Consultation | None:
        """Question ``ticket`` has no answer. ``cause``: ``late``, ``absent``, ``malformed``, ``failed``. Returns as
        `answered` does."""
        entry = self._close(ticket, now)
        if entry is None:
            return None
        consultation, asked = entry
        if cause == "late":
            self._standing[asked.policy.name].is_late(now)
        elif cause != "unsent":
            self._standing[asked.policy.name] = _Standing()
        self._count(asked, cause)
        return self._if_finished(consultation)

    def overdue(self, now: float) -> list[Consultation]:
        """Give up every question whose deadline has passed; the consultations that are finished with that."""
        late = [ticket for ticket, (_, asked) in self._open.items() if asked.due <= now]
        finished = [self.failed(ticket, "late", now) for ticket in late]
        return [consultation for consultation in finished if consultation is not None]

    def forget(self, consultation: Consultation) -> None:
        """Whoever it was about is gone. Open questions stay open until they end; answers were for nothing."""
        consultation.forgotten = True
        for asked in consultation.asked:
            if asked.answer is not None and asked.outcome is None:
                self._count(asked, "unneeded")

    def _close(self, ticket: int, now: float) -> tuple[Consultation, Asked] | None:
        entry = self._open.pop(ticket, None)
        if entry is None:
            return None
        consultation, asked = entry
        self._keys.discard((asked.policy.name, asked.ask, consultation.subject))
        self._open_of[asked.policy.name] -= 1
        if not self._open_of[asked.policy.name]:
            del self._open_of[asked.policy.name]
        consultation.open -= 1
        asked.took_s = max(0.0, now - asked.at)
        return entry

    @staticmethod
    def _if_finished(consultation: Consultation) -> Consultation | None:
        return consultation if consultation.finished and not consultation.forgotten else None

    def _count(self, asked: Asked, outcome: str) -> None:
        asked.outcome = outcome
        self._counts[asked.policy.name, asked.ask, outcome] += 1

    # Weighing

    def weigh(self, consultation: Consultation, prompt_blocks: int) -> Verdict:
        """What the answers come to: the first hold or refusal counts, biases add, choices stand side by side.

        ``prompt_blocks``: of the turn's prompt, the unit of weights.
        """
        first: tuple[UserPolicy, AdmitAnswer] | None = None
        bias = 0.0
        for asked in consultation.asked:
            answer = asked.answer
            if not isinstance(answer, AdmitAnswer):
                continue
            bias += answer.order_bias_s * asked.policy.factor
            stops = answer.action in ("hold", "refuse")
            if stops and first is not None:
                self._count(asked, "overruled")
                continue
            self._count(asked, answer.action or ("admit" if answer.order_bias_s else NO_OPINION))
            if stops:
                first = asked.policy, answer
        preferred = self._preferred(consultation, prompt_blocks, is_needed=first is None)
        if first is not None:
            return _stopped(*first)
        bias = max(-MAX_ORDER_BIAS_S, min(MAX_ORDER_BIAS_S, bias))
        return Verdict(order_bias_s=bias, preferred=preferred)

    def _preferred(self, consultation: Consultation, prompt_blocks: int, *, is_needed: bool) -> tuple[Preferred, ...]:
        preferred = []
        for asked in consultation.asked:
            answer = asked.answer
            if not isinstance(answer, RouteAnswer):
                continue
            if not answer.worker or not is_needed:
                self._count(asked, "unneeded" if answer.worker else NO_OPINION)
                continue
            preferred.append(Preferred(asked, answer.worker, answer.rank, -asked.policy.blocks(prompt_blocks)))
        return tuple(preferred)

    def became(self, preferred: Preferred, outcome: str) -> None:
        """What became of a route policy's choice: ``used``, ``outvoted`` or ``unusable``."""
        if preferred.asked.outcome is None:
            self._count(preferred.asked, outcome)

    def weigh_lease(self, consultation: Consultation) -> LeaseVerdict:
        """The first word in order counts."""
        verdict = LeaseVerdict()
        for asked in consultation.asked:
            answer = asked.answer
            if not isinstance(answer, LeaseAnswer):
                continue
            if answer.keep is None:
                self._count(asked, NO_OPINION)
            elif verdict.keep is not None:
                self._count(asked, "overruled")
            else:
                self._count(asked, "keep" if answer.keep else "release")
                ttl_s = LEASE_TTL_S if answer.ttl_ms is None else answer.ttl_ms / 1000
                verdict = LeaseVerdict(answer.keep, min(ttl_s, MAX_LEASE_TTL_S))
        return verdict


def summary(consultation: Consultation, times: Mapping[tuple[str, PolicyAsk], int]) -> tuple[PolicyAsked, ...]:
    """The consultation for a decision. ``times``: how often each policy was asked about the turn."""
    return tuple(
        PolicyAsked(
            policy=asked.policy.name,
            ask=asked.ask,
            outcome=asked.outcome or NO_OPINION,
            took_ms=round(asked.took_s * 1000, 3),
            times=times.get((asked.policy.name, asked.ask), 1),
            reason=_words(asked.answer.reason) if asked.answer is not None else None,
        )
        for asked in consultation.asked
    )


def _stopped(policy: UserPolicy, answer: AdmitAnswer) -> Verdict:
    if answer.action == "refuse":
        return Verdict(policy.name, refuse=True, reason=_words(answer.reason))
    hold_ms = HOLD_MS if answer.hold_ms is None else answer.hold_ms
    return Verdict(policy.name, hold_s=min(max(hold_ms, MIN_HOLD_MS), MAX_HOLD_MS) / 1000, reason=_words(answer.reason))


def _words(reason: str | None) -> str | None:
    """A policy's own words, as one line that is not too long."""
    if not reason:
        return None
    return " ".join(reason[: 4 * MAX_REASON].split())[:MAX_REASON]

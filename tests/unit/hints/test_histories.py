"""Random histories of facts, results and losses against a cache that believes everything it hears, and nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schemas.hint import ActionResult, HintIntent, HintOutcome
from schemas.index import SessionResidency
from schemas.policy import HintAnswer, PlannedAction
from services.hints.config import HintsSettings
from services.hints.effects import AskPolicy, AskSession, PlannedHint
from services.hints.events import (
    ActionAnswered,
    IntentGiven,
    NotSent,
    PlannerEvent,
    PolicyAnswered,
    PolicyFailed,
    SessionAnswered,
    Tick,
)
from services.hints.in_flight import DIRECTION
from services.hints.planner import Planner
from services.hints.user_policies import HintPolicy
from tests.unit.hints.support import START, decided, ended, key, pool, session, tool, worker

WORKERS = ("a", "b")
NAMES = ("s1", "s2", "s3", "s4")
CAPACITY = 10_000
OUTCOMES: tuple[HintOutcome, ...] = ("accepted", "clipped", "deferred", "rejected", "missing", "unsupported")


class Cache:
    """Pins of one rank that may live: sent, not known to be undone, and not over. What it was told in order."""

    def __init__(self) -> None:
        self.pins: dict[str, dict[str, tuple[int, float]]] = {}

    def weight(self, now: float) -> int:
        lives = [[tokens for tokens, until in pins.values() if until > now] for pins in self.pins.values()]
        return sum(max(tokens) for tokens in lives if tokens)


class Histories(RuleBasedStateMachine):
    """``under_way``: every hint that has neither an answer nor a deadline behind it."""

    @initialize(asks=st.booleans(), burst=st.sampled_from([3, 400]))
    def begin(self, asks: bool, burst: int) -> None:
        policies = (HintPolicy(name="x", asked=asks),)
        self.settings = HintsSettings(
            policies=policies, ask_sessions=asks, pin_ttl_s=20.0, demote_after_s=3.0, max_sessions=3,
            actions_burst=burst, actions_per_s=2.0, share_min_tokens=16, unsupported_s=10.0,
        )  # fmt: skip
        self.planner = Planner(self.settings)
        self.now = START
        self.under_way: dict[str, PlannedHint] = {}
        self.ended: Counter[str] = Counter()
        self.caches = {name: Cache() for name in WORKERS}
        self.open: dict[str, bool] = {}
        self.bucket = dict.fromkeys(WORKERS, float(burst))
        self.asked: list[AskSession | AskPolicy] = []
        self.sent = 0
        self.last_drop: dict[tuple[str, str], int] = {}
        self.do(pool("p"))
        for name in WORKERS:
            self.do(worker(name, "tier:host", pool="p"))

    def do(self, event: PlannerEvent) -> None:
        for effect in self.planner.handle(event, self.now):
            if isinstance(effect, PlannedHint):
                self.take(effect)
            else:
                self.asked.append(effect)

    def take(self, hint: PlannedHint) -> None:
        """A hint leaves: what must hold of it at that moment."""
        note(f"{hint.action_type} {hint.session.root} at {hint.worker}: {hint.payload}")
        self.sent += 1
        assert hint.action_id not in self.under_way
        lane = (hint.session, hint.worker, DIRECTION[hint.action_type])
        assert lane not in {
            (each.session, each.worker, DIRECTION[each.action_type]) for each in self.under_way.values()
        }
        self.under_way[hint.action_id] = hint
        assert hint.payload.expires_ms == int((self.now + self.settings.result_deadline_s) * 1000)
        name, pins = hint.session.root, self.caches[hint.worker].pins
        if hint.action_type != "dereference":
            assert name in self.open, "nothing is sent for a session that has closed"
            self.bucket[hint.worker] -= 1
            assert self.bucket[hint.worker] > -1e-6, "more often than it may"
        if hint.action_type == "dereference":
            self.last_drop[name, hint.worker] = int(hint.action_id.removeprefix("h"))
        if hint.action_type == "pin":
            assert 0 < (hint.payload.ttl_ms or 0) <= 20_000
            until = self.now + (hint.payload.ttl_ms or 0) / 1000
            pins.setdefault(name, {})[hint.action_id] = (hint.payload.tokens or 0, until)

    # Facts

    @rule(
        name=st.sampled_from(NAMES), where=st.sampled_from(WORKERS), tokens=st.integers(100, 6000),
        state=st.sampled_from(["opened", "acting", "leased", "released", "revoked", "expired", "paused", "resumed"]),
        lasts=st.sampled_from([0.5, 15.0, 90.0]), parent=st.sampled_from([None, "s1"]),
    )  # fmt: skip
    def fact(self, name: str, where: str, tokens: int, state: str, lasts: float, parent: str | None) -> None:
        if state not in ("released", "revoked", "expired") or name in self.open:
            self.opened(name)
        lease_until = self.now + lasts if state == "leased" else None
        self.do(
            session(
                name, state, where, tokens=tokens, lease_until=lease_until, parent=parent if parent != name else None
            )
        )

    @rule(name=st.sampled_from(NAMES))
    def close(self, name: str) -> None:
        self.open.pop(name, None)
        self.do(session(name, "closed", "a"))

    @rule(name=st.sampled_from(NAMES), where=st.sampled_from(WORKERS), tokens=st.integers(100, 6000))
    def decide(self, name: str, where: str, tokens: int) -> None:
        self.opened(name)
        self.do(decided(name, where, tokens=tokens, parent="s1" if name != "s1" else None, reach={"a": 40, "b": 9}))

    @rule(name=st.sampled_from(NAMES), event=st.sampled_from(["start", "end", "error"]))
    def tools(self, name: str, event: str) -> None:
        self.do(ended(name, "bash"))
        self.do(tool(name, event))

    @rule(where=st.sampled_from(WORKERS), incarnation=st.sampled_from("12"), leaves=st.integers(0, 5))
    def worker_seen(self, where: str, incarnation: str, leaves: int) -> None:
        before = self.planner.workers.get(where)
        health: Any = "left" if not leaves else "ready"
        self.do(worker(where, "tier:host", pool="p", incarnation=incarnation, health=health))
        if health == "left" or (before is not None and before.incarnation != incarnation):
            self.caches[where].pins.clear()

    def opened(self, name: str) -> None:
        """Of too many sessions the planner forgets the one that it heard of longest ago."""
        self.open.pop(name, None)
        self.open[name] = True
        if len(self.open) > self.settings.max_sessions:
            del self.open[next(iter(self.open))]

    # Results

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), outcome=st.sampled_from(OUTCOMES))
    def answer(self, data: st.DataObject, outcome: HintOutcome) -> None:
        action_id = data.draw(st.sampled_from(sorted(self.under_way)))
        hint = self.under_way.pop(action_id)
        self.ended[action_id] += 1
        self.carried_out(hint, outcome)
        result = ActionResult(action_id=action_id, action_type=hint.action_type, outcome=outcome)
        self.do(ActionAnswered(hint.worker, result))
        unknown = self.planner.unknown_results
        self.do(ActionAnswered(hint.worker, result))
        assert self.planner.unknown_results == unknown + 1, "an action is answered once"

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def bus_away(self, data: st.DataObject) -> None:
        action_id = data.draw(st.sampled_from(sorted(self.under_way)))
        hint = self.under_way.pop(action_id)
        self.ended[action_id] += 1
        self.caches[hint.worker].pins.get(hint.session.root, {}).pop(action_id, None)
        self.do(NotSent(action_id))

    def carried_out(self, hint: PlannedHint, outcome: HintOutcome) -> None:
        pins = self.caches[hint.worker].pins.get(hint.session.root, {})
        if hint.action_type == "pin" and outcome in ("rejected", "missing", "unsupported"):
            pins.pop(hint.action_id, None)
        elif hint.action_type == "pin":
            for earlier in list(pins):
                if earlier == hint.action_id:
                    break
                del pins[earlier]
        elif hint.action_type == "dereference" and outcome not in ("rejected", "unsupported"):
            number = int(hint.action_id.removeprefix("h"))
            for each in [each for each in pins if int(each.removeprefix("h")) < number]:
                del pins[each]

    # Questions, intents, time

    @precondition(lambda self: self.asked)
    @rule(
        known=st.booleans(), depth=st.integers(0, 300), late=st.booleans(),
        action=st.sampled_from(["pin", "retain", "prefetch", "demote", "share", "dereference"]),
        where=st.sampled_from(WORKERS),
    )  # fmt: skip
    def reply(self, known: bool, depth: int, late: bool, action: Any, where: str) -> None:
        asked = self.asked.pop(0)
        if isinstance(asked, AskSession):
            found = SessionResidency(depth=depth, block_size=16, shared_blocks=depth // 2) if known else None
            self.do(SessionAnswered(asked.session, found))
        elif late:
            self.do(PolicyFailed(asked.ticket, "late"))
        else:
            actions = (PlannedAction(action_type=action, worker=where, ttl_ms=15_000),) if known else None
            self.do(PolicyAnswered(asked.ticket, HintAnswer(actions=actions)))

    @rule(name=st.sampled_from(NAMES), action=st.sampled_from(["pin", "retain", "demote", "dereference"]))
    def intend(self, name: str, action: Any) -> None:
        intent = HintIntent(
            source="x", epoch=1, seq=0, at_ms=0, policy="x", session=key(name), action_type=action, ttl_ms=9_000
        )
        self.do(IntentGiven("x", intent))

    @rule(seconds=st.sampled_from([0.2, 1.0, 4.0, 30.0]))
    def passes(self, seconds: float) -> None:
        self.now += seconds
        for name in WORKERS:
            self.bucket[name] = min(float(self.settings.actions_burst), self.bucket[name] + seconds * 2.0)
        due = [each for each, hint in self.under_way.items() if hint.payload.expires_ms <= int(self.now * 1000)]
        for action_id in due:
            del self.under_way[action_id]
            self.ended[action_id] += 1
        self.do(Tick())

    @invariant()
    def is_bounded(self) -> None:
        if not hasattr(self, "planner"):
            return
        planner = self.planner
        assert set(planner.gate.flights.ids()) == set(self.under_way), "every action ends once, by answer or deadline"
        assert planner.gate.flights.waiting <= len(self.under_way)
        assert sum(planner.gate.sent.values()) == self.sent == len(self.under_way) + self.ended.total()
        assert all(count == 1 for count in self.ended.values())
        assert len(planner.sessions) <= self.settings.max_sessions
        for name, cache in self.caches.items():
            assert cache.weight(self.now) <= self.settings.pin_share * CAPACITY
            assert planner.gate.pins.of((name, 0)) >= cache.weight(self.now), "what may be pinned weighs"  # type: ignore[arg-type]

    @invariant()
    def nothing_is_pinned_for_a_session_that_closed(self) -> None:
        """A letting go is under way, was sent, or cannot be carried out by this worker; else the pin is over."""
        if not hasattr(self, "planner"):
            return
        for name, cache in self.caches.items():
            for root, pins in cache.pins.items():
                alive = [each for each, (_, until) in pins.items() if until > self.now]
                if alive and root not in self.open:
                    last = max(int(each.removeprefix("h")) for each in alive)
                    assert last < self.let_go(root, name), f"{root} at {name}"

    def let_go(self, root: str, name: str) -> float:
        """The number of the last letting go of the session there; endless where the worker cannot."""
        if not self.planner.workers.can(name, "dereference", self.now):
            return float("inf")
        return self.last_drop.get((root, name), -1)


Histories.TestCase.settings = settings(stateful_step_count=40)
TestHistories = pytest.mark.long(Histories.TestCase)

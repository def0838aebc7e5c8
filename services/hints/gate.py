"""The gate between wishes and caches: what may be sent is sent once, what may not is counted with its reason.

The planner's own letting go is never held back by budget or rate: it frees both, and there is no more of it than of
what was kept. A user's policy may say it as often as it likes, so that it has its rate.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from schemas.hint import ActionPayload, ActionType, HintTarget
from schemas.session import engine_session_id
from services.hints.budget import Charge, Ledger, RateLimit
from services.hints.config import HintsSettings
from services.hints.effects import PlannedHint
from services.hints.in_flight import DIRECTION, Flight, InFlight, Lane
from services.hints.sessions import Session
from services.hints.wishes import Place, Wish
from services.hints.workers import Workers

SUCCEEDS = frozenset({"accepted", "clipped", "deferred"})
"""Outcomes after which the action counts as done, or as about to be."""


MOST_KEPT = 4
"""Times the bound on sessions: what they keep in all, by what other planners say."""


def lane_of(wish: Wish) -> Lane:
    """Where only one action at a time may be under way."""
    return Lane(wish.session, wish.place, DIRECTION[wish.action_type])


class Gate:
    """Budgets, rates, and actions under way. ``active``: we are the one who sends.

    ``sent`` by action, ``not_sent`` by (action, reason), ``outcomes`` by (action, outcome, engine).
    """

    def __init__(self, settings: HintsSettings, workers: Workers, prefix: str) -> None:
        self._settings = settings
        self._workers = workers
        self._prefix = prefix
        self._numbers = 0
        self._rates: OrderedDict[str, RateLimit] = OrderedDict()
        self._policy_rates: dict[str, RateLimit] = {
            policy.name: RateLimit(settings.policy_actions_per_s, settings.policy_actions_burst)
            for policy in settings.policies
        }
        self.active = True
        self.pins: Ledger[Place] = Ledger()
        self.retained: Ledger[str] = Ledger()
        self.flights = InFlight()
        self.sent: Counter[ActionType] = Counter()
        self.not_sent: Counter[tuple[ActionType, str]] = Counter()
        self.outcomes: Counter[tuple[ActionType, str, str]] = Counter()
        self.policy_refused: Counter[tuple[str, str]] = Counter()

    def rename(self, prefix: str) -> None:
        """Action ids begin with ``prefix`` from now on, numbered anew: a new leadership's are nobody else's."""
        self._prefix, self._numbers = prefix, 0

    # Sending

    def send(self, wish: Wish, session: Session | None, now: float) -> list[PlannedHint]:
        """Send it, let it wait for what is under way, or count why not. ``session``: as it is now, ``None``: closed."""
        if not self.active:
            return []
        reason = self._refusal(wish, session, now)
        if reason is None and self.flights.on(lane_of(wish)) is not None:
            if self.flights.wait(lane_of(wish), wish):
                self.refuse(wish, "displaced")
            return []
        reason = reason or self._over_limit(wish, now)
        if reason is not None:
            self.refuse(wish, reason)
            return []
        self._numbers += 1
        hint = self._hint(wish, f"{self._prefix}{self._numbers}", now)
        self._book(wish, hint.action_id, session, now)
        self.sent[wish.action_type] += 1
        return [hint]

    def observe(self, wish: Wish, action_id: str, session: Session | None, now: float) -> None:
        """Another planner has sent it: it counts as though we had. Anybody on the bus may say so: more than a planner
        would keep is not taken in."""
        if self.flights.get(action_id) is not None:
            return
        if len(self.pins) + len(self.retained) >= MOST_KEPT * self._settings.max_sessions:
            return
        under_way = self.flights.on(lane_of(wish))
        if under_way is not None or self.flights.full:
            self.flights.end(under_way or self.flights.oldest)
        self._book(wish, action_id, session, now)

    def refuse(self, wish: Wish, reason: str) -> None:
        """Count it."""
        self.not_sent[wish.action_type, reason] += 1
        if wish.policy:
            self.policy_refused[wish.policy, reason] += 1

    def _refusal(self, wish: Wish, session: Session | None, now: float) -> str | None:
        """Why it must not be sent at all."""
        if not self._workers.can(wish.place.worker, wish.action_type, now):
            return "unsupported"
        if wish.action_type == "dereference":
            return None
        if session is None:
            return "closed"
        if wish.generation != session.generation:
            return "overtaken"
        known = self._workers.get(wish.place.worker)
        if known is None or not known.usable:
            return "worker_unusable"
        if wish.place.rank >= known.ranks:
            return "unknown_rank"
        return self._cannot(wish, session)

    def _cannot(self, wish: Wish, session: Session) -> str | None:
        """What its kind needs and has not."""
        known = self._workers.get(wish.place.worker)
        if wish.action_type == "pin":
            if not wish.tokens or not wish.ttl_s or wish.ttl_s <= 0:
                return "nothing_to_keep"
            if session.lease is None and not wish.policy:
                return "no_lease"
            return "no_capacity" if known is None or not known.kv_tokens else None
        if wish.action_type in ("prefetch", "demote"):
            return "no_lower_tier" if self._workers.lowest(wish.place) is None else None
        if wish.action_type == "share":
            if wish.last is not None and wish.last <= session.shared_blocks:
                return "shared_already"
            pooled = known is not None and self._workers.pool_is_usable(known.pool)
            return None if pooled else "no_pool"
        return None

    def _over_limit(self, wish: Wish, now: float) -> str | None:
        """Why it may not be sent now."""
        policy_rate = self._policy_rates.get(wish.policy)
        if wish.action_type == "dereference":
            return "policy_rate" if policy_rate is not None and not policy_rate.take(now) else None
        if self.flights.full:
            return "too_many_under_way"
        reason = self._over_budget(wish)
        if reason is not None:
            return reason
        if policy_rate is not None and not policy_rate.take(now):
            return "policy_rate"
        return None if self._rate(wish.place.worker).take(now) else "rate"

    def _over_budget(self, wish: Wish) -> str | None:
        worker = wish.place.worker
        if wish.action_type == "pin":
            known = self._workers.get(worker)
            limit = self._settings.pin_share * (known.kv_tokens if known is not None else 0)
            charge = Charge("", wish.tokens, 0.0, wish.policy)
            own = self._settings.policy_pin_share * limit
            return None if self.pins.fits(wish.session, wish.place, charge, limit, own) else "over_budget"
        if wish.action_type == "retain":
            charge = Charge("", 1, 0.0, wish.policy)
            most = self._settings.max_retained_per_worker
            own = self._settings.policy_pin_share * most
            return None if self.retained.fits(wish.session, worker, charge, most, own) else "over_budget"
        return None

    def _rate(self, worker: str) -> RateLimit:
        rate = self._rates.get(worker)
        if rate is None:
            rate = self._rates[worker] = RateLimit(self._settings.actions_per_s, self._settings.actions_burst)
        self._rates.move_to_end(worker)
        while len(self._rates) > self._settings.max_workers:
            self._rates.popitem(last=False)
        return rate

    def _hint(self, wish: Wish, action_id: str, now: float) -> PlannedHint:
        target = HintTarget(
            session_id=engine_session_id(wish.session, wish.session_id),
            session=wish.session.text(),
            first=wish.first,
            last=wish.last,
            block_size=wish.block_size,
        )
        payload = ActionPayload(
            target=target,
            expires_ms=int((now + self._settings.result_deadline_s) * 1000),
            ttl_ms=int(wish.ttl_s * 1000) if wish.ttl_s is not None else None,
            priority=wish.priority,
            tokens=wish.tokens or None,
            to=wish.to,
            source=wish.source,
            parent=engine_session_id(wish.session, wish.parent) if wish.parent is not None else None,
            deadline_ms=int(wish.deadline * 1000) if wish.deadline is not None else None,
            reason=wish.reason,
            cancels=wish.cancels,
        )
        return PlannedHint(
            wish.place.worker, wish.place.rank, wish.session, wish.session_id, action_id, wish.action_type, payload
        )

    def _book(self, wish: Wish, action_id: str, session: Session | None, now: float) -> None:
        """It leaves: under way, on the ledger, and in what is kept."""
        frees: tuple[str, ...] = ()
        until = now + (wish.ttl_s or 0.0)
        if wish.action_type == "dereference":
            frees = self.pins.held(wish.session, wish.place)
            if wish.reason != "unpinned":
                frees += self.retained.held(wish.session, wish.place.worker)
        due = now + self._settings.result_deadline_s
        flight = Flight(
            action_id, wish.action_type, lane_of(wish), wish.session, wish.generation, due, frees, wish.last or 0
        )
        self.flights.begin(flight)
        if wish.action_type == "pin":
            self.pins.charge(wish.session, wish.place, Charge(action_id, wish.tokens, until, wish.policy))
        elif wish.action_type == "retain":
            self.retained.charge(wish.session, wish.place.worker, Charge(action_id, 1, until, wish.policy))
        if session is None:
            return
        if wish.action_type == "dereference":
            session.let_go(wish.place, pin_only=wish.reason == "unpinned")
        if wish.action_type not in ("pin", "retain", "demote"):
            return
        kept = session.keep(wish.place)
        if wish.action_type == "pin":
            kept.pin, kept.pin_until = action_id, until
        elif wish.action_type == "retain":
            kept.retain, kept.retain_until = action_id, until
        else:
            kept.demote, kept.demoted, kept.demoted_until = action_id, wish.to, until

    # What became of it

    def over(self, action_id: str, outcome: str, session: Session | None) -> Wish | None:
        """The action is over: ``outcome`` of `schemas.hint.HintOutcome`, ``unanswered`` or ``unsent``. Returns who
        waited for it. One that is not under way must not be told here. ``session``: whose it was, as it is now."""
        ended = self.flights.end(action_id)
        assert ended is not None
        flight, waiting = ended
        action, worker = flight.action_type, flight.lane.place.worker
        if self.active:
            self.outcomes[action, outcome, self._workers.engine(worker)] += 1
        if action == "dereference":
            if outcome in SUCCEEDS or outcome == "missing":
                for each in flight.frees:
                    self.pins.free(each)
                    self.retained.free(each)
            return waiting
        kept = session.kept if session is not None and session.kept is not None else None
        if outcome in SUCCEEDS:
            self.pins.confirmed(action_id)
            self.retained.confirmed(action_id)
            if kept is not None and kept.pin == action_id:
                kept.pinned = outcome != "deferred"
            if action == "share" and session is not None:
                session.shared_blocks = max(session.shared_blocks, flight.blocks)
        elif outcome != "unanswered":  # it may have been carried out all the same: then it weighs until it ends
            self.pins.free(action_id)
            self.retained.free(action_id)
            if kept is not None:
                kept.undo(action_id)
        return waiting

"""The hint planner: facts in, actions for caches out. No bus, no clock: ``handle(event, now) -> effects``.

It follows every session from fact to fact and wishes what its caches should do next (`rules`); users' policies may say
otherwise (`consulting`); the `gate` lets through what budgets, rates and actions under way allow. Hints are soft:
losing every one changes timing only. Source: spec thunderagent-and-hints §5.3; DESIGN §7.
"""

from __future__ import annotations

from collections import Counter

from schemas.decision import Decision
from schemas.hint import MAX_TTL_MS, ActionPayload, ActionResult
from schemas.index import SessionResidency
from schemas.request import RequestEnd
from schemas.session import MOVES_SESSION, SessionFact, SessionKey
from schemas.tool import ToolEvent
from schemas.worker import WorkerState
from services.hints.agenda import Agenda
from services.hints.config import HintsSettings
from services.hints.effects import PlannedHint, PlannerEffect
from services.hints.events import (
    ActionAnswered,
    Decided,
    IntentGiven,
    NotSent,
    PlannerEvent,
    PolicyAnswered,
    PolicyFailed,
    PoolSeen,
    SessionAnswered,
    SessionChanged,
    Tick,
    ToolChanged,
    TurnEnded,
    WorkerSeen,
)
from services.hints.gate import Gate
from services.hints.idle import UNPIN_AFTER_S, Idle
from services.hints.proposals import Proposals
from services.hints.questions import SessionQuestions
from services.hints.return_times import ReturnTimes
from services.hints.rules import Rules
from services.hints.sessions import MAX_TOOL_CHARACTERS, MAX_TOOLS, KnownPrefix, Session, SessionTable
from services.hints.wishes import Place, Wish
from services.hints.workers import Workers

Hints = list[PlannedHint]


USER_TURN = "user_turn"
"""Stands for a tool where a person is next. Source: spec scheduling §5.5."""


class Planner:
    """See the module. ``prefix`` begins the id of every action."""

    def __init__(self, settings: HintsSettings, prefix: str = "h") -> None:
        self._settings = settings
        self.workers = Workers(settings.max_workers, settings.unsupported_s)
        self.returns = ReturnTimes()
        self.sessions = SessionTable(settings.max_sessions)
        self.gate = Gate(settings, self.workers, prefix)
        self.questions = SessionQuestions(settings.max_questions if settings.ask_sessions else 0)
        self.agenda = Agenda(8 * settings.max_sessions)
        self.superseded: Counter[str] = Counter()
        self.unknown_results = 0
        self._rules = Rules(settings, self.workers, self.returns)
        self.proposals = Proposals(settings, self.sessions, self._rules, self.gate, self.agenda)
        self._idle = Idle(settings, self.sessions, self.workers, self._rules, self.gate, self.agenda, self.proposals)

    def handle(self, event: PlannerEvent, now: float) -> list[PlannerEffect]:
        """Take in one event; ``now`` is Unix seconds (or any other clock that every event is told by)."""
        match event:
            case SessionChanged(fact):
                return self._session_changed(fact, now)
            case Decided(decision):
                return self._decided(decision, now)
            case TurnEnded(end):
                self._turn_ended(end)
                return []
            case ToolChanged(tool):
                return [*self._tool_changed(tool, now)]
            case WorkerSeen(state):
                self._worker_seen(state)
                return []
            case PoolSeen(pool):
                self.workers.pool_seen(pool)
                return []
            case ActionAnswered(worker, result):
                return [*self._answered(worker, result, now)]
            case NotSent(action_id):
                return [*self._over(action_id, "unsent", now)]
            case SessionAnswered(key, residency, _):
                return [*self._session_answered(key, residency, now)]
            case PolicyAnswered(ticket, answer):
                return [*self.proposals.concluded(self.proposals.consulting.answered(ticket, answer), now)]
            case PolicyFailed(ticket, cause):
                return [*self.proposals.concluded(self.proposals.consulting.failed(ticket, cause, now), now)]
            case IntentGiven(publisher, intent):
                return [*self.proposals.intent(publisher, intent, now)]
            case Tick():
                return [*self._tick(now)]

    # Sessions

    def _session_changed(self, fact: SessionFact, now: float) -> list[PlannerEffect]:
        if fact.session.family == "request":
            return []  # nobody comes back to it: it leaves nothing worth a word
        if fact.state == "closed":
            return [*self._closed(fact, now)]
        if fact.state in ("released", "revoked", "expired") and self.sessions.get(fact.session) is None:
            return []  # the lease of a session that has closed meanwhile
        session = self.sessions.touch(fact.session, fact.session_id, fact.parent)
        hints = self._make_room(now)
        session.model = fact.model or session.model
        match fact.state:
            case "acting":
                return [*hints, *self._acting(session, fact, now)]
            case "leased":
                return [*hints, *self._leased(session, fact, now)]
            case "released" | "revoked" | "expired":
                return [*hints, *self._lease_over(session, fact, now)]
            case "paused":
                return [*hints, *self._paused(session, fact, now)]
            case "resumed":
                return [*hints, *self._resumed(session, fact, now)]
        return [*hints]

    def _acting(self, session: Session, fact: SessionFact, now: float) -> list[PlannerEffect]:
        """The turn is over and its tools run: keep what they come back to."""
        place = _place_of(fact)
        session.state, session.generation = "acting", session.generation + 1
        session.idle_since, session.turns, session.lease = now, fact.turns, None
        before, session.context_tokens = session.context_tokens, fact.context_tokens or session.context_tokens
        if place is None:
            return []  # it failed everywhere: nothing is anywhere
        hints = self._let_go_elsewhere(session, place, now)
        hints += self._rewritten_after_all(session, place, before, fact, now)
        session.place = place
        self._idle.arm(session, now)
        retain = self._rules.retain(session, place) if _comes_back(fact) else None
        effects = self.proposals.propose(session, fact.state, [retain], now)
        question = self.questions.ask(session.key, now) if self.gate.active else []
        return [*hints, *effects, *question]

    def _leased(self, session: Session, fact: SessionFact, now: float) -> list[PlannerEffect]:
        """The router holds room for it: so should the cache."""
        place = _place_of(fact)
        if place is None or fact.lease is None:
            return []
        session.lease = fact.lease
        if session.place is None:
            session.place = place
        if place != session.place:
            return []  # the lease of an earlier place: it has moved since
        pin = self._rules.pin(session, place, now)
        return self.proposals.propose(session, fact.state, [pin], now)

    def _lease_over(self, session: Session, fact: SessionFact, now: float) -> list[PlannerEffect]:
        """``released``: its turn runs again, or it is over, and the next fact says which. Else the pin goes at once;
        when its room was taken for others (``revoked``), its KV goes below, where there is a below, not nowhere."""
        session.lease = None
        place = _place_of(fact) or session.place
        if fact.state == "released" or place is None:
            self.agenda.add(now + UNPIN_AFTER_S, "unpin", session.key, session.generation)
            return []
        if fact.reason == "worker_lost":
            session.kept = None
            return []
        hints = self._idle.unpin(session, now)
        if fact.state == "expired" or session.state != "acting" or place != session.place:
            return [*hints]  # of an expired one nobody has said that its room is needed: a long tool's turn comes
        return [
            *hints,
            *self.proposals.propose(session, fact.state, [self._rules.demote(session, place, "revoked")], now),
        ]

    def _paused(self, session: Session, fact: SessionFact, now: float) -> list[PlannerEffect]:
        """It does not run until it is resumed: its KV is in others' way, where that has not gone below already (its
        lease was revoked)."""
        place = session.place or _place_of(fact)
        session.state, session.generation = "paused", session.generation + 1
        session.lease, session.idle_since = None, 0.0
        if place is None:
            return []
        hints = self._idle.unpin(session, now)
        kept = session.kept
        is_below = kept is not None and kept.place == place and kept.demoted_until > now
        demote = None if is_below else self._rules.demote(session, place, "paused")
        return [*hints, *self.proposals.propose(session, fact.state, [demote], now)]

    def _resumed(self, session: Session, fact: SessionFact, now: float) -> list[PlannerEffect]:
        """Its turn comes next, and it is known where: what it has below, or in the pool, comes up there."""
        session.state, session.generation = "acting", session.generation + 1
        place = _place_of(fact)
        if place is None:
            return []
        there = self._reaches(session, place, now)
        prefetch = self._rules.prefetch(session, place, now, "resumed") if there else None
        if prefetch is not None and session.kept is not None and session.kept.place == place:
            session.kept.demoted, session.kept.demoted_until = None, 0.0  # paused again, it is to go down again
        return self.proposals.propose(session, fact.state, [prefetch], now)

    def _closed(self, fact: SessionFact, now: float) -> Hints:
        """Nobody needs its prefix. Its parent goes on when its last child has closed."""
        session = self.sessions.get(fact.session)
        place = _place_of(fact)
        if session is None:
            self.sessions.close(fact.session)
            if place is None:
                return []
            session = Session(fact.session, fact.session_id, place=place)
        session.place = session.place or place
        hints = self._close(session, fact.reason if fact.reason == "worker_lost" else "closed", now)
        parent = self.sessions.get(session.parent)
        if parent is not None and not parent.children:
            hints += self._idle.bring_up(parent, now, now, "children_closed")
        return hints

    def _close(self, session: Session, reason: str, now: float) -> Hints:
        """The session is over for the planner."""
        session.generation += 1
        self.sessions.close(session.key)
        self.questions.forget(session.key)
        hints: Hints = []
        places = {session.place, session.kept.place if session.kept is not None else None}
        for place in sorted(each for each in places if each is not None):
            self.gate.flights.forget_wishes(session.key, place)
            hints += self.gate.send(self._rules.release(session, place, reason), None, now)
        session.kept = None
        return hints

    def _make_room(self, now: float) -> Hints:
        """Sessions beyond the limit: the one touched longest ago is as good as closed."""
        hints: Hints = []
        while (oldest := self.sessions.overflow()) is not None:
            hints += self._close(oldest, "forgotten", now)
        return hints

    # Turns

    def _decided(self, decision: Decision, now: float) -> list[PlannerEffect]:
        """The session's next turn runs there."""
        key = decision.identity.key
        if decision.kind not in MOVES_SESSION or key.family == "request":
            return []
        session = self.sessions.touch(key, decision.identity.session_id, decision.identity.parent)
        hints = self._make_room(now)
        place = Place(decision.worker, decision.rank)
        first, was = session.place is None, session.place
        if session.state == "acting" and session.idle_since and decision.attempt == 0:
            self.returns.add(session.tool, max(0.0, now - session.idle_since))
        session.state, session.generation = "reasoning", session.generation + 1
        session.model, session.idle_since = decision.model, 0.0
        before, session.prompt_tokens = session.prompt_tokens, decision.input_tokens
        session.tool, session.tools = "", set()
        for each in {place, was or place}:
            self.gate.flights.forget_wishes(key, each)  # what was meant for the time until now
        hints += self._rewritten(session, was, before, decision, now)
        hints += self._let_go_elsewhere(session, place, now)
        session.place, session.lease = place, None
        if session.kept is not None:
            session.kept.demoted_until = 0.0  # the engine loads what its turn needs
            session.kept.demote = session.kept.demoted = None
        hints += self._share(session, decision, place, now) if first else []
        return [*hints, *self.proposals.propose(session, "decided", [], now)]

    def _let_go_elsewhere(self, session: Session, place: Place, now: float) -> Hints:
        """It runs at ``place``: what another one keeps for it is of no use."""
        kept = session.kept
        if kept is None or kept.place == place:
            return []
        over = kept.is_over(now) and not self.gate.pins.held(session.key, kept.place)
        self.gate.flights.forget_wishes(session.key, kept.place)
        hints = [] if over else self.gate.send(self._rules.release(session, kept.place, "moved"), session, now)
        session.kept = None
        return hints

    def _rewritten(self, session: Session, place: Place | None, before: int, decision: Decision, now: float) -> Hints:
        """A prompt that only grows cannot be shorter than the one ``before``, counted or estimated in the same way: it
        was compacted or rewritten, and what its session had is let go before the new one needs the room."""
        new = decision.input_tokens
        if place is None or not new or new >= self._settings.supersede_share * before:
            return []
        surviving, old = decision.predicted_cached_tokens, session.context_tokens
        return self._supersede(session, place, "shorter", surviving, old, now)

    def _rewritten_after_all(self, session: Session, place: Place, before: int, fact: SessionFact, now: float) -> Hints:
        """Far less was cached than the session had, although the cache had promised to keep it: what it kept is not
        what was asked for (spec: scheduling §5.5)."""
        kept, cached = session.kept, fact.numbers.get("cached_tokens")
        if cached is None or kept is None or kept.place != place or not kept.pinned:
            return []
        expected = min(before, fact.numbers.get("input_tokens", 0.0))
        if kept.pin_until <= session.idle_since or cached >= self._settings.supersede_share * expected:
            return []
        return self._supersede(session, place, "not_cached", int(cached), before, now)

    def _supersede(self, session: Session, place: Place, evidence: str, surviving: int, old: int, now: float) -> Hints:
        """Once a turn: several things may tell of the same rewrite."""
        if session.superseded_in == session.turns:
            return []
        session.superseded_in = session.turns
        self.superseded[evidence] += 1
        session.known, session.shared_blocks = None, 0
        return self.gate.send(self._rules.supersede(session, place, surviving, old), session, now)

    def _share(self, child: Session, decision: Decision, place: Place, now: float) -> Hints:
        """The index saw the child's prefix at its parent's worker, neither where it goes nor in the pool of both."""
        parent = self.sessions.get(child.parent)
        if parent is None or parent.place is None or not decision.block_size:
            return []
        if parent.place.worker == place.worker or not self.workers.share_a_pool(parent.place.worker, place.worker):
            return []
        there = max(
            (each.blocks.reach for each in decision.candidates if (each.worker, each.rank) == parent.place), default=0
        )
        here = decision.predicted_cached_tokens + decision.predicted_shared_tokens
        if there * decision.block_size - here < max(1, self._settings.share_min_tokens):
            return []
        return self.proposals.send([self._rules.share(parent, child, there, decision.block_size)], parent, now)

    def _turn_ended(self, end: RequestEnd) -> None:
        """What it called; a turn that called nothing waits for a person, which is another kind of waiting."""
        session = self.sessions.get(end.identity.key)
        if session is not None and end.kind in MOVES_SESSION:
            session.tool = end.tool_names[-1][:MAX_TOOL_CHARACTERS] if end.tool_names else USER_TURN

    def _tool_changed(self, tool: ToolEvent, now: float) -> Hints:
        """Which tool runs; when the last one has ended the next turn is near. Inferred ends come when it is there."""
        session = self.sessions.get(tool.session)
        if session is None or tool.inferred:
            return []
        call = tool.tool_call_id[:MAX_TOOL_CHARACTERS]
        if tool.event == "start":
            if len(session.tools) < MAX_TOOLS:
                session.tools.add(call)
            if session.tool in ("", USER_TURN):  # else its name at the model is known, by which gaps are learned
                session.tool = tool.tool_class[:MAX_TOOL_CHARACTERS]
            return []
        session.tools.discard(call)
        return self._idle.bring_up(session, now, now, "tools_ended") if not session.tools else []

    def _reaches(self, session: Session, place: Place, now: float) -> bool:
        """Whether a place has a way to the session's KV: below its own device, or in a pool that it reads."""
        kept = session.kept
        if kept is not None and kept.place == place and kept.demoted is not None and kept.demoted_until > now:
            return True
        before = session.place.worker if session.place is not None else place.worker
        return self.workers.share_a_pool(before, place.worker)

    def _tick(self, now: float) -> Hints:
        self.gate.pins.expire(now)
        self.gate.retained.expire(now)
        hints: Hints = []
        for action_id in self.gate.flights.overdue(now):
            hints += self._over(action_id, "unanswered", now)
        for verdict in self.proposals.consulting.overdue(now):
            hints += self.proposals.concluded(verdict, now)
        for entry in self.agenda.due(now):
            hints += self._idle.due(entry, now)
        return hints

    # What became of it

    def _answered(self, worker: str, result: ActionResult, now: float) -> Hints:
        """A result is a fact. One of nobody's action, or of another worker's, is only counted."""
        flight = self.gate.flights.get(result.action_id)
        if flight is None or flight.lane.place.worker != worker or flight.action_type != result.action_type:
            self.unknown_results += 1
            return []
        if result.outcome == "unsupported":
            self.workers.cannot(worker, result.action_type, now)
        return self._over(result.action_id, result.outcome, now)

    def _over(self, action_id: str, outcome: str, now: float) -> Hints:
        flight = self.gate.flights.get(action_id)
        if flight is None:
            return []
        session = self.sessions.get(flight.session)
        waiting = self.gate.over(action_id, outcome, session)
        if waiting is None:
            return []
        owner = self.sessions.get(waiting.session)
        if waiting.action_type == "dereference" and owner is not None and _has_come_back(owner, waiting):
            self.gate.refuse(waiting, "overtaken")
            return []
        return self.proposals.send([waiting], owner, now)

    def _session_answered(self, key: SessionKey, residency: SessionResidency | None, now: float) -> Hints:
        """What an indexer knows of the session. A chain that has become shorter was rewritten."""
        self.questions.answered(key, residency is not None, now)
        session = self.sessions.get(key)
        if session is None or residency is None or residency.error is not None:
            return []
        before, session.known = session.known, KnownPrefix.of(residency)
        after = session.known
        if before is None or after is None or session.place is None or session.state != "acting":
            return []
        if before.block_size != after.block_size or after.depth >= self._settings.supersede_share * before.depth:
            return []
        return self._supersede(session, session.place, "index", 0, before.depth * before.block_size, now)

    def _worker_seen(self, state: WorkerState) -> None:
        """What a worker kept is gone when it left or began anew."""
        if not self.workers.seen(state):
            return
        self.gate.pins.forget({seat for seat in self.gate.pins.seats() if seat.worker == state.worker})
        self.gate.retained.forget({state.worker})
        for session in self.sessions.all():
            if session.kept is not None and session.kept.place.worker == state.worker:
                session.kept = None

    # Following another planner

    def observe(self, hint: PlannedHint, now: float) -> None:
        """Another planner has sent this: it counts as though we had, so that we can take over."""
        session = self.sessions.get(hint.session)
        wish = _wish_of(hint, session.generation if session is not None else 0)
        self.gate.observe(wish, hint.action_id, session, now)

    def lead(self, prefix: str, now: float) -> None:
        """From now on we are the one who sends. What was to be done later is found anew: once, however often the lead
        has changed."""
        self.gate.active = True
        self.agenda.clear()
        self.gate.rename(prefix)
        for session in self.sessions.all():
            if session.state == "acting":
                self._idle.arm(session, now)
                if session.lease is not None:
                    self.agenda.add(now, "renew", session.key, session.generation)

    def follow(self) -> None:
        """From now on another one sends."""
        self.gate.active = False


def _place_of(fact: SessionFact) -> Place | None:
    return Place(fact.worker, fact.rank or 0) if fact.worker is not None else None


def _comes_back(fact: SessionFact) -> bool:
    """Whether anybody is likely to. Of those that are recognised by their content most first turns are the last: not
    before the second one is it a conversation."""
    return fact.session.family != "prefix" or fact.turns > 1


def _has_come_back(session: Session, waiting: Wish) -> bool:
    """Whether what was to be let go is wanted again: by the time that it may be sent, newer things are kept there."""
    kept = session.kept
    if kept is None or kept.place != waiting.place or waiting.reason == "superseded":
        return False
    return waiting.reason != "unpinned" or kept.pin is not None


def _wish_of(hint: PlannedHint, generation: int) -> Wish:
    """What the other planner must have wished."""
    payload: ActionPayload = hint.payload
    return Wish(
        action_type=hint.action_type,
        session=hint.session,
        session_id=hint.session_id,
        place=Place(hint.worker, hint.rank),
        generation=generation,
        ttl_s=min(payload.ttl_ms, MAX_TTL_MS) / 1000 if payload.ttl_ms is not None else None,
        tokens=payload.tokens or 0,
        to=payload.to,
        reason=payload.reason,
    )

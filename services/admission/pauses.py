"""Which sessions are paused: what admission tells the bus of them (``session.paused``, ``session.resumed``).

A session is paused when it is idle, has KV somewhere, and its next turn has waited with the scheduling policy for
``paused_after_s``; or when a policy that pauses programs puts it aside. A first turn, or one of a session whose worker
is lost, has no KV that anybody could move, and a session that the policy keeps a lease for has its room: none of these
is paused. Turns that wait for anything else (a user's policy, an earlier turn of their session) do not pause it.

Each pause ends once: with the grant of a turn (``granted``, or ``adopted`` where others placed it), with the policy's
word (``policy``), when its turn waits no more (``cancelled``, or why it was refused), when nobody knows of it any more
(``policy_restarted``, ``leader_changed``), or with the session (``closed``). ``soon`` comes before the grant, where the
turn has moved up to the second place or the first and there is only one rank that it can go to.
"""

from __future__ import annotations

import math

from schemas.session import MOVES_SESSION, SessionFact, SessionIdentity, SessionKey
from services.admission.asks import Ask
from services.admission.effects import Effect
from services.admission.outcomes import PauseTold, Place
from services.admission.sessions import Pause, Session, SessionState
from services.admission.state import AdmissionState

IDLE = "idle"
"""Reason of a pause by the policy, while no turn waits."""
SOON_PLACE = 2
"""One turn before it: it is next but one."""


class Pauses:
    """Begins and ends pauses. Every answer is what is to be told, empty where nothing changed."""

    def __init__(self, state: AdmissionState) -> None:
        self._state = state
        self._settings = state.settings

    # Turns that wait with the policy

    def lined_up(self, ask: Ask, now: float) -> None:
        """The turn waits with the policy from now on."""
        ask.pause_at = now + self._settings.paused_after_s

    def overdue(self, ask: Ask, place_in_line: int | None, line_length: int, now: float) -> list[Effect]:
        """The turn waits for so long that its session is paused. ``place_in_line``: in the policy's order, if it has
        one; ``line_length``: how many wait."""
        ask.pause_at = now + self._settings.hold_keepalive_s  # once told it is idle, or its lease is over
        request = ask.request
        session = self._state.sessions.get(request.identity.key)
        if session is None or request.kind not in MOVES_SESSION or session.state is not SessionState.ACTING:
            return []
        if ask.hold_reason == "session_order" or self._has_lease(session):
            return []
        waited = ask.held_s + (now - ask.held_since if ask.held_since is not None else 0.0)
        numbers = {"held_s": waited, "in_line": float(line_length)}
        if place_in_line is not None:
            numbers["place"] = float(place_in_line)
        pause = Pause(ask.hold_reason or "policy", request.request_id, place_in_line)
        return self._state.pause(request.identity.key, pause, numbers, now)

    def moved_up(self, ask: Ask, place_in_line: int | None, now: float) -> list[Effect]:
        """It is next, or next but one, and was not when it was paused: what waits below may come up now, if it is known
        where."""
        if place_in_line is None or place_in_line > SOON_PLACE or not self._state.sessions.paused:
            return []
        session = self._state.sessions.get(ask.request.identity.key)
        pause = session.pause if session is not None else None
        if pause is None or pause.request_id != ask.request.request_id:
            return []
        place = self._only_place(ask.request.request_id)
        if place is None or pause.place_in_line is None or pause.place_in_line <= place_in_line:
            return []
        ask.pause_at = math.inf  # once
        return self._state.resume(ask.request.identity.key, "soon", place, now)

    def left(self, ask: Ask, reason: str, now: float) -> list[Effect]:
        """The turn waits no more, and was not granted. What the policy has put aside stays so."""
        key, request_id = ask.request.identity.key, ask.request.request_id
        session = self._state.sessions.get(key)
        if session is None or session.pause is None or session.pause.request_id != request_id:
            return []
        if self._has_paused(session):
            session.pause.request_id = ""
            return []
        return self._state.resume(key, reason, None, now)

    # Policies that pause

    def told(self, told: PauseTold, *, turn_waits: bool, now: float) -> list[Effect]:
        """A policy's word. ``turn_waits``: the pause is of a turn that still waits, so that it stands when nobody knows
        where the session would go. A standby's policy may be ahead of the leader's, or behind."""
        if self._state.facts is None:
            return []
        if told.state == "resumed":
            if told.place is None and turn_waits:
                return []
            return self._state.resume(told.session, told.reason, told.place, now)
        session = self._state.sessions.get(told.session)
        return self._idle(session, now) if session is not None else []

    def _idle(self, session: Session, now: float) -> list[Effect]:
        key, scheduled = session.identity.key, self._state.scheduled
        if scheduled is not None and scheduled.has_turn(key):
            return []  # one that waits is told of when it has waited long enough
        return self._state.pause(key, Pause(IDLE), {}, now)

    # Leadership

    def lead(self, now: float) -> list[Effect]:
        """We lead from now on: what the leader before had paused is over, but for what our policy has put aside too."""
        effects: list[Effect] = []
        sessions = self._state.sessions
        for key in list(sessions.paused):
            session = sessions.get(key)
            if session is not None and session.pause is not None and self._has_paused(session):
                session.pause.request_id = ""
            else:
                effects += self._state.resume(key, "leader_changed", None, now)
        scheduled = self._state.scheduled
        for pool in scheduled.pools.values() if scheduled is not None else ():
            for name in pool.paused:
                session = sessions.get(SessionKey.from_text(name))
                effects += self._idle(session, now) if session is not None else []
        return effects

    def heard(self, fact: SessionFact, now: float) -> list[Effect]:
        """What another leader told. One that still speaks although we lead is contradicted."""
        facts, reason = self._state.facts, fact.reason or ""
        if facts is None:
            if fact.state == "paused":
                return [*self._learned(fact, now), *self._state.pause(fact.session, Pause(reason), {}, now)]
            return self._state.resume(fact.session, reason, None, now)
        if fact.epoch >= facts.epoch or fact.state != "paused":
            return []  # ourselves, or what we have ended already
        if not self._state.sessions.pause(fact.session, Pause(reason), {}):
            return []
        return self._state.resume(fact.session, "leader_changed", None, now)

    # Inside

    def _learned(self, fact: SessionFact, now: float) -> list[Effect]:
        """A process that began after the session's last turn does not know it, and must end its pause if it leads."""
        sessions = self._state.sessions
        if fact.worker is None or sessions.get(fact.session) is not None:
            return []
        identity = SessionIdentity(key=fact.session, session_id=fact.session_id, parent=fact.parent)
        changes = sessions.learn(identity, fact.model or "", fact.turns, fact.context_tokens, now)
        sessions.placed(fact.session, "turn", fact.worker, fact.rank or 0)
        return self._state.tell_sessions(changes, now)

    def _has_paused(self, session: Session) -> bool:
        scheduled = self._state.scheduled
        if scheduled is None or not any(pool.paused for pool in scheduled.pools.values()):
            return False
        name = session.identity.key.text()
        return any(name in pool.paused for pool in scheduled.pools.values())

    def _has_lease(self, session: Session) -> bool:
        """Whether the policy keeps room for it where it ran last."""
        scheduled = self._state.scheduled
        if scheduled is None or session.worker is None:
            return False
        name, place = session.identity.key.text(), (session.worker, session.rank or 0)
        seats = ((pool, pool.seats.get(place)) for pool in scheduled.pools.values())
        return any(seat is not None and (name, seat) in pool.leases for pool, seat in seats)

    def _only_place(self, request_id: str) -> Place | None:
        """Where the request will go, whenever it does: the only seat of its pool."""
        scheduled = self._state.scheduled
        turn = scheduled.turns.get(request_id) if scheduled is not None else None
        if scheduled is None or turn is None:
            return None
        places = scheduled.pools[turn.pool].seats
        return next(iter(places)) if len(places) == 1 else None

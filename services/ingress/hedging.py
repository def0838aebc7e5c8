"""Requests that are sent twice to be fast: off unless the settings say after how long (docs/adr/0037).

A request whose engine has not begun to answer is sent to a second worker, if admission grants that one at once.
Whoever begins first is relayed; the other is closed, and its booking given back. One extra sending at most: a retry
excludes it, and it excludes a retry. An error is no beginning of the second's: the first is waited for.
"""

from __future__ import annotations

from services.ingress import events
from services.ingress.breaker import Breaker
from services.ingress.dispatching import Forwards
from services.ingress.effects import CloseUpstream, Effect, Follow
from services.ingress.facts import Facts
from services.ingress.requests import Race, Record
from services.ingress.workers import Workers

ASKED_FOR_S = 1.0
"""How long admission is asked for a second sending, in seconds: it is granted at once or not at all."""


class Hedging:
    """The second sending of one request, from the question to its end."""

    def __init__(self, facts: Facts, workers: Workers, breaker: Breaker, forwards: Forwards) -> None:
        self._facts = facts
        self._workers = workers
        self._breaker = breaker
        self._forwards = forwards

    def ask(self, record: Record, avoided: tuple[str, ...], now: float) -> list[Effect]:
        """Ask for it, where another worker may take it."""
        barred = {*record.excluded, *avoided, record.worker}
        if all(state.worker in barred for state in self._workers.placeable(record.model, now)):
            return []
        record.race, record.hedge_asked = Race(record.attempt + 1, now), True
        return [self._facts.hedge_question(record, now, ASKED_FOR_S, avoided)]

    def decided(
        self, record: Record, race: Race, event: events.HedgeAnswered, wanted: bool, now: float
    ) -> list[Effect]:
        """Send it, if it was granted and is ``wanted`` still. Silence may be a grant that is late: that is given back,
        too."""
        granted = event.granted
        if granted is None or not wanted or granted.grant.worker in (record.worker, *record.excluded):
            return self.drop(record)
        race.granted, race.sent_at, record.hedged = granted, now, "lost"
        self._breaker.sent(granted.grant.worker, now)
        return [self._forwards.granted(record, race.attempt, granted, now)]

    def drop(self, record: Record) -> list[Effect]:
        """No second sending any more, whatever came of it: what it holds is given back at once."""
        race, record.race = record.race, None
        if race is None:
            return []
        close = [CloseUpstream(record.request_id, race.attempt)] if race.granted is not None else []
        return [*close, self._facts.cancel(record, "hedge_over", hedge=True)]

    def takes_over(self, record: Record, now: float) -> list[Effect]:
        """The second sending is the request now, if there is one; nothing of the first is wanted any more."""
        race = record.race
        if race is None or race.granted is None:
            return []
        granted, close = race.granted, CloseUpstream(record.request_id, record.attempt)
        record.switch(granted, race)
        grant = granted.grant
        said = self._facts.dispatched(record, grant.worker, grant.rank, granted.mode, now)
        return [close, said, Follow(record.request_id, record.attempt)]

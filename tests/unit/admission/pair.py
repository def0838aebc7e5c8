"""A leader and its standby, which hears what is on the bus and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from schemas.request import RequestEnd
from schemas.session import SessionFact
from services.admission.core import Core
from services.admission.effects import Effect, Publish, PublishDecision
from services.admission.events import (
    AdmitAsked,
    Decided,
    Ended,
    Event,
    LeadershipChanged,
    MatchAnswered,
    MatchFailed,
    PauseHeard,
    WorkerStated,
)
from services.admission.outcomes import Noticed
from tests.unit.admission.build import Driven

TO_THE_LEADER = (AdmitAsked, LeadershipChanged, MatchAnswered, MatchFailed)
"""Events that are no facts: questions, and answers to our own."""


def grants(core: Core) -> dict[str, tuple[str, int]]:
    """Where each open grant is."""
    return {entry.grant.request_id: (entry.grant.worker, entry.grant.rank) for entry in core.state.ledger}


def turns(core: Core) -> dict[str, tuple[str, int]]:
    """Where the scheduling policy has each turn that is granted. One that it has let may still wait for a place."""
    scheduled = core.state.scheduled
    assert scheduled is not None
    granted = grants(core)
    return {
        turn.request_id: turn.place
        for turn in scheduled.turns.values()
        if turn.place is not None and turn.request_id in granted
    }


@dataclass
class Pair(Driven):
    """``fresh`` makes a process that knows nothing, of that name. ``apart``: grants from before the standby began."""

    fresh: Callable[[str, float], Core] = field(kw_only=True)
    apart: set[str] = field(default_factory=set)
    names: int = 1

    def __post_init__(self) -> None:
        self.standby = self.another()

    def another(self) -> Core:
        self.names += 1
        return self.fresh(f"admission-{self.names}", self.now)

    def do(self, event: Event) -> list[Effect]:
        effects = super().do(event)
        if not isinstance(event, TO_THE_LEADER):
            self.hear(event)
        for effect in effects:
            if isinstance(effect, PublishDecision):
                self.hear(Decided(effect.fact()))
            elif isinstance(effect, Publish) and isinstance(effect.fact, RequestEnd):
                self.hear(Ended(effect.fact))
            elif (
                isinstance(effect, Publish)
                and isinstance(effect.fact, SessionFact)
                and effect.fact.state in ("paused", "resumed")
            ):
                self.hear(PauseHeard(effect.fact))
        return effects

    def hear(self, event: Event) -> None:
        """The standby takes a fact in, and says nothing."""
        said = [effect for effect in self.standby.handle(event, self.now) if not isinstance(effect, Noticed)]
        assert said == []

    def take_over(self, epoch: int, *, crashed: bool) -> list[Effect]:
        """The standby leads from now on. The leader is its standby; if it ``crashed``, a new process is."""
        before, self.core = self.core, self.standby
        if crashed:
            self.standby = self.another()
            self.apart |= set(grants(self.core))
            for worker in self.core.state.fleet:
                self.hear(WorkerStated(worker.state))
        else:
            assert before.handle(LeadershipChanged(None), self.now) == []
            self.standby = before
        return self.do(LeadershipChanged(epoch))

    def check_alike(self, may_differ: set[str]) -> None:
        """The standby's books are the leader's, but for grants of requests that asked again meanwhile, of those that
        are older than the process, and of second sendings, which a table of their ingress tells it of."""
        for leads, follows in ((grants(self.core), grants(self.standby)), (turns(self.core), turns(self.standby))):
            hedges = {name for name in leads.keys() | follows.keys() if name.startswith("hedge:")}
            may_differ = may_differ | self.apart | hedges
            missing = {name: place for name, place in leads.items() if follows.get(name) != place}
            assert missing.keys() <= may_differ
            assert follows.keys() - leads.keys() <= may_differ


def choose(seed: int) -> Callable[[int], int]:
    return random.Random(seed).randrange

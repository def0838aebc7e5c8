"""Asked over the bus or held by admission itself, the index gives the same decisions for the same facts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.config import ReplicaSettings
from replica.core import Replica
from replica.events import WorkerSeen
from schemas.base import from_msgpack, to_msgpack
from schemas.decision import Decision
from schemas.index import MatchReply
from schemas.worker import WorkerProfile
from services.admission.config import AdmissionSettings
from services.admission.core import Core
from services.admission.effects import AskIndex, Effect
from services.admission.events import AdmitAsked, Ended, Event, LeadershipChanged, MatchAnswered, WorkerStated
from services.indexer.config import IndexerSettings
from services.indexer.core import IndexerCore
from tests.unit.admission.build import START, ask, end, facts
from tests.unit.replica.bridge import BLOCK, Bridge, chain, removed, stored

MODEL = "tiny"
WORKERS = ("a", "b", "c")


@dataclass
class House:
    """One admission and one index: ``asked`` as an indexer answers, in bytes, else as a replica in the process does."""

    asked: bool
    core: Core = field(init=False)
    replica: Replica = field(init=False)

    def __post_init__(self) -> None:
        self.core = Core(AdmissionSettings(warmup_s=0.0), "admission-1", random.Random(3).randrange, START)
        self.indexer = IndexerCore(IndexerSettings(instance="index"), 1)
        self.replica = self.indexer.replica if self.asked else Replica(ReplicaSettings(), "index")
        self.bridges = {name: Bridge(self.replica, name, now=START) for name in WORKERS}
        self.do(LeadershipChanged(1))

    def do(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, START)
        for effect in list(effects):
            if isinstance(effect, AskIndex):
                effects += self.core.handle(MatchAnswered(effect.ticket, self._answer(effect)), START)
        return effects

    def _answer(self, effect: AskIndex) -> MatchReply:
        if self.asked:
            return from_msgpack(self.indexer.match(to_msgpack(effect.question), START), MatchReply)
        return self.replica.match(effect.question, START)

    def act(self, action: str, worker: str, number: int) -> list[Decision]:
        at = self.bridges[worker]
        if action == "store":
            at.publish(stored(number))
        elif action == "remove":
            at.publish(removed(number))
        elif action == "lose":
            at.publish(stored(number), heard=False)
        elif action == "answer":
            at.answer()
        elif action == "restart":
            at.restart(f"{2000 + number}.0")
        elif action == "beat":
            profile = WorkerProfile(url="http://e", model=MODEL, block_size=BLOCK if number else 2 * BLOCK)
            state = at.state(profile=profile)
            at.give(WorkerSeen(state))
            self.do(WorkerStated(state))
        elif action == "ask":
            request = msgspec.structs.replace(
                ask(f"r{number}", f"s{number % 3}", tokens=BLOCK + 1, block_size=BLOCK, model=MODEL),
                chain=chain(number % 6),
            )
            effects = self.do(AdmitAsked(request, "reply"))
            return [msgspec.structs.replace(decision, decide_us=0) for decision in facts(effects, Decision)]
        else:
            self.do(Ended(end(f"r{number}", f"s{number % 3}")))
        return []


ACTIONS = ("store", "store", "remove", "lose", "answer", "restart", "beat", "ask", "ask", "end")
actions = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.sampled_from(WORKERS), st.integers(0, 9)), min_size=1, max_size=40
)


@pytest.mark.long
@given(actions=actions)
def test_asked_or_own_decisions_are_the_same(actions: list[tuple[str, str, int]]) -> None:
    """Whatever is stored, lost, restarted, restored and asked, in whatever order: worker, rank, costs, blocks, health
    and reasons of every candidate are equal."""
    asked, own = House(asked=True), House(asked=False)
    for house in (asked, own):
        for name in WORKERS:
            house.act("beat", name, 1)
    for action, worker, number in actions:
        assert asked.act(action, worker, number) == own.act(action, worker, number)

"""Random histories of clients that name nobody, between two indexers that hear of everything a little late, and begin
anew now and then: nothing is given to a wrong conversation. See `tests.unit.indexer.test_recognising`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvcore.session_index import SessionLimits
from schemas.index import RecogniseRequest
from schemas.request import Outcome, RequestEnd, Usage
from schemas.session import SessionIdentity, SessionKey
from services.indexer.recognising import SETTLED_S, Recogniser
from services.ingress.config import IngressSettings
from tests.histories.conftest import record
from tests.histories.test_policies import SEED
from tests.support.recognition import placed
from tests.unit.admission.scheduling.machine import Tally
from tests.unit.indexer.test_recognising import Client, chain, next_client, next_prompt

HISTORIES = 600
STEPS = 80
STEP_S = 15.0
LAG_S = 7.0
"""A fact is heard before its client's next turn, and after others' turns."""

Fact = Callable[[Recogniser], None]

OUTCOMES: tuple[Outcome, ...] = ("completed", "completed", "completed", "upstream_error", "client_disconnect")


@dataclass(slots=True)
class Indexer:
    """A recogniser, and the facts that are on their way to it, in order."""

    recogniser: Recogniser
    coming: list[tuple[float, Fact]] = field(default_factory=list)

    def tell(self, fact: Fact, at: float) -> None:
        self.coming.append((max([at, *(due for due, _ in self.coming[-1:])]), fact))

    def hear(self, now: float) -> None:
        while self.coming and self.coming[0][0] <= now:
            self.coming.pop(0)[1](self.recogniser)


class House:
    """Two indexers; requests ask either. ``taken`` counts answers that an ingress would take, by reason."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now = 0.0
        self.least = IngressSettings().recognise_confidence
        self.indexers = [Indexer(Recogniser(SessionLimits(), since=-SETTLED_S)) for _ in range(2)]
        self.clients: list[Client] = []
        self.begun: dict[Client, float] = {}
        self.members: dict[SessionKey, list[Client]] = {}
        self.running: list[tuple[str, SessionKey, Client]] = []
        self.taken: Counter[str] = Counter()

    def step(self, answers: int, questions: int) -> None:
        self.now += STEP_S
        for indexer in self.indexers:
            indexer.hear(self.now)
        if self.chance.random() < 0.03:
            self.indexers[self.chance.randrange(2)] = Indexer(Recogniser(SessionLimits(), since=self.now))
        if self.running and self.chance.random() < 0.55:
            self.end(*self.running.pop(self.chance.randrange(len(self.running))))
            return
        busy = [client for _, _, client in self.running]
        away = [client for client in self.clients if self.now - self.begun[client] > SETTLED_S]
        client = next_client(self.chance, [each for each in self.clients if each not in busy and each not in away])
        self.begin(client, next_prompt(self.chance, client, answers, questions))

    def begin(self, client: Client, parts: list[str]) -> None:
        request_id, prompt = f"r{self.now:.0f}", chain(*parts)
        question = RecogniseRequest(
            model="m", message_chain=prompt.hashes, preamble=prompt.preamble, request_id=request_id
        )
        reply = self.chance.choice(self.indexers).recogniser.recognise(question, "i", self.now)
        given = reply.session if reply.confidence >= self.least else None
        session = given or SessionKey(family="prefix", root=request_id)
        client.turns += 1
        if given is not None:
            self.taken[reply.reason or reply.relation] += 1
            members = self.members[given]
            fork_at_the_end = client.turns == 1 and client.origin in members
            assert client in members or fork_at_the_end or reply.relation == "repeats", (reply, parts)
        if client not in self.begun:
            self.clients.append(client)
        self.begun[client] = self.now
        self.members.setdefault(session, []).append(client)
        client.sent, client.answered = parts, False
        self.running.append((request_id, session, client))
        fact, now = placed(session, request_id, prompt, parent=reply.parent if given is None else None), self.now
        self.tell(lambda recogniser: recogniser.accepted(session, request_id, now))
        self.tell(lambda recogniser: recogniser.placed(fact, now))

    def end(self, request_id: str, session: SessionKey, client: Client) -> None:
        """Answered, failed, or broken off by its client, who keeps what had come."""
        outcome = self.chance.choice(OUTCOMES)
        some = outcome == "client_disconnect" and self.chance.random() < 0.5
        client.answered = some or outcome == "completed"
        end = RequestEnd(
            source="ingress-1", epoch=1, seq=1, at_ms=1, request_id=request_id, model="m",
            identity=SessionIdentity(key=session, session_id=session.root), outcome=outcome,
            usage=Usage(output_tokens=2 if some else None),
        )  # fmt: skip
        now = self.now
        self.tell(lambda recogniser: recogniser.ended(end, now))

    def tell(self, fact: Fact) -> None:
        for indexer in self.indexers:
            indexer.tell(fact, self.now + self.chance.random() * LAG_S)


@pytest.mark.timeout(300)
def test_nothing_is_given_to_a_wrong_conversation(request: pytest.FixtureRequest) -> None:
    """With two exceptions, as there; and nobody comes back after longer than an indexer takes to settle."""
    print(f"HISTORIES_SEED={SEED}")
    taken: Counter[str] = Counter()
    for number in range(HISTORIES):
        chance = random.Random(f"{SEED} recognising {number}")
        house = House(chance)
        answers, questions = chance.randint(1, 3), chance.randint(1, 3)
        for _ in range(STEPS):
            house.step(answers, questions)
        taken += house.taken
    record(request, "nameless clients, two indexers", Tally(HISTORIES, taken.total()))
    assert taken["continues"] > HISTORIES
    assert taken["first_prompt"] > HISTORIES
    assert taken["retry"] > 0

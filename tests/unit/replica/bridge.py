"""A bridge as a replica sees it: it publishes, beats, restarts, and answers for its index."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from kvcore.dump import Steps, at_once
from kvcore.errors import BadDumpError
from kvcore.events import decode_batch
from kvcore.hashing import chain_hashes, pack_tokens
from kvcore.index import PrefixIndex, PreparedRanks
from replica.config import ReplicaSettings
from replica.core import Replica
from replica.effects import AskSnapshot, ReplicaEffect, SourceChanged
from replica.events import (
    BatchReceived,
    PromptPlaced,
    ReplicaEvent,
    RequestEnded,
    SnapshotFailed,
    SnapshotReceived,
    Tick,
    Work,
    WorkerSeen,
)
from schemas.index import ChainUnit, MatchRequest, WorkerMatch
from schemas.kv import KvHeaders, RankMark
from schemas.placed import Placed
from schemas.request import RequestEnd, Usage
from schemas.session import SessionIdentity, SessionKey
from schemas.worker import RankStream, WorkerHealth, WorkerProfile, WorkerState

BLOCK = 4


def stored(number: int) -> bytes:
    """A batch that stores block ``number`` of a chain of its own."""
    tokens = [number * BLOCK + place for place in range(BLOCK)]
    return msgspec.msgpack.encode([1.0, [["BlockStored", [number + 1], None, tokens, BLOCK]], 0])


def removed(number: int) -> bytes:
    return msgspec.msgpack.encode([1.0, [["BlockRemoved", [number + 1]]], 0])


def chain(number: int) -> bytes:
    return chain_hashes(pack_tokens([number * BLOCK + place for place in range(BLOCK)]), BLOCK)


@dataclass
class Bridge:
    """What a bridge keeps: its index, its marks, its numbers."""

    core: Replica
    worker: str = "w"
    incarnation: str = "1000.0"
    seq: int = -1
    index: PrefixIndex = field(default_factory=PrefixIndex)
    now: float = 100.0
    facts: int = 0
    epoch: int = 1
    first: bool = True
    works: bool = True
    asked: list[AskSnapshot] = field(default_factory=list)
    out: list[ReplicaEffect] = field(default_factory=list)
    loading: list[tuple[AskSnapshot, tuple[RankMark, ...], Steps[PreparedRanks]]] = field(default_factory=list)

    def give(self, event: ReplicaEvent) -> None:
        self.now += 0.01
        effects = self.core.handle(event, self.now)
        while self.core.behind and self.works:
            effects += self.core.handle(Work(), self.now)
        self.out += effects
        self.asked += [effect for effect in effects if isinstance(effect, AskSnapshot)]

    def publish(self, payload: bytes, *, heard: bool = True) -> None:
        self.seq += 1
        self.index.apply(self.worker, 0, decode_batch(payload))
        headers = KvHeaders(worker=self.worker, rank=0, incarnation=self.incarnation, seq=self.seq, first=self.first)
        self.first = False
        if heard:
            self.give(BatchReceived(headers, payload))

    def restart(self, name: str) -> None:
        self.incarnation, self.seq, self.first = name, -1, True
        self.index = PrefixIndex()

    def state(self, health: WorkerHealth = "ready", **changes: object) -> WorkerState:
        self.facts += 1
        stream = RankStream(rank=0, incarnation=self.incarnation, seq=self.seq)
        values = {
            "streams": (stream,),
            "profile": WorkerProfile(url="http://e", model="tiny", block_size=BLOCK),
            **changes,
        }
        return WorkerState(
            source="bridge-w",
            epoch=self.epoch,
            seq=self.facts,
            at_ms=0,
            worker=self.worker,
            incarnation="1000",
            health=health,
            **values,  # type: ignore[arg-type]  # the test's own values
        )

    def beat(self, health: WorkerHealth = "ready", **changes: object) -> None:
        self.give(WorkerSeen(self.state(health, **changes)))

    def answer(self) -> None:
        """Answer every snapshot question that is open."""
        while self.asked:
            question = self.asked.pop(0)
            marks = (RankMark(rank=0, incarnation=self.incarnation, seq=self.seq),)
            self.snapshot(question, marks, self.index.dump())

    def snapshot(self, question: AskSnapshot, marks: tuple[RankMark, ...], dump: bytes) -> None:
        """As the shell does it, without its pauses."""
        try:
            prepared = at_once(self.core.prepare(question.worker, marks, dump))
        except BadDumpError as error:
            self.give(SnapshotFailed(question.worker, question.ticket, error.reason))
            return
        self.give(SnapshotReceived(question.worker, question.ticket, marks, prepared))
        at_once(self.core.index.discard(prepared))

    def answer_slowly(self) -> None:
        """Begin to load an answer; `load_on` goes on with it."""
        if self.asked:
            question = self.asked.pop(0)
            marks = (RankMark(rank=0, incarnation=self.incarnation, seq=self.seq),)
            steps = self.core.prepare(question.worker, marks, self.index.dump())
            self.loading.append((question, marks, steps))

    def load_on(self) -> None:
        """One step of every load."""
        for load in list(self.loading):
            question, marks, steps = load
            try:
                next(steps)
            except StopIteration as end:
                self.loading.remove(load)
                self.give(SnapshotReceived(question.worker, question.ticket, marks, end.value))
                at_once(self.core.index.discard(end.value))

    def fail(self) -> None:
        while self.asked:
            question = self.asked.pop(0)
            self.give(SnapshotFailed(question.worker, question.ticket, "no_responders"))

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.give(Tick())

    def told(self) -> list[tuple[str, str | None]]:
        return [(change.health, change.reason) for change in self.out if isinstance(change, SourceChanged)]

    def content(self) -> object:
        return self.core.index.content().get((self.worker, 0), {})

    def expected(self) -> object:
        return self.index.content().get((self.worker, 0), {})

    def match(self, number: int = 0) -> WorkerMatch:
        request = MatchRequest(model="tiny", block_size=BLOCK, chain=chain(number))
        reply = self.core.match(request, self.now)
        return next(match for match in reply.matches if match.worker == self.worker)


def bridge(**changes: object) -> Bridge:
    return Bridge(Replica(ReplicaSettings(**changes), "replica-1"))  # type: ignore[arg-type]


def placed(
    number: int,
    blocks: bytes,
    *,
    indexed: int | None = None,
    unit: ChainUnit = "tokens",
    session: SessionKey | None = None,
    **changes: object,
) -> PromptPlaced:
    """Prompt ``number`` went to rank 0 of worker ``w``."""
    values = {"worker": "w", "rank": 0, "block_size": BLOCK, **changes}
    fact = Placed(
        source="admission-1",
        epoch=1,
        seq=number,
        at_ms=0,
        request_id=str(number),
        model="tiny",
        session=session,
        unit=unit,
        chain=blocks,
        indexed=indexed,
        **values,  # type: ignore[arg-type]  # the test's own values
    )
    return PromptPlaced(fact)


def ended(number: int, usage: Usage, predicted: int | None = None) -> RequestEnded:
    """A request that rank 0 of worker ``w`` served well."""
    end = RequestEnd(
        source="ingress-1",
        epoch=1,
        seq=number,
        at_ms=0,
        request_id=str(number),
        model="tiny",
        identity=SessionIdentity(key=SessionKey(root="s"), session_id="s"),
        outcome="completed",
        worker="w",
        rank=0,
        predicted_cached_tokens=predicted,
        usage=usage,
    )
    return RequestEnded(end)

"""Messages and a driven core for the admission tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from schemas.admit import AdmitCancel, AdmitRequest, Granted, Held, Refused
from schemas.index import MatchReply, SourceHealth, TierBlocks, WorkerMatch
from schemas.ingress import InFlight, IngressState
from schemas.request import Outcome, RequestAccepted, RequestDispatched, RequestEnd, Usage
from schemas.session import Family, RequestKind, SessionIdentity, SessionKey
from schemas.worker import RankLoad, WorkerHealth, WorkerProfile, WorkerState
from services.admission.config import AdmissionSettings
from services.admission.core import Core
from services.admission.effects import AskIndex, AskPolicy, Effect, Publish, PublishDecision, Reply, WriteRow
from services.admission.events import (
    Accepted,
    AdmitAsked,
    AdmitCancelled,
    Dispatched,
    Ended,
    Event,
    IngressStated,
    LeadershipChanged,
    MatchAnswered,
    Tick,
    WorkerStated,
)
from services.admission.policies.commit import Commit

MODEL = "m"
START = 1_000_000.0
K = TypeVar("K")


def identity(
    name: str, *, parent: str | None = None, final: bool | None = None, family: Family = "dynamo"
) -> SessionIdentity:
    return SessionIdentity(
        key=SessionKey(family=family, root=name),
        session_id=name,
        parent=SessionKey(family=family, root=parent) if parent else None,
        parent_session_id=parent,
        final=final,
    )


def ask(
    request_id: str,
    session: str | SessionIdentity = "s",
    *,
    attempt: int = 0,
    tokens: int = 64,
    block_size: int = 16,
    chain: bool = True,
    kind: RequestKind = "turn",
    ingress: str = "ingress-1",
    ingress_epoch: int = 1,
    excluded: tuple[str, ...] = (),
    avoided: tuple[str, ...] = (),
    model: str = MODEL,
    deadline_ms: int = 0,
    parent: str | None = None,
) -> AdmitRequest:
    return AdmitRequest(
        request_id=request_id,
        model=model,
        ingress=ingress,
        ingress_epoch=ingress_epoch,
        identity=identity(session, parent=parent) if isinstance(session, str) else session,
        received_ms=int(START * 1000),
        deadline_ms=deadline_ms,
        attempt=attempt,
        kind=kind,
        input_tokens=tokens,
        block_size=block_size,
        chain=b"\x01" * 8 * (tokens // block_size) if chain else b"",
        excluded=excluded,
        avoided=avoided,
    )


def worker_state(
    name: str,
    *,
    health: WorkerHealth = "ready",
    ranks: int = 1,
    block_size: int | None = 16,
    incarnation: str = "i1",
    loads: Sequence[RankLoad] = (),
    model: str = MODEL,
    seq: int = 0,
) -> WorkerState:
    return WorkerState(
        source=f"bridge-{name}",
        epoch=1,
        seq=seq,
        at_ms=0,
        worker=name,
        incarnation=incarnation,
        health=health,
        profile=WorkerProfile(url=f"http://{name}", model=model, ranks=ranks, block_size=block_size, kv_tokens=16_000),
        loads=tuple(loads),
    )


def end(
    request_id: str,
    session: str | SessionIdentity = "s",
    *,
    outcome: Outcome = "completed",
    usage: Usage | None = None,
    kind: RequestKind = "turn",
    worker: str | None = None,
    ingress: str = "ingress-1",
    ingress_epoch: int = 1,
) -> RequestEnd:
    return RequestEnd(
        source=ingress,
        epoch=ingress_epoch,
        seq=0,
        at_ms=0,
        request_id=request_id,
        model=MODEL,
        identity=identity(session) if isinstance(session, str) else session,
        outcome=outcome,
        kind=kind,
        worker=worker,
        rank=0 if worker else None,
        usage=usage or Usage(),
    )


def accepted(
    request_id: str, session: str = "s", *, ingress: str = "ingress-1", epoch: int = 1, digest: str = ""
) -> RequestAccepted:
    return RequestAccepted(
        source=ingress,
        epoch=epoch,
        seq=0,
        at_ms=0,
        request_id=request_id,
        model=MODEL,
        identity=identity(session),
        received_ms=int(START * 1000),
        stream=True,
        x_request_id=f"x-{request_id}",
        digest=digest,
    )


def in_flight(
    request_id: str, session: str = "s", *, worker: str | None = None, attempt: int = 0, digest: str = ""
) -> InFlight:
    return InFlight(
        request_id=request_id,
        model=MODEL,
        identity=identity(session),
        received_ms=int(START * 1000),
        worker=worker,
        rank=0 if worker else None,
        grant_id=f"g-{request_id}" if worker else None,
        grant_epoch=1 if worker else None,
        mode="policy" if worker else None,
        input_tokens=64,
        attempt=attempt,
        digest=digest,
    )


def match_reply(
    reach: dict[str, int], health: SourceHealth = "synced", shared: tuple[tuple[int, int], ...] = ()
) -> MatchReply:
    return MatchReply(
        indexer="indexer-1",
        matches=tuple(
            WorkerMatch(worker=name, rank=0, blocks=TierBlocks(device=blocks), health=health)
            for name, blocks in reach.items()
        ),
        shared=shared,
    )


@dataclass
class Driven:
    """A core with a clock. ``said`` collects every effect; the index answers at once with ``reach``."""

    core: Core
    now: float = START
    reach: dict[str, int] = field(default_factory=dict)
    answer_index: bool = True
    said: list[Effect] = field(default_factory=list)
    questions: list[AskIndex] = field(default_factory=list)

    def do(self, event: Event) -> list[Effect]:
        """Handle one event; the index's answer, if it is to answer, is part of it."""
        effects = self.core.handle(event, self.now)
        done: list[Effect] = []
        while effects:
            effect = effects.pop(0)
            done.append(effect)
            if isinstance(effect, AskIndex):
                self.questions.append(effect)
                if self.answer_index:
                    effects += self.core.handle(MatchAnswered(effect.ticket, match_reply(self.reach)), self.now)
        self.said += done
        return done

    def workers(self, *names: str, **more: int) -> None:
        for name in names:
            self.reach.setdefault(name, 0)
            self.do(WorkerStated(worker_state(name, ranks=more.get("ranks", 1))))

    def ask(self, request: AdmitRequest) -> list[Effect]:
        return self.do(AdmitAsked(request, f"reply.{request.request_id}.{request.attempt}"))

    def accept(self, fact: RequestAccepted) -> None:
        self.do(Accepted(fact))

    def end(self, fact: RequestEnd) -> list[Effect]:
        return self.do(Ended(fact))

    def cancel(self, request_id: str, ingress: str = "ingress-1", reason: str = "client_disconnect") -> list[Effect]:
        return self.do(AdmitCancelled(AdmitCancel(request_id=request_id, ingress=ingress, reason=reason)))

    def dispatched(self, request_id: str, worker: str, *, mode: str = "policy", attempt: int = 0) -> list[Effect]:
        fact = RequestDispatched(
            source="ingress-1", epoch=1, seq=0, at_ms=0, request_id=request_id, model=MODEL, worker=worker, rank=0,
            attempt=attempt, mode=mode, grant_id=None,  # type: ignore[arg-type]
        )  # fmt: skip
        return self.do(Dispatched(fact))

    def state(self, *items: InFlight, ingress: str = "ingress-1", epoch: int = 1) -> list[Effect]:
        fact = IngressState(
            source=ingress, epoch=epoch, seq=0, at_ms=round(self.now * 1000), ingress=ingress, in_flight=items
        )
        return self.do(IngressStated(fact))

    def wait(self, seconds: float, *, heartbeats: bool = True, ingresses: Sequence[str] = ()) -> list[Effect]:
        """Let time pass in ticks; workers (and the ingresses named, with nothing in flight) speak once a second."""
        effects: list[Effect] = []
        until = self.now + seconds
        beat = self.now
        while self.now < until:
            self.now = min(until, self.now + 0.1)
            if heartbeats and self.now >= beat + 1:
                beat = self.now
                for worker in list(self.core.state.fleet):
                    effects += self.do(WorkerStated(worker.state))
                for ingress in ingresses:
                    effects += self.state(ingress=ingress)
            effects += self.do(Tick())
        return effects


def driven(*, lead: bool = True, warm: bool = True, seed: int = 7, **settings: object) -> Driven:
    """A core that leads with epoch 10, warm, without workers; under policy ``kv`` unless another is named."""
    values = {"warmup_s": 0.0 if warm else 1.2, "policy": "kv", **settings}
    core = Core(AdmissionSettings(**values), "admission-1", random.Random(seed).randrange, START)  # type: ignore[arg-type]
    driven = Driven(core)
    if lead:
        driven.do(LeadershipChanged(10))
    return driven


def replies(effects: Sequence[Effect], kind: type[K]) -> list[K]:
    """The replies of one kind (`Granted`, `Held`, `Refused`)."""
    return [each.message for each in effects if isinstance(each, Reply) and isinstance(each.message, kind)]


def granted(effects: Sequence[Effect]) -> Granted:
    """The only grant."""
    (only,) = replies(effects, Granted)
    return only


def held(effects: Sequence[Effect]) -> list[Held]:
    return replies(effects, Held)


def refused(effects: Sequence[Effect]) -> Refused:
    """The only refusal."""
    (only,) = replies(effects, Refused)
    return only


def facts(effects: Sequence[Effect], kind: type[K]) -> list[K]:
    """Published facts of one kind (`Decision`, `SessionFact`, `RequestEnd`)."""
    published = [
        each.fact if isinstance(each, Publish) else each.fact()
        for each in effects
        if isinstance(each, Publish | PublishDecision)
    ]
    return [fact for fact in published if isinstance(fact, kind)]


def rows(effects: Sequence[Effect]) -> list[WriteRow]:
    return [each for each in effects if isinstance(each, WriteRow)]


def policy_questions(effects: Sequence[Effect]) -> list[AskPolicy]:
    return [each for each in effects if isinstance(each, AskPolicy)]


def check_books(core: Core) -> None:
    """The accounts of every rank are exactly the sums over the open grants, and none is negative."""
    sums: dict[tuple[str, int], list[int]] = {}
    for entry in core.state.ledger:
        total = sums.setdefault((entry.grant.worker, entry.grant.rank), [0, 0, 0, 0])
        for place, amount in enumerate((1, entry.prefill_tokens > 0, entry.prefill_tokens, entry.blocks)):
            total[place] += amount
    for rank, account in core.state.ledger.accounts():
        found = [account.requests, account.waiting, account.prefill_tokens, account.blocks]
        assert sums.pop(rank, [0, 0, 0, 0]) == found
    assert not sums


def check_conserved(core: Driven) -> None:
    """What the policy has booked is exactly what is granted and leased, recomputed from its parts."""
    scheduled = core.core.state.scheduled
    assert scheduled is not None
    check_books(core.core)
    granted_at = {entry.grant.request_id: (entry.grant.worker, entry.grant.rank) for entry in core.core.state.ledger}
    numbers: set[int] = set()
    for turn in scheduled.turns.values():
        numbers.add(turn.number)
        if turn.place is not None and turn.request_id in granted_at:
            assert granted_at[turn.request_id] == turn.place
        else:
            assert core.core.deciding.waits(turn.request_id)
    for pool in scheduled.pools.values():
        assert isinstance(pool.policy, Commit), scheduled.failed
        book = pool.policy.book
        assert set(book.turns) == numbers
        assert set(book.seats) == set(pool.places)
        for seat in book.seats.values():
            programs = [program for program in book.programs if program.seat == seat.number]
            running = [turn for program in programs for turn in program.running.values()]
            assert seat.load == sum(turn.charge for turn in running) + sum(each.lease_charge for each in programs)
            assert seat.running == len(running)
            assert seat.prefill == sum(turn.prefill for turn in running)

"""An ingress, bridges and an indexer, as far as admission sees them: real messages over a real nats-server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from bus import subjects
from bus.facts import Stamp
from bus.interface import BusMessage, Endpoint
from bus.nats import NatsBus
from schemas.admit import AdmitCancel, AdmitReply, AdmitRequest, Granted, Held
from schemas.base import from_json, from_msgpack, to_json, to_msgpack
from schemas.decision import Decision
from schemas.index import MatchReply, MatchRequest, TierBlocks, WorkerMatch
from schemas.ingress import InFlight, IngressState
from schemas.request import RequestAccepted, RequestEnd, Usage
from schemas.session import SessionFact, SessionIdentity, SessionKey
from schemas.worker import WorkerProfile, WorkerState

MODEL = "some/model.v1"


def identity(name: str) -> SessionIdentity:
    return SessionIdentity(key=SessionKey(family="dynamo", root=name), session_id=name)


class World:
    """Speaks for workers and one ingress once every 0.2 s; collects decisions, ends and session facts."""

    def __init__(self, bus: NatsBus, workers: Sequence[str] = ("w1", "w2"), model: str = MODEL) -> None:
        self.bus = bus
        self.model = model
        self.workers = list(workers)
        self.ingress = "ingress-1"
        self.epoch = int(time.time() * 1000)
        self.in_flight: dict[str, InFlight] = {}
        self.decisions: list[Decision] = []
        self.ends: list[RequestEnd] = []
        self.sessions: list[SessionFact] = []
        self.reach: dict[str, int] = {}
        self.kv_tokens: dict[str, int] = {}
        self.asked_of_index: list[MatchRequest] = []
        self.ingress_speaks = True
        self._seq = 0
        self._speaking: asyncio.Task[None] | None = None

    async def start(self, *, index: bool = True) -> None:
        root = subjects.ROOT
        await self.bus.subscribe(f"{root}.decision.*", lambda m: self.decisions.append(from_json(m.payload, Decision)))
        await self.bus.subscribe(f"{root}.request.end.*", lambda m: self.ends.append(from_json(m.payload, RequestEnd)))
        await self.bus.subscribe(
            f"{root}.session.*.*", lambda m: self.sessions.append(from_json(m.payload, SessionFact))
        )
        if index:
            endpoint = Endpoint("match", subjects.INDEX_MATCH, self._match)
            await self.bus.serve("tidegate-indexer", "1.0.0", "as far as admission sees it", [endpoint], {})
        self._speaking = asyncio.create_task(self._speak())

    async def stop(self) -> None:
        if self._speaking is not None:
            self._speaking.cancel()
            await asyncio.gather(self._speaking, return_exceptions=True)

    def _match(self, message: BusMessage) -> None:
        self.asked_of_index.append(from_msgpack(message.payload, MatchRequest))
        matches = tuple(
            WorkerMatch(worker=name, rank=0, blocks=TierBlocks(device=self.reach.get(name, 0))) for name in self.workers
        )
        self.bus.publish(message.reply, to_msgpack(MatchReply(indexer="indexer-1", matches=matches)))

    async def _speak(self) -> None:
        while True:
            self.speak()
            await asyncio.sleep(0.2)

    def speak(self) -> None:
        """One heartbeat of everybody."""
        for name in self.workers:
            size = self.kv_tokens.get(name, 16_000)
            profile = WorkerProfile(url=f"http://{name}", model=self.model, block_size=16, kv_tokens=size)
            state = WorkerState(
                **self.stamp(f"bridge-{name}"), worker=name, incarnation="i1", health="ready", profile=profile
            )
            self.bus.publish(subjects.worker_state(name), to_json(state))
        if self.ingress_speaks:
            state_of_ingress = IngressState(
                **self.stamp(self.ingress), ingress=self.ingress, in_flight=tuple(self.in_flight.values())
            )
            self.bus.publish(subjects.ingress_state(self.ingress), to_json(state_of_ingress))

    def stamp(self, source: str) -> Stamp:
        self._seq += 1
        return Stamp(source=source, epoch=self.epoch, seq=self._seq, at_ms=int(time.time() * 1000))

    # The ingress

    def request(self, request_id: str, session: str, *, tokens: int = 64, **more: object) -> AdmitRequest:
        now_ms = int(time.time() * 1000)
        values: dict[str, object] = {
            "request_id": request_id,
            "model": self.model,
            "ingress": self.ingress,
            "ingress_epoch": self.epoch,
            "identity": identity(session),
            "received_ms": now_ms,
            "deadline_ms": now_ms + 30_000,
            "input_tokens": tokens,
            "block_size": 16,
            "chain": b"\x01" * 8 * (tokens // 16),
        }
        return AdmitRequest(**{**values, **more})  # type: ignore[arg-type]

    def accept(self, request: AdmitRequest) -> None:
        """As an ingress does: named in its facts from here on."""
        fact = RequestAccepted(
            **self.stamp(self.ingress),
            request_id=request.request_id,
            model=self.model,
            identity=request.identity,
            received_ms=request.received_ms,
            kind=request.kind,
        )
        self.bus.publish(subjects.request("accepted", self.model), to_json(fact))
        self.in_flight[request.request_id] = InFlight(
            request_id=request.request_id,
            model=self.model,
            identity=request.identity,
            received_ms=request.received_ms,
            kind=request.kind,
        )

    async def ask(
        self, request: AdmitRequest, *, idle_s: float = 10.0, deadline_s: float = 20.0, held: list[Held] | None = None
    ) -> AdmitReply:
        """The final answer to one ask; ``held`` collects what came before it. Raises `BusTimeoutError`."""
        answers = self.bus.request_many(
            subjects.admit(request.model), to_msgpack(request), idle_timeout_s=idle_s, deadline_s=deadline_s
        )
        try:
            async for answer in answers:
                reply: AdmitReply = from_msgpack(answer.payload, AdmitReply)  # type: ignore[arg-type]
                if not isinstance(reply, Held):
                    return reply
                if held is not None:
                    held.append(reply)
        finally:
            await answers.aclose()
        raise AssertionError("no final answer")

    async def grant(self, request: AdmitRequest, **more: float) -> Granted:
        """Accept and ask; the grant."""
        self.accept(request)
        reply = await self.ask(request, **more)  # type: ignore[arg-type]
        assert isinstance(reply, Granted), reply
        self.in_flight[request.request_id] = InFlight(
            request_id=request.request_id,
            model=self.model,
            identity=request.identity,
            received_ms=request.received_ms,
            kind=request.kind,
            worker=reply.grant.worker,
            rank=reply.grant.rank,
            grant_id=reply.grant.grant_id,
            grant_epoch=reply.grant.epoch,
            mode=reply.mode,
            input_tokens=request.input_tokens,
        )
        return reply

    def end(self, request: AdmitRequest, worker: str) -> None:
        self.in_flight.pop(request.request_id, None)
        fact = RequestEnd(
            **self.stamp(self.ingress),
            request_id=request.request_id,
            model=self.model,
            identity=request.identity,
            outcome="completed",
            kind=request.kind,
            worker=worker,
            rank=0,
            usage=Usage(input_tokens=request.input_tokens, output_tokens=10),
        )
        self.bus.publish(subjects.request("end", self.model), to_json(fact))

    def cancel(self, request: AdmitRequest) -> None:
        cancel = AdmitCancel(request_id=request.request_id, ingress=self.ingress)
        self.bus.publish(subjects.admit_cancel(self.model), to_msgpack(cancel))

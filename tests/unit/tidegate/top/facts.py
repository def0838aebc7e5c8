"""Facts of a small house, numbered as their sources number them."""

from __future__ import annotations

from bus.facts import FactNumbers, Stamp
from schemas.admit import Grant
from schemas.base import Fact
from schemas.decision import Candidate, Decision
from schemas.hint import ActionResult, HintResult
from schemas.index import IndexSource, SourceHealth
from schemas.ingress import InFlight, IngressState
from schemas.request import (
    Outcome,
    RequestAccepted,
    RequestDispatched,
    RequestEnd,
    RequestFirstToken,
    Usage,
)
from schemas.session import Lease, RequestKind, SessionFact, SessionFactState, SessionIdentity, SessionKey
from schemas.tool import ToolEvent
from schemas.worker import RankLoad, WorkerProfile, WorkerState
from tidegate.top.model import Model

START = 1_800_000_000.0
"""Unix seconds of the first fact."""

Heard = tuple[str, Fact]
"""A fact, and the family of its subject."""


def identity(name: str, tenant: str = "default", parent: str | None = None, agent: str = "") -> SessionIdentity:
    key = SessionKey(tenant=tenant, family="tidegate", root=name, agent=agent)
    return SessionIdentity(key=key, session_id=name, parent_session_id=parent)


class House:
    """Makes facts; ``at`` is in seconds after `START`."""

    def __init__(self) -> None:
        self._numbers: dict[str, FactNumbers] = {}

    def stamp(self, source: str, family: str, at: float) -> Stamp:
        return self._numbers.setdefault(source, FactNumbers(source, 1)).stamp(family, START + at)

    def accepted(self, at: float, request: str, who: SessionIdentity, kind: RequestKind = "turn") -> Heard:
        stamp = self.stamp("ingress-1", "request.accepted", at)
        fact = RequestAccepted(
            **stamp, request_id=request, model="sim-8b", identity=who, received_ms=stamp["at_ms"], kind=kind
        )
        return "request.accepted", fact

    def dispatched(self, at: float, request: str, worker: str, rank: int = 0, attempt: int = 0) -> Heard:
        stamp = self.stamp("ingress-1", "request.dispatched", at)
        fact = RequestDispatched(**stamp, request_id=request, model="sim-8b", worker=worker, rank=rank, attempt=attempt)
        return "request.dispatched", fact

    def first_token(self, at: float, request: str, ttft_ms: float) -> Heard:
        stamp = self.stamp("ingress-1", "request.first_token", at)
        return "request.first_token", RequestFirstToken(**stamp, request_id=request, model="sim-8b", ttft_ms=ttft_ms)

    def end(
        self,
        at: float,
        request: str,
        who: SessionIdentity,
        *,
        tokens: tuple[int, int, int] = (1000, 100, 800),
        predicted: int = 800,
        tools: tuple[str, ...] = (),
        outcome: Outcome = "completed",
        kind: RequestKind = "turn",
    ) -> Heard:
        """``tokens``: input, output, cached."""
        usage = Usage(input_tokens=tokens[0], output_tokens=tokens[1], cached_tokens=tokens[2])
        fact = RequestEnd(
            **self.stamp("ingress-1", "request.end", at),
            request_id=request,
            model="sim-8b",
            identity=who,
            outcome=outcome,
            kind=kind,
            usage=usage,
            predicted_cached_tokens=predicted,
            tool_names=tools,
        )
        return "request.end", fact

    def decision(
        self, at: float, request: str, who: SessionIdentity, worker: str, *, hold_ms: int = 0, reason: str | None = None
    ) -> Heard:
        stamp = self.stamp("admission-1", "decision", at)
        grant = Grant(
            grant_id=f"g-{request}",
            request_id=request,
            worker=worker,
            rank=0,
            owner="ingress-1",
            epoch=1,
            expires_ms=stamp["at_ms"] + 10_000,
        )
        fact = Decision(
            **stamp,
            request_id=request,
            model="sim-8b",
            worker=worker,
            rank=0,
            identity=who,
            grant=grant,
            hold_ms=hold_ms,
            hold_reason=reason,
            candidates=(Candidate(worker=worker, rank=0, health="synced"),),
        )
        return "decision", fact

    def session(
        self,
        at: float,
        who: SessionIdentity,
        state: SessionFactState,
        *,
        worker: str | None = None,
        turns: int = 0,
        context: int = 0,
        reason: str | None = None,
        lease: tuple[float, int] | None = None,
    ) -> Heard:
        """``lease``: seconds that it lasts, tokens."""
        stamp = self.stamp("admission-1", f"session.{state}", at)
        given = None
        if lease is not None:
            expires = stamp["at_ms"] + int(lease[0] * 1000)
            given = Lease(owner=who.key.text(), epoch=1, since_ms=stamp["at_ms"], expires_ms=expires, tokens=lease[1])
        fact = SessionFact(
            **stamp,
            session=who.key,
            session_id=who.session_id,
            state=state,
            worker=worker,
            turns=turns,
            context_tokens=context,
            reason=reason,
            lease=given,
        )
        return f"session.{state}", fact

    def tool(self, at: float, who: SessionIdentity, call: str, tool: str, *, ended: bool = False) -> Heard:
        event, status = ("end", "succeeded") if ended else ("start", "running")
        fact = ToolEvent(
            **self.stamp("recorder-1", f"tool.{event}", at),
            session=who.key,
            session_id=who.session_id,
            event=event,  # type: ignore[arg-type]
            tool_call_id=call,
            tool_class=tool,
            status=status,  # type: ignore[arg-type]
        )
        return f"tool.{event}", fact

    def worker(self, at: float, worker: str, *, usage: float = 0.25, running: int = 1, waiting: int = 0) -> Heard:
        profile = WorkerProfile(url="http://e", model="sim-8b", engine="vllm", kv_tokens=100_000)
        load = RankLoad(rank=0, running=running, waiting=waiting, kv_usage=usage)
        stamp = self.stamp(f"bridge-{worker}", "worker.state", at)
        fact = WorkerState(**stamp, worker=worker, incarnation="i", health="ready", profile=profile, loads=(load,))
        return "worker.state", fact

    def index(self, at: float, worker: str, health: SourceHealth, reason: str | None = None) -> Heard:
        stamp = self.stamp("indexer-1", "index.source", at)
        return "index.source", IndexSource(**stamp, worker=worker, rank=0, health=health, reason=reason)

    def hints(self, at: float, who: SessionIdentity, worker: str) -> Heard:
        results = (
            ActionResult(action_id="a", action_type="pin", outcome="accepted"),
            ActionResult(action_id="b", action_type="pin", outcome="unsupported"),
        )
        stamp = self.stamp(f"bridge-{worker}", "hint.result", at)
        fact = HintResult(**stamp, worker=worker, rank=0, session=who.key, message_id="m", results=results)
        return "hint.result", fact

    def in_flight(
        self, at: float, *named: tuple[str, SessionIdentity, str | None], part: int = 0, parts: int = 1
    ) -> Heard:
        """``named``: request, whose, on which worker."""
        stamp = self.stamp("ingress-1", "ingress.state", at)
        rows = tuple(
            InFlight(
                request_id=request,
                model="sim-8b",
                identity=who,
                received_ms=stamp["at_ms"] - 500,
                worker=worker,
                rank=None if worker is None else 0,
                hold_reason="at_limit" if worker is None else None,
                held_since_ms=stamp["at_ms"] - 400 if worker is None else None,
            )
            for request, who, worker in named
        )
        return "ingress.state", IngressState(**stamp, ingress="ingress-1", in_flight=rows, part=part, parts=parts)


def told(*facts: Heard, at: float = 10.0, model: Model | None = None) -> Model:
    """A model that has heard these, all at the same moment (seconds after `START`)."""
    model = model or Model()
    model.begin(START)
    for family, fact in facts:
        model.handle(family, fact, START + at)
    model.tick(START + at)
    return model


def story() -> Model:
    """A few sessions in every state on three workers, as the golden frames show them."""
    house = House()
    build, child = identity("build-api", "research"), identity("build-api/tests", "research", parent="build-api")
    docs, review, night = identity("docs"), identity("review-42"), identity("nightly", "batch")
    fix, done = identity("fix-\x1b[2Jlogin-見出し"), identity("done")
    facts = [
        house.worker(0.0, "engine-1", usage=0.62, running=2, waiting=1),
        house.worker(0.0, "engine-2", usage=0.31),
        house.index(0.1, "engine-2", "approximate", "no_events"),
        house.accepted(1.0, "r1", build),
        house.decision(1.1, "r1", build, "engine-1"),
        house.dispatched(1.1, "r1", "engine-1"),
        house.accepted(1.5, "r2", docs),
        house.decision(3.0, "r2", docs, "engine-2", hold_ms=1500, reason="at_limit"),
        house.dispatched(3.0, "r2", "engine-2"),
        house.first_token(3.1, "r2", 1_640.0),
        house.end(4.0, "r2", docs, tokens=(24_000, 900, 23_000), predicted=22_500, tools=("bash",)),
        house.session(4.0, docs, "acting", worker="engine-2", turns=7, context=24_900),
        house.tool(4.2, docs, "c1", "bash"),
        house.session(4.3, docs, "leased", worker="engine-2", turns=7, context=24_900, lease=(300.0, 24_000)),
        house.accepted(5.0, "r3", child),
        house.session(5.0, review, "acting", worker="engine-1", turns=3, context=1_200_000),
        house.session(5.1, review, "leased", worker="engine-1", turns=3, lease=(65.0, 9_000)),
        house.session(5.2, night, "acting", worker="engine-1", turns=12, context=8_000),
        house.session(5.3, night, "paused", worker="engine-1", turns=12, reason="kv_pressure"),
        house.end(6.0, "r0", fix, tokens=(512, 20, 0), predicted=256, outcome="upstream_error"),
        house.session(6.5, done, "closed", turns=2, reason="final"),
        house.hints(7.0, docs, "engine-2"),
        house.accepted(7.5, "r9", identity("lost-one")),
    ]
    del facts[7]  # a decision is lost on the way, the next one shows it
    facts += [house.decision(8.0, "r10", review, "engine-1"), house.dispatched(8.0, "r10", "engine-1")]
    return told(*facts)

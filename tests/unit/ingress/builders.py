"""Small requests, facts and replies for the tests of the core."""

from __future__ import annotations

import json
from typing import Any

from schemas.admit import Grant, Granted, Held, Refused
from schemas.base import Fact
from schemas.request import RequestEnd, Usage
from schemas.trace import TraceRow
from schemas.worker import WorkerHealth, WorkerProfile, WorkerState
from services.ingress import events
from services.ingress.answers import AnswerFacts
from services.ingress.core import IngressCore, IngressRules
from services.ingress.effects import Effect, Publish, PublishRow
from services.ingress.endpoints import Endpoint, endpoint_of, read_request
from services.ingress.identity import read_headers, resolve
from services.ingress.tokens import PromptTokens, from_ids

MODEL = "m"
GOOD = AnswerFacts(
    usage=Usage(input_tokens=10, output_tokens=3, cached_tokens=8), finish_reason="stop", complete=True, data_lines=3
)


def received(
    request_id: str,
    *,
    path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None,
    x_request_id: str | None = None,
    **members: Any,
) -> events.RequestReceived:
    """A request as the shell hands it in."""
    endpoint: Endpoint | None = endpoint_of(path)
    assert endpoint is not None
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi", **members}
    request = read_request(endpoint, json.dumps(body).encode())
    signals = read_headers([(name.encode(), value.encode()) for name, value in (headers or {}).items()])
    resolved = resolve(signals, request.facts, endpoint, request_id=request_id)
    return events.RequestReceived(request_id=request_id, request=request, resolved=resolved, x_request_id=x_request_id)


def worker(name: str, seq: int = 0, health: WorkerHealth = "ready", ranks: int = 1) -> events.WorkerHeard:
    """A worker's fact."""
    profile = WorkerProfile(url=f"http://{name}", model=MODEL, block_size=4, ranks=ranks)
    return events.WorkerHeard(
        state=WorkerState(
            source=f"bridge-{name}",
            epoch=1,
            seq=seq,
            at_ms=0,
            worker=name,
            incarnation="1",
            health=health,
            profile=profile,
        )
    )


def counted(request_id: str, tokens: int | None = 10) -> events.PromptCounted:
    """The prompt's tokens, or none."""
    if tokens is None:
        return events.PromptCounted(request_id=request_id, skipped="off")
    prompt: PromptTokens = from_ids(range(tokens), 4)
    return events.PromptCounted(request_id=request_id, tokens=prompt, tokens_from="tokenizer")


def granted(
    request_id: str, worker_name: str, attempt: int = 0, *, rank: int = 0, hold_ms: int = 0, cached: int = 8
) -> events.AdmitReplied:
    """A grant."""
    grant = Grant(
        grant_id=f"grant-{request_id}-{attempt}",
        request_id=request_id,
        worker=worker_name,
        rank=rank,
        owner="ingress-1",
        epoch=7,
        expires_ms=0,
    )
    reply = Granted(
        request_id=request_id,
        epoch=7,
        grant=grant,
        url="http://elsewhere",
        predicted_cached_tokens=cached,
        index_health="synced",
        hold_ms=hold_ms,
        priority=-3,
    )
    return events.AdmitReplied(request_id=request_id, attempt=attempt, reply=reply)


def held(request_id: str, attempt: int = 0, place: int = 2) -> events.AdmitReplied:
    """A keep-alive of a held request."""
    reply = Held(request_id=request_id, epoch=7, reason="no_room", place=place)
    return events.AdmitReplied(request_id=request_id, attempt=attempt, reply=reply)


def refused(request_id: str, attempt: int = 0, status: int = 429) -> events.AdmitReplied:
    """A refusal."""
    reply = Refused(request_id=request_id, epoch=7, reason="queue_full", status=status, retry_after_s=2)
    return events.AdmitReplied(request_id=request_id, attempt=attempt, reply=reply)


class Scene:
    """A core, its clock, and every effect so far."""

    def __init__(self, *workers: str, rules: IngressRules | None = None) -> None:
        self.now = 1000.0
        self.core = IngressCore("ingress-1", 42, rules or IngressRules())
        self.effects: list[Effect] = []
        for name in workers:
            self.play(worker(name))

    def play(self, *happened: events.Event, after_s: float = 0.0) -> list[Effect]:
        """Events, one after the other; the effects of all of them."""
        self.now += after_s
        new: list[Effect] = []
        for event in happened:
            new += self.core.handle(event, self.now)
        self.effects += new
        return new

    def facts(self) -> list[Fact]:
        """Every fact published so far."""
        return [effect.fact for effect in self.effects if isinstance(effect, Publish)]

    def end(self) -> tuple[RequestEnd, TraceRow]:
        """The one end and the one row so far."""
        ends = [fact for fact in self.facts() if isinstance(fact, RequestEnd)]
        rows = [effect.row for effect in self.effects if isinstance(effect, PublishRow)]
        assert (len(ends), len(rows)) == (1, 1)
        return ends[0], rows[0]

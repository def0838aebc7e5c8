"""Requests in flight: told one by one as they go, and all together once a second by each ingress. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import IntEnum

from schemas.ingress import IngressState
from schemas.session import MOVES_SESSION, RequestKind, SessionIdentity
from tidegate.top.text import bounded

MAX_REQUESTS = 16_384
MAX_ENDED = 16_384
"""Ended requests whose ids are remembered: what is said of them late must not bring them back."""

SILENT_S = 10.0
"""An ingress that says nothing for so long has no requests any more (twice what admission waits)."""


class Stage(IntEnum):
    """How far a request is; it never goes back."""

    ACCEPTED = 0
    DISPATCHED = 1
    ANSWERING = 2


@dataclass(slots=True)
class Request:
    """One in flight. ``session``: the key's text, bounded (empty: not told yet). Unix ms: ``since_ms`` it was accepted,
    ``placed_ms`` sent to a worker, ``at_ms`` named alive by the last fact that does; ``told_ms`` when its ingress last
    said whether, since when (``held_ms``) and why it is held."""

    ingress: str
    session: str
    kind: RequestKind
    since_ms: int
    at_ms: int
    stage: Stage = Stage.ACCEPTED
    worker: str | None = None
    rank: int | None = None
    attempt: int = 0
    placed_ms: int | None = None
    told_ms: int = 0
    held_ms: int | None = None
    hold_reason: str | None = None

    @property
    def moves(self) -> bool:
        """Whether it is a turn of its session, not something beside it."""
        return self.kind in MOVES_SESSION


@dataclass(slots=True)
class _Ingress:
    """``named``: requests of the parts of one state that have come, until all have."""

    heard: float
    epoch: int = 0
    at_ms: int = 0
    parts: set[int] = field(default_factory=set)
    named: set[str] = field(default_factory=set)


class Requests:
    """By request id. ``forgotten``: more than fit. ``vanished``: gone without an end, as their ingress says."""

    def __init__(self, most: int = MAX_REQUESTS) -> None:
        self._most = most
        self._open: OrderedDict[str, Request] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._ingresses: OrderedDict[str, _Ingress] = OrderedDict()
        self.forgotten = 0
        self.vanished = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def ingresses(self) -> int:
        """Those heard of lately."""
        return len(self._ingresses)

    def values(self) -> list[Request]:
        return list(self._open.values())

    def hear(self, ingress: str, now: float) -> None:
        """Something came from this ingress."""
        known = self._ingresses.get(ingress)
        if known is not None:
            known.heard = now
            return
        self._ingresses[ingress] = _Ingress(now)
        while len(self._ingresses) > 256:
            self._ingresses.popitem(last=False)

    def accept(
        self, request_id: str, ingress: str, identity: SessionIdentity, kind: RequestKind, since_ms: int, at_ms: int
    ) -> Request | None:
        """Begin, or go on with, a request; ``None``: it has ended."""
        request_id = bounded(request_id)
        if request_id in self._ended:
            return None
        request = self._open.get(request_id)
        if request is None:
            request = self._begin(request_id, Request(ingress, "", kind, since_ms, at_ms))
        request.session = request.session or bounded(identity.key.text())
        request.ingress, request.kind, request.since_ms = ingress, kind, since_ms
        request.at_ms = max(request.at_ms, at_ms)
        return request

    def get_or_guess(self, request_id: str, ingress: str, at_ms: int) -> Request | None:
        """One that is spoken of before, or without, its beginning; ``None``: it has ended."""
        request_id = bounded(request_id)
        if request_id in self._ended:
            return None
        request = self._open.get(request_id)
        if request is None:
            request = self._begin(request_id, Request(ingress, "", "turn", at_ms, at_ms))
        request.at_ms = max(request.at_ms, at_ms)
        return request

    def end(self, request_id: str) -> bool:
        """It is over; ``False``: it was already."""
        request_id = bounded(request_id)
        if request_id in self._ended:
            return False
        self._open.pop(request_id, None)
        self._ended[request_id] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        return True

    def reported(self, state: IngressState) -> None:
        """An ingress has said who is in flight; call after `accept` for each. Who is not named is gone."""
        ingress = self._ingresses[bounded(state.source)]
        mark = (state.epoch, state.at_ms)
        if mark < (ingress.epoch, ingress.at_ms):
            return
        if mark != (ingress.epoch, ingress.at_ms):
            ingress.epoch, ingress.at_ms = mark
            ingress.parts, ingress.named = set(), set()
        ingress.parts.add(state.part)
        ingress.named.update(bounded(one.request_id) for one in state.in_flight)
        if len(ingress.parts) < state.parts:
            return
        self._drop(
            [
                request_id
                for request_id, request in self._open.items()
                if request.ingress == bounded(state.source)
                and request.at_ms < state.at_ms
                and request_id not in ingress.named
            ]
        )

    def tick(self, now: float) -> None:
        """What belongs to an ingress that has fallen silent is gone."""
        for name in [name for name, ingress in self._ingresses.items() if now - ingress.heard > SILENT_S]:
            del self._ingresses[name]
        self._drop([key for key, request in self._open.items() if request.ingress not in self._ingresses])

    def _begin(self, request_id: str, request: Request) -> Request:
        self._open[request_id] = request
        while len(self._open) > self._most:
            self._open.popitem(last=False)
            self.forgotten += 1
        return request

    def _drop(self, gone: list[str]) -> None:
        for request_id in gone:
            del self._open[request_id]
        self.vanished += len(gone)


def place(request: Request, worker: str, rank: int | None, attempt: int, at_ms: int) -> None:
    """It goes to this worker; an earlier attempt, heard late, changes nothing."""
    if attempt < request.attempt:
        return
    request.worker, request.rank, request.attempt = bounded(worker), rank, attempt
    request.stage = max(request.stage, Stage.DISPATCHED)
    request.placed_ms = at_ms if request.placed_ms is None else min(request.placed_ms, at_ms)
    request.at_ms = max(request.at_ms, at_ms)

"""Which fault a failed request or a marked decision is owed to, by what DESIGN.md decided in advance. Pure.

A failure is explained only where the fault touched that very request: it was at the front door that was killed, or its
answer came from the engine that was. Everything else is unexplained, and fails the soak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from load.soak.plan import Promise, Step, promise

Symptom = Literal["no_connection", "connection_lost", "status", "in_band", "cut_answer", "cut_stream", "timeout"]
"""``status``: an answer with an error's status. ``in_band``: an error inside a stream, which then is cut.
``cut_answer``: a whole answer that had begun was cut, which is all that can be said then. ``cut_stream``: a stream
ended well, without what its API ends with. ``timeout``: nothing came for longer than any time-out of the house."""

_BROKEN_OFF = ("in_band", "cut_answer")
"""What a client sees of an engine that goes after its first byte."""

_NOT_READY = "no_worker"
"""What a front door says that has just been started and has heard of no worker: it is not ready either."""

EDGE_S = 0.5
"""Clocks are one, but what a client sees comes a little before or after."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A step that was done: ``name`` of the part, Unix seconds. ``whole_at``: all was well again (infinity: never).
    ``led_at``: another admission led (of a leader's fault; infinity: never)."""

    step: Step
    name: str
    began_at: float
    mended_at: float
    whole_at: float
    led_at: float | None = None

    @property
    def promise(self) -> Promise:
        return promise(self.step)

    @property
    def counted_from(self) -> float:
        """When its bound begins to run."""
        return self.began_at if self.promise.stands_in else self.mended_at

    @property
    def marked_until(self) -> float:
        """The end of the time in which its marks may be seen."""
        return max(self.whole_at, self.counted_from + self.promise.bound_ms / 1000)


@dataclass(frozen=True, slots=True)
class Failure:
    """One request that did not succeed, as its client saw it. ``status``: of an answer that began. ``worker`` and
    ``outcome`` are from its row."""

    ingress: str
    began_at: float
    ended_at: float
    symptom: Symptom
    reason: str = ""
    worker: str | None = None
    outcome: str | None = None
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A decision that was not made as it should be: ``fallback``, or a source's health other than ``synced``. Unix
    seconds of the request's receipt and of the decision."""

    received_at: float
    decided_at: float
    mark: str


def explain(failure: Failure, faults: Sequence[Fault]) -> tuple[Fault, str] | None:
    """The newest fault that it can be owed to, and the class of failure; ``None``: nothing explains it. ``faults``: in
    the order in which they began."""
    for fault in reversed(faults):
        if failure.ended_at < fault.began_at - EDGE_S or failure.began_at > fault.whole_at + EDGE_S:
            continue
        name = _class_of(failure, fault)
        if name is not None and name in fault.promise.failures:
            return fault, name
    return None


def _class_of(failure: Failure, fault: Fault) -> str | None:
    at_door = failure.ingress == fault.name
    if at_door and failure.reason == _NOT_READY and failure.ended_at >= fault.mended_at:
        return "ingress_starting"
    match fault.step.what, fault.step.kind:
        case "kill", "ingress":
            gone = failure.symptom in ("no_connection", "connection_lost", "cut_answer")
            return "ingress_killed" if at_door and gone else None
        case "stop", "ingress":
            refused = failure.symptom == "no_connection" or failure.reason == "stopping"
            return "ingress_stopped" if at_door and (refused or _closed_at_once(failure, fault)) else None
        case "kill", "engine":
            begun = failure.outcome == "upstream_lost" and failure.worker == fault.name
            return "engine_killed" if begun and failure.symptom in _BROKEN_OFF else None
        case "hang", "engine":
            begun = failure.outcome == "upstream_timeout" and failure.worker == fault.name
            return "engine_hung" if begun and failure.symptom in _BROKEN_OFF else None
    return None


def _closed_at_once(failure: Failure, fault: Fault) -> bool:
    """A connection of the very moment in which the front door closed its port: the kernel had taken it, nobody read."""
    unread = failure.symptom == "connection_lost" and failure.status is None and failure.outcome is None
    return unread and abs(failure.began_at - fault.began_at) <= EDGE_S


def explained_mark(mark: Mark, faults: Sequence[Fault]) -> Fault | None:
    """The newest fault in whose time such a mark may be seen."""
    for fault in reversed(faults):
        overlaps = mark.decided_at >= fault.began_at - EDGE_S and mark.received_at <= fault.marked_until + EDGE_S
        if overlaps and mark.mark in fault.promise.marks:
            return fault
    return None

"""What passes between the judge of an envelope, the adapters and the bridge's core."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from schemas.hint import ActionPayload, HintOutcome
from schemas.worker import Engine
from services.bridge.hint_page import HintPage

MAX_REASON_CHARACTERS = 128
"""Of a reason that an engine gives in its own words."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One action that may be carried out. ``place``: its number in the envelope. ``payload``: an object, as JSON, never
    decoded whole: a stranger's nesting is nobody's stack. ``read``: what we know of it, of a type that we know.
    ``clipped``: what was already taken off it, as the reason of a `clipped`."""

    place: int
    action_id: str
    action_type: str
    action_version: str
    payload: bytes
    read: ActionPayload | None = None
    clipped: str | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one action. ``reason``: stable, where it is ours."""

    outcome: HintOutcome
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is known of the engine that a hint is for.

    ``page``: what it says of hints itself (``GET /kv_hints``), ``None``: nothing. ``has_pin_prefix``: it answers at
    SGLang's ``/hicache/pin_prefix``. ``by_request``: what the front door puts into this engine's requests
    (`services.bridge.config.BridgeSettings.request_hints`). ``pool``: the shared pool that it reads; empty: none.
    """

    kind: Engine = "unknown"
    page: HintPage | None = None
    has_pin_prefix: bool = False
    by_request: frozenset[str] = frozenset()
    pool: str = ""


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """How a call ended: ``status`` and ``body``, or the ``problem``: ``engine_unreachable``, ``engine_timeout``,
    ``bad_answer``, ``bridge_busy``."""

    status: int = 0
    body: bytes = b""
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request (POST) to the engine. ``read``: what its answer says of the actions, by place."""

    path: str
    body: bytes
    asked: tuple[Asked, ...]
    read: Callable[[Call, CallAnswer], Mapping[int, Done]]


@dataclass(slots=True)
class Lowered:
    """``done``: by place, what is known at once. ``calls``: to be made in this order for the rest."""

    done: dict[int, Done] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)


def failed(call: Call, answer: CallAnswer) -> Mapping[int, Done] | None:
    """The outcome of a call that brought no answer to read; ``None``: it brought one (status 200)."""
    if answer.problem is not None:
        done = Done("rejected", answer.problem)
    elif answer.status in (404, 405, 501):
        done = Done("unsupported", "engine_has_no_hint_interface")
    elif answer.status >= 500:
        done = Done("rejected", "engine_error")
    elif answer.status != 200:
        done = Done("rejected", "engine_refused")
    else:
        return None
    return dict.fromkeys((asked.place for asked in call.asked), done)


def all_of(asked: Sequence[Asked], done: Done) -> Lowered:
    """The same for every action."""
    return Lowered(dict.fromkeys((each.place for each in asked), done))

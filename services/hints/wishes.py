"""What the planner would have a cache do, before it is known whether that may be sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from schemas.hint import ActionType
from schemas.session import SessionKey

Tier = Literal["device", "host", "disk", "pool"]


class Place(NamedTuple):
    """One rank of one worker."""

    worker: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One action (`schemas.hint.ActionPayload` says what each has). Times are seconds.

    ``generation``: of its session when it was made; once the session has moved on it is not sent. ``policy``: the
    user's policy that wants it, or empty.
    """

    action_type: ActionType
    session: SessionKey
    session_id: str
    place: Place
    generation: int
    ttl_s: float | None = None
    priority: int | None = None
    tokens: int = 0
    to: Tier | None = None
    source: str | None = None
    parent: str | None = None
    deadline: float | None = None
    reason: str | None = None
    cancels: str | None = None
    first: int = 0
    last: int | None = None
    block_size: int = 0
    policy: str = ""

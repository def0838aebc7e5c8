"""Reads an envelope and says which of its actions may be carried out: the rules that hold for every engine.

Each action is read by itself: a bad one does not spoil the others. Source of the envelope: spec
thunderagent-and-hints §5.3; unknown types and versions are carried to the adapter, not dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, get_args

import msgspec

from schemas.base import BadMessageError, from_json
from schemas.hint import MAX_TTL_MS, PROTOCOL_VERSION, ActionPayload, ActionType
from schemas.session import SessionKey
from services.bridge.adapters.actions import Asked, Done

MAX_ACTIONS = 256
"""Actions that one envelope may carry; a longer one is rejected whole."""

MAX_ID_CHARACTERS = 256
MAX_COMMAND_BYTES = 1024 * 1024
MAX_PROBLEMS = 8
"""Unreadable actions that a result names; of more, their number."""

KNOWN_TYPES: frozenset[str] = frozenset(get_args(ActionType))

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]


class _Envelope(msgspec.Struct, frozen=True, kw_only=True):
    message_id: _Name
    actions: tuple[msgspec.Raw, ...]
    protocol_version: str = PROTOCOL_VERSION


class _Command(msgspec.Struct, frozen=True, kw_only=True):
    """`schemas.hint.HintCommand` with its actions still unread."""

    worker: str
    rank: int
    session: SessionKey
    envelope: _Envelope


class _Action(msgspec.Struct, frozen=True, kw_only=True):
    """`schemas.hint.HintAction` of any type and version."""

    action_id: Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARACTERS)]
    action_type: _Name
    action_version: _Name = "1.0"
    payload: msgspec.Raw = msgspec.Raw(b"{}")


@dataclass(slots=True)
class Judged:
    """One command as read. ``asked``: actions for the adapter; ``done``: what is decided already, by place; ``heads``:
    id and type of every action that could be read, by place. ``error``: the command, or an action, could not be."""

    rank: int = 0
    session: SessionKey = field(default_factory=SessionKey)
    message_id: str = ""
    asked: list[Asked] = field(default_factory=list)
    done: dict[int, Done] = field(default_factory=dict)
    heads: dict[int, tuple[str, str]] = field(default_factory=dict)
    error: str | None = None


def judge(payload: bytes, worker: str, ranks: int, now_ms: int, is_closed: Callable[[str], bool]) -> Judged:
    """Read one command. ``is_closed``: whether a session (its key as text) is over. What cannot be read at all has an
    empty message id and ``error``."""
    if len(payload) > MAX_COMMAND_BYTES:
        return Judged(error=f"a command of {len(payload)} bytes; {MAX_COMMAND_BYTES} are read")
    try:
        command = from_json(payload, _Command)
    except BadMessageError as error:
        return Judged(error=str(error))
    envelope = command.envelope
    judged = Judged(command.rank, command.session, envelope.message_id)
    fault = _fault(command, worker, ranks)
    session_closed = is_closed(command.session.text())
    problems: list[str] = []
    seen: set[str] = set()
    for place, raw in enumerate(envelope.actions[:MAX_ACTIONS]):
        try:
            action = from_json(bytes(raw), _Action)
        except BadMessageError as error:
            problems.append(f"action {place}: {error}")
            continue
        judged.heads[place] = action.action_id, action.action_type
        reason = fault or _id_fault(action, seen)
        seen.add(action.action_id)
        verdict = Done("rejected", reason) if reason else _asked(place, action, now_ms, session_closed, is_closed)
        if isinstance(verdict, Done):
            judged.done[place] = verdict
        else:
            judged.asked.append(verdict)
    if problems:
        left = len(problems) - MAX_PROBLEMS
        judged.error = "; ".join(problems[:MAX_PROBLEMS]) + (f"; and {left} more" if left > 0 else "")
    return judged


def _fault(command: _Command, worker: str, ranks: int) -> str | None:
    """What is wrong with the envelope as a whole."""
    if command.worker != worker:
        return "wrong_worker"
    if not 0 <= command.rank < ranks:
        return "unknown_rank"
    if command.envelope.protocol_version != PROTOCOL_VERSION:
        return "protocol_version"
    if len(command.envelope.actions) > MAX_ACTIONS:
        return "too_many_actions"
    return None


def _id_fault(action: _Action, seen: set[str]) -> str | None:
    if not action.action_id:
        return "no_action_id"
    return "repeated_action_id" if action.action_id in seen else None


def _asked(
    place: int, action: _Action, now_ms: int, session_closed: bool, is_closed: Callable[[str], bool]
) -> Asked | Done:
    """The action as an adapter gets it. Of a type or version that we do not know nothing is interpreted."""
    payload, clipped = bytes(action.payload), None
    if payload[:1] != b"{":
        return Done("rejected", "bad_payload")
    if action.action_type not in KNOWN_TYPES or action.action_version.partition(".")[0] != "1":
        return Asked(place, action.action_id, action.action_type, action.action_version, payload)
    try:
        read = from_json(payload, ActionPayload)
    except BadMessageError:
        return Done("rejected", "bad_payload")
    if read.expires_ms <= now_ms:
        return Done("rejected", "expired")
    # Letting go is what closing is told with: it comes after it, and only it may.
    if action.action_type != "dereference" and (
        session_closed or (read.target.session and is_closed(read.target.session))
    ):
        return Done("rejected", "session_closed")
    if read.ttl_ms is not None and read.ttl_ms > MAX_TTL_MS:
        payload, clipped = _with_ttl(payload), "ttl"
        read = msgspec.structs.replace(read, ttl_ms=MAX_TTL_MS)
    return Asked(place, action.action_id, action.action_type, action.action_version, payload, read, clipped)


def _with_ttl(payload: bytes) -> bytes:
    """The payload with the longest ``ttl_ms`` that there is. It was read before, so that it can be read again."""
    members = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    members["ttl_ms"] = msgspec.Raw(b"%d" % MAX_TTL_MS)
    return msgspec.json.encode(members)

"""The hint envelope as engines take it: ``{protocol_version, message_id, actions}`` (spec thunderagent-and-hints §5.3).

Unknown action types and versions are carried and answered ``unsupported``; a shape that is wrong is refused whole.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from load.engine.errors import EngineError

PROTOCOL_VERSION = "0.1"
SUPPORTED: dict[str, tuple[str, ...]] = {
    "pin": ("1.0",),
    "retain": ("1.0",),
    "prefetch": ("1.0",),
    "demote": ("1.0",),
    "share": ("1.0",),
    "dereference": ("1.0",),
}
"""Action types and their versions."""
MAX_ACTIONS = 256
MAX_ID_CHARS = 256

Identifier = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_CHARS)]


class HintsError(EngineError):
    """The envelope is malformed (the sender's fault)."""

    reason = "bad_hints"


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One action; ``payload`` as `schemas.hint.ActionPayload`."""

    action_id: Identifier
    action_type: Identifier
    action_version: Identifier = "1.0"
    payload: dict[str, Any] = msgspec.field(default_factory=dict)


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Some actions together; they are carried out in order."""

    protocol_version: Identifier
    message_id: Identifier
    actions: Annotated[tuple[Action, ...], msgspec.Meta(min_length=1, max_length=MAX_ACTIONS)]


def read_envelope(raw: bytes | dict[str, Any]) -> Envelope:
    """The envelope in a body, or in a field of one. Raises `HintsError`."""
    try:
        fields = msgspec.json.decode(raw) if isinstance(raw, bytes) else raw
        envelope = msgspec.convert(fields, Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HintsError(f"kv_hints: {error}") from error
    if len({action.action_id for action in envelope.actions}) != len(envelope.actions):
        raise HintsError("kv_hints: action_id must be unique in an envelope")
    return envelope


def session_of(action: Action) -> str | None:
    """The session that it names, if it does so legibly."""
    target = action.payload.get("target")
    session_id = target.get("session_id") if isinstance(target, dict) else None
    return session_id if isinstance(session_id, str) else None

"""Hints at the bridge: read an envelope and say what became of each action.

No engine of today can act on a hint that comes over its OpenAI API (spec: engine-events §3, §5: envelopes reach vLLM
only through its Python or Rust front end, SGLang only through ``/generate`` and then as mere transport), so every
well-formed action is ``unsupported``, and the sender learns so. Each action is read by itself: a bad one does not
spoil the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from schemas.base import BadMessageError, from_json
from schemas.hint import PROTOCOL_VERSION, ActionResult, HintAction, HintOutcome
from schemas.session import SessionKey

MAX_ACTIONS = 256
"""Actions that one envelope may carry; a longer one is rejected whole."""


class _Envelope(msgspec.Struct, frozen=True, kw_only=True):
    message_id: str
    actions: tuple[msgspec.Raw, ...]
    protocol_version: str = PROTOCOL_VERSION


class _Command(msgspec.Struct, frozen=True, kw_only=True):
    """`schemas.hint.HintCommand` with its actions still unread."""

    worker: str
    rank: int
    session: SessionKey
    envelope: _Envelope


@dataclass(frozen=True, slots=True)
class HintAnswer:
    """What a `HintResult` says, but for its place in the stream of facts."""

    rank: int
    session: SessionKey
    message_id: str
    results: tuple[ActionResult, ...]
    error: str | None = None


def judge(payload: bytes, worker: str, ranks: int) -> HintAnswer:
    """Answer one command. What cannot be read at all is answered with an empty message id and ``error``."""
    try:
        command = from_json(payload, _Command)
    except BadMessageError as error:
        return HintAnswer(0, SessionKey(), "", (), str(error))
    envelope = command.envelope
    fault = _fault(command, worker, ranks)
    results: list[ActionResult] = []
    problems: list[str] = []
    seen: set[str] = set()
    for place, raw in enumerate(envelope.actions[:MAX_ACTIONS]):
        try:
            action = from_json(bytes(raw), HintAction)
        except BadMessageError as error:
            problems.append(f"action {place}: {error}")
            continue
        reason = fault or _action_fault(action, seen)
        seen.add(action.action_id)
        outcome: HintOutcome = "rejected" if reason else "unsupported"
        results.append(
            ActionResult(
                action_id=action.action_id,
                action_type=action.action_type,
                outcome=outcome,
                reason=reason or "engine_has_no_hint_interface",
            )
        )
    return HintAnswer(
        command.rank, command.session, envelope.message_id, tuple(results), "; ".join(problems) if problems else None
    )


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


def _action_fault(action: HintAction, seen: set[str]) -> str | None:
    if not action.action_id:
        return "no_action_id"
    if action.action_id in seen:
        return "repeated_action_id"
    if action.action_version.partition(".")[0] != "1":
        return "action_version"
    return None

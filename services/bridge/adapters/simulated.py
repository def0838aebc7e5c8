"""Engines that take envelopes: those that answer ``GET /kv_hints``, as the simulated engine does. Every action of a
type and version that the page names goes to ``POST /kv_hints?rank=N`` in one envelope, in its order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from schemas.base import UNDECODABLE
from schemas.hint import PROTOCOL_VERSION, HintOutcome
from services.bridge.adapters.actions import (
    MAX_REASON_CHARACTERS,
    Asked,
    Call,
    CallAnswer,
    Done,
    EngineFacts,
    Lowered,
    all_of,
    failed,
)

_MAX_RESULTS = 1024


class _Result(msgspec.Struct):
    action_id: str
    outcome: HintOutcome
    reason: str | None = None


class _Answer(msgspec.Struct):
    results: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MAX_RESULTS)]


def lower(asked: Sequence[Asked], facts: EngineFacts, message_id: str, rank: int) -> Lowered:
    """One call with all that the page names. ``facts.page`` must be there."""
    page = facts.page
    assert page is not None
    if PROTOCOL_VERSION not in page.protocols:
        return all_of(asked, Done("unsupported", "protocol_version"))
    lowered = Lowered()
    taken: list[Asked] = []
    types = {name for name, _ in page.actions}
    for each in asked:
        if page.takes(each.action_type, each.action_version):
            taken.append(each)
        else:
            known = each.action_type in types
            lowered.done[each.place] = Done("unsupported", "action_version" if known else "action_type")
    if taken:
        lowered.calls.append(Call(f"/kv_hints?rank={rank}", envelope_of(taken, message_id), tuple(taken), _read))
    return lowered


def envelope_of(asked: Sequence[Asked], message_id: str) -> bytes:
    """The actions in one envelope, as JSON, written whole."""
    return msgspec.json.encode(
        {
            "protocol_version": PROTOCOL_VERSION,
            "message_id": message_id,
            "actions": [
                {
                    "action_id": each.action_id,
                    "action_type": each.action_type,
                    "action_version": each.action_version,
                    "payload": msgspec.Raw(each.payload),
                }
                for each in asked
            ],
        }
    )


def _read(call: Call, answer: CallAnswer) -> Mapping[int, Done]:
    """By action id. An action that the engine does not name was not taken: nobody knows that it was."""
    broken = failed(call, answer)
    if broken is not None:
        return broken
    try:
        rows = msgspec.json.decode(answer.body, type=_Answer).results
    except UNDECODABLE:
        return dict.fromkeys((asked.place for asked in call.asked), Done("rejected", "bad_answer"))
    told: dict[str, Done] = {}
    for row in rows:
        try:
            result = msgspec.json.decode(row, type=_Result)
        except UNDECODABLE:
            continue
        reason = result.reason[:MAX_REASON_CHARACTERS] if result.reason is not None else None
        told[result.action_id] = Done(result.outcome, reason)
    nothing = Done("rejected", "not_answered")
    return {asked.place: told.get(asked.action_id, nothing) for asked in call.asked}

"""Commands as the planner and as strangers send them."""

from __future__ import annotations

import json
from typing import Any

from schemas.base import to_json
from schemas.hint import ActionPayload, ActionType, HintAction, HintCommand, HintEnvelope, HintTarget
from schemas.session import SessionKey
from services.bridge.adapters.actions import Asked, EngineFacts
from services.bridge.adapters.judging import Judged, judge
from services.bridge.hint_page import HintPage

SESSION = SessionKey(family="dynamo", root="s1")
NOW_MS = 1_000_000
ALL: tuple[ActionType, ...] = ("pin", "retain", "prefetch", "demote", "share", "dereference")
PAGE = HintPage(
    frozenset({"0.1"}), tuple((name, frozenset({"1.0"})) for name in ALL), ("host", "pool")
)  # fmt: skip
TAKES = EngineFacts(kind="simulated", page=PAGE)


def payload(**fields: Any) -> dict[str, Any]:
    known = {"target": HintTarget(session_id="s1", session=SESSION.text()), "expires_ms": NOW_MS + 5_000}
    return dict(json.loads(to_json(ActionPayload(**{**known, **fields}))))


def action(action_id: str = "a", action_type: ActionType = "retain", **fields: Any) -> HintAction:
    return HintAction(action_id=action_id, action_type=action_type, payload=payload(**fields))


def command(*actions: HintAction, worker: str = "w", rank: int = 0, version: str = "0.1") -> bytes:
    return to_json(
        HintCommand(
            source="hints-1",
            epoch=1,
            seq=0,
            at_ms=0,
            worker=worker,
            rank=rank,
            session=SESSION,
            session_id="s1",
            envelope=HintEnvelope(message_id="m1", actions=actions, protocol_version=version),
        )
    )


def raw(**changes: Any) -> bytes:
    """The bytes of a command with members of its envelope replaced by anything."""
    told = json.loads(command(action()))
    told["envelope"].update(changes)
    return json.dumps(told).encode()


def judged(message: bytes, closed: tuple[str, ...] = ()) -> Judged:
    return judge(message, "w", 1, NOW_MS, closed.__contains__)


def asked(*actions: HintAction) -> list[Asked]:
    """Those of them that the judge lets through."""
    return judged(command(*actions)).asked


def one_of_each() -> list[Asked]:
    fields: dict[ActionType, dict[str, Any]] = {"pin": {"ttl_ms": 1000}, "demote": {"to": "pool"}}
    return asked(*(action(name, name, **fields.get(name, {})) for name in ALL))

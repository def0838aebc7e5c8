"""The one name users import: ``from tidegate import Policy, connect``, and the messages that policies see and answer.

They are imported when they are asked for: the command line (`tidegate.cli`), which is in this package too, begins
without them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bus.policy import Policy, connect
    from schemas.decision import Candidate, Decision
    from schemas.policy import (
        AdmitAnswer,
        AdmitQuestion,
        HintAnswer,
        HintQuestion,
        LeaseAnswer,
        LeaseQuestion,
        PlannedAction,
        RouteAnswer,
        RouteQuestion,
    )
    from schemas.session import SessionIdentity, SessionKey

__all__ = [
    "AdmitAnswer",
    "AdmitQuestion",
    "Candidate",
    "Decision",
    "HintAnswer",
    "HintQuestion",
    "LeaseAnswer",
    "LeaseQuestion",
    "PlannedAction",
    "Policy",
    "RouteAnswer",
    "RouteQuestion",
    "SessionIdentity",
    "SessionKey",
    "connect",
]

_WHERE = {
    "AdmitAnswer": "schemas.policy",
    "AdmitQuestion": "schemas.policy",
    "Candidate": "schemas.decision",
    "Decision": "schemas.decision",
    "HintAnswer": "schemas.policy",
    "HintQuestion": "schemas.policy",
    "LeaseAnswer": "schemas.policy",
    "LeaseQuestion": "schemas.policy",
    "PlannedAction": "schemas.policy",
    "Policy": "bus.policy",
    "RouteAnswer": "schemas.policy",
    "RouteQuestion": "schemas.policy",
    "SessionIdentity": "schemas.session",
    "SessionKey": "schemas.session",
    "connect": "bus.policy",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

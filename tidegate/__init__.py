"""The one name users import: ``from tidegate import Policy, connect``, and the messages that policies see and answer.

The command line is `tidegate.cli`.
"""

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

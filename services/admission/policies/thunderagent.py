"""Policy ``thunderagent``: pause and resume programs so that what the active ones hold fits. Two forms of it."""

from __future__ import annotations

from typing import Literal

import msgspec

from services.admission.policies.pausing import Pausing
from services.admission.policies.thunderagent_dynamo import DynamoParameters, DynamoThunderAgent
from services.admission.policies.thunderagent_paper import PaperParameters, PaperThunderAgent


class ThunderAgentParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``form``: Dynamo's port with its thresholds, or the authors' code; each with its own parameters."""

    form: Literal["dynamo", "paper"] = "dynamo"
    dynamo: DynamoParameters = DynamoParameters()
    paper: PaperParameters = PaperParameters()


def thunderagent(parameters: ThunderAgentParameters) -> Pausing:
    """The form that was chosen."""
    if parameters.form == "dynamo":
        return DynamoThunderAgent(parameters.dynamo)
    return PaperThunderAgent(parameters.paper)

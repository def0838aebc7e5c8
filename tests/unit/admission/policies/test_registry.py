"""Policies by name: made from defaults and from parameters; what is wrong is said."""

from __future__ import annotations

import pytest

from load.sim import workloads
from load.sim.run import SimConfig, simulate
from services.admission.policies.registry import POLICIES, PolicyParameterError, make_policy
from services.admission.policies.thunderagent_dynamo import DynamoThunderAgent
from services.admission.policies.thunderagent_paper import PaperThunderAgent


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_finishes_every_program(name: str) -> None:
    """With its defaults, on two workers under pressure, with sub-agents: nothing is held for ever."""
    programs = workloads.generate("tree", count=8, rate_per_s=0.2, seed=2)
    result = simulate(programs, make_policy(name), SimConfig(workers=2, kv_tokens=125_000))
    assert (result.unfinished, result.refused) == (0, 0)
    assert len(result.roots) == 8


def test_thunderagent_has_two_forms() -> None:
    """The port is the default; each form has its own parameters."""
    assert isinstance(make_policy("thunderagent"), DynamoThunderAgent)
    port = make_policy("thunderagent", {"dynamo": {"pause_target": 0.5}})
    assert isinstance(port, DynamoThunderAgent)
    assert port.parameters.pause_target == 0.5
    assert isinstance(make_policy("thunderagent", {"form": "paper"}), PaperThunderAgent)


@pytest.mark.parametrize(
    ("name", "parameters", "reason"),
    [
        ("continuuum", {}, "unknown_policy"),
        ("continuum", {"pressure": "D"}, "bad_parameters"),
        ("continuum", {"presure": "A"}, "bad_parameters"),
        ("thunderagent", {"dynamo": {"pause_target": 0.99}}, "bad_parameters"),
        ("static_ttl", {"ttl_s": "long"}, "bad_parameters"),
    ],
)
def test_what_is_wrong_is_said(name: str, parameters: dict[str, object], reason: str) -> None:
    """The reason is stable."""
    with pytest.raises(PolicyParameterError) as refused:
        make_policy(name, parameters)
    assert refused.value.reason == reason

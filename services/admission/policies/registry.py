"""Policies by name, made from typed parameters: the service, the laboratory and the CLI make them here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import msgspec

from services.admission.cost import CostWeights
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.policies.commit import Commit, CommitParameters
from services.admission.policies.concur import Concur, ConcurParameters
from services.admission.policies.continuum import Continuum, ContinuumParameters
from services.admission.policies.infercept import Infercept, InferceptParameters
from services.admission.policies.kv import Kv
from services.admission.policies.lease import Lease, LeaseParameters
from services.admission.policies.least_load import LeastLoad
from services.admission.policies.plas import Plas, PlasParameters
from services.admission.policies.program_fcfs import ProgramFcfs
from services.admission.policies.round_robin import RoundRobin
from services.admission.policies.static_ttl import StaticTtl, StaticTtlParameters
from services.admission.policies.thunderagent import ThunderAgentParameters, thunderagent
from services.admission.scheduling.interface import Policy
from services.admission.scoring import Choose, first


class PolicyParameterError(ValueError):
    """No such policy, or parameters that it does not have (the configuration's fault).

    ``reason``: ``unknown_policy``, ``bad_parameters``.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Given:
    """What a policy is made with besides its parameters. It alone feeds ``learned`` while it lives. ``choose`` draws
    below n."""

    choose: Choose = first
    learned: LearnedPool = field(default_factory=LearnedPool)


P = TypeVar("P", bound=msgspec.Struct)


class Maker(Protocol):
    """Makes one policy from parameters that are not checked yet."""

    def build(self, parameters: Mapping[str, object], given: Given) -> Policy: ...


@dataclass(frozen=True, slots=True)
class Entry(Generic[P]):
    """One policy: the type of its parameters, and how it is made from them."""

    parameters: type[P]
    make: Callable[[P, Given], Policy]

    def build(self, parameters: Mapping[str, object], given: Given) -> Policy:
        """Raises `msgspec.ValidationError`."""
        return self.make(msgspec.convert(parameters, self.parameters), given)


class NoParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For policies that have none."""


class KvParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See `services.admission.policies.kv`."""

    weights: CostWeights = CostWeights()
    stickiness: float = 3.0
    child_stickiness: float = 0.25


def _kv(parameters: KvParameters, given: Given) -> Policy:
    return Kv(
        parameters.weights,
        stickiness=parameters.stickiness,
        child_stickiness=parameters.child_stickiness,
        choose=given.choose,
    )


POLICIES: dict[str, Maker] = {}
"""Every policy by its name."""


def _register(name: str, parameters: type[P], make: Callable[[P, Given], Policy]) -> None:
    POLICIES[name] = Entry(parameters, make)


_register("round_robin", NoParameters, lambda _, given: RoundRobin())
_register("least_load", NoParameters, lambda _, given: LeastLoad())
_register("kv", KvParameters, _kv)
_register("commit", CommitParameters, lambda parameters, given: Commit(parameters, given.learned, given.choose))
_register("lease", LeaseParameters, lambda parameters, given: Lease(parameters, given.learned))
_register("program_fcfs", NoParameters, lambda _, given: ProgramFcfs())
_register("plas", PlasParameters, lambda parameters, given: Plas(parameters))
_register("infercept", InferceptParameters, lambda parameters, given: Infercept(parameters))
_register("static_ttl", StaticTtlParameters, lambda parameters, given: StaticTtl(parameters))
_register("continuum", ContinuumParameters, lambda parameters, given: Continuum(parameters))
_register("concur", ConcurParameters, lambda parameters, given: Concur(parameters))
_register("thunderagent", ThunderAgentParameters, lambda parameters, given: thunderagent(parameters))


def make_policy(name: str, parameters: Mapping[str, object] | None = None, given: Given | None = None) -> Policy:
    """The policy of that name. Raises `PolicyParameterError`."""
    entry = POLICIES.get(name)
    if entry is None:
        raise PolicyParameterError("unknown_policy", f"no policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    try:
        return entry.build(parameters or {}, given or Given())
    except (msgspec.ValidationError, ValueError) as error:
        raise PolicyParameterError("bad_parameters", f"policy {name!r}: {error}") from error

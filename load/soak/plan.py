"""What is done to which part, in which order, and what must be true afterwards. Pure: equal seeds, equal plans."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

What = Literal["kill", "stop", "partition", "hang"]
"""``kill``: SIGKILL. ``stop``: SIGTERM. Both are started again. ``partition``: what goes between the part and the bus
is held back without closing anything, then let go. ``hang``: SIGSTOP, then SIGCONT."""

LEADER, STANDBY = "admission-leader", "admission-standby"
"""Targets by what they are when their turn comes, not by name."""

ENGINES = ("engine-1", "engine-2")
INGRESSES = ("ingress-1", "ingress-2")
BRIDGES = ("bridge-1", "bridge-2")
INDEXERS = ("indexer-1", "indexer-2")
ADMISSIONS = ("admission-1", "admission-2")

DOWN_S = (0.3, 3.0)
"""How long a part that was ended stays away."""
LEADER_DOWN_S = (2.5, 4.0)
"""Of a leader: longer than its lease, so that it is the standby that takes over."""
CUT_S = (4.0, 13.0)
"""How long a partition lasts: the longer ones are noticed by pings (two of 5 s), the shorter ones only by silence."""
HANG_S = 12.0
"""Longer than the front door waits for an engine in a soak."""


@dataclass(frozen=True, slots=True)
class Step:
    """One fault. ``lasts_s``: from its beginning until it is mended."""

    what: What
    target: str
    lasts_s: float

    @property
    def kind(self) -> str:
        """The target without its number: ``ingress`` of ``ingress-2``."""
        return kind_of(self.target)


@dataclass(frozen=True, slots=True)
class Promise:
    """What DESIGN.md promises about one kind of fault.

    ``bound_ms``: until no request fails or is placed ``fallback`` or ``blind`` for it any more, counted from the fault
    where another part stands in (``stands_in``), else from its mending. ``failures``: how requests that were
    touched may fail, as classes of `load.soak.attribution`. ``marks``: of decisions, that may be seen meanwhile.
    """

    bound_ms: int
    stands_in: bool = False
    failures: frozenset[str] = frozenset()
    marks: frozenset[str] = frozenset()


TAKEOVER_MS = 2_000
"""Until another admission leads, from the fault that took the leader."""

LOSES_FACTS = frozenset({"nats", "ingress", LEADER})
"""Kinds of targets with whose faults facts are lost, or counted anew: a grant's time to live begins again."""

WHOLE_MS = 20_000
"""Until every part is ready again, one admission leads and every source of each indexer is ``synced``, from the
mending: most of it is the start of a Python process."""

_FALLBACK = frozenset({"fallback"})
_SOURCE = frozenset({"catching_up", "approximate", "blind"})

PROMISES: dict[tuple[What, str], Promise] = {
    ("kill", "engine"): Promise(10_000, failures=frozenset({"engine_killed"}), marks=_SOURCE),
    ("hang", "engine"): Promise(5_000, failures=frozenset({"engine_hung"}), marks=_SOURCE),
    ("kill", "ingress"): Promise(10_000, failures=frozenset({"ingress_killed", "ingress_starting"})),
    ("stop", "ingress"): Promise(10_000, failures=frozenset({"ingress_stopped", "ingress_starting"})),
    ("partition", "ingress"): Promise(3_000, marks=_FALLBACK),
    ("kill", "bridge"): Promise(10_000, marks=_SOURCE),
    ("partition", "bridge"): Promise(5_000, marks=_SOURCE),
    ("kill", "indexer"): Promise(0, stands_in=True),
    ("stop", "indexer"): Promise(0, stands_in=True),
    ("partition", "indexer"): Promise(0, stands_in=True),
    ("kill", LEADER): Promise(TAKEOVER_MS, stands_in=True, marks=_FALLBACK | _SOURCE),
    ("stop", LEADER): Promise(TAKEOVER_MS, stands_in=True, marks=_FALLBACK | _SOURCE),
    ("partition", LEADER): Promise(TAKEOVER_MS, stands_in=True, marks=_FALLBACK | _SOURCE),
    ("kill", STANDBY): Promise(0, stands_in=True),
    ("kill", "hints"): Promise(0, stands_in=True),
    ("partition", "hints"): Promise(0, stands_in=True),
    ("kill", "recorder"): Promise(0, stands_in=True),
    ("partition", "recorder"): Promise(0, stands_in=True),
    ("kill", "nats"): Promise(5_000, marks=_FALLBACK | _SOURCE),
    ("stop", "nats"): Promise(5_000, marks=_FALLBACK | _SOURCE),
}


def kind_of(target: str) -> str:
    """The target without its number; a role stays what it is."""
    name, dash, number = target.rpartition("-")
    return name if dash and number.isdigit() else target


def promise(step: Step) -> Promise:
    """Raises `KeyError` for a fault that no round has."""
    return PROMISES[step.what, step.kind]


def one_round(randomness: random.Random, nats: int = 1) -> list[Step]:
    """Every process killed once; a front door, a leader, an indexer and the bus stopped; one of each kind cut off from
    the bus; an engine hung: in random order. ``nats``: how many servers the bus has."""
    servers = tuple(f"nats-{number}" for number in range(1, nats + 1))
    killed = (*ENGINES, *BRIDGES, *INDEXERS, LEADER, STANDBY, *INGRESSES, "hints", "recorder", *servers)
    stopped = (randomness.choice(INGRESSES), LEADER, randomness.choice(INDEXERS), randomness.choice(servers))
    cut = (randomness.choice(INGRESSES), LEADER, randomness.choice(BRIDGES), randomness.choice(INDEXERS))
    steps = [Step("kill", target, randomness.uniform(*_down_s(target))) for target in killed]
    steps += [Step("stop", target, randomness.uniform(*_down_s(target))) for target in stopped]
    steps += [Step("partition", target, randomness.uniform(*CUT_S)) for target in (*cut, "hints", "recorder")]
    steps.append(Step("hang", randomness.choice(ENGINES), HANG_S))
    randomness.shuffle(steps)
    return steps


def _down_s(target: str) -> tuple[float, float]:
    return LEADER_DOWN_S if target == LEADER else DOWN_S


def steps(seed: int, nats: int = 1) -> Iterator[Step]:
    """Round after round, for ever."""
    randomness = random.Random(seed)
    while True:
        yield from one_round(randomness, nats)

"""What goes wrong in a scenario: perturbations by name, and what they make of its programs.

Everything is drawn from the seed and the program's name, so that all policies meet the same. What happens to the fleet
while it runs is `load.sim.disturbed`'s.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from load.sim.content import Chain
from load.sim.programs import Program, Turn

PATIENCE_S = 30.0
"""So long a turn that is to fail waits for its first token."""
RETRY_S = 1.0
"""After so long a client asks again."""

COMPACTED = 0.3
"""What a compaction leaves of a context."""

SINGLE_PROMPT, SINGLE_OUTPUT = (500, 8_000), 200
"""Tokens of a request without a session: prompt between these, and answer."""

Happens = Literal["lost", "less"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Perturbation:
    """One thing that goes wrong. ``what``: for people. ``bounded``: whether a policy that learns must keep its gain.

    ``labels``: what programs say they are. ``tools_factor``: of tool times, from half of the programs on.
    ``cached``: what engines say of cached tokens (``stale``: what they should have said of the turn before).
    ``index_s``: residency is as it was up to so long ago. ``compacts``, ``aborts``, ``retries``: shares (of programs,
    of turns). ``singles``: requests without a session, per program. ``fleet``: the first worker is gone, or has
    ``less_memory`` less, ``from_share`` to ``to_share`` of the time in which programs arrive.
    """

    name: str
    what: str
    labels: Literal["true", "missing", "wrong"] = "true"
    tools_factor: float = 1.0
    cached: Literal["exact", "missing", "stale"] = "exact"
    index_s: float = 0.0
    compacts: float = 0.0
    aborts: float = 0.0
    retries: float = 0.0
    singles: float = 0.0
    fleet: Happens | None = None
    less_memory: float = 0.4
    from_share: float = 0.4
    to_share: float = 0.6

    @property
    def least_workers(self) -> int:
        """A fleet must have so many."""
        return 2 if self.fleet == "lost" else 1

    @property
    def is_less_work(self) -> bool:
        """Programs need less GPU time."""
        return self.compacts > 0 or self.aborts > 0

    @property
    def changes_programs(self) -> bool:
        """What programs do alone is not the same."""
        return self.compacts > 0 or self.tools_factor != 1.0

    @property
    def static_fleet(self) -> bool:
        """Bounds, which know the future, do not know that of the fleet."""
        return self.fleet is None


NOTHING = Perturbation(name="", what="nothing goes wrong")

PERTURBATIONS = {
    each.name: each
    for each in (
        Perturbation(name="no-labels", what="programs do not say what they are", labels="missing"),
        Perturbation(name="wrong-labels", what="labels are dealt out at random", labels="wrong"),
        Perturbation(name="regime", what="tools ten times slower from half on", tools_factor=10.0),
        Perturbation(name="no-cached", what="engines do not say what they found cached", cached="missing"),
        Perturbation(name="stale-cached", what="engines say what they found a turn ago", cached="stale"),
        Perturbation(name="stale-index", what="residency is 0 to 5 s old", index_s=5.0),
        Perturbation(name="compaction", what="half of the programs rewrite their prompt to 30 %", compacts=0.5),
        Perturbation(name="aborts", what="2 % of turns are given up by their client, which leaves", aborts=0.02),
        Perturbation(name="retries", what="5 % of turns fail and are asked again", retries=0.05),
        Perturbation(name="singles", what="four requests without a session for every program", singles=4.0),
        Perturbation(name="less-memory", what="a worker loses 40 % of its KV for a fifth of the time", fleet="less"),
        Perturbation(name="worker-lost", what="a worker dies, and is back after a fifth of the time", fleet="lost"),
    )
}


def perturbed(programs: Sequence[Program], perturbation: Perturbation, seed: int) -> list[Program]:
    """``programs`` as they are when that goes wrong; in the order of their arrival."""
    labels = sorted({program.label for program in programs})
    found = []
    for number, program in enumerate(programs):
        source = random.Random(f"{seed}/{perturbation.name}/{program.name}")
        slower = perturbation.tools_factor if number >= len(programs) // 2 else 1.0
        found.append(_program(program, perturbation, source, labels, slower))
    if perturbation.singles and programs:
        found = sorted([*found, *_singles(programs, perturbation, seed)], key=lambda program: program.arrival_s)
    return found


def until_aborted(program: Program) -> Program:
    """What runs of it: up to the turn in which its client goes away."""
    for index, turn in enumerate(program.turns):
        if turn.fails == "abort":
            return replace(program, turns=program.turns[: index + 1])
    return program


def _program(
    program: Program, how: Perturbation, source: random.Random, labels: Sequence[str], slower: float
) -> Program:
    label = program.label
    if how.labels == "missing":
        label = ""
    elif how.labels == "wrong":
        label = source.choice(labels) if len(labels) > 1 else f"{program.label}-{source.randrange(4)}"
    turns = list(program.turns)
    if how.compacts and len(turns) > 3 and source.random() < how.compacts:
        turns = _compacted(turns, len(turns) // 2)
    return replace(program, label=label, turns=tuple(_turn(turn, how, source, labels, slower) for turn in turns))


def _turn(turn: Turn, how: Perturbation, source: random.Random, labels: Sequence[str], slower: float) -> Turn:
    fails: Literal["", "abort", "retry"] = ""
    if turn.output_tokens > 1 and (how.aborts or how.retries):
        draw = source.random()
        fails = "abort" if draw < how.aborts else "retry" if draw < how.aborts + how.retries else ""
    children = tuple(_program(child, how, source, labels, slower) for child in turn.children)
    return replace(turn, gap_s=turn.gap_s * slower, fails=fails, children=children)


def _compacted(turns: Sequence[Turn], at: int) -> list[Turn]:
    """From turn ``at`` on the context is `COMPACTED` of what it was, behind the same beginning, and grows as before."""
    before = turns[at]
    parts = before.chain.path
    kept = parts[-1][1]
    chain = Chain(before.chain, kept)
    short = max(1, kept * 16, round(before.prompt_tokens * COMPACTED))
    less = before.prompt_tokens - short
    if less <= 0:
        return list(turns)
    changed = [replace(turn, prompt_tokens=max(1, turn.prompt_tokens - less), chain=chain) for turn in turns[at:]]
    changed[0] = replace(changed[0], new_tokens=max(1, short - kept * 16))
    return [*turns[:at], *changed]


def _singles(programs: Sequence[Program], how: Perturbation, seed: int) -> Iterator[Program]:
    """Requests without a session, over the time in which programs arrive."""
    source = random.Random(f"{seed}/{how.name}/singles")
    end_s = max(program.arrival_s for program in programs)
    for number in range(round(how.singles * len(programs))):
        prompt = source.randint(*SINGLE_PROMPT)
        output = max(2, round(source.expovariate(1 / SINGLE_OUTPUT)))
        turn = Turn(prompt, output, prompt, Chain())
        yield Program(f"single-{number}", "", source.uniform(0.0, end_s), (turn,), single=True)

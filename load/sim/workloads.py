"""Seeded generators of agent programs, with the sizes and tails that were published, and a check of what they made.

Sources: spec scheduling §1.10 (turns, tool times, tokens, recipe) and policy (head: mix, lognormal, pareto, trees, slow
tools). What they leave open was chosen here and is marked "ours". Equal arguments give equal programs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from load.sim.content import Chain
from load.sim.programs import Program, Turn, with_children

WINDOW = 118_000
"""The longest final context, in tokens (policy: cap of the lognormal load)."""
MOST_TURNS = 400
LEAST_PROMPT = 64
BLOCK = 16
"""Shared prefixes end at a multiple of it: only whole blocks are shared."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool's time: lognormal with this median (seconds) and sigma, at most ``cap_s``; or one of two fixed times."""

    name: str
    weight: float
    median_s: float
    sigma: float
    cap_s: float = 120.0
    modes_s: tuple[float, float] | None = None

    def draw(self, source: random.Random) -> float:
        """Seconds of one call."""
        if self.modes_s is not None:
            return self.modes_s[source.random() < 0.5]
        return min(self.cap_s, source.lognormvariate(math.log(self.median_s), self.sigma))


SWE_SCALE = 1.3
"""Brings the mixture of §1.10 to the published mean of 925 ms."""

SWE_TOOLS = tuple(
    Tool(name, weight, median_s * SWE_SCALE, sigma)
    for name, weight, median_s, sigma in (
        ("grep", 0.17, 0.08, 1.0),
        ("sed", 0.15, 0.06, 1.0),
        ("cat", 0.15, 0.05, 1.0),
        ("ls", 0.10, 0.04, 1.0),
        ("cd", 0.21, 0.022, 2.845),
        ("python", 0.14, 0.55, 1.0),
        ("pytest", 0.08, 2.6, 1.1),
    )
)
BFCL_TOOLS = (Tool("web_search", 0.85, 1.5446, 0.662), Tool("fetch_url", 0.15, 0.7794, 1.344))
"""Together 1.923 s +- 2.133 s; ``fetch_url`` with its published tail. The split is ours."""
SLOW_TOOLS = (
    *(replace(tool, weight=0.8 * tool.weight) for tool in SWE_TOOLS),
    Tool("build", 0.2, 40.0, 0.6, 600.0),
)
TWO_MODES = (Tool("either", 1.0, 0.0, 0.0, modes_s=(0.1, 60.0)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One class of programs. Draws: number of turns, final context given the turns (tokens).

    ``shared_tokens``: of the first prompt, the same in every program of the class. ``output_tokens``: mean of a turn,
    lognormal with ``output_sigma``.
    """

    label: str
    turns: Callable[[random.Random], float]
    final: Callable[[random.Random, int], float]
    tools: tuple[Tool, ...] = SWE_TOOLS
    first_tokens: int = 2_500
    shared_tokens: int = 0
    output_tokens: int = 220
    output_sigma: float = 0.6
    spawns: int = 0
    """Gaps at which it starts sub-agents."""
    forks: bool = False
    """They begin with its context, instead of with a prompt of their own."""
    group: int = 1
    """So many programs, one after another, begin with the same ``shared_tokens``; 1: all of the class do."""


def _normal(mean: float, sd: float) -> Callable[[random.Random], float]:
    return lambda source: source.normalvariate(mean, sd)


def _final(mean: float, sd: float) -> Callable[[random.Random, int], float]:
    return lambda source, _: source.normalvariate(mean, sd)


def _lognormal(mean: float, cv: float) -> Callable[[random.Random], float]:
    sigma = math.sqrt(math.log(1 + cv * cv))
    return lambda source: source.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)


def _pareto(mean: float, shape: float) -> Callable[[random.Random], float]:
    return lambda source: mean * (shape - 1) / shape * source.paretovariate(shape)


def _per_turn(tokens: int) -> Callable[[random.Random, int], float]:
    return lambda _, turns: tokens * turns


_rollout_final = _lognormal(20_000, 0.5)
_bfcl_final = _lognormal(93_256 * 0.4, 68_687 / 93_256)
SWE = Shape(label="swe", turns=_normal(10.9, 2.1), final=_final(70_126, 19_732))
BFCL = Shape(label="bfcl", turns=_normal(6.3, 2.3), final=lambda source, _: _bfcl_final(source), tools=BFCL_TOOLS)
SHORT = Shape(label="short", turns=_normal(4, 0.8), final=_final(18_000, 3_600))
LONG = Shape(label="long", turns=_normal(18, 3.0), final=_final(95_000, 14_000))
LOGNORMAL = Shape(label="lognormal", turns=_lognormal(10.9, 1.5), final=_per_turn(5_500))
PARETO = Shape(label="pareto", turns=_pareto(10.9, 1.5), final=_per_turn(5_500))
MAIN = Shape(label="main", turns=_normal(9, 1.5), final=_final(60_000, 9_000), spawns=2)
SUB = Shape(label="sub", turns=_normal(4, 0.8), final=_final(24_000, 4_800))
FORKING = replace(MAIN, forks=True)  # ours: sub-agents that are told everything, as branches of one conversation
SLOW = replace(SWE, label="slow", tools=SLOW_TOOLS)
OPENHANDS = Shape(  # ours: longer sessions behind a long common prompt, with the published tools of coding agents
    label="openhands",
    turns=_lognormal(30, 0.6),
    final=_final(85_000, 18_000),
    first_tokens=9_000,
    shared_tokens=6_400,
)
TWO_MODE = replace(SWE, label="two-mode", tools=TWO_MODES)

ROLLOUT = Shape(  # ours: eight attempts at each task of an RL batch, which think long and run their code
    label="rollout",
    turns=_normal(6, 2),
    final=lambda source, _: _rollout_final(source),
    tools=(Tool("python", 0.8, 0.7, 1.0), Tool("tests", 0.2, 3.4, 1.1)),
    first_tokens=2_500,
    shared_tokens=2_432,
    output_tokens=700,
    output_sigma=0.8,
    group=8,
)

MIXES: dict[str, tuple[tuple[float, Shape], ...]] = {
    "swe": ((1.0, SWE),),
    "bfcl": ((1.0, BFCL),),
    "mix": ((0.5, SHORT), (0.5, LONG)),
    "swebfcl": ((0.5, SWE), (0.5, BFCL)),
    "lognormal": ((1.0, LOGNORMAL),),
    "pareto": ((1.0, PARETO),),
    "tree": ((1.0, MAIN),),
    "forks": ((1.0, FORKING),),
    "slow": ((1.0, SLOW),),
    "openhands": ((1.0, OPENHANDS),),
    "regime": ((1.0, SWE),),
    "two-mode": ((1.0, TWO_MODE),),
    "rollout": ((1.0, ROLLOUT),),
}
"""Workloads by name. ``regime``: from half of the programs on, every tool takes ten times as long."""

REGIME_FACTOR = 10.0


def generate(
    name: str,
    *,
    count: int = 150,
    rate_per_s: float = 1.0,
    seed: int = 1,
    turn_multiplier: int = 1,
    shared_tokens: int | None = None,
) -> list[Program]:
    """``count`` programs of workload ``name`` that arrive as a Poisson process.

    ``turn_multiplier``: every turn becomes so many, with increments and outputs divided by it and tool times drawn
    anew. ``shared_tokens`` replaces the common beginning of every class. Raises `KeyError` for an unknown name.
    """
    mix = MIXES[name]
    arrivals = random.Random(f"{seed}/{name}/arrivals")
    shared: dict[str, Chain] = {}
    programs = []
    time_s = 0.0
    for number in range(count):
        time_s += arrivals.expovariate(rate_per_s)
        source = random.Random(f"{seed}/{name}/{number}")
        shape = source.choices([shape for _, shape in mix], [weight for weight, _ in mix])[0]
        if shared_tokens is not None:
            shape = replace(shape, shared_tokens=shared_tokens)
        slower = REGIME_FACTOR if name == "regime" and number >= count // 2 else 1.0
        maker = _Maker(source, shared, turn_multiplier, slower, number)
        programs.append(maker.program(shape, f"{name}-{number}", time_s))
    return programs


@dataclass(frozen=True, slots=True)
class _Maker:
    """Draws one program and its sub-agents."""

    source: random.Random
    shared: dict[str, Chain]
    multiplier: int
    slower: float
    number: int = 0

    def program(
        self,
        shape: Shape,
        name: str,
        arrival_s: float,
        parent: str | None = None,
        context: tuple[Chain, int] | None = None,
    ) -> Program:
        """``context``: the chain and the tokens that it begins with, where those are its parent's."""
        inherited = 0 if context is None else context[1]
        contexts = [(inherited + prompt, output) for prompt, output in self._contexts(shape)]
        spawn_at = set(self.source.sample(range(len(contexts) - 1), min(shape.spawns, len(contexts) - 1)))
        common = shape.shared_tokens // BLOCK * BLOCK
        group = f"{shape.label}/{self.number // shape.group}" if shape.group > 1 else shape.label
        chain = self._chain(group, common) if context is None else Chain(context[0], inherited // BLOCK)
        turns: list[Turn] = []
        known = common + inherited
        for index, (prompt, output) in enumerate(contexts):
            last = index == len(contexts) - 1
            children: tuple[Program, ...] = ()
            if index in spawn_at:
                number = self.source.randint(2, 4)
                told = (chain, (prompt + output - 1) // BLOCK * BLOCK) if shape.forks else None
                children = tuple(self.program(SUB, f"{name}.{index}.{each}", 0.0, name, told) for each in range(number))
            tool = self.source.choices(shape.tools, [tool.weight for tool in shape.tools])[0]
            gap_s = tool.draw(self.source) * self.slower
            turns.append(
                Turn(
                    prompt_tokens=prompt,
                    output_tokens=output,
                    new_tokens=max(1, prompt - known),
                    chain=chain,
                    tool=None if last else tool.name,
                    gap_s=0.0 if last else gap_s,
                    children=children,
                )
            )
            known = prompt + output - 1
        return Program(name, shape.label, arrival_s, tuple(turns), parent)

    def _chain(self, group: str, common: int) -> Chain:
        if not common:
            return Chain()
        return Chain(self.shared.setdefault(group, Chain()), common // BLOCK)

    def _contexts(self, shape: Shape) -> list[tuple[int, int]]:
        """Prompt and output tokens of each turn: increments by exponential weights + 0.3 (§1.10)."""
        count = min(MOST_TURNS, max(2, round(shape.turns(self.source))))
        first = max(shape.first_tokens, shape.shared_tokens + LEAST_PROMPT)
        location = math.log(shape.output_tokens) - shape.output_sigma**2 / 2
        outputs = [max(4, round(self.source.lognormvariate(location, shape.output_sigma))) for _ in range(count)]
        least = first + sum(outputs) + LEAST_PROMPT * (count - 1)
        final = min(WINDOW, max(least, round(shape.final(self.source, count))))
        if least > final:  # a very long program: what it writes shrinks, so that it still fits the window
            room = max(1.0, (final - first - LEAST_PROMPT * (count - 1)) / sum(outputs))
            outputs = [max(4, int(output * min(1.0, room))) for output in outputs]
        rest = final - first - sum(outputs)
        weights = [self.source.expovariate(1.0) + 0.3 for _ in range(count - 1)]
        total = sum(weights)
        increments = [first, *(max(LEAST_PROMPT, round(rest * weight / total)) for weight in weights)]
        contexts = []
        context = 0
        for increment, output in zip(increments, outputs, strict=True):
            for _ in range(self.multiplier):
                least = 1 if context else shape.shared_tokens + LEAST_PROMPT
                context += max(least, increment // self.multiplier)
                written = max(1, output // self.multiplier)
                contexts.append((context, written))
                context += written
        return contexts


# The check of what was made


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a sample of programs, sub-agents included. Tool times in seconds; top decile: share of all tool time."""

    programs: int
    turns_mean: float
    turns_sd: float
    final_mean: float
    final_sd: float
    output_mean: float
    tool_mean_s: float
    tool_sd_s: float
    tool_top_decile: float
    eta: float


def measure(programs: Sequence[Program], label: str | None = None) -> Measured:
    """What ``programs`` (of one label, if given) turned out to be."""
    chosen = [program for program in with_children(programs) if label in (None, program.label)]
    turns = [float(len(program.turns)) for program in chosen]
    finals = [float(program.final_tokens) for program in chosen]
    outputs = [float(turn.output_tokens) for program in chosen for turn in program.turns]
    tools = sorted((turn.gap_s for program in chosen for turn in program.turns if turn.tool), reverse=True)
    total = math.fsum(tools)
    top = math.fsum(tools[: max(1, len(tools) // 10)]) / total if total else 0.0
    return Measured(
        programs=len(chosen),
        turns_mean=_mean(turns),
        turns_sd=_sd(turns),
        final_mean=_mean(finals),
        final_sd=_sd(finals),
        output_mean=_mean(outputs),
        tool_mean_s=_mean(tools),
        tool_sd_s=_sd(tools),
        tool_top_decile=top,
        eta=eta([len(program.turns) for program in chosen]),
    )


def eta(lengths: Sequence[int]) -> float:
    """``-Corr(k, N - k)`` over turns k = 1..N-1 of programs of N turns; 0 where it is undefined (§1.3)."""
    done: list[float] = []
    left: list[float] = []
    for length in lengths:
        done.extend(range(1, length))
        left.extend(length - turn for turn in range(1, length))
    if len(done) < 2:
        return 0.0
    spread = _sd(done) * _sd(left)
    if not spread:
        return 0.0
    covariance = _mean([a * b for a, b in zip(done, left, strict=True)]) - _mean(done) * _mean(left)
    return -covariance / spread


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _sd(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)) if values else 0.0


@dataclass(frozen=True, slots=True)
class Expected:
    """A published number of a recipe, and how far a large sample may be from it (relative, or absolute for shares)."""

    workload: str
    label: str | None
    name: str
    value: float
    tolerance: float
    relative: bool = True

    def difference(self, measured: Measured) -> float:
        """How far off, in the tolerance's unit."""
        seen: float = getattr(measured, self.name)
        return abs(seen - self.value) / (abs(self.value) if self.relative else 1.0)


def _clipped_sd(sd: float, low: float, high: float, mean: float) -> float:
    """Standard deviation of a normal clipped to ``low``..``high``, by summing over it."""
    normal = NormalDist(mean, sd)
    cells = [min(high, max(low, normal.inv_cdf((cell + 0.5) / 4_000))) for cell in range(4_000)]
    return _sd(cells)


RECIPES = (
    Expected("swe", None, "turns_mean", 10.9, 0.02),
    Expected("swe", None, "turns_sd", 2.1, 0.05),
    Expected("swe", None, "final_mean", 70_126, 0.03),
    Expected("swe", None, "final_sd", _clipped_sd(19_732, 5_000, WINDOW, 70_126), 0.05),
    Expected("swe", None, "output_mean", 220, 0.03),
    Expected("swe", None, "tool_mean_s", 0.925, 0.12),
    Expected("swe", None, "tool_sd_s", 3.2 * SWE_SCALE, 0.2),
    Expected("swe", None, "tool_top_decile", 0.79, 0.05, relative=False),
    Expected("swe", None, "eta", 0.79, 0.03, relative=False),
    Expected("bfcl", None, "turns_mean", 6.3, 0.02),
    Expected("bfcl", None, "turns_sd", 2.3, 0.05),
    Expected("bfcl", None, "final_mean", 93_256 * 0.4, 0.05),
    Expected("bfcl", None, "tool_mean_s", 1.923, 0.05),
    Expected("bfcl", None, "tool_sd_s", 2.133, 0.2),
    Expected("bfcl", None, "tool_top_decile", 0.35, 0.05, relative=False),
    Expected("bfcl", None, "eta", 0.52, 0.05, relative=False),
    Expected("mix", "short", "turns_mean", 4.0, 0.03),
    Expected("mix", "short", "final_mean", 18_000, 0.03),
    Expected("mix", "long", "turns_mean", 18.0, 0.03),
    Expected("mix", "long", "final_mean", 95_000, 0.03),
    Expected("lognormal", None, "turns_mean", 10.9, 0.12),
    Expected("lognormal", None, "eta", -0.32, 0.15, relative=False),
    Expected("tree", "main", "turns_mean", 9.0, 0.02),
    Expected("tree", "main", "final_mean", 60_000, 0.03),
    Expected("tree", "sub", "turns_mean", 4.0, 0.03),
    Expected("tree", "sub", "final_mean", 24_000, 0.03),
)
"""Published numbers (standard deviations of contexts after the window's clip). Heavy tails converge slowly, so what
sums tool times has wide tolerances. The recipe's own mixture gives a standard deviation of 4.2 s for swe tools where
the publication has 3.55 s; we follow the recipe. `pareto` has an infinite variance and is not listed."""


SMALLER = {"mix": 3, "tree": 5}
"""Samples of these may be smaller by so much: they have no tails to measure, or many sub-agents."""


def check(seed: int = 1, count: int = 4_000) -> list[tuple[Expected, float, bool]]:
    """Every recipe against a large sample: what is expected, what was measured, and whether it is near enough."""
    rows = []
    samples: dict[tuple[str, str | None], Measured] = {}
    generated: dict[str, list[Program]] = {}
    for expected in RECIPES:
        key = (expected.workload, expected.label)
        if key not in samples:
            if expected.workload not in generated:
                size = max(1, count // SMALLER.get(expected.workload, 1))
                generated[expected.workload] = generate(expected.workload, count=size, seed=seed)
            samples[key] = measure(generated[expected.workload], expected.label)
        measured = samples[key]
        near = expected.difference(measured) <= expected.tolerance
        rows.append((expected, getattr(measured, expected.name), near))
    return rows


def main() -> None:
    """Print every recipe beside what a large sample measures: ``python -m load.sim.workloads``."""
    for expected, measured, near in check():
        name = expected.workload if expected.label is None else f"{expected.workload}/{expected.label}"
        verdict = "" if near else "  FAR"
        print(f"{name:12} {expected.name:16} {expected.value:12.3f} {measured:12.3f}{verdict}")


if __name__ == "__main__":
    main()
